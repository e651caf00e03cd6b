"""The contenders of the decoding suite, their rounds, and what rounded weights lose.

This project, transformers and nanoGPT, each continuing the same prompts greedily with the same weights. NanoGPT keeps
the weights that it draws itself: its speed does not depend on them.
"""

import contextlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsgpt.benchmarks.decoding import HUGGING_FACE, NANOGPT, OURS, RATIO_GOAL, SHARE_GOAL, Work, peers_of
from dsgpt.common.errors import UserError
from dsgpt.formats.hugging_face import hugging_face_config, to_hugging_face
from dsgpt.formats.tensor_files import DTYPES
from dsgpt.inference.commands import EvaluateRequest as Request
from dsgpt.inference.decoder import Decoder
from dsgpt.inference.evaluate import evaluate
from dsgpt.inference.generation import generate_batch
from dsgpt.machine.console import Console
from dsgpt.machine.device import HugePages
from dsgpt.model.config import PRESETS
from dsgpt.model.gpt2 import GPT2, initialize

# What rounded weights lose: a trained model predicts the same text in each precision, and with weights in 8 bits.

WEIGHTS = (("fp32", "none"), ("bf16", "none"), ("bf16", "int8"))
"""Precision and quantization."""


def measure_losses(checkpoint: Path, data: Path, *, device: str) -> dict[str, Any]:
    """Loss and perplexity of the model of ``checkpoint`` on the token file ``data``, as the record has them.

    Raises:
        UserError: the model or the file cannot be used.
    """
    found: dict[str, Any] = {}
    for precision, quantize in WEIGHTS:
        request = Request(checkpoint=checkpoint, data=data, precision=precision, quantize=quantize, device=device)
        record = evaluate(request, console=Console(speaks=False))
        name = precision if quantize == "none" else quantize
        found[name] = {key: record[key] for key in ("loss", "perplexity", "bits_per_byte")}
    return {"checkpoint": checkpoint.as_posix(), "tokens": record["tokens"], "weights": found}


@dataclass(frozen=True, kw_only=True)
class Continued:
    """What a contender generated."""

    ids: list[list[int]]
    seconds: float
    token_sec: float | None
    """Seconds of a token after the first; None if the contender does not say."""


Contender = Callable[[Tensor], Continued]
"""From prompts (B, T) to what follows them."""


def draw_model(work: Work, device: torch.device) -> GPT2:
    """The model of a row, with random weights: as fast as a trained one."""
    model = GPT2(PRESETS[work.model_size])
    initialize(model, config=model.config, seed=1)
    return model.to(device=device, dtype=DTYPES[work.precision]).eval()


def draw_prompts(work: Work, device: torch.device) -> Tensor:
    """Random ids, (B, T)."""
    shape, vocabulary = (work.batch_size, work.prompt_tokens), PRESETS[work.model_size].vocab_size
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(device)


def open_contender(kind: str, work: Work, model: GPT2, *, checkout: Path | None) -> Contender:
    """The contender ``kind`` with the weights of ``model``.

    Raises:
        UserError: the checkout has another model than a GPT-2 of this size.
    """
    if kind == OURS:
        return _ours(work, Decoder(model, batch_size=work.batch_size, quantize=work.quantize))
    if kind == HUGGING_FACE:
        return _hugging_face(work, model)
    assert kind == NANOGPT and checkout is not None
    return _nanogpt(work, model, checkout)


def _ours(work: Work, decoder: Decoder) -> Contender:
    def generate(prompts: Tensor) -> Continued:
        started = time.perf_counter()
        times, steps = [], []
        for ids in generate_batch(decoder, prompts.tolist(), new_tokens=work.new_tokens):
            times.append(time.perf_counter())
            steps.append(ids)
        return Continued(
            ids=[list(ids) for ids in zip(*steps, strict=True)],
            seconds=times[-1] - started,
            token_sec=(times[-1] - times[0]) / (len(times) - 1),
        )

    return generate


def _hugging_face(work: Work, model: GPT2) -> Contender:
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - takes seconds

    config = GPT2Config.from_dict(hugging_face_config(model.config, dtype="fp32", end_of_text=None))
    peer: Any = GPT2LMHeadModel(config)
    weights = dict(to_hugging_face(model.state_dict().items(), model.config))
    weights["lm_head.weight"] = weights.pop("transformer.lm_head.weight")[: model.config.vocab_size]
    peer.load_state_dict(weights)
    peer = peer.to(device=model.wte.weight.device, dtype=model.wte.weight.dtype).eval()

    @torch.inference_mode()
    def generate(prompts: Tensor) -> Continued:
        started = time.perf_counter()
        ids = peer.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=work.new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found = ids[:, prompts.shape[1] :].tolist()  # waits for the device
        return Continued(ids=found, seconds=time.perf_counter() - started, token_sec=None)

    return generate


def _nanogpt(work: Work, model: GPT2, checkout: Path) -> Contender:
    """NanoGPT's own ``generate``; runs ``model.py`` of the user's checkout."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", checkout / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = model.config
    with contextlib.redirect_stdout(None):
        peer = module.GPT(
            module.GPTConfig(
                block_size=config.block_size,
                vocab_size=config.padded_vocab_size,
                n_layer=config.n_layer,
                n_head=config.n_head,
                n_embd=config.n_embd,
                dropout=0.0,
                bias=True,
            )
        ).to(device=model.wte.weight.device, dtype=model.wte.weight.dtype)
    peer.eval()
    expected, found = (sum(parameter.numel() for parameter in each.parameters()) for each in (model, peer))
    if found != expected:
        raise UserError(f"{NANOGPT} has {found:,} parameters instead of {expected:,}: is it another version?")

    @torch.inference_mode()
    def generate(prompts: Tensor) -> Continued:
        started = time.perf_counter()
        ids = peer.generate(prompts, work.new_tokens, top_k=1)
        new = ids[:, prompts.shape[1] :].tolist()  # waits for the device
        return Continued(ids=new, seconds=time.perf_counter() - started, token_sec=None)

    return generate


# Interleaved rounds: in each, every contender continues the same prompts, and the weights' bytes are read once.

READS = 5
"""Readings of the weights' bytes in a round; the fastest counts."""
_COLUMNS = 4096


def measure_row(work: Work, *, rounds: int, device: torch.device, checkout: Path | None) -> dict[str, Any]:
    """Seconds of every contender in every round, the ratio to transformers, and the share of the memory's floor.

    In each round another contender is the first, so that a machine that becomes slower favours none. Warm-up and
    loading do not count; reading the prompts counts, except in the share, which is of the tokens after the first.

    Raises:
        UserError: nanoGPT's checkout has another model.
    """
    model, prompts = draw_model(work, device), draw_prompts(work, device)
    kinds = peers_of(work, nanogpt=checkout is not None)
    contenders = {kind: open_contender(kind, work, model, checkout=checkout) for kind in kinds}
    size = bytes_read(model, quantize=work.quantize)
    read = _reader(size, device)
    for contender in contenders.values():
        contender(prompts)
    found: dict[str, list[Continued]] = {kind: [] for kind in kinds}
    floors: list[float] = []
    for number in range(rounds):
        for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
            found[kind].append(contenders[kind](prompts))
        floors.append(min(_timed(read, device) for _ in range(READS)))
    seconds = {kind: [each.seconds for each in turns] for kind, turns in found.items()}
    token_sec = [each.token_sec for each in found[OURS] if each.token_sec]
    return {
        "key": work.key,
        "title": work.title,
        "work": work.as_dict(),
        "bytes_per_token": size,
        "seconds": {kind: span(values) for kind, values in seconds.items()},
        "token_sec": span(token_sec),
        "floor_sec": span(floors),
        "ratios": {
            kind: span([theirs / ours for theirs, ours in zip(seconds[kind], seconds[OURS], strict=True)])
            for kind in kinds[1:]
        },
        "share": span([floor / token for floor, token in zip(floors, token_sec, strict=True)]),
        "same_ids": found[OURS][0].ids == found[HUGGING_FACE][0].ids,
        "ratio_goal": RATIO_GOAL if work.has_goals else None,
        "share_goal": SHARE_GOAL if work.has_goals else None,
    }


def bytes_read(model: GPT2, *, quantize: str = "none") -> int:
    """Bytes of weights that every token needs: all but the positions, and of the embedding, as head, no padding.

    In 8 bits, a matrix has a byte for each weight and a scale for each output.
    """
    head = model.wte.weight[: model.config.vocab_size]
    read = [head, *(weight for name, weight in model.named_parameters() if not name.startswith(("wte", "wpe")))]
    if quantize == "none":
        return sum(weight.nbytes for weight in read)
    return sum(
        weight.numel() + len(weight) * weight.element_size() if weight.dim() == 2 else weight.nbytes for weight in read
    )


def _reader(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A matrix of ``size`` bytes in fp32, and a vector to multiply it by: the fastest way here to read memory once.

    The matrix is in huge pages, like those of our weights whose layout is PyTorch's.
    """
    matrix = torch.ones((max(1, size // 4 // _COLUMNS), _COLUMNS), device=device)
    return HugePages().copy(matrix), torch.ones(_COLUMNS, device=device)


def _timed(read: tuple[Tensor, Tensor], device: torch.device) -> float:
    started = time.perf_counter()
    torch.mv(*read)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def span(values: list[float]) -> dict[str, Any]:
    """Median, smallest and largest of ``values``, and all of them."""
    return {"median": statistics.median(values), "smallest": min(values), "largest": max(values), "values": values}

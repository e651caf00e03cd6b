"""This project, transformers and nanoGPT, each continuing the same prompts greedily with the same weights.

NanoGPT keeps the weights that it draws itself: its speed does not depend on them.
"""

import contextlib
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsgpt.benchmarks.decoding.work import HUGGING_FACE, NANOGPT, OURS, Work
from dsgpt.common.errors import UserError
from dsgpt.formats.hugging_face import hugging_face_config, to_hugging_face
from dsgpt.formats.tensor_files import DTYPES
from dsgpt.inference.decoder import Decoder
from dsgpt.inference.generation import generate_batch
from dsgpt.model.config import PRESETS
from dsgpt.model.gpt2 import GPT2
from dsgpt.model.initialization import initialize


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

"""Contenders of the speed and decoding suites in the process that they run in, and what this machine can do at most.

Trainers: this program's strategies, nanoGPT from a checkout, and a plain loop around Hugging Face's GPT-2. Each takes
whole optimizer steps on the same token file: batch, forward and backward pass, clipping, AdamW. The loops of nanoGPT
and Hugging Face are what their own trainers do by default: nanoGPT's ``train.py`` with its fused AdamW on GPUs only;
transformers' ``Trainer`` with torch's fused AdamW. In bf16 both compute under autocast; on a CPU nanoGPT's own script
would compute in fp32.

Generators: this project, transformers and nanoGPT, each continuing the same prompts greedily with the same weights.
NanoGPT keeps the weights that it draws itself: its speed does not depend on them.

``python -m dsgpt.benchmarks.contenders JOB`` is a rank of a trainer, which takes steps when told to. Each line of the
input is a number of steps; the answer is a line of JSON. An empty input ends the process.
"""

import contextlib
import importlib.util
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dsgpt.benchmarks import cells, decoding, frame, launch
from dsgpt.benchmarks.speed import DDP, ENGINE, HUGGING_FACE, NANOGPT_DEFAULTS, OURS, PEERS, Shape, StepSetup
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.data.token_file import open_token_file
from dsgpt.formats.hugging_face import hugging_face_config, to_hugging_face
from dsgpt.formats.tensor_files import DTYPES
from dsgpt.inference.decoder import Decoder
from dsgpt.inference.generation import generate_batch
from dsgpt.machine.device import HugePages, synchronisations
from dsgpt.machine.launcher import exit_rank
from dsgpt.machine.probe import keep_freed_memory
from dsgpt.machine.topology import read_topology
from dsgpt.model.config import PRESETS, GPT2Config
from dsgpt.model.gpt2 import GPT2, initialize
from dsgpt.telemetry.cost import peak_bytes

# Trainers.

VALIDATED_AT_ONCE = 32
LR = 6e-4
ADAMW = {"lr": LR, "betas": [0.9, 0.95], "weight_decay": 0.1}
TRAINING = {"optimizer": {"type": "AdamW", "params": ADAMW}, "gradient_clipping": 1.0}


Step = Callable[[], Tensor]
"""Takes a step; returns its loss, which may still be on its way."""


@contextlib.contextmanager
def own_trainer(kind: str, work: StepSetup, *, tokens: Path, folder: Path) -> Iterator[Step]:
    """A strategy of this program, built from flags as ``src/gpt2.py`` builds it, without the loop around it."""
    # imported here: they are not to be in the memory of peers
    from dsgpt.strategies.base import build_strategy  # noqa: PLC0415
    from dsgpt.training.trainer import training_batches  # noqa: PLC0415

    recipe = folder / "recipe.json"
    write_json_atomic(recipe, {**TRAINING, "zero_optimization": {"stage": 1}} if kind == ENGINE else TRAINING)
    global_batch = work.batch * read_topology().world_size
    values: dict[str, Any] = {
        **cells.file_values(cells.Corpus(train=tokens, val=tokens), recipe=recipe, run_dir=folder / "run"),
        **launch.shape_values(work.model),
        **{"run_type": {OURS: "baseline", ENGINE: "optimized", DDP: "ddp"}[kind], "max_train_steps": 1_000_000},
        **{"global_batch_size": global_batch, "micro_batch_size_per_gpu": work.batch, "seq_length": work.shape.length},
        **{"precision": work.precision, "device": work.device},
        **({"threads_per_device": work.threads} if work.device == "cpu" else {}),
        **({"compile": True} if work.compile else {}),
    }
    with (
        launch.joined_run(launch.training_words(values)) as (config, device),
        contextlib.closing(build_strategy(config, device)) as strategy,
        contextlib.closing(training_batches(config, first_step=0)) as batches,
    ):
        steps = itertools.count(1)
        yield lambda: strategy.train_step(batches, next(steps)).loss


class PeerLoop:
    """The loop of a peer in this process.

    Args:
        kind: ``NANOGPT`` or ``HUGGING_FACE``.
        work: what a step does.
        tokens: the token file.
        peer: the checkout of nanoGPT.
        beta2: of AdamW.
        decay: weight decay of AdamW.

    Raises:
        UserError: the peer has another model.
    """

    def __init__(
        self, kind: str, work: StepSetup, *, tokens: Path, peer: Path | None, beta2: float = 0.95, decay: float = 0.1
    ) -> None:
        torch.set_num_threads(work.threads or torch.get_num_threads())
        self._batches, self._device, self._length = _random_windows(work, tokens), work.device, work.shape.length
        self._precision, self._kind, betas = DTYPES[work.precision], kind, (0.9, beta2)
        if kind == frame.NANOGPT:
            assert peer is not None
            self._model = nanogpt_model(work.model, peer).to(work.device)
            with contextlib.redirect_stdout(None):
                self._optimizer = self._model.configure_optimizers(decay, LR, betas, work.device)
        else:
            self._model = hugging_face_model(work.model, use_cache=False).to(work.device)
            check_size(HUGGING_FACE, self._model, work.model.parameter_count())
            weights = list(self._model.parameters())
            matrices = {"params": [each for each in weights if each.dim() > 1], "weight_decay": decay}
            vectors = {"params": [each for each in weights if each.dim() == 1], "weight_decay": 0.0}
            self._optimizer = torch.optim.AdamW([matrices, vectors], lr=LR, betas=betas, fused=True)
        self._forward = torch.compile(self._model) if work.compile else self._model
        self._model.train()

    def _loss(self, inputs: Tensor, targets: Tensor) -> Any:
        if self._kind == frame.NANOGPT:
            return self._forward(inputs, targets)[1]
        return self._forward(input_ids=inputs, labels=targets, shift_labels=targets).loss

    def step(self, *, lr: float = LR) -> Tensor:
        """One step at the learning rate ``lr``."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        inputs, targets = (part.to(self._device, non_blocking=True) for part in next(self._batches))
        with torch.autocast(self._device, self._precision, enabled=self._precision != torch.float32):
            loss: Tensor = self._loss(inputs, targets)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    @torch.no_grad()
    def validate(self, tokens: Path, *, windows: int) -> float:
        """The mean loss of the first ``windows`` windows of a token file, one after the other."""
        ids, length, losses = open_token_file(tokens).memmap(), self._length, []
        self._model.eval()
        for first in range(0, windows, VALIDATED_AT_ONCE):
            starts = [index * length for index in range(first, min(first + VALIDATED_AT_ONCE, windows))]
            inputs, targets = (part.to(self._device) for part in _windows(ids, starts, length))
            losses.append(float(self._loss(inputs, targets)) * len(starts))
        self._model.train()
        return sum(losses) / windows


def _windows(ids: NDArray[np.unsignedinteger], starts: list[int], length: int) -> tuple[Tensor, Tensor]:
    """The windows that begin at ``starts``: inputs, and the ids that follow them, (B, T) each."""
    windows = torch.from_numpy(np.stack([ids[start : start + length + 1].astype(np.int64) for start in starts]))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _random_windows(work: StepSetup, tokens: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of windows at random places, (B, T) each: inputs, and the ids that follow them."""
    ids, length, generator = open_token_file(tokens).memmap(), work.shape.length, torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(ids) - length, (work.batch,), generator=generator).tolist()
        inputs, targets = _windows(ids, starts, length)
        yield (inputs.pin_memory(), targets.pin_memory()) if work.device == "cuda" else (inputs, targets)


def nanogpt_model(config: GPT2Config, checkout: Path) -> Any:
    """NanoGPT's model of the shape ``config``; runs ``model.py`` of the user's checkout.

    Raises:
        UserError: the checkout has another model.
    """
    spec = importlib.util.spec_from_file_location("nanogpt_model", checkout / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shape = config.as_dict() | {"vocab_size": config.padded_vocab_size, "dropout": 0.0}
    with contextlib.redirect_stdout(None):
        model = module.GPT(module.GPTConfig(**shape, bias=True))
    check_size(frame.NANOGPT, model, config.padded_parameter_count())
    return model


def hugging_face_model(config: GPT2Config, *, use_cache: bool) -> Any:
    """Hugging Face's GPT-2 of the shape ``config``, with scaled_dot_product_attention."""
    from transformers import GPT2Config as PeerConfig  # noqa: PLC0415 - takes seconds
    from transformers import GPT2LMHeadModel  # noqa: PLC0415

    values = hugging_face_config(config, dtype="fp32", end_of_text=None) | {"use_cache": use_cache}
    kind: Any = GPT2LMHeadModel
    return kind._from_config(PeerConfig.from_dict(values), attn_implementation="sdpa")


def check_size(name: str, model: nn.Module, expected: int) -> None:
    """Refuse a peer whose model is not of this shape: a smaller one would be compared with a larger one.

    Raises:
        UserError: it has not ``expected`` parameters.
    """
    size = sum(parameter.numel() for parameter in model.parameters())
    if size != expected:
        raise UserError(f"{name} has a model of {size:,} parameters instead of {expected:,}: is it another version?")


# A rank of a trainer.


def main() -> None:
    """Build the contender of the job, then take steps; or train nanoGPT to the end of its schedule."""
    job_file = Path(sys.argv[1])
    job = json.loads(job_file.read_text(encoding="utf-8"))
    work = StepSetup(**{**job["work"], "shape": Shape(**job["work"]["shape"])})
    tokens, peer = Path(job["tokens"]), job["peer"] and Path(job["peer"])

    def answer(values: Mapping[str, Any]) -> None:
        print(job["mark"] + json.dumps(values), flush=True)

    if "schedule" in job:
        answer({"curve": train_nanogpt(work, **job["schedule"], tokens=tokens, val=Path(job["val"]), peer=peer)})
        return
    if job["keeps_memory"]:
        keep_freed_memory()
    torch.manual_seed(0)
    with contextlib.ExitStack() as resources:
        step: Step
        if job["kind"] in PEERS:
            step = PeerLoop(job["kind"], work, tokens=tokens, peer=peer).step
        else:
            step = resources.enter_context(own_trainer(job["kind"], work, tokens=tokens, folder=job_file.parent))
        for line in sys.stdin:
            started, loss = time.perf_counter(), torch.zeros(())
            with synchronisations(work.device) as waits:
                for _ in range(int(line)):
                    loss = step()
            value = float(loss)  # waits for the device
            seconds, peak = time.perf_counter() - started, peak_bytes(work.device)
            waited = None if work.device == "cpu" else len(waits)
            answer({"seconds": seconds, "loss": value, "peak_bytes": peak, "synchronisations": waited})
        exit_rank(0)  # at once: ranks are ended one after the other, and none is to wait for its peers


def nanogpt_rate(step: int, *, steps: int) -> float:
    """The learning rate of nanoGPT in ``step``; the first is 0. A cosine to a tenth follows the warm-up."""
    lr, warm_up = NANOGPT_DEFAULTS["lr"], NANOGPT_DEFAULTS["warm_up_steps"]
    if step < warm_up:
        return lr * (step + 1) / (warm_up + 1)
    done = (step - warm_up) / max(1, steps - warm_up)
    return lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def train_nanogpt(
    work: StepSetup, *, steps: int, validate_every: int, windows: int, tokens: Path, val: Path, peer: Path
) -> list[tuple[float, float]]:
    """Train nanoGPT with its own settings; returns training seconds so far and validation loss at each validation."""
    torch.manual_seed(1337)
    beta2, decay = NANOGPT_DEFAULTS["beta2"], NANOGPT_DEFAULTS["weight_decay"]
    loop = PeerLoop(frame.NANOGPT, work, tokens=tokens, peer=peer, beta2=beta2, decay=decay)
    curve, seconds = [], 0.0
    for step in range(steps):
        seconds += _timed(partial(loop.step, lr=nanogpt_rate(step, steps=steps)), work.device)
        if (step + 1) % validate_every == 0 or step + 1 == steps:
            curve.append((seconds, loop.validate(val, windows=windows)))
    return curve


# What this machine can do: its matrix products at the shapes of a model, and its memory.

SECONDS = 0.4
"""Time spent on each product."""


def products_sec(work: StepSetup) -> float:
    """The seconds that all matrix products of a step take, each at the speed that it has alone.

    A backward pass multiplies twice for each product of the forward pass: for the gradient of the inputs, and for that
    of the weights.
    """
    torch.set_num_threads(work.threads or torch.get_num_threads())
    dtype, device, rows, total = DTYPES[work.precision], work.device, work.tokens, 0.0
    wide, blocks = work.shape.n_embd, work.shape.n_layer
    of_a_block = [(3 * wide, wide), (wide, wide), (4 * wide, wide), (wide, 4 * wide)]
    for outputs, inputs, count in [*((*shape, blocks) for shape in of_a_block), (work.shape.vocab_size, wide, 1)]:
        x, w = torch.randn(rows, inputs, device=device).to(dtype), torch.randn(outputs, inputs, device=device).to(dtype)
        y = torch.randn(rows, outputs, device=device).to(dtype)
        for left, right in ((x, w.T), (y, w), (y.T, x)):
            total += count * _seconds(partial(torch.mm, left, right, out=left @ right), device)
    return total


def _seconds(call: Callable[[], object], device: str) -> float:
    """Seconds of one call, after one for warm-up: the shortest of all that fit into ``SECONDS``."""
    call()
    shortest, started = float("inf"), time.perf_counter()
    while time.perf_counter() - started < SECONDS:
        shortest = min(shortest, _timed(call, device))
    return shortest


def _timed(call: Callable[[], object], device: str) -> float:
    started = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


# Generators, their rounds, and what rounded weights lose.

READS = 5
"""Readings of the weights' bytes in a round; the fastest counts."""
_COLUMNS = 4096


class Continued(NamedTuple):
    """Ids that a contender generated, and its times."""

    ids: list[list[int]]
    seconds: float
    token_sec: float | None
    """Seconds of a token after the first; None if the contender does not say."""


Generator = Callable[[Tensor], Continued]
"""Maps prompts (B, T) to their continuations."""


def draw_model(row: decoding.DecodingRow, device: torch.device) -> GPT2:
    """The model of a row, with random weights: as fast as a trained one."""
    model = GPT2(PRESETS[row.model_size])
    initialize(model, config=model.config, seed=1)
    return model.to(device=device, dtype=DTYPES[row.precision]).eval()


def draw_prompts(row: decoding.DecodingRow, device: torch.device) -> Tensor:
    """Random ids, (B, T)."""
    shape, vocabulary = (row.batch_size, row.prompt_tokens), PRESETS[row.model_size].vocab_size
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(device)


def open_generator(kind: str, row: decoding.DecodingRow, model: GPT2, *, checkout: Path | None) -> Generator:
    """The contender ``kind`` with the weights of ``model``.

    Raises:
        UserError: the checkout has another model than a GPT-2 of this size.
    """
    if kind == decoding.OURS:
        decoder = Decoder(model, batch_size=row.batch_size, quantize=row.quantize, compiled=row.compiled)

        def own(prompts: Tensor) -> Continued:
            started = time.perf_counter()
            tokens = generate_batch(decoder, prompts.tolist(), new_tokens=row.new_tokens)
            times, steps = zip(*((time.perf_counter(), ids) for ids in tokens), strict=True)
            ids, token_sec = [list(column) for column in zip(*steps, strict=True)], times[-1] - times[0]
            return Continued(ids, times[-1] - started, token_sec / (len(times) - 1))

        return own
    if kind == frame.NANOGPT:
        assert checkout is not None
        peer = nanogpt_model(model.config, checkout)
        options: dict[str, Any] = {"top_k": 1}
    else:
        peer = hugging_face_model(model.config, use_cache=True)
        weights = dict(to_hugging_face(model.state_dict().items(), model.config))
        weights["lm_head.weight"] = weights.pop("transformer.lm_head.weight")[: model.config.vocab_size]
        peer.load_state_dict(weights)
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    peer = peer.to(device=model.wte.weight.device, dtype=model.wte.weight.dtype).eval()

    @torch.inference_mode()
    def generate(prompts: Tensor) -> Continued:
        started = time.perf_counter()
        mask = {} if kind == frame.NANOGPT else {"attention_mask": torch.ones_like(prompts)}
        ids = peer.generate(prompts, max_new_tokens=row.new_tokens, **options, **mask)
        new = ids[:, prompts.shape[1] :].tolist()  # waits for the device
        return Continued(new, time.perf_counter() - started, None)

    return generate


def measure_decoding(
    row: decoding.DecodingRow, *, rounds: int, device: torch.device, checkout: Path | None
) -> decoding.Result:
    """Seconds of every contender in every round, the ratio to transformers, and the share of the memory's floor.

    Warm-up and loading do not count; reading the prompts counts, except in the share, which is of the tokens after the
    first. In each round the weights' bytes are read once, too: that is the floor.

    Raises:
        UserError: nanoGPT's checkout has another model.
    """
    model, prompts = draw_model(row, device), draw_prompts(row, device)
    nanogpt = checkout is not None and row.batch_size == 1  # it reads all tokens again for each new
    kinds = [decoding.OURS, decoding.HUGGING_FACE, *([frame.NANOGPT] if nanogpt else [])]
    generators = {kind: open_generator(kind, row, model, checkout=checkout) for kind in kinds}
    size = bytes_read(model, quantize=row.quantize)
    # The product of a matrix of as many bytes and a vector is the fastest way here to read memory once. The matrix is
    # in huge pages, like those of our weights whose layout is PyTorch's.
    matrix = HugePages().copy(torch.ones((max(1, size // 4 // _COLUMNS), _COLUMNS), device=device))
    read = partial(torch.mv, matrix, torch.ones(_COLUMNS, device=device))
    for generate in generators.values():
        generate(prompts)
    calls: dict[str, Callable[[], Any]] = {kind: partial(generate, prompts) for kind, generate in generators.items()}
    calls["floor"] = lambda: min(_timed(read, device.type) for _ in range(READS))
    turns = frame.contest(calls, rounds=rounds)
    seconds = {kind: [each.seconds for each in turns[kind]] for kind in kinds}
    token_sec = [each.token_sec for each in turns[decoding.OURS]]
    goals = decoding.GOALS if row.quantize == "none" else dict.fromkeys(decoding.GOALS)  # 8 bits are for memory
    head = {"key": row.key, "title": row.title, "work": asdict(row), "bytes_per_token": size, **goals}
    return head | {
        "seconds": {kind: frame.span(values) for kind, values in seconds.items()},
        "token_sec": frame.span(token_sec),
        "floor_sec": frame.span(turns["floor"]),
        "ratios": {kind: frame.ratios(seconds[kind], seconds[decoding.OURS]) for kind in kinds[1:]},
        "share": frame.ratios(turns["floor"], token_sec),
        "same_ids": turns[decoding.OURS][0].ids == turns[decoding.HUGGING_FACE][0].ids,
    }


def bytes_read(model: GPT2, *, quantize: str = "none") -> int:
    """Bytes of weights that every token needs: all but the positions, and of the embedding, as head, no padding.

    In 8 bits, a matrix has a byte for each weight and a scale for each output.
    """
    head = model.wte.weight[: model.config.vocab_size]
    read = [head, *(weight for name, weight in model.named_parameters() if not name.startswith(("wte", "wpe")))]
    rounded = [weight for weight in read if weight.dim() == 2 and quantize != "none"]
    saved = sum(weight.nbytes - weight.numel() - len(weight) * weight.itemsize for weight in rounded)
    return sum(weight.nbytes for weight in read) - saved


if __name__ == "__main__":
    main()
    exit_rank(0)

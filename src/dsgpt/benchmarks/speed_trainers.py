"""The contenders of the speed suite, and what this machine can do at most.

The contenders: this program's strategies, nanoGPT from a checkout, and a plain loop around Hugging Face's GPT-2. Each
takes whole optimizer steps on the same token file: batch, forward and backward pass, clipping, AdamW. The loops of
nanoGPT and Hugging Face are what their own trainers do by default: nanoGPT's ``train.py`` with its fused AdamW on GPUs
only; transformers' ``Trainer`` with torch's fused AdamW. In bf16 both compute under autocast; on a CPU nanoGPT's own
script would compute in fp32.
"""

import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dsgpt.benchmarks.speed_work import DDP, ENGINE, HUGGING_FACE, NANOGPT, OURS, Shape, Work
from dsgpt.common.errors import UserError
from dsgpt.data.token_file import open_token_file

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
VALIDATED_AT_ONCE = 32
LR = 6e-4
TRAINING = {
    "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "gradient_clipping": 1.0,
}


class Trainer(Protocol):
    """Takes optimizer steps."""

    def step(self) -> Tensor:
        """One step; returns its loss, which may still be on its way."""
        ...


def open_trainer(kind: str, work: Work, *, tokens: Path, folder: Path, peer: Path | None) -> Trainer:
    """The contender ``kind`` in this process.

    Args:
        kind: as in ``workloads.Entry``.
        work: what a step does.
        tokens: the token file.
        folder: for the files of a run.
        peer: the checkout of a peer that has one.
    """
    if kind in (OURS, ENGINE, DDP):
        return _Own(kind, work, tokens=tokens, folder=folder)
    return open_loop(kind, work, tokens=tokens, peer=peer)


def open_loop(
    kind: str,
    work: Work,
    *,
    tokens: Path,
    peer: Path | None,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.1,
) -> "PeerLoop":
    """The loop of a peer in this process; see ``open_trainer``."""
    torch.set_num_threads(work.threads or torch.get_num_threads())
    if kind == NANOGPT:
        assert peer is not None
        return _nanogpt(work, tokens, peer, betas, weight_decay)
    assert kind == HUGGING_FACE
    return _hugging_face(work, tokens, betas, weight_decay)


class _Own:
    """A strategy of this program, built from flags as ``src/gpt2.py`` builds it, without the loop around it."""

    def __init__(self, kind: str, work: Work, *, tokens: Path, folder: Path) -> None:
        from dsgpt.common.files import write_json_atomic  # noqa: PLC0415
        from dsgpt.config.options import parse_arguments  # noqa: PLC0415
        from dsgpt.config.run_config import resolve  # noqa: PLC0415
        from dsgpt.machine.device import bring_up  # noqa: PLC0415
        from dsgpt.machine.process_group import joined  # noqa: PLC0415
        from dsgpt.machine.topology import read_topology  # noqa: PLC0415
        from dsgpt.strategies.base import build_strategy  # noqa: PLC0415
        from dsgpt.training.trainer import training_batches  # noqa: PLC0415

        recipe = folder / "recipe.json"
        write_json_atomic(recipe, {**TRAINING, "zero_optimization": {"stage": 1}} if kind == ENGINE else TRAINING)
        run_type = {OURS: "baseline", ENGINE: "optimized", DDP: "ddp"}[kind]
        topology = read_topology()
        options, problems = parse_arguments(
            _flags(work, run_type, recipe=recipe, tokens=tokens, folder=folder, ranks=topology.world_size)
        )
        config = resolve(options, topology=topology, problems=problems)
        self._held = contextlib.ExitStack()
        device = bring_up(config.device, local_rank=topology.local_rank, threads=config.threads_per_device)
        if run_type != "baseline":
            self._held.enter_context(joined(topology, device))
        self._strategy = self._held.enter_context(contextlib.closing(build_strategy(config, device)))
        self._batches = self._held.enter_context(contextlib.closing(training_batches(config, first_step=0)))
        self._step = 0

    def step(self) -> Tensor:
        self._step += 1
        return self._strategy.train_step(self._batches, self._step).loss


def _flags(work: Work, run_type: str, *, recipe: Path, tokens: Path, folder: Path, ranks: int) -> list[str]:
    shape = work.shape
    values: dict[str, Any] = {
        "run_type": run_type,
        "deepspeed_config": recipe,
        "train_data_path": tokens,
        "val_data_path": tokens,
        "checkpoint_path": folder / "run",
        "num_layers": shape.n_layer,
        "num_heads": shape.n_head,
        "embedding_size": shape.n_embd,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.positions,
        "seq_length": shape.length,
        "global_batch_size": work.batch * ranks,
        "micro_batch_size_per_gpu": work.batch,
        "max_train_steps": 1_000_000,
        "precision": work.precision,
        "device": work.device,
    }
    if work.device == "cpu":
        values["threads_per_device"] = work.threads
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return [*words, "--compile"] if work.compile else words


class PeerLoop:
    """A peer's training loop."""

    def __init__(
        self, work: Work, tokens: Path, *, loss: Callable[[Tensor, Tensor], Tensor], model: nn.Module, optimizer: Any
    ) -> None:
        self._model, self._loss, self._optimizer = model, loss, optimizer
        self._batches, self._device, self._length = _random_windows(work, tokens), work.device, work.shape.length
        self._precision = DTYPES[work.precision]
        model.train()

    def step(self, *, lr: float = LR) -> Tensor:
        """One step at the learning rate ``lr``."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        inputs, targets = (part.to(self._device, non_blocking=True) for part in next(self._batches))
        with torch.autocast(self._device, self._precision, enabled=self._precision != torch.float32):
            loss = self._loss(inputs, targets)
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
    found = torch.from_numpy(np.stack([ids[start : start + length + 1].astype(np.int64) for start in starts]))
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def _random_windows(work: Work, tokens: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of windows at random places, (B, T) each: inputs, and the ids that follow them."""
    ids, length, generator = open_token_file(tokens).memmap(), work.shape.length, torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(ids) - length, (work.batch,), generator=generator).tolist()
        inputs, targets = _windows(ids, starts, length)
        yield (inputs.pin_memory(), targets.pin_memory()) if work.device == "cuda" else (inputs, targets)


def _nanogpt(work: Work, tokens: Path, checkout: Path, betas: tuple[float, float], weight_decay: float) -> PeerLoop:
    """NanoGPT's model with its own optimizer; runs ``model.py`` of the user's checkout."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", checkout / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shape = work.shape
    padded = -(-shape.vocab_size // 64) * 64
    with contextlib.redirect_stdout(None):
        model = module.GPT(
            module.GPTConfig(
                block_size=shape.positions,
                vocab_size=padded,
                n_layer=shape.n_layer,
                n_head=shape.n_head,
                n_embd=shape.n_embd,
                dropout=0.0,
                bias=True,
            )
        ).to(work.device)
        optimizer = model.configure_optimizers(weight_decay, LR, betas, work.device)
    _check_size(NANOGPT, model, shape, rows=padded)
    forward = torch.compile(model) if work.compile else model
    return PeerLoop(work, tokens, loss=lambda x, y: forward(x, y)[1], model=model, optimizer=optimizer)


def _check_size(name: str, model: nn.Module, shape: Shape, *, rows: int) -> None:
    """Refuse a peer whose model is not of this shape: a smaller one would be compared with a larger one.

    Raises:
        UserError: the number of parameters differs from that of a GPT-2 with ``rows`` rows in its tied embedding.
    """
    wide = shape.n_embd
    expected = wide * (rows + shape.positions + 2) + shape.n_layer * (12 * wide**2 + 13 * wide)
    found = sum(parameter.numel() for parameter in model.parameters())
    if found != expected:
        raise UserError(f"{name} has a model of {found:,} parameters instead of {expected:,}: is it another version?")


def _hugging_face(work: Work, tokens: Path, betas: tuple[float, float], weight_decay: float) -> PeerLoop:
    """Hugging Face's GPT-2 with scaled_dot_product_attention, and the optimizer that its Trainer takes by default."""
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    shape = work.shape
    config = GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.positions,
        n_embd=shape.n_embd,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model: Any = GPT2LMHeadModel._from_config(config, attn_implementation="sdpa")  # type: ignore[no-untyped-call]
    model = model.to(work.device)
    _check_size(HUGGING_FACE, model, shape, rows=shape.vocab_size)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=betas, fused=True)
    forward = torch.compile(model) if work.compile else model
    return PeerLoop(
        work,
        tokens,
        loss=lambda x, y: forward(input_ids=x, labels=y, shift_labels=y).loss,
        model=model,
        optimizer=optimizer,
    )


# What this machine can do: its matrix products at the shapes of a model, and its memory.

SECONDS = 0.4
"""Time spent on each product."""
COPIED_BYTES = 512 << 20


def measure_ceilings(work: Work) -> dict[str, Any]:
    """FLOP/s of every matrix product of a step, alone, and the seconds that all of a step's products take at that rate.

    A backward pass multiplies twice for each product of the forward pass: for the gradient of the inputs, and for that
    of the weights.
    """
    if work.threads:
        torch.set_num_threads(work.threads)
    dtype, device, rows = DTYPES[work.precision], work.device, work.tokens
    found, total = [], 0.0
    for name, (outputs, inputs, count) in work.shape.products().items():
        x, w = torch.randn(rows, inputs, device=device).to(dtype), torch.randn(outputs, inputs, device=device).to(dtype)
        y = torch.randn(rows, outputs, device=device).to(dtype)
        flops = 2.0 * rows * inputs * outputs
        for purpose, left, right in (("forward", x, w.T), ("inputs", y, w), ("weights", y.T, x)):
            out = left @ right
            seconds = _seconds(partial(torch.mm, left, right, out=out), device)
            total += seconds * count
            found.append({"product": name, "gradient": purpose, "flops_per_sec": flops / seconds, "count": count})
    return {"products": found, "products_sec": total, "copy_bytes_per_sec": _copy_bytes_per_sec(device)}


def _seconds(call: Callable[[], object], device: str) -> float:
    """Seconds of one call, after one for warm-up: the shortest of all that fit into ``SECONDS``."""
    call()
    shortest, started = float("inf"), time.perf_counter()
    while time.perf_counter() - started < SECONDS:
        begun = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        shortest = min(shortest, time.perf_counter() - begun)
    return shortest


def _copy_bytes_per_sec(device: str) -> float:
    """Bytes read and written per second by a copy that fits into no cache."""
    source = torch.ones(COPIED_BYTES // 4, device=device)
    target = torch.ones_like(source)
    return 2 * COPIED_BYTES / _seconds(lambda: target.copy_(source), device)

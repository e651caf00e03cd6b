"""Predicts the most tensor memory that a rank needs in a training, or in a step of it, and what it is made of.

A step has moments at which memory can be highest: the loss, the beginning and the end of the backward pass, the
reduction of gradients, the optimizer's step. The peak of a step is the largest of them, in a step after the first. A
training also starts, saves and evaluates.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from dsgpt.planning.activations import (
    block_gradient_bytes,
    head_gradient_bytes,
    kept_bytes,
    kept_logits_bytes,
    logits_bytes,
    recomputed_bytes,
    stream_bytes,
)
from dsgpt.planning.model_state import model_state
from dsgpt.planning.moments import EVALUATION, MOMENTS, Moment, save, start
from dsgpt.planning.moments_pytorch import baseline, ddp, fsdp
from dsgpt.planning.moments_zero import bf16_optimizer, zero0, zero1, zero2
from dsgpt.planning.moments_zero3 import zero3
from dsgpt.planning.setup import Setup

PARTS = (
    "weights",
    "master",
    "optimizer",
    "gradients",
    "new_gradients",
    "gathered",
    "buckets",
    "activations",
    "logits",
    "other",
)
"""What a peak is made of; ``docs/records.md`` describes each."""
_LARGEST_SEARCHED = 1 << 20
"""Sequences of a micro batch beyond which no larger one is looked for."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment with the most memory."""

    moment: str
    """One of ``moments.MOMENTS``."""
    parts: dict[str, int]
    """Bytes of each of ``PARTS``."""

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())

    def as_dict(self) -> dict[str, Any]:
        """As records hold it."""
        return {"moment": self.moment, "parts": self.parts, "total": self.total}


def peak_memory(setup: Setup, *, rank: int = 0, device: str = "cpu", among: Collection[str] = MOMENTS) -> Peak:
    """The moment at which ``rank`` needs the most memory of its device.

    Args:
        setup: the training.
        rank: of all ranks.
        device: ``cpu``, where offloaded state is in the same memory, or ``cuda``.
        among: the moments that count; ``moments.STEP`` for the peak of a training step.
    """
    held = _held(setup, rank, device)
    peaks = [
        Peak(moment=moment.name, parts=dict.fromkeys(PARTS, 0) | held | _transient(setup, moment, rank, device))
        for moment in _reached(setup, rank, device)
        if moment.name in among
    ]
    return max(peaks, key=lambda peak: peak.total)


def worst_peak(setup: Setup, *, device: str = "cpu", among: Collection[str] = MOMENTS) -> tuple[int, Peak]:
    """The rank that needs the most memory, and its peak."""
    deals_unevenly = setup.run_type == "optimized" and setup.recipe.zero_stage in {1, 2}
    ranks = range(0, setup.world_size, setup.sizes.tensor) if deals_unevenly else setup.first_ranks
    peaks = {rank: peak_memory(setup, rank=rank, device=device, among=among) for rank in ranks}
    worst = max(peaks, key=lambda rank: peaks[rank].total)
    return worst, peaks[worst]


def largest_micro_batch(setup: Setup, *, limit_bytes: int, device: str) -> int | None:
    """The most sequences of a micro batch with which every rank's peak is within ``limit_bytes``; None if not even 1.

    The accumulation stays as it is, so the global batch changes.
    """

    def fits(micro: int) -> bool:
        _, peak = worst_peak(replace(setup, micro_batch_size=micro), device=device)
        return peak.total <= limit_bytes

    if not fits(1):
        return None
    low, high = 1, 2
    while high <= _LARGEST_SEARCHED and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _held(setup: Setup, rank: int, device: str) -> dict[str, int]:
    """Model state that exists all the time; gradients do not."""
    state = model_state(setup, rank=rank)
    sizes = {"parameters": state.parameters, "optimizer": state.optimizer, "master": state.master}
    elsewhere = {} if device == "cpu" else state.off_device
    names = {"parameters": "weights", "optimizer": "optimizer", "master": "master"}
    return {names[key]: size - elsewhere.get(key, 0) for key, size in sizes.items()}


def _moments(setup: Setup, rank: int, device: str) -> list[Moment]:
    if setup.run_type != "optimized":
        return {"baseline": baseline, "ddp": ddp, "fsdp": fsdp}[setup.run_type](setup, device=device)
    of_stage = {0: zero0, 1: zero1, 2: zero2, 3: zero3}[setup.recipe.zero_stage]
    if setup.uses_bf16_optimizer:
        of_stage = bf16_optimizer
    return of_stage(setup, rank, device=device)


def _reached(setup: Setup, rank: int, device: str) -> Iterator[Moment]:
    """The moments that the rank goes through; only the last pipeline stage computes a loss."""
    found = _moments(setup, rank, device)
    evaluation = next(moment for moment in found if moment.name == EVALUATION)
    for moment in [start(setup, rank, device=device), *found, save(setup, evaluation.parts)]:
        if moment.name != "loss" or _computes_loss(setup, rank):
            yield moment


def _computes_loss(setup: Setup, rank: int) -> bool:
    return setup.stage(rank) == setup.sizes.pipeline - 1


def _transient(setup: Setup, moment: Moment, rank: int, device: str) -> dict[str, int]:
    """The parts of a moment besides model state."""
    parts, stream, kept = dict(moment.parts), stream_bytes(setup), 0
    if moment.name == "start":
        return parts | {"optimizer": 0}
    if setup.sizes.pipeline > 1:
        kept += stream * (3 if setup.stage(rank) else 1)  # received activations, and gradients
        parts["logits"] = kept_logits_bytes(setup) if _computes_loss(setup, rank) else 0
    if moment.name in {"step", "save"}:
        return parts | {"activations": kept}
    kept += kept_bytes(setup, moment.blocks) * (setup.micro_batches_in_flight(rank) if moment.blocks else 1)
    if moment.name == "forward":
        parts["activations"] = kept + block_gradient_bytes(setup)
    elif moment.name == EVALUATION:
        parts["activations"] = kept + 2 * stream
        computed = _computes_loss(setup, rank)
        parts["logits"] = logits_bytes(setup, device=device, gradients=False) if computed else 0
    elif moment.name == "loss":
        parts["activations"] = kept + 2 * stream  # the last LayerNorm's output and its gradient
        parts["logits"] = logits_bytes(setup, device=device)
        parts["new_gradients"] = parts.get("new_gradients", 0) + head_gradient_bytes(setup, device=device)
    else:
        parts["activations"] = kept + stream + recomputed_bytes(setup) + block_gradient_bytes(setup)
    return parts

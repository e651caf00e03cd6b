"""Predicts the most tensor memory that a rank needs in a training, or in a step of it, and what it is made of.

A step has moments at which memory can be highest: the loss, the beginning and the end of the backward pass, the
reduction of gradients, the optimizer's step. The peak of a step is the largest of them, in a step after the first. A
training also starts, saves and evaluates. ``dsgpt.planner.strategy`` says what exists then besides model state and
activations.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from dsgpt.planner.setup import FULL, Setup, model_parameters
from dsgpt.planner.strategies import Zero3, strategy_of
from dsgpt.planner.strategy import ModelState, Moment, embedding_bytes
from dsgpt.planner.work import (
    block_gradient_bytes,
    head_gradient_bytes,
    kept_bytes,
    kept_logits_bytes,
    logits_bytes,
    recomputed_bytes,
    stream_bytes,
)

STEP = ("forward", "loss", "backward", "reduction", "step")
"""The moments of a training step."""
EVALUATION = "evaluation"
MOMENTS = ("start", *STEP, "save", EVALUATION)
"""Those of a training."""


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
    """One of ``MOMENTS``."""
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
        among: the moments that count; ``STEP`` for the peak of a training step.
    """
    strategy = strategy_of(setup)
    kept = _kept(strategy.model_state(rank), device)
    moments = strategy.moments(rank, device)
    evaluation = next(moment for moment in moments if moment.name == EVALUATION)
    start = Moment(name="start", parts={"other": strategy.start_bytes(rank, device)})
    peaks = [
        Peak(moment=moment.name, parts=dict.fromkeys(PARTS, 0) | kept | _transient(setup, moment, rank, device))
        for moment in [start, *moments, _save(setup, evaluation.parts)]
        if moment.name in among and (moment.name != "loss" or setup.computes_loss(rank))
    ]
    return max(peaks, key=lambda peak: peak.total)


def worst_peak(setup: Setup, *, device: str = "cpu", among: Collection[str] = MOMENTS) -> tuple[int, Peak]:
    """The rank that needs the most memory, and its peak."""
    peaks = {
        rank: peak_memory(setup, rank=rank, device=device, among=among) for rank in strategy_of(setup).distinct_ranks
    }
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


def _save(setup: Setup, between: Mapping[str, int]) -> Moment:
    """While a checkpoint is written: a parameter and its moments, whole, in fp32, and those of the next one.

    Every rank gathers them on its device. The main rank looks for values that are not finite, with 7 bytes a number.
    ZeRO-3 may still have the embedding gathered, from an evaluation.

    Args:
        setup: the training.
        between: bytes of the parts that exist between two steps.
    """
    sizes = [part.numel for part in model_parameters(setup.model)]
    strategy = strategy_of(setup)
    each = FULL * (1 + setup.moments) if strategy.gathers_to_save else 0
    whole = max(each * size + max(each * following, 7 * size) for size, following in pairwise([*sizes, 0]))
    kept = embedding_bytes(setup) if isinstance(strategy, Zero3) else 0
    return Moment(name="save", parts={**between, "gathered": whole + kept})


def _kept(state: ModelState, device: str) -> dict[str, int]:
    """Model state that exists all the time; gradients do not."""
    away = {} if device == "cpu" else state.off_device
    return {
        "weights": state.parameters - away.get("parameters", 0),
        "optimizer": state.optimizer - away.get("optimizer", 0),
        "master": state.master - away.get("master", 0),
    }


def _transient(setup: Setup, moment: Moment, rank: int, device: str) -> dict[str, int]:
    """The parts of a moment besides model state."""
    parts, stream, kept = dict(moment.parts), stream_bytes(setup), 0
    if moment.name == "start":
        return parts | {"optimizer": 0}
    if setup.sizes.pipeline > 1:
        kept += stream * (3 if setup.stage(rank) else 1)  # received activations, and gradients
        parts["logits"] = kept_logits_bytes(setup) if setup.computes_loss(rank) else 0
    if moment.name in {"step", "save"}:
        return parts | {"activations": kept}
    kept += kept_bytes(setup, moment.blocks) * (setup.micro_batches_in_flight(rank) if moment.blocks else 1)
    if moment.name == "forward":
        parts["activations"] = kept + block_gradient_bytes(setup)
    elif moment.name == EVALUATION:
        parts["activations"] = kept + 2 * stream
        computed = setup.computes_loss(rank)
        parts["logits"] = logits_bytes(setup, device=device, gradients=False) if computed else 0
    elif moment.name == "loss":
        parts["activations"] = kept + 2 * stream  # the last LayerNorm's output and its gradient
        parts["logits"] = logits_bytes(setup, device=device)
        parts["new_gradients"] = parts.get("new_gradients", 0) + head_gradient_bytes(setup, device=device)
    else:
        parts["activations"] = kept + stream + recomputed_bytes(setup) + block_gradient_bytes(setup)
    return parts

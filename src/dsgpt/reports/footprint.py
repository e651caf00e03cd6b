"""Memory of a rank and what it holds, and the times of steps: of runs, and of the turns of sweeps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dsgpt.reports.fields import Fields

QUANTILES = 20
"""Times of steps are kept as ``QUANTILES + 1`` quantiles, from the smallest to the largest."""
STATE_PARTS = {"parameters": "weights", "gradients": "gradients", "optimizer": "optimizer", "master": "master weights"}
"""Keys of the record's ``model_state_bytes_per_rank``, and what they are called in pictures."""
PREDICTED_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "new_gradients": "gradients",
    "optimizer": "optimizer",
    "master": "master weights",
    "activations": "activations",
    "logits": "activations",
    "buckets": "buckets and gathered layers",
    "gathered": "buckets and gathered layers",
}
"""Keys of the record's ``predicted_peak_memory``; all others are ``other``."""
OTHER = "other"
PARTS = (*dict.fromkeys(PREDICTED_PARTS.values()), OTHER)
"""The parts of memory, in the order in which they are drawn."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The figures; None for what the record does not have. Sizes are in bytes."""

    model_state: dict[str, float] | None = None
    """By part of ``PARTS``, of the rank that holds most, while the optimizer steps."""
    state_rank0: float | None = None
    """All model state of rank 0; None if some of it is not on the device."""
    predicted: dict[str, float] | None = None
    """By part of ``PARTS``, at the peak of a step of rank 0."""
    peak: float | None = None
    """Measured, of rank 0."""
    peak_kind: Literal["allocated", "resident", "tensors"] | None = None
    """By PyTorch on the GPU; the resident set of the process on a CPU, which holds Python and all libraries too; or all
    tensors, counted one by one (``benchmark.py plan``)."""
    step_times_sec: list[float] | None = None
    """Quantiles of the times of the steps after the warm-up, at equal distances from the smallest to the largest."""

    @property
    def rest(self) -> float | None:
        """Bytes that PyTorch allocated at the peak beyond rank 0's model state: activations and all else."""
        if self.peak_kind != "allocated" or self.peak is None or self.state_rank0 is None:
            return None
        return max(0.0, self.peak - self.state_rank0)


def read_footprint(
    record: Fields, *, gpu_memory: float | None, host_memory: float | None, step_times: Sequence[float]
) -> Footprint:
    """The footprint of a run.

    Args:
        record: of the run.
        gpu_memory: peak bytes allocated on rank 0's GPU.
        host_memory: peak resident set of rank 0's process.
        step_times: seconds of each step after the warm-up.
    """
    state = record.section("cost").section("model_state_bytes_per_rank")
    predicted = record.section("summary").section("predicted_peak_memory").section("rank0").section("parts")
    parts = {name: size for key, name in STATE_PARTS.items() if (size := state.number(key)) is not None}
    gpu = gpu_memory is not None
    return Footprint(
        model_state=parts or None,
        state_rank0=_state_of_rank_0(state),
        predicted=parts_of_prediction(predicted),
        peak=gpu_memory if gpu else host_memory,
        peak_kind=("allocated" if gpu else "resident") if gpu or host_memory is not None else None,
        step_times_sec=quantiles(step_times) or None,
    )


def quantiles(values: Sequence[float], *, count: int = QUANTILES) -> list[float]:
    """``count + 1`` quantiles of ``values`` at equal distances, interpolated linearly; all values if they are fewer."""
    ordered = sorted(values)
    if len(ordered) <= count + 1:
        return ordered
    return [quantile(ordered, index / count) for index in range(count + 1)]


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of the sorted values are, interpolated linearly (NumPy's default)."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def pooled(times: Sequence[Sequence[float]]) -> list[float]:
    """The quantiles of all turns of a cell together; each turn counts as much as any other."""
    return sorted(value for turn in times for value in turn)


def _state_of_rank_0(state: Fields) -> float | None:
    by_rank = state.series("total_by_rank")
    return by_rank[0] if by_rank and len(state.section("by_device").names()) == 1 else None


def parts_of_prediction(parts: Fields) -> dict[str, float] | None:
    """The bytes of a predicted peak by part of ``PARTS``; None if there are none."""
    found: dict[str, float] = {}
    for key in parts.names():
        size = parts.number(key)
        if size is not None:
            name = PREDICTED_PARTS.get(key, OTHER)
            found[name] = found.get(name, 0.0) + size
    return found or None

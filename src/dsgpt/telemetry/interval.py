"""Figures of the steps between two lines for the user."""

from collections.abc import Sequence
from typing import TypedDict

from dsgpt.telemetry.meter import Figures, throughput
from dsgpt.telemetry.record import percentile


class IntervalFigures(TypedDict):
    """The figures of an interval; None where no step counts."""

    steps: int
    """Warm-up included, which the other figures leave out."""
    tokens_per_sec: float | None
    step_time_p50_sec: float | None
    step_time_p95_sec: float | None
    data_wait_share: float | None
    """Seconds that a rank waited for data, as a share of the seconds of the steps: of the rank that waited longest."""
    data_wait_rank: int | None
    """That rank; a step ends for all ranks when the last one has its data."""


def interval_figures(figures: Figures, *, waits: Sequence[float]) -> IntervalFigures:
    """The figures of an interval.

    Args:
        figures: of its steps, on this rank.
        waits: seconds in which each rank waited for data in them.
    """
    seconds = sum(figures.step_secs)
    slowest = max(range(len(waits)), key=waits.__getitem__)
    return {
        "steps": figures.steps,
        "tokens_per_sec": throughput(figures),
        "step_time_p50_sec": percentile(figures.step_secs, 0.50),
        "step_time_p95_sec": percentile(figures.step_secs, 0.95),
        "data_wait_share": waits[slowest] / seconds if seconds else None,
        "data_wait_rank": slowest if seconds else None,
    }

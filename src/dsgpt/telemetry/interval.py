"""Figures of the steps between two lines for the user."""

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
    """Seconds that rank 0 waited for data, as a share of the seconds of its steps."""


def interval_figures(figures: Figures) -> IntervalFigures:
    """The figures of an interval."""
    seconds = sum(figures.step_secs)
    return {
        "steps": figures.steps,
        "tokens_per_sec": throughput(figures),
        "step_time_p50_sec": percentile(figures.step_secs, 0.50),
        "step_time_p95_sec": percentile(figures.step_secs, 0.95),
        "data_wait_share": sum(figures.dataload_secs) / seconds if seconds else None,
    }

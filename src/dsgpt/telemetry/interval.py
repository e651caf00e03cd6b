"""Figures of the steps between two lines for the user, over all ranks."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

from dsgpt.telemetry.meter import Figures, throughput
from dsgpt.telemetry.record import percentile


class RankShare(NamedTuple):
    """What one rank adds to the figures of an interval; NaN for what it does not know, so that it can be gathered."""

    data_wait_sec: float
    """Seconds in which it waited for data, in the steps that count."""
    computing_sec: float
    """Seconds of the same steps in which its thread did not sleep; see ``clocks.ThreadClock``."""
    loss: float
    """Mean loss of what it read in the last step."""


@dataclass
class RankTimes:
    """Times of every rank in the steps that count, which take every rank equally long."""

    steps: int = 0
    step_sec: float = 0.0
    """Sum over the steps."""
    data_wait_sec: list[float] = field(default_factory=list)
    """Of each rank, like the next."""
    computing_sec: list[float] = field(default_factory=list)

    def add(self, other: "RankTimes") -> None:
        """Add the times of further steps."""
        self.steps += other.steps
        self.step_sec += other.step_sec
        self.data_wait_sec = _sums(self.data_wait_sec, other.data_wait_sec)
        self.computing_sec = _sums(self.computing_sec, other.computing_sec)

    def figures(self) -> "RankFigures":
        """Which ranks the others waited for, and how long."""
        slowest = lag = data_wait_rank = None
        if self.steps:
            data_wait_rank = max(range(len(self.data_wait_sec)), key=self.data_wait_sec.__getitem__)
        if self.steps and len(self.computing_sec) > 1 and all(map(math.isfinite, self.computing_sec)):
            slowest = max(range(len(self.computing_sec)), key=self.computing_sec.__getitem__)
            others = statistics.median_low(self.computing_sec)
            lag = (self.computing_sec[slowest] - others) / self.steps
        return {
            "data_wait_share": None if data_wait_rank is None else self.data_wait_sec[data_wait_rank] / self.step_sec,
            "data_wait_rank": data_wait_rank,
            "slowest_rank": slowest,
            "slowest_rank_lag_sec": lag,
        }


def _sums(one: list[float], other: list[float]) -> list[float]:
    return [a + b for a, b in zip(one, other, strict=True)] if one else list(other)


class RankFigures(TypedDict):
    """The figures that compare ranks; None where no step counts."""

    data_wait_share: float | None
    """Seconds that a rank waited for data, as a share of the seconds of the steps: of the rank that waited longest."""
    data_wait_rank: int | None
    """That rank; a step ends for all ranks when the last one has its data."""
    slowest_rank: int | None
    """The rank that computed longest; None on GPUs, and for one rank."""
    slowest_rank_lag_sec: float | None
    """Seconds of a step that it computed longer than the median rank, or of two ranks than the other; the mean."""


class IntervalFigures(RankFigures):
    """The figures of an interval; None where no step counts."""

    steps: int
    """Warm-up included, which the other figures but ``largest_loss`` leave out."""
    tokens_per_sec: float | None
    step_time_p50_sec: float | None
    step_time_p95_sec: float | None
    largest_loss: float | None
    """In the last step, of the rank whose part of the batch had the largest mean loss."""


def interval_figures(figures: Figures, *, ranks: Sequence[RankShare]) -> tuple[IntervalFigures, RankTimes]:
    """The figures of an interval, and the times that they come from.

    Args:
        figures: of its steps, on this rank.
        ranks: what each rank adds.
    """
    times = RankTimes(
        steps=len(figures.step_secs),
        step_sec=sum(figures.step_secs),
        data_wait_sec=[rank.data_wait_sec for rank in ranks],
        computing_sec=[rank.computing_sec for rank in ranks],
    )
    return {
        "steps": figures.steps,
        "tokens_per_sec": throughput(figures),
        "step_time_p50_sec": percentile(figures.step_secs, 0.50),
        "step_time_p95_sec": percentile(figures.step_secs, 0.95),
        "largest_loss": max((rank.loss for rank in ranks if math.isfinite(rank.loss)), default=None),
        **times.figures(),
    }, times

"""Whether one of two programs is faster beyond noise: paired differences, and an interval by the bootstrap."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dsgpt.common.measured import NO_DIFFERENCE, no_difference

CONFIDENCE, RESAMPLES, SEED = 0.95, 10_000, 1337
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)
"""Quantiles of Student's t distribution for ``CONFIDENCE``, two-sided, with 1, 2, ... degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class SpeedDifference:
    """How much faster B is than A, as a share of A's speed; negative if it is slower."""

    change: float
    low: float
    high: float
    """The ends of the interval with ``CONFIDENCE``."""
    pairs: int

    @property
    def verdict(self) -> str:
        """``faster`` or ``slower`` if the whole interval is on that side of 0, otherwise ``NO_DIFFERENCE``."""
        if no_difference(self.low, self.high, than=(0.0, 0.0)):
            return NO_DIFFERENCE
        return "faster" if self.low > 0 else "slower"


def speed_difference(a: Sequence[float], b: Sequence[float], *, block: int = 1, seed: int = SEED) -> SpeedDifference:
    """Compare the speeds of pairs by the geometric mean of their ratios.

    The interval is the percentile interval of a circular block bootstrap (Politis and Romano, 1992). Resamples of a few
    pairs vary too little: of two equal programs, the interval of three pairs calls every fourth different. So with
    fewer than ten pairs it is that of Student's t test of the logarithms, if that is wider.

    Args:
        a: speeds of A, above 0.
        b: those of B, pair by pair.
        block: pairs that are drawn together, because what slows one may slow its neighbours; 1 for independent pairs.
        seed: of the resamples.

    Raises:
        ValueError: fewer than two pairs, or unequal numbers of speeds.
    """
    import numpy as np  # noqa: PLC0415 - takes its time

    if len(a) != len(b) or len(a) < 2:
        raise ValueError(f"{len(a)} and {len(b)} speeds are not two pairs or more")
    logs = np.log(np.asarray(b, dtype=np.float64)) - np.log(np.asarray(a, dtype=np.float64))
    pairs, draws = len(logs), math.ceil(len(logs) / block)
    random = np.random.default_rng(seed)
    starts = random.integers(0, pairs, size=(RESAMPLES, draws))  # (R, D)
    places = (starts[:, :, None] + np.arange(block)) % pairs  # (R, D, block)
    means = logs[places.reshape(RESAMPLES, -1)[:, :pairs]].mean(axis=1)  # (R,)
    tail = (1 - CONFIDENCE) / 2
    mean, (low, high) = float(logs.mean()), np.quantile(means, [tail, 1 - tail]).tolist()
    if pairs - 1 <= len(STUDENT_T):
        half = STUDENT_T[pairs - 2] * float(logs.std(ddof=1)) / math.sqrt(pairs)
        low, high = min(low, mean - half), max(high, mean + half)
    return SpeedDifference(change=math.expm1(mean), low=math.expm1(low), high=math.expm1(high), pairs=pairs)


def block_length(steps: int) -> int:
    """The usual length of a block for that many neighbouring steps: their cube root."""
    return max(1, round(math.cbrt(steps)))

"""Fewer points of a long curve, such that its picture stays the same. Imports no Streamlit."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
POINTS = 1200
"""Of a curve in a picture: about one for each pixel of its width."""


def kept(values: Values, *, points: int = POINTS) -> NDArray[np.intp]:
    """The places of at most ``points`` values: of each stretch the smallest and the largest, so no peak is lost.

    The first and the last value are always kept. NaN is kept only where a stretch holds nothing else.

    Args:
        values: shape (n,), in the order in which they are drawn.
        points: at least 4.

    Returns:
        Ascending, each once.
    """
    if len(values) <= points:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), (points - 2) // 2 + 1).astype(np.intp)
    low, high = np.where(np.isnan(values), np.inf, values), np.where(np.isnan(values), -np.inf, values)
    found = [0, len(values) - 1]
    for start, end in pairwise(edges):
        found += [start + int(low[start:end].argmin()), start + int(high[start:end].argmax())]
    return np.unique(found)


def smoothed(values: Values, *, window: int) -> Values:
    """The mean of each value and the ``window - 1`` before it, shape (n,); NaN counts as missing."""
    if window <= 1 or len(values) == 0:
        return values
    known = ~np.isnan(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    amount = counts[ends] - counts[starts]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(amount > 0, (sums[ends] - sums[starts]) / amount, np.nan)

"""Points of the pictures of curves: losses against an axis, and the difference of two runs. Imports no Streamlit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsgpt.dashboard.folders import is_reference
from dsgpt.dashboard.sampling import POINTS, kept, smoothed
from dsgpt.dashboard.steps import Steps, Values

Table = dict[str, list[object]]
LEAST_DIFFERENCE = 1e-8
"""Where a difference is drawn that is exactly 0: a logarithmic axis has no 0. It is below fp32's rounding of a loss."""


@dataclass(frozen=True)
class Axis:
    """A horizontal axis."""

    column: str
    """Of ``Steps``."""
    title: str
    scale: float = 1.0
    """Units of the column per unit of the axis."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A curve in full, in the units of its axes."""

    name: str
    x: Values
    y: Values
    low: Values | None = None
    """The least of the curves whose mean this is; None if it is one curve."""
    high: Values | None = None


def axes(price: float | None) -> dict[str, Axis]:
    """The axes of a loss, by name; ``price`` is that of a device hour."""
    found = {
        "steps": Axis("step", "optimizer steps"),
        "tokens": Axis("tokens", "tokens"),
        "time": Axis("train_time_sec", "training time (s)"),
    }
    if price:
        found["money"] = Axis("train_time_sec", "cost of all devices ($)")
    return found


def money_per_second(price: float | None, devices: float | None) -> float | None:
    """What all devices of a run cost in a second."""
    return None if price is None or devices is None else price * devices / 3600


def loss_series(
    name: str, steps: Steps, *, validation: bool, axis: Axis, factor: float = 1.0, window: int = 1
) -> Series:
    """The losses of a run.

    Args:
        name: of the run.
        steps: of the run.
        validation: the losses of validations, not of training steps.
        axis: the horizontal one.
        factor: of the values on it; money per second, for example.
        window: of the trailing mean, in points.
    """
    columns, key = (steps.validation, "val_loss") if validation else (steps.train, "loss")
    return Series(name=name, x=columns[axis.column] * factor / axis.scale, y=smoothed(columns[key], window=window))


def difference(name: str, steps: Steps, baseline: Steps, *, validation: bool = False) -> Series:
    """The distance of a run's loss from the baseline's at each step that both recorded; at least the least."""
    key = "val_loss" if validation else "loss"
    ours, theirs = (each.validation if validation else each.train for each in (steps, baseline))
    common, own, other = np.intersect1d(ours["step"], theirs["step"], assume_unique=True, return_indices=True)
    distance = np.abs(ours[key][own] - theirs[key][other])
    return Series(name=name, x=common, y=np.maximum(distance, LEAST_DIFFERENCE))


def points(series: Sequence[Series], *, most: int = POINTS) -> Table:
    """The fields ``run``, ``x`` and ``y`` of at most ``most`` points of each curve: what a picture needs.

    If a curve has a band, also ``low`` and ``high``.
    """

    def chosen(each: Series) -> NDArray[np.signedinteger[Any]]:
        drawn = [values for values in (each.y, each.low, each.high) if values is not None]
        return np.unique(np.concatenate([kept(values, points=most // len(drawn)) for values in drawn]))

    return _table(series, chosen)


def numbers(series: Sequence[Series], *, x: str, y: str) -> Table:
    """Every point, under the headings ``x`` and ``y``."""
    table = _table(series, lambda each: np.arange(len(each.y)))
    titles = {"x": x, "y": y, "low": "least", "high": "most"}
    return {titles.get(field, field): values for field, values in table.items()}


def _table(series: Sequence[Series], places: Callable[[Series], NDArray[np.signedinteger[Any]]]) -> Table:
    table: Table = {"run": [], "x": [], "y": []}
    if banded := any(each.low is not None for each in series):
        table |= {"low": [], "high": []}
    for each in series:
        chosen = places(each)
        chosen = chosen[~(np.isnan(each.x[chosen]) | np.isnan(each.y[chosen]))]
        table["run"] += [each.name] * len(chosen)
        table["x"] += each.x[chosen].tolist()
        table["y"] += each.y[chosen].tolist()
        if banded:
            for field, values in (("low", each.low), ("high", each.high)):
                table[field] += (each.y if values is None else values)[chosen].tolist()
    return table


def labels(names: Sequence[str]) -> Mapping[str, str]:
    """Short names: without the folders, unless two runs would have the same. Those of another machine say so."""
    short = [name.rpartition("/")[2] + (" (another machine)" if is_reference(name) else "") for name in names]
    return {name: own if short.count(own) == 1 else name for name, own in zip(names, short, strict=True)}


def described(series: Sequence[Series], *, y: str) -> str:
    """The curves in words: where each ends."""
    ends = {each.name: each.y[~np.isnan(each.y)] for each in series}
    parts = [f"{name} ends at {known[-1]:.4g}" for name, known in ends.items() if len(known)]
    return f"{y}: " + ("; ".join(parts) or "nothing recorded")

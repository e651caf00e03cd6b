"""Curves of runs: their points, the picture of them in Vega-Lite, and the curves of several seeds as one."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsgpt.charts.comparison import ROWS
from dsgpt.common.text import NO_DIFFERENCE, no_difference
from dsgpt.dashboard.figures import ZOOM, figure
from dsgpt.dashboard.steps import Steps, Values
from dsgpt.dashboard.summaries import grouped, is_reference
from dsgpt.record.equal_work import inference_stamps, judge
from dsgpt.record.runs import Run
from dsgpt.record.work import NOTED

POINTS = 1200
"""Of a curve in a picture: about one for each pixel of its width."""
HEIGHT = 300
"""Of a picture without its legend, in pixels."""
ROW_HEIGHT, LINE_HEIGHT = 7, 15
"""Of a legend: what a name adds to its lines, and a line, in pixels."""
LINE = 42
"""Letters of a line of a legend: so many are seen on a phone."""
_BREAK = re.compile(rf".{{1,{LINE}}}$|.{{1,{LINE - 1}}}[-_/. ]|.{{1,{LINE}}}")
"""A line of a long name: up to a sign that parts its words, if there is one."""
NUMBERS = {"labelExpr": "abs(datum.value) < 1 ? format(datum.value, '.6~g') : format(datum.value, '~s')"}
"""Of an axis: 12k, but 0.002 in place of 2m, which reads as minutes or millions."""
DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 2, 1, 2], [10, 4], [1, 3], [6, 2, 2, 2]]
"""Beside the colours, for the colour-blind and for grey print."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A curve in full, in the units of its axes."""

    name: str
    x: Values
    y: Values
    low: Values | None = None
    """The least of the curves whose mean this is; None if it is one curve."""
    high: Values | None = None


def labels(names: Sequence[str]) -> dict[str, str]:
    """Short names: without the folders, unless two runs would have the same. Those of another machine say so."""
    short = [name.rpartition("/")[2] + (" (another machine)" if is_reference(name) else "") for name in names]
    return {name: own if short.count(own) == 1 else name for name, own in zip(names, short, strict=True)}


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


def thinned(values: Values, *, points: int = POINTS) -> NDArray[np.intp]:
    """The places of at most ``points`` values: of each stretch the smallest and the largest, so no peak is lost.

    The first and the last value are always among them. NaN is only where a stretch holds nothing else.

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
    places = [0, len(values) - 1]
    for start, end in pairwise(edges):
        places += [start + int(low[start:end].argmin()), start + int(high[start:end].argmax())]
    return np.unique(places)


def points(series: Sequence[Series], *, most: int | None = None) -> dict[str, list[Any]]:
    """The fields ``run``, ``x`` and ``y`` of at most ``most`` points of each curve, or of all.

    If a curve has a band, also ``low`` and ``high``.
    """
    table: dict[str, list[Any]] = {"run": [], "x": [], "y": []}
    if any(each.low is not None for each in series):
        table |= {"low": [], "high": []}
    for each in series:
        low, high = each.y if each.low is None else each.low, each.y if each.high is None else each.high
        places = np.arange(len(each.y))
        if most is not None:
            drawn = [each.y] if each.low is None else [each.y, low, high]
            places = np.unique(np.concatenate([thinned(values, points=most // len(drawn)) for values in drawn]))
        places = places[~(np.isnan(each.x[places]) | np.isnan(each.y[places]))]
        columns = {"x": each.x, "y": each.y, "low": low, "high": high}
        for field in table:
            table[field] += [each.name] * len(places) if field == "run" else columns[field][places].tolist()
    return table


def show_curves(
    series: Sequence[Series],
    names: Sequence[str],
    *,
    x: str,
    y: str,
    title: str,
    key: str,
    most: int = POINTS,
    level: int = 3,
    keeps_zoom: bool = False,
    **picture: Any,
) -> None:
    """Show curves of the runs ``names`` with their numbers: as ``figure`` and, for ``picture``, as ``lines`` do.

    ``most`` limits the points that are drawn of a curve.
    """
    titles = {"x": x, "y": y, "low": "least", "high": "most"}
    ends = {each.name: each.y[~np.isnan(each.y)] for each in series}
    in_words = "; ".join(f"{name} ends at {known[-1]:.4g}" for name, known in ends.items() if len(known))
    figure(
        lines(names, x=x, y=y, band=any(each.low is not None for each in series), **picture),
        points=points(series, most=most),
        numbers=lambda: {titles.get(field, field): values for field, values in points(series).items()},
        title=title,
        alternative=f"{y}: {in_words or 'nothing recorded'}",
        key=key,
        level=level,
        keeps_zoom=keeps_zoom,
    )


def lines(
    names: Sequence[str],
    *,
    x: str,
    y: str,
    logarithmic: bool = False,
    from_zero: bool = False,
    rules: Mapping[str, float] | None = None,
    drawn: Sequence[str] | None = None,
    ordered: bool = False,
    band: bool = False,
) -> dict[str, Any]:
    """A line for each name, which the mouse can move, and with Ctrl zoom.

    The fields of its points are ``run``, ``x`` and ``y``; of a band, ``low`` and ``high``.

    Args:
        names: of the runs; their order decides the colours.
        x: title of the horizontal axis, with its unit.
        y: the same of the vertical axis.
        logarithmic: the vertical axis.
        from_zero: the vertical axis begins at 0.
        rules: horizontal lines by their label.
        drawn: those of ``names`` that have a curve, if not all.
        ordered: the field ``order`` of the points says in which order they are joined, if not that of ``x``.
        band: the lines are means, drawn above their ranges.
    """
    scale: dict[str, Any] = {"type": "log"} if logarithmic else {"zero": from_zero}
    encoding: dict[str, Any] = {
        "x": {"field": "x", "type": "quantitative", "title": x, "axis": {**NUMBERS, "grid": False}},
        "y": {"field": "y", "type": "quantitative", "title": y, "scale": scale},
        **look(names, drawn or names),
        "tooltip": [
            {"field": "run", "type": "nominal", "title": "run"},
            {"field": "x", "type": "quantitative", "title": x, "format": ",.6~g"},
            {"field": "y", "type": "quantitative", "title": y, "format": ",.6~g"},
        ],
    }
    if ordered:
        encoding["order"] = {"field": "order", "type": "quantitative"}
    if logarithmic:
        encoding["y"]["axis"] = {"format": "~e", "values": [10.0**power for power in range(-12, 13)]}
    with_ctrl = "wheel![event.ctrlKey]"  # the wheel alone scrolls the page
    zoom = {"name": ZOOM, "select": {"type": "interval", "zoom": with_ctrl}, "bind": "scales"}
    curve = {"mark": {"type": "line", "strokeWidth": 1.7, "clip": True}, "encoding": encoding, "params": [zoom]}
    layers: list[dict[str, Any]] = [curve]
    if band:
        ranges = {**{key: encoding[key] for key in ("x", "color")}, "y": {**encoding["y"], "field": "low"}}
        mark = {"type": "area", "opacity": 0.2, "clip": True}
        layers.insert(0, {"mark": mark, "encoding": {**ranges, "y2": {"field": "high"}}})
    for label, value in (rules or {}).items():
        at: dict[str, Any] = {"datum": value, "type": "quantitative"}
        once: dict[str, Any] = {"data": {"values": [{}]}}
        rule = {"type": "rule", "strokeDash": [4, 4], "aria": False}
        text = {"type": "text", "text": label, "align": "left", "dx": 4, "dy": -6}
        layers.append({**once, "mark": rule, "encoding": {"y": at}})
        layers.append({**once, "mark": text, "encoding": {"y": at, "x": {"value": 0}}})
    legend = sum(ROW_HEIGHT + LINE_HEIGHT * len(in_lines(name)) for name in drawn or names) if len(names) > 1 else 0
    return {"height": HEIGHT + legend, **({"layer": layers} if len(layers) > 1 else curve)}


def in_lines(name: str) -> list[str]:
    """A name in lines that a phone shows whole."""
    return [name] if len(name) <= LINE else _BREAK.findall(name)


def look(names: Sequence[str], drawn: Sequence[str]) -> dict[str, Any]:
    """Colours and dashes in the order of ``names``, and a legend of ``drawn``, as Vega-Lite's channels."""
    legend = {
        "orient": "bottom",
        "columns": 1,
        "values": list(drawn),
        "labelExpr": f"{json.dumps({name: in_lines(name) for name in drawn})}[datum.label]",
        "labelLimit": 0,
        "symbolType": "stroke",
        "symbolSize": 400,
        "symbolStrokeWidth": 2,
        "symbolOpacity": 1,
    }
    run = {"field": "run", "type": "nominal", "title": None, "legend": legend if len(names) > 1 else None}
    dashes = [DASHES[place % len(DASHES)] for place in range(len(names))]
    return {
        "color": {**run, "scale": {"domain": list(names)}},
        "strokeDash": {**run, "scale": {"domain": list(names), "range": dashes}},
    }


# Runs that differ in the seed alone, shown as one: the mean of each figure, and its range.


def by_seed(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs in their order; those of the same work and setup but for the seed are one group."""

    def setups(run: Run) -> set[frozenset[tuple[str, str | None]]]:
        return {
            frozenset((key, value) for key, value in each.setup.items() if key not in NOTED) for each in run.segments
        }

    def alike(one: Run, other: Run) -> bool:
        seed, other_seed = one.work["seed"], other.work["seed"]
        if None in (seed, other_seed) or seed == other_seed or setups(one) != setups(other):
            return False
        same = replace(other, work={**other.work, "seed": seed})
        return judge([one, same]).answer == "yes" and not inference_stamps([one, other])

    return grouped(runs, lambda group, run: all(alike(each, run) for each in group))


def mean_run(group: Sequence[Run]) -> Run:
    """The mean of every figure that all runs of a group have; a group of one is its run."""
    first = group[0]
    if len(group) == 1:
        return first
    figures: dict[str, Any] = {}
    for field in fields(Run):
        if field.type == float | None:
            values = [getattr(run, field.name) for run in group]
            figures[field.name] = None if None in values else float(np.mean(values))
    latencies = [latency for run in group for latency in run.latency_range or ()]
    return replace(
        first,
        **figures,
        name=f"{first.name} (mean of {len(group)} seeds)",
        status=next((run.status for run in group if run.status != "completed"), first.status),
        segments=tuple(segment for run in group for segment in run.segments),
        work={**first.work, "seed": ", ".join(sorted((run.work["seed"] for run in group), key=int))},
        latency_range=(min(latencies), max(latencies)) if latencies else None,
        notes=tuple(f"{run.name}: {note}" for run in group for note in run.notes),
    )


def aligned(group: Sequence[Steps]) -> list[Steps]:
    """Each with the steps and the validations that all have."""
    if len(group) == 1:
        return [*group]
    train, validation = (
        reduce(np.intersect1d, [getattr(each, part)["step"] for each in group]) for part in ("train", "validation")
    )
    return [replace(each, train=_at(train, each.train), validation=_at(validation, each.validation)) for each in group]


def _at(steps: Values, columns: Mapping[str, Values]) -> dict[str, Values]:
    places = np.isin(columns["step"], steps)
    return {name: values[places] for name, values in columns.items()}


def mean_steps(group: Sequence[Steps]) -> Steps:
    """The mean of every column of aligned steps."""
    if len(group) == 1:
        return group[0]
    train = {name: np.mean([each.train[name] for each in group], axis=0) for name in group[0].train}
    validation = {name: np.mean([each.validation[name] for each in group], axis=0) for name in group[0].validation}
    return replace(group[0], train=train, validation=validation)


def band(group: Sequence[Series], *, name: str) -> Series:
    """The mean of curves of aligned steps, and their least and most; a group of one is its curve."""
    if len(group) == 1:
        return group[0]
    y = np.stack([each.y for each in group])
    x = np.mean([each.x for each in group], axis=0)
    return Series(name=name, x=x, y=y.mean(axis=0), low=y.min(axis=0), high=y.max(axis=0))


def with_ranges(rows: Sequence[Sequence[str]], groups: Sequence[Sequence[Run]]) -> list[list[str]]:
    """The rows of ``charts.comparison.result_rows``, with the range of what was measured beside each mean.

    Means whose ranges overlap have no difference.
    """
    measured = {row.label: row for row in ROWS}
    ranged = [[*cells] for cells in rows]
    for cells in ranged:
        row, base = measured.get(cells[0]), None
        for place, group in enumerate(groups, start=1):
            values = [value for run in group if row and (value := row.value(run)) is not None]
            if row is None or len(group) == 1 or len(values) < len(group):
                continue
            least, most = min(values), max(values)
            cells[place] += f" ({row.form(least)} to {row.form(most)})"
            if place == 1:
                base = least, most
            elif base and no_difference(least, most, than=base):
                cells[len(groups) + place - 1] = NO_DIFFERENCE
    return ranged

"""The pictures of the compare page: curves, bars and tables, in Vega-Lite.

Vega-Lite for the pictures of the dashboard: lines and bars, one look per run. Colours are the theme's, which Streamlit
sets: the palette of the charts, in the order of the names.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsgpt.charts.comparison import speed_up
from dsgpt.common.text import NO_DIFFERENCE, no_difference
from dsgpt.dashboard import formats
from dsgpt.dashboard.runs import is_reference
from dsgpt.dashboard.steps import POINTS, Steps, Values, kept, smoothed
from dsgpt.dashboard.summaries import cost
from dsgpt.record.runs import Run
from dsgpt.record.suites import TITLES, Concurrency
from dsgpt.record.sweeps import Comparison, Spread, Sweep

ZOOM = "zoom"
"""The part of a picture of lines that is shown."""
HEIGHT = 300
"""Of a picture without its legend, in pixels."""
ROW_HEIGHT, LINE_HEIGHT = 7, 15
"""Of a legend: what a name adds to its lines, and a line, in pixels."""
LINE = 42
"""Letters of a line of a legend: so many are seen on a phone."""
ROOM = 1.2
"""For the value behind the longest bar."""
_BREAK = re.compile(rf".{{1,{LINE}}}$|.{{1,{LINE - 1}}}[-_/. ]|.{{1,{LINE}}}")
"""A line of a long name: up to a sign that parts its words, if there is one."""
NUMBERS = {"labelExpr": "abs(datum.value) < 1 ? format(datum.value, '.6~g') : format(datum.value, '~s')"}
"""Of an axis: 12k, but 0.002 in place of 2m, which reads as minutes or millions."""
DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 2, 1, 2], [10, 4], [1, 3], [6, 2, 2, 2]]
"""Beside the colours, for the colour-blind and for grey print."""


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
        **_look(names, drawn or names),
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
    legend = sum(ROW_HEIGHT + LINE_HEIGHT * len(in_lines(name)) for name in drawn or names) if len(names) > 1 else 0
    ranges = {**{key: encoding[key] for key in ("x", "color")}, "y": {**encoding["y"], "field": "low"}}
    area = {"mark": {"type": "area", "opacity": 0.2, "clip": True}, "encoding": {**ranges, "y2": {"field": "high"}}}
    around = [*([area] if band else []), curve, *_rules(rules or {})]
    return {"height": HEIGHT + legend, **({"layer": around} if len(around) > 1 else curve)}


def _rules(rules: Mapping[str, float]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    once: dict[str, Any] = {"data": {"values": [{}]}}
    for label, value in rules.items():
        at = {"datum": value, "type": "quantitative"}
        rule = {"type": "rule", "strokeDash": [4, 4], "aria": False}
        text = {"type": "text", "text": label, "align": "left", "dx": 4, "dy": -6}
        found.append({**once, "mark": rule, "encoding": {"y": at}})
        found.append({**once, "mark": text, "encoding": {"y": at, "x": {"value": 0}}})
    return found


def bars(names: Sequence[str], *, x: str, values: Sequence[Any], groups: Sequence[str] = ()) -> dict[str, Any]:
    """A horizontal bar from 0 for each name, which is above it; the fields are ``run``, ``value`` and ``label``.

    Args:
        names: of the runs, from the top.
        x: title of the axis, with its unit.
        values: of the bars; None where there is none.
        groups: by the field ``group``, bars of one group have one colour; without, each has its own.
    """
    run = {"field": "run", "type": "nominal", "sort": list(names), "title": None}
    most = max((value for value in values if value), default=None)
    scale = {"zero": True} if most is None else {"zero": True, "domainMax": ROOM * most}
    base = {
        "y": {**run, "axis": None},
        "x": {"field": "value", "type": "quantitative", "title": x, "scale": scale, "axis": NUMBERS},
        "tooltip": [{**run, "title": "run"}, {"field": "value", "type": "quantitative", "title": x, "format": ",.6~g"}],
    }
    colour = {**_look(names, names)["color"], "legend": None}
    if groups:
        colour |= {"field": "group", "scale": {"domain": list(dict.fromkeys(groups))}}
    text = {"type": "text", "align": "left"}
    value = {"mark": {**text, "dx": 5, "dy": 8}, "encoding": {**base, "text": {"field": "label"}}}
    name = {
        "mark": {**text, "dy": -11, "limit": {"expr": "width"}},
        "encoding": {**base, "x": {"value": 0}, "text": run},
    }
    bar = {"mark": {"type": "bar", "height": 16, "yOffset": 8}, "encoding": {**base, "color": colour}}
    return {"height": {"step": 44}, "layer": [bar, value, name]}


def in_lines(name: str) -> list[str]:
    """A name in lines that a phone shows whole."""
    return [name] if len(name) <= LINE else _BREAK.findall(name)


def _look(names: Sequence[str], drawn: Sequence[str]) -> dict[str, Any]:
    """Colours and dashes in the order of ``names``, and a legend of ``drawn``."""
    domain = list(names)
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
    run = {
        "field": "run",
        "type": "nominal",
        "title": None,
        "legend": legend if len(domain) > 1 else None,
    }
    dashes = [DASHES[place % len(DASHES)] for place in range(len(domain))]
    return {
        "color": {**run, "scale": {"domain": domain}},
        "strokeDash": {**run, "scale": {"domain": domain, "range": dashes}},
    }


# Points of the pictures of curves: losses against an axis, and the difference of two runs.

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


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A figure of a run."""

    title: str
    """With its unit."""
    value: Callable[[Run, Run], float | None]
    """Of the baseline and the run."""
    form: Callable[[float | None], str]
    compares: bool = False
    """Whether it is a ratio to the baseline, which only equal work allows."""


def efficiency(base: Run, run: Run) -> float | None:
    """The speed-up per device, of the devices of the baseline; 1 is ideal."""
    ratio = speed_up(base, run)
    if ratio is None or not base.device_count or not run.device_count:
        return None
    return ratio * base.device_count / run.device_count


def _memory(base: Run, run: Run) -> float | None:
    """Of one kind for all: on GPUs what PyTorch allocated, otherwise the resident memory of rank 0."""
    found = run.gpu_memory if base.gpu_memory is not None else run.host_memory
    return None if found is None else found / 1e9


def measures(price: float | None) -> Mapping[str, Measure]:
    """Every measure by its short name; ``price`` is that of a device hour."""
    found = {
        "time": Measure(title="training time (s)", value=lambda _, run: run.train_time, form=formats.seconds),
        "throughput": Measure(
            title="tokens/s, all devices", value=lambda _, run: run.tokens_per_sec, form=formats.rate
        ),
        "speed-up": Measure(title="speed-up in training time", value=speed_up, form=formats.times, compares=True),
        "efficiency": Measure(title="speed-up per device", value=efficiency, form=formats.share, compares=True),
        "memory": Measure(title="peak memory of rank 0 (GB)", value=_memory, form=_gigabytes),
        "latency": Measure(
            title="inference latency, batch 1 (s)", value=lambda _, run: run.inference_latency, form=formats.seconds
        ),
    }
    if price:
        found["money"] = Measure(
            title="cost of all devices ($)", value=lambda _, run: cost(run, price), form=formats.money
        )
    return found


def _gigabytes(value: float | None) -> str:
    return formats.memory(None if value is None else value * 1e9)


def bar_points(runs: Sequence[Run], measure: Measure) -> Table:
    """The fields ``run``, ``value`` and ``label``; the first run is the baseline. Unknown values have no bar."""
    values = [measure.value(runs[0], run) for run in runs]
    return {
        "run": [run.name for run in runs],
        "value": list(values),
        "label": [measure.form(value) for value in values],
    }


def as_table(rows: Sequence[Sequence[str]], *, first: str) -> Table:
    """Rows of ``reports.comparison``, the first of which is the header, as columns; equal headings get a number."""
    header, *body = rows
    table: Table = {}
    for place, heading in enumerate(header):
        name = heading or first
        table[name if name not in table else f"{name} ({place})"] = [row[place] for row in body]
    return table


def comparison_table(sweep: Sweep, comparison: Comparison) -> Table:
    """A row for each cell of a comparison of a sweep, the baseline first."""
    base = sweep.cell(comparison.baseline)
    compared = {each.cell: each for each in comparison.cells}
    cells = [base, *(sweep.cell(name) for name in compared if name != base.name)]
    found = [compared.get(cell.name) for cell in cells]
    return {
        "cell": [cell.name for cell in cells],
        "devices": [cell.devices for cell in cells],
        "tokens/s": [float(round(cell.tokens_per_sec.median)) if cell.tokens_per_sec else None for cell in cells],
        "speed-up": [1.0 if each is None else _median(each.speed_up) for each in found],
        "smallest": [None if each is None or not each.speed_up else each.speed_up.smallest for each in found],
        "largest": [None if each is None or not each.speed_up else each.speed_up.largest for each in found],
        "judged": [NO_DIFFERENCE if each and _unclear(each.speed_up) else "" for each in found],
        "efficiency": [1.0 if each is None else each.efficiency for each in found],
        "work": ["baseline" if each is None else each.same_work for each in found],
        "loss minus baseline": [None if each is None else each.loss_difference for each in found],
        "failures": [len(cell.failures) for cell in cells],
    }


def _unclear(spread: Spread | None) -> bool:
    return spread is not None and no_difference(spread.smallest, spread.largest)


def _median(spread: Spread | None) -> float | None:
    return None if spread is None else spread.median


def concurrency_table(record: Concurrency) -> Table:
    """A row for each engine at each concurrency."""
    rows = [(engine, at, load) for engine in record.engines for at, load in engine.by_concurrency.items()]
    return {
        "engine": [TITLES.get(engine.name, engine.name) for engine, _, _ in rows],
        "requests at once": [float(at) if at.isdecimal() else None for _, at, _ in rows],
        "tokens/s": [load.tokens_per_sec.median for _, _, load in rows],
        "latency, median (s)": [load.latency_sec.p50 for _, _, load in rows],
        "latency, 95% (s)": [load.latency_sec.p95 for _, _, load in rows],
        "first token, 95% (s)": [load.ttft_sec.p95 for _, _, load in rows],
        "peak memory (GB)": [
            None if not load.peak_memory_bytes else load.peak_memory_bytes / 1e9 for _, _, load in rows
        ],
    }

"""Vega-Lite for the pictures of the dashboard: lines and bars, one look per run. Imports no Streamlit.

Colours are the theme's, which Streamlit sets: the palette of the charts, in the order of the names.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

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

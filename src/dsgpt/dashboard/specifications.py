"""Vega-Lite for the pictures of the dashboard: lines and bars, one look per run. Imports no Streamlit.

Colours are the theme's, which Streamlit sets: the palette of the charts, in the order of the names.
"""

from collections.abc import Mapping, Sequence
from typing import Any

HEIGHT = 300
"""Of a picture without its legend, in pixels."""
ROW_HEIGHT, LEGEND_COLUMNS = 22, 2
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
) -> dict[str, Any]:
    """A line for each name, which the mouse can move, and with Ctrl zoom.

    The fields of its points are ``run``, ``x`` and ``y``.

    Args:
        names: of the runs; their order decides the colours.
        x: title of the horizontal axis, with its unit.
        y: the same of the vertical axis.
        logarithmic: the vertical axis.
        from_zero: the vertical axis begins at 0.
        rules: horizontal lines by their label.
    """
    scale: dict[str, Any] = {"type": "log"} if logarithmic else {"zero": from_zero}
    encoding: dict[str, Any] = {
        "x": {"field": "x", "type": "quantitative", "title": x, "axis": {"format": "~s", "grid": False}},
        "y": {"field": "y", "type": "quantitative", "title": y, "scale": scale},
        **_look(names),
        "tooltip": [
            {"field": "run", "type": "nominal", "title": "run"},
            {"field": "x", "type": "quantitative", "title": x, "format": ",.6~g"},
            {"field": "y", "type": "quantitative", "title": y, "format": ",.6~g"},
        ],
    }
    if logarithmic:
        encoding["y"]["axis"] = {"format": "~e", "values": [10.0**power for power in range(-12, 13)]}
    legend_rows = -(-len(names) // LEGEND_COLUMNS) if len(names) > 1 else 0
    with_ctrl = "wheel![event.ctrlKey]"  # the wheel alone scrolls the page
    zoom = {"name": "zoom", "select": {"type": "interval", "zoom": with_ctrl}, "bind": "scales"}
    curve = {"mark": {"type": "line", "strokeWidth": 1.7, "clip": True}, "encoding": encoding, "params": [zoom]}
    height = {"height": HEIGHT + ROW_HEIGHT * legend_rows}
    return {**height, **({"layer": [curve, *_rules(rules)]} if rules else curve)}


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


def bars(names: Sequence[str], *, x: str, form: str = ",.6~g") -> dict[str, Any]:
    """A horizontal bar from 0 for each name, with its value; the fields are ``run``, ``value`` and ``label``.

    Args:
        names: of the runs, from the top.
        x: title of the axis, with its unit.
        form: of the values in the tooltip.
    """
    run = {"field": "run", "type": "nominal", "sort": list(names), "title": None}
    base = {
        "y": {**run, "axis": {"labelLimit": 220, "ticks": False, "domain": False}},
        "x": {"field": "value", "type": "quantitative", "title": x, "scale": {"zero": True}, "axis": {"format": "~s"}},
        "tooltip": [{**run, "title": "run"}, {"field": "value", "type": "quantitative", "title": x, "format": form}],
    }
    colour = {**_look(names)["color"], "legend": None}
    text = {"mark": {"type": "text", "align": "left", "dx": 5}, "encoding": {**base, "text": {"field": "label"}}}
    return {
        "height": {"step": 34},
        "layer": [{"mark": {"type": "bar", "height": 20}, "encoding": {**base, "color": colour}}, text],
    }


def _look(names: Sequence[str]) -> dict[str, Any]:
    domain = list(names)
    legend = {
        "orient": "bottom",
        "columns": LEGEND_COLUMNS,
        "labelLimit": 260,
        "symbolType": "stroke",
        "symbolStrokeWidth": 3,
    }
    run = {
        "field": "run",
        "type": "nominal",
        "title": None,
        "legend": {**legend, "symbolType": "stroke"} if len(domain) > 1 else None,
    }
    dashes = [DASHES[place % len(DASHES)] for place in range(len(domain))]
    return {
        "color": {**run, "scale": {"domain": domain}},
        "strokeDash": {**run, "scale": {"domain": domain, "range": dashes}},
    }

"""Elements of all pages: figures with their units, foreign text, tables, curves, pictures and their numbers."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import streamlit as st
from numpy.typing import NDArray
from streamlit.components.v2 import component
from streamlit.delta_generator import DeltaGenerator

from dsgpt.charts.themes import LIGHT, THEMES, Theme
from dsgpt.common.errors import UserError
from dsgpt.common.files import printable
from dsgpt.common.text import REPOSITORY, UNKNOWN, duration

Values = NDArray[np.float64]
Table = Mapping[str, Sequence[Any]]
"""Columns by their heading, all of one length. A heading names the unit."""


seconds = partial(duration, exact=True)


def written(value: float | None, form: str) -> str:
    """A figure in a ``form`` of ``str.format``, such as ``{:.2f}x``."""
    return UNKNOWN if value is None else form.format(value)


_SPECIAL = re.compile(r"[\\`*_{}\[\]()<>#+\-.!|~$^=&]|:(?=[\w:])|(?<=:material)/")
_REPLACED = re.compile(
    r"((?::(?:[+-]1|(?!\d\d:)[\w-]+):|(?:[a-z]+://|www\.)[^\s`]+|[^\s`@]+@[^\s`@]+)+"
    r"|(?<!\S)(?:<->|->|<-|--|>=|<=|~=)(?!\S))",
    re.IGNORECASE,
)
"""Text that Streamlit replaces by icons, emoji, typographic signs and links even behind a backslash, but not in code.

Two digits between colons are of a time: no emoji is called so.
"""


def plain(text: str) -> str:
    """Foreign text for a place that reads Markdown: nothing in it is markup, a link, a formula or an icon.

    The reader sees, and copies, the text itself. A part that only code protects looks like code.
    """
    pieces = _REPLACED.split(" ".join(printable(text).split()))
    return "".join(f"`{piece}`" if place % 2 else _SPECIAL.sub(r"\\\g<0>", piece) for place, piece in enumerate(pieces))


def refusal(error: UserError) -> str:
    """Every mistake, a paragraph each, in Markdown; shipped files are named as they are in the repository."""
    return "\n\n".join(plain(line.replace(f"{REPOSITORY}/", "")) for line in error.problems)


def page_theme() -> Theme:
    """Light or dark, as the browser shows the page; light before it has said so."""
    return THEMES.get(st.context.theme.type or LIGHT.name, LIGHT)


def heading(text: str, *, level: int) -> None:
    """Show ``text``, as it is, as a heading; one above it has the level before, and that of the page has level 1.

    It looks like bold text: ``st.header`` is for the parts of a page.
    """
    st.html(f'<h{level} class="small-heading">{escape(text)}</h{level}>')


def ask_number(
    place: DeltaGenerator, label: str, least: float, most: float | None, *, key: str, empty: str, **more: Any
) -> Any:
    """A number that the reader may leave out: then None. ``empty`` is what the field says meanwhile."""
    return place.number_input(label, least, most, None, key=key, placeholder=empty, **more)


def show_metrics(*metrics: tuple[str, str, str]) -> None:
    """Show figures beside each other: the label of each, its value, and a caption."""
    for column, (label, value, caption) in zip(st.columns(len(metrics)), metrics, strict=True):
        column.metric(label, value)
        column.caption(plain(caption))


def download(label: str, data: str | bytes, *, file: str, key: str, **more: Any) -> None:
    """Offer ``data`` as a file; ``more`` is for ``st.download_button``."""
    st.download_button(label, data, file_name=file, key=key, on_click="ignore", icon=":material/download:", **more)


_FRAME = '<div class="drawing" role="group" tabindex="0" aria-label="Picture" style="overflow-x:auto"></div>'
"""Frame in which a picture is scrolled sideways on a narrow page."""
_SHOW = """
export default function({ parentElement, data }) {
  parentElement.querySelector(".drawing").innerHTML = data.svg;
}
"""


def drawing(svg: str, *, key: str, name: str) -> None:
    """Show ``svg``, made by ``dsgpt.dashboard.pictures``, which escapes every text in it, and offer it as a file.

    Streamlit's own ``st.html`` drops SVG, and in ``st.image`` the shapes would have no titles.

    Args:
        svg: the picture.
        key: unique on the page.
        name: of the downloaded file, without its ending.
    """
    component("dsgpt_drawing", html=_FRAME, js=_SHOW)(data={"svg": svg}, key=key)
    download("Download SVG", svg, file=f"{name}.svg", key=f"{key}-svg", mime="image/svg+xml", type="tertiary")


ZOOM = "zoom"
"""The part of a picture of lines that is shown."""


def figure(
    specification: Mapping[str, Any],
    *,
    points: Table,
    numbers: Table | Callable[[], Table],
    title: str,
    alternative: str,
    key: str,
    level: int = 3,
    keeps_zoom: bool = False,
) -> None:
    """Show a picture, and below it its numbers as a table and as a CSV file.

    Args:
        specification: of Vega-Lite with a height, without data, width and title. Without colours of its own it has
            those of the theme, light or dark: the charts' palette, in the order of the names in the legend.
        points: what the picture shows, by the names of its fields. A name has neither ``.`` nor ``[``.
        numbers: the table; a function is called when somebody opens it.
        title: above the picture. It names what is measured and the unit.
        alternative: one or two sentences for those who do not see the picture.
        key: unique on the page; the same at every rerun.
        level: of the title among the headings of the page; 2 if it belongs to no part with an ``st.header``.
        keeps_zoom: when the points change. The page, or the fragment, runs again after every zoom.
    """
    theme = page_theme()
    whole = {"config": {"text": {"color": theme.ink}, "rule": {"color": theme.quiet}}, **specification}
    heading(title, level=level)
    zoomed: dict[str, Any] = {"on_select": "rerun", "selection_mode": ZOOM} if keeps_zoom else {}
    st.vega_lite_chart(pa.table(dict(points)), whole, width="stretch", key=key, alt=alternative, **zoomed)
    below = st.expander("Numbers", key=f"{key}-numbers", on_change="rerun")
    if below.open:
        with below:
            show_table(numbers() if callable(numbers) else numbers, key=f"{key}-table", name=title)


def parts(category: str, value: str, *, unit: str, sort: str | None = None, **axis: Any) -> dict[str, Any]:
    """A bar for each value of the field ``category``, as long as the field ``value``, in ``unit``.

    ``sort`` and ``axis`` are Vega-Lite's, of the names and of the horizontal axis.
    """
    x = {"field": value, "type": "quantitative", "title": unit} | ({"axis": axis} if axis else {})
    return {
        "mark": {"type": "bar", "tooltip": {"content": "data"}},
        "height": {"step": 24},
        "encoding": {"y": {"field": category, "type": "nominal", "sort": sort, "title": None}, "x": x},
    }


def progress_column(width: Any) -> Any:
    """A column of shares from 0 to 1; ``width`` is Streamlit's."""
    return st.column_config.ProgressColumn(format="percent", min_value=0.0, max_value=1.0, width=width)


def columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The values of every heading; the first row has all headings."""
    rows = [*rows]
    return {heading: [row[heading] for row in rows] for heading in rows[0]} if rows else {}


def show_table(table: Table, *, key: str, name: str) -> None:
    """Show columns as a table, and offer them as a CSV file called like ``name``."""
    shown = pa.table({heading: list(values) for heading, values in table.items()})
    st.dataframe(shown, hide_index=True, placeholder="", alt=name)
    file = "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-")
    download("Download CSV", as_csv(table), file=f"{file}.csv", key=f"{key}-csv", mime="text/csv")


def as_csv(table: Table) -> bytes:
    """The columns as RFC 4180 writes them. A cell that a spreadsheet would compute begins with an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text)
    for row in ([*table], *zip(*table.values(), strict=True)):
        risky = [isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cell in row]
        writer.writerow([f"'{cell}" if is_risky else cell for cell, is_risky in zip(row, risky, strict=True)])
    return text.getvalue().encode()


# Curves of runs: their points, and the picture of them in Vega-Lite.

POINTS = 1200
"""Points of a curve in a picture: about one for each pixel of its width."""
HEIGHT = 300
"""Height of a picture without its legend, in pixels."""
ROW_HEIGHT, LINE_HEIGHT = 7, 15
"""Pixels of a legend: for each name, and for each of its lines."""
LINE = 42
"""Letters of a line of a legend: a phone shows as many."""
_BREAK = re.compile(rf".{{1,{LINE}}}$|.{{1,{LINE - 1}}}[-_/. ]|.{{1,{LINE}}}")
"""A line of a long name: up to a sign that parts its words, if there is one."""
NUMBERS = {"labelExpr": "abs(datum.value) < 1 ? format(datum.value, '.6~g') : format(datum.value, '~s')"}
"""Format of an axis: 12k, but 0.002 in place of 2m, which reads as minutes or millions."""
DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 2, 1, 2], [10, 4], [1, 3], [6, 2, 2, 2]]
"""Dashes beside the colours, for the colour-blind and for grey print."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A curve in full, in the units of its axes."""

    name: str
    x: Values
    y: Values
    low: Values | None = None
    """The least of the curves whose mean this is; None if it is one curve."""
    high: Values | None = None


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
    most: int = POINTS,
    picture: Mapping[str, Any] | None = None,
    **more: Any,
) -> None:
    """Show curves of the runs ``names`` with their numbers.

    ``most`` limits the points that are drawn of a curve, ``picture`` is for ``lines``, and ``more`` for ``figure``.
    """
    titles = {"x": x, "y": y, "low": "least", "high": "most"}
    ends = {each.name: each.y[~np.isnan(each.y)] for each in series}
    in_words = "; ".join(f"{name} ends at {values[-1]:.4g}" for name, values in ends.items() if len(values))
    figure(
        lines(names, x=x, y=y, band=any(each.low is not None for each in series), **picture or {}),
        points=points(series, most=most),
        numbers=lambda: {titles.get(field, field): values for field, values in points(series).items()},
        alternative=f"{y}: {in_words or 'nothing recorded'}",
        **more,
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
    across, up = ({"field": name, "type": "quantitative", "title": title} for name, title in (("x", x), ("y", y)))
    values = [{**value, "format": ",.6~g"} for value in (across, up)]
    encoding: dict[str, Any] = {
        "x": {**across, "axis": {**NUMBERS, "grid": False}},
        "y": {**up, "scale": scale},
        **look(names, drawn or names),
        "tooltip": [{"field": "run", "type": "nominal", "title": "run"}, *values],
    }
    if ordered:
        encoding["order"] = {"field": "order", "type": "quantitative"}
    if logarithmic:
        encoding["y"]["axis"] = {"format": "~e", "values": [10.0**power for power in range(-12, 13)]}
    # the wheel alone scrolls the page
    zoom = {"name": ZOOM, "select": {"type": "interval", "zoom": "wheel![event.ctrlKey]"}, "bind": "scales"}
    curve = {"mark": {"type": "line", "strokeWidth": 1.7, "clip": True}, "encoding": encoding, "params": [zoom]}
    layers: list[dict[str, Any]] = [curve]
    if band:
        ranges = {**{key: encoding[key] for key in ("x", "color")}, "y": {**encoding["y"], "field": "low"}}
        mark = {"type": "area", "opacity": 0.2, "clip": True}
        layers.insert(0, {"mark": mark, "encoding": {**ranges, "y2": {"field": "high"}}})
    for label, value in (rules or {}).items():
        at: dict[str, Any] = {"datum": value, "type": "quantitative"}
        once: dict[str, Any] = {"data": {"values": [{}]}}
        text = {"type": "text", "text": label, "align": "left", "dx": 4, "dy": -6}
        layers.append({**once, "mark": {"type": "rule", "strokeDash": [4, 4], "aria": False}, "encoding": {"y": at}})
        layers.append({**once, "mark": text, "encoding": {"y": at, "x": {"value": 0}}})
    legend = sum(ROW_HEIGHT + LINE_HEIGHT * len(in_lines(name)) for name in drawn or names) if len(names) > 1 else 0
    return {"height": HEIGHT + legend, **({"layer": layers} if len(layers) > 1 else curve)}


def in_lines(name: str) -> list[str]:
    """A name in lines that a phone shows whole."""
    return [name] if len(name) <= LINE else _BREAK.findall(name)


def look(names: Sequence[str], drawn: Sequence[str]) -> dict[str, Any]:
    """Colours and dashes in the order of ``names``, and a legend of ``drawn``, as Vega-Lite's channels."""
    legend: dict[str, Any] = {"orient": "bottom", "columns": 1, "values": list(drawn)}
    legend["labelExpr"] = f"{json.dumps({name: in_lines(name) for name in drawn})}[datum.label]"
    legend |= {"labelLimit": 0, "symbolType": "stroke"}
    legend |= {"symbolSize": 400, "symbolStrokeWidth": 2, "symbolOpacity": 1}
    run = {"field": "run", "type": "nominal", "title": None, "legend": legend if len(names) > 1 else None}
    scale = {"domain": list(names), "range": [DASHES[place % len(DASHES)] for place in range(len(names))]}
    return {"color": {**run, "scale": {"domain": list(names)}}, "strokeDash": {**run, "scale": scale}}

"""A picture with its numbers beside it, and the headings and columns around it."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import pyarrow as pa
import streamlit as st
from streamlit.components.v2 import component
from streamlit.delta_generator import DeltaGenerator

from dsgpt.charts.options import LIGHT, THEMES, Theme
from dsgpt.dashboard.curves import ZOOM

# The theme of the page that is shown.


def page_theme() -> Theme:
    """Light or dark, as the browser shows the page; light before it has said so."""
    return THEMES.get(st.context.theme.type or LIGHT.name, LIGHT)


# Headings of pictures and columns, whose text may be foreign.

HEADING_STYLE = """.small-heading {font-size: 1rem; font-weight: 600; line-height: 1.6; margin: 0; padding: 0}
.small-heading {overflow-wrap: anywhere}"""
"""They look like bold text: ``st.header`` is for the parts of a page."""


def heading(text: str, *, level: int) -> None:
    """Show ``text``, as it is, as a heading; one above it has the level before, and that of the page has level 1."""
    st.html(f'<h{level} class="small-heading">{escape(text)}</h{level}>')


# Columns whose elements begin at one height.

_KEY = "aligned"
ROWS = 6
"""Elements of the fullest column."""
_BLOCK = f".st-key-{_KEY} > div > [data-testid=stHorizontalBlock]"
_COLUMN = f"{_BLOCK} > [data-testid=stColumn]"
ALIGNED_STYLE = f"""@media (min-width: 640px) {{
  {_BLOCK} {{display: grid; grid-auto-flow: column; grid-auto-columns: minmax(0, 1fr)}}
  {_BLOCK} {{grid-template-rows: repeat({ROWS}, auto); row-gap: 1rem}}
  {_COLUMN} {{grid-row: span {ROWS}; width: auto}}
  {_COLUMN}, {_COLUMN} > [data-testid=stVerticalBlock] {{display: grid; grid-template: subgrid / minmax(0, 1fr)}}
  {_COLUMN} > [data-testid=stVerticalBlock] {{grid-row: span {ROWS}}}
}}"""
"""On a narrower page, Streamlit shows one column below the other."""


def aligned(count: int) -> list[DeltaGenerator]:
    """Columns, as ``st.columns`` makes them; of each, the first ``ROWS`` elements share their rows with the others'.

    A page may call it once.
    """
    with st.container(key=_KEY):
        return st.columns(count)


# Shows a picture that is SVG text of our own, with the titles of its shapes, and offers it as a file.

_FRAME = '<div class="drawing" role="group" tabindex="0" aria-label="Picture" style="overflow-x:auto"></div>'
"""On a narrow page the picture is scrolled sideways."""
_SHOW = """
export default function({ parentElement, data }) {
  parentElement.querySelector(".drawing").innerHTML = data.svg;
}
"""


def drawing(svg: str, *, key: str, name: str) -> None:
    """Show ``svg``, made by ``dsgpt.dashboard.pictures``, which escapes every text in it.

    Streamlit's own ``st.html`` drops SVG, and in ``st.image`` the shapes would have no titles.

    Args:
        svg: the picture.
        key: unique on the page.
        name: of the downloaded file, without its ending.
    """
    show = component("dsgpt_drawing", html=_FRAME, js=_SHOW)
    show(data={"svg": svg}, key=key)
    st.download_button(
        "Download SVG",
        svg,
        file_name=f"{name}.svg",
        mime="image/svg+xml",
        key=f"{key}-svg",
        on_click="ignore",
        icon=":material/download:",
        type="tertiary",
    )


# A picture with its numbers beside it: every page shows its pictures with ``figure``.

Table = Mapping[str, Sequence[Any]]
"""Columns by their heading, all of one length. A heading names the unit."""


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
    whole = {
        "config": {"text": {"color": theme.ink}, "rule": {"color": theme.quiet}},
        **specification,
    }
    heading(title, level=level)
    zoomed: dict[str, Any] = {"on_select": "rerun", "selection_mode": ZOOM} if keeps_zoom else {}
    st.vega_lite_chart(pa.table(dict(points)), whole, width="stretch", key=key, alt=alternative, **zoomed)
    below = st.expander("Numbers", key=f"{key}-numbers", on_change="rerun")
    if not below.open:
        return
    with below:
        table = numbers() if callable(numbers) else numbers
        show_table(table, key=f"{key}-table", name=title)


def show_table(table: Table, *, key: str, name: str) -> None:
    """Show columns as a table, and offer them as a CSV file called like ``name``."""
    columns = pa.table({heading: list(values) for heading, values in table.items()})
    st.dataframe(columns, hide_index=True, placeholder="", alt=name)
    file = "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-")
    st.download_button(
        "Download CSV",
        as_csv(table),
        file_name=f"{file}.csv",
        mime="text/csv",
        key=f"{key}-csv",
        on_click="ignore",
        icon=":material/download:",
    )


def as_csv(table: Table) -> bytes:
    """The columns as RFC 4180 writes them. A cell that a spreadsheet would compute begins with an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(map(_cell, table))
    writer.writerows(map(_cell, row) for row in zip(*table.values(), strict=True))
    return text.getvalue().encode()


def _cell(value: Any) -> Any:
    dangerous = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if dangerous else value

"""A picture with its numbers beside it: every page shows its pictures with ``figure``."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import streamlit as st

from dsgpt.dashboard.headings import heading
from dsgpt.dashboard.specifications import ZOOM
from dsgpt.dashboard.theme import page_theme

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

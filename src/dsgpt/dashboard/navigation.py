"""The pages, their order, and how one page leads to another."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import streamlit as st
from streamlit.navigation.page import Page


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A page in the navigation. Its ``name`` is its module in ``pages`` and its address."""

    name: str
    title: str
    icon: str
    """Of Google's Material Symbols, which Streamlit brings."""


ENTRIES = {
    "Runs": (
        Entry(name="overview", title="Overview", icon=":material/table_rows:"),
        Entry(name="compare", title="Compare", icon=":material/compare_arrows:"),
        Entry(name="live", title="Live", icon=":material/monitoring:"),
    ),
    "Before a run": (
        Entry(name="split", title="How it is split", icon=":material/account_tree:"),
        Entry(name="plan", title="Plan and cost", icon=":material/payments:"),
    ),
    "After a run": (Entry(name="generate", title="Try it", icon=":material/chat:"),),
}
"""By the heading above them."""


def pages() -> dict[str, list[Page]]:
    """Every page, as ``st.navigation`` takes them; the first is the default."""
    found = {}
    for heading, entries in ENTRIES.items():
        found[heading] = [_page(entry, default=entry.name == "overview") for entry in entries]
    return found


def go_to(name: str, **query: Any) -> None:
    """Leave this page for another, with ``query`` in its address."""
    page = next(page for own in pages().values() for page in own if page.url_path == name)
    st.switch_page(page, query_params=query)


def _page(entry: Entry, *, default: bool) -> Page:
    return st.Page(_showing(entry.name), title=entry.title, icon=entry.icon, url_path=entry.name, default=default)


def _showing(name: str) -> Callable[[], None]:
    """A function that imports the page when it is opened: a page may need what takes seconds to import."""

    def show() -> None:
        importlib.import_module(f"dsgpt.dashboard.pages.{name}").show()

    return show

"""The frame around all pages, and the first one, "Overview": every run, and which of equal work was fastest."""

import importlib
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from string import Template
from typing import Any

import pyarrow as pa
import streamlit as st
from streamlit.delta_generator import DeltaGenerator
from streamlit.navigation.page import Page

from dsgpt.charts.comparison import speed_up
from dsgpt.charts.themes import DARK, LIGHT
from dsgpt.common.errors import UserError
from dsgpt.common.files import printable
from dsgpt.common.text import UNKNOWN, dollars
from dsgpt.dashboard import reading, ui
from dsgpt.dashboard.reading import Summary
from dsgpt.dashboard.ui import plain, written
from dsgpt.training.status import Status

SYMBOLS = {Status.RUNNING: "▶", Status.FINISHED: "✓", Status.INTERRUPTED: "⏸"}
SYMBOLS |= {Status.FAILED: "✕", Status.ABANDONED: "⚠", Status.UNKNOWN: "?"}
FAVOURITES = "favourites"
"""Key in the session's state: names of runs, in the order in which they were chosen."""
PRICE = "price"
FIRST = "A run appears here as soon as it starts. To make the first one, in a terminal beside this repository:"
BEFORE = "**Plan and cost** says what it will cost and which setup is best; **How it is split** explains setups."
FIRST_RUN = """\
make demo                                  # two small trainings of the same work, in about five minutes
.venv/bin/python src/gpt2.py --help        # a training of your own
"""


def show() -> None:
    """Show the page."""
    summaries = reading.in_order(reading.summaries_of(reading.current_folder()))
    if not summaries:
        st.header("No run yet")
        st.write(FIRST)
        st.code(FIRST_RUN, language=None, wrap_lines=True)
        st.write(BEFORE)
        return
    _show_answer(summaries)
    _show_table(_search(summaries))
    _show_favourites(summaries)
    for each in summaries:
        if each.problem:
            st.warning(f"**{plain(each.name)}** {plain(each.problem)}", icon=":material/broken_image:")
        elif each.status == Status.ABANDONED:
            st.info(f"**{plain(each.name)}** is abandoned: {plain(each.reason)}.", icon=":material/link_off:")


def _show_answer(summaries: Sequence[Summary]) -> None:
    answers, columns = reading.own_answers(summaries), st.columns([3, 3, 2, 2], vertical_alignment="top")
    if answers:
        answer = answers[0]
        fastest, baseline, cheapest, count = answer.runs[0], answer.baseline, answer.cheapest, len(answer.runs)
        # A metric reads Markdown.
        short = {run.name: plain(reading.labels([run.name])[run.name]) for run in answer.runs}
        work = f"{count} finished runs that did the same work"
        least = f"The baseline is {plain(baseline.name)}, the slowest on the fewest devices."
        columns[0].metric("Fastest of equal work", short[fastest.name], help=f"Of {work}. {least}")
        text = f"{ui.seconds(fastest.train_time)}. It is the baseline: no other run is faster."
        if fastest is not baseline:
            text = f"{ui.seconds(fastest.train_time)} instead of {ui.seconds(baseline.train_time)}: "
            text += f"**{written(speed_up(baseline, fastest), '{:.2f}x')}** the speed of the baseline"
        columns[0].caption(text)
        columns[1].metric("Cheapest of equal work", short[cheapest.name] if cheapest else UNKNOWN)
        if cheapest:
            spent = reading.cost(cheapest, st.session_state.get(PRICE))
            amount = f"{ui.seconds(reading.device_seconds(cheapest))} of device time"
            columns[1].caption(amount if spent is None else f"{amount}: **{plain(dollars(spent))}**")
        if len(answers) > 1:
            groups = f"Of {count} runs that did the same work, the newest of {len(answers)} such groups"
            st.caption(f"{groups}; Compare shows the others.")
    else:
        columns[0].metric("Fastest of equal work", "not known yet", help="It takes two finished runs of the same work.")
    running = sum(each.status == Status.RUNNING for each in summaries)
    columns[2].metric("Running now", f"{running}", help="Live watches them.")
    columns[3].metric("Runs", f"{len(summaries)}")


def asked_price(place: DeltaGenerator) -> float | None:
    """The price of a device hour, as the reader gives it in ``place``; pages share it."""
    label, more = "Price of a device hour ($)", {"step": 0.1, "persist_state": "session"}
    price: float | None = ui.ask_number(place, label, 0.0, None, key=PRICE, empty=UNKNOWN, **more)
    return price


def _search(summaries: Sequence[Summary]) -> list[Summary]:
    """The runs that the reader asks for."""
    left, middle, right = st.columns([4, 4, 2])
    words = left.text_input("Search", placeholder="name, strategy, model or state", key="search").lower().split()
    states = [status.value for status in SYMBOLS if any(each.status == status for each in summaries)]
    wanted = middle.pills("State", states, selection_mode="multi", key="states")
    asked_price(right)
    shown = []
    for each in summaries:
        run = each.recorded.run
        parts = (each.name, each.status.value, run and run.strategy, each.recorded.model)
        text = " ".join(part for part in parts if part).lower()
        if (not wanted or each.status.value in wanted) and all(word in text for word in words):
            shown.append(each)
    return shown


def _show_table(summaries: Sequence[Summary]) -> None:
    if not summaries:
        st.info("No run matches.")
        return
    names = [each.name for each in summaries]
    chosen = st.session_state.setdefault(FAVOURITES, [])
    key = "runs-" + sha256("\0".join(names).encode()).hexdigest()[:16]

    def choose() -> None:
        ticked = {names[row] for row in st.session_state[key].selection.rows if row < len(names)}
        before = [name for name in st.session_state[FAVOURITES] if name not in names or name in ticked]
        st.session_state[FAVOURITES] = before + [name for name in names if name in ticked and name not in before]

    rows = []
    for name, each in zip(reading.labels(names).values(), summaries, strict=True):
        run, started = each.recorded.run, each.recorded.started
        devices, rate = run.device_count if run else None, each.tokens_per_sec
        row: dict[str, Any] = {"run": name, "state": f"{SYMBOLS[each.status]} {each.status.value}"}
        row |= {"strategy": run.strategy if run else None, "model": each.recorded.model}
        row |= {"devices": None if devices is None else round(devices), "progress": each.progress}
        row |= {"train loss": each.train_loss, "val loss": each.val_loss}
        row |= {"tokens/s": None if rate is None else round(rate), "goodput": each.recorded.goodput}
        when = started.strftime("%Y-%m-%d %H:%M") if started else None
        rows.append(row | {"when": when, "folder": each.name.rpartition("/")[0]})
    table = pa.Table.from_pylist(rows, schema=pa.schema({heading: kind for heading, (kind, _) in _COLUMNS.items()}))
    ticked = {"selection": {"rows": [names.index(name) for name in chosen if name in names]}}
    select: dict[str, Any] = {"on_select": choose, "selection_mode": "multi-row", "selection_default": ticked}
    look = {heading: shown for heading, (_, shown) in _COLUMNS.items()}
    words = "Every run with its state, strategy, model, progress, losses and speed"
    st.dataframe(table, hide_index=True, key=key, column_config=look, placeholder="", alt=words, **select)


_Text, _Number = st.column_config.TextColumn, st.column_config.NumberColumn
_COLUMNS: dict[str, tuple[pa.DataType, Any]] = {
    "run": (pa.string(), _Text(width=225, pinned=True)),
    "state": (pa.string(), _Text(width=105)),
    "strategy": (pa.string(), _Text(width=75)),
    "model": (pa.string(), _Text()),
    "devices": (pa.float64(), _Number(format="%d", width=60)),
    "progress": (pa.float64(), ui.progress_column(80)),
    "train loss": (pa.float64(), _Number(format="%.4f", width=75, help="Of the last step, nats per token.")),
    "val loss": (pa.float64(), _Number(format="%.4f", width=65, help="Of the last validation, nats per token.")),
    "tokens/s": (pa.float64(), _Number(format="localized", width=75, help="Of all devices.")),
    "goodput": (pa.float64(), _Number(format="percent", width=70, help="Wall time in steps that are kept.")),
    "when": (pa.string(), _Text(width=125, help="When its last process began, in UTC.")),
    "folder": (pa.string(), _Text()),
}
"""Columns of the table: their types, because columns may be empty, and their look."""


def _show_favourites(summaries: Sequence[Summary]) -> None:
    names = {each.name for each in summaries}
    chosen = [name for name in st.session_state.get(FAVOURITES, []) if name in names]
    left, right = st.columns([2, 8], vertical_alignment="center")
    label = "Compare favourites" if len(chosen) < 2 else f"Compare {len(chosen)} favourites"
    if left.button(label, type="primary", disabled=len(chosen) < 2, key="compare", width="stretch"):
        page = next(page for group in pages().values() for page in group if page.url_path == "compare")
        st.switch_page(page, query_params={"runs": chosen})
    if chosen:
        right.caption("Favourites: " + ", ".join(map(plain, chosen)))
    else:
        right.caption("Tick runs in the table: they are your favourites until you close this tab.")


# The frame around all pages.


def pages() -> dict[str, list[Page]]:
    """Every page by the heading above it, as ``st.navigation`` takes them; the first is the default."""
    runs = [_page("overview", "Overview", "table_rows"), _page("compare", "Compare", "compare_arrows")]
    runs += [_page("live", "Live", "monitoring"), _page("spikes", "Spikes", "troubleshoot")]
    before = [_page("split", "How it is split", "account_tree"), _page("plan", "Plan and cost", "payments")]
    return {"Runs": runs, "Before a run": before, "After a run": [_page("generate", "Try it", "chat")]}


def _page(name: str, title: str, icon: str) -> Page:
    """A page whose address is its module's name. Its icon is one of Google's Material Symbols, which Streamlit brings.

    The module is imported when the page is opened: it may need what takes seconds to import.
    """
    look: dict[str, Any] = {"title": title, "icon": f":material/{icon}:", "default": name == "overview"}
    return st.Page(lambda: importlib.import_module(f"dsgpt.dashboard.{name}").show(), url_path=name, **look)


ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
    f'<path d="M2 2v12h12" fill="none" stroke="{LIGHT.palette[5]}" stroke-width="1.5"/>'
    f'<path d="M3 3c2 7 5 8 11 8.5" fill="none" stroke="{LIGHT.palette[0]}" stroke-width="2.5"/></svg>'
)
"""A loss curve. An icon of Google's or an emoji would be fetched from another machine."""
_ROWS = 6
"""Elements of the fullest column of "Try it"."""
STYLE = Template(Path(__file__).with_name("style.css").read_text(encoding="utf-8")).substitute(
    rows=_ROWS, quiet=f"{LIGHT.quiet}, {DARK.quiet}", background=f"{LIGHT.background}, {DARK.background}"
)
"""Streamlit leaves a fifth of the screen empty around a page, and some of its colours have too little contrast to read
(WCAG 2.2, 1.4.3). The browser chooses between the themes: it may change them while the page is open.
"""


def show_frame() -> None:
    """Show the page that the address names, and what is around every page."""
    st.set_page_config(page_title="dsgpt", page_icon=ICON, layout="wide", initial_sidebar_state=240)
    st.html(f"<style>\n{STYLE}</style>")
    page = st.navigation(pages(), expanded=True)
    try:
        folder = reading.current_folder()
    except UserError as error:
        st.error(ui.plain(str(error)))
        return
    with st.sidebar:
        st.caption("Runs in")
        st.text(printable(folder))
    st.title(page.title)
    for name in reading.contents(folder).unnamed:
        st.warning(f"**{ui.plain(name)}** is not shown: its name is not UTF-8; rename it")
    page.run()

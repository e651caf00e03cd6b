"""Every run in a table, and which of those that did the same work was fastest."""

from collections.abc import Sequence
from hashlib import sha256

import pyarrow as pa
import streamlit as st
from streamlit.elements.lib.column_types import ColumnConfig

from dsgpt.dashboard import formats
from dsgpt.dashboard.curves import labels
from dsgpt.dashboard.formats import plain
from dsgpt.dashboard.navigation import go_to
from dsgpt.dashboard.runs import current_folder
from dsgpt.dashboard.summaries import (
    Answer,
    Summary,
    answers,
    cost,
    device_seconds,
    in_order,
    newest,
    own,
    runs_with_records,
    summaries_of,
)
from dsgpt.record.runs import Run
from dsgpt.training.status import Status

SYMBOLS = {
    Status.RUNNING: "▶",
    Status.FINISHED: "✓",
    Status.INTERRUPTED: "⏸",
    Status.FAILED: "✕",
    Status.ABANDONED: "⚠",
    Status.UNKNOWN: "?",
}
FAVOURITES = "favourites"
"""In the session's state: names of runs, in the order in which they were chosen."""
PRICE = "price"
FIRST_RUN = """\
make demo                                  # two small trainings of the same work, in about five minutes
.venv/bin/python src/gpt2.py --help        # a training of your own
"""


def show() -> None:
    """Show the page."""
    folder = current_folder()
    summaries = in_order(summaries_of(folder))
    if not summaries:
        _show_first_steps()
        return
    _show_answer(summaries)
    shown = _search(summaries)
    _show_table(shown)
    _show_favourites(summaries)
    _show_damage(summaries)


def _show_first_steps() -> None:
    st.header("No run yet")
    st.write("A run appears here as soon as it starts. To make the first one, in a terminal beside this repository:")
    st.code(FIRST_RUN, language=None, wrap_lines=True)
    st.write("**Plan and cost** says what it will cost and which setup is best; **How it is split** explains setups.")


def _show_answer(summaries: Sequence[Summary]) -> None:
    found = answers(runs_with_records(own(summaries)))
    columns = st.columns([3, 3, 2, 2], vertical_alignment="top")
    if found:
        answer = newest(found)
        _show_fastest(answer, columns)
        if len(found) > 1:
            st.caption(
                f"Of {len(answer.runs)} runs that did the same work, the newest of {len(found)} such groups; "
                "Compare shows the others."
            )
    else:
        columns[0].metric("Fastest of equal work", "not known yet", help="It takes two finished runs of the same work.")
    running = sum(each.status == Status.RUNNING for each in summaries)
    columns[2].metric("Running now", f"{running}", help="Live watches them.")
    columns[3].metric("Runs", f"{len(summaries)}")


def _show_fastest(answer: Answer, columns: Sequence["st.delta_generator.DeltaGenerator"]) -> None:
    fastest, baseline = answer.fastest, answer.baseline
    columns[0].metric(
        "Fastest of equal work",
        _name(fastest),
        help=f"Of {len(answer.runs)} finished runs that did the same work. The baseline is "
        f"{plain(baseline.name)}, the slowest on the fewest devices.",
    )
    columns[0].caption(
        f"{formats.seconds(fastest.train_time)} instead of {formats.seconds(baseline.train_time)}: "
        f"**{formats.times(answer.speed_up)}** the speed of the baseline"
    )
    cheapest = answer.cheapest
    if cheapest is None:
        columns[1].metric("Cheapest of equal work", formats.UNKNOWN)
        return
    price = st.session_state.get(PRICE)
    spent = cost(cheapest, price)
    columns[1].metric("Cheapest of equal work", _name(cheapest))
    amount = f"{formats.seconds(device_seconds(cheapest))} of device time"
    columns[1].caption(amount if spent is None else f"{amount}: **{plain(formats.money(spent))}**")


def _name(run: Run) -> str:
    """Of a run without its folders, for a metric, which reads Markdown."""
    return plain(labels([run.name])[run.name])


def _search(summaries: Sequence[Summary]) -> list[Summary]:
    """The runs that the reader asks for."""
    left, middle, right = st.columns([4, 4, 2])
    words = left.text_input("Search", placeholder="name, strategy, model or state", key="search").lower().split()
    states = [status.value for status in SYMBOLS if any(each.status == status for each in summaries)]
    wanted = middle.pills("State", states, selection_mode="multi", key="states")
    right.number_input(
        "Price of a device hour ($)",
        min_value=0.0,
        value=None,
        step=0.1,
        key=PRICE,
        placeholder="unknown",
        persist_state="session",
    )
    found = [each for each in summaries if not wanted or each.status.value in wanted]
    return [each for each in found if all(word in _text(each) for word in words)]


def _text(summary: Summary) -> str:
    run = summary.recorded.run
    parts = (summary.name, summary.status.value, run and run.strategy, summary.recorded.model)
    return " ".join(part for part in parts if part).lower()


def _show_table(summaries: Sequence[Summary]) -> None:
    if not summaries:
        st.info("No run matches.")
        return
    names = [each.name for each in summaries]
    chosen = st.session_state.setdefault(FAVOURITES, [])
    key = "runs-" + sha256("\0".join(names).encode()).hexdigest()[:16]

    def choose() -> None:
        rows = st.session_state[key].selection.rows
        visible = {names[row] for row in rows if row < len(names)}
        kept = [name for name in st.session_state[FAVOURITES] if name not in names or name in visible]
        st.session_state[FAVOURITES] = kept + [name for name in names if name in visible and name not in kept]

    st.dataframe(
        _columns(summaries),
        hide_index=True,
        key=key,
        on_select=choose,
        selection_mode="multi-row",
        selection_default={"selection": {"rows": [names.index(name) for name in chosen if name in names]}},
        column_config=_formats(),
        placeholder="",
        alt="Every run with its state, strategy, model, progress, losses and speed",
    )


def _columns(summaries: Sequence[Summary]) -> pa.Table:
    runs = [each.recorded.run for each in summaries]
    started = [each.recorded.started for each in summaries]
    names = [each.name for each in summaries]
    return pa.table(
        {
            "run": [*labels(names).values()],
            "state": [f"{SYMBOLS[each.status]} {each.status.value}" for each in summaries],
            "strategy": [run.strategy if run else None for run in runs],
            "model": [each.recorded.model for each in summaries],
            "devices": pa.array([_whole(run.device_count) if run else None for run in runs], pa.float64()),
            "progress": pa.array([each.progress for each in summaries], pa.float64()),
            "train loss": pa.array([each.train_loss for each in summaries], pa.float64()),
            "val loss": pa.array([each.val_loss for each in summaries], pa.float64()),
            "tokens/s": pa.array([_whole(each.tokens_per_sec) for each in summaries], pa.float64()),
            "when": pa.array(
                [None if moment is None else moment.strftime("%Y-%m-%d %H:%M") for moment in started], pa.string()
            ),
            "folder": [name.rpartition("/")[0] for name in names],
        }
    )


def _whole(value: float | None) -> float | None:
    return None if value is None else float(round(value))


def _formats() -> dict[str, ColumnConfig]:
    column = st.column_config
    return {
        "run": column.TextColumn(width=225, pinned=True),
        "state": column.TextColumn(width=105),
        "strategy": column.TextColumn(width=75),
        "model": column.TextColumn(),
        "devices": column.NumberColumn(format="%d", width=60),
        "progress": column.ProgressColumn(format="percent", min_value=0.0, max_value=1.0, width=80),
        "train loss": column.NumberColumn(format="%.4f", width=75, help="Of the last step, nats per token."),
        "val loss": column.NumberColumn(format="%.4f", width=65, help="Of the last validation, nats per token."),
        "tokens/s": column.NumberColumn(format="localized", width=75, help="Of all devices."),
        "when": column.TextColumn(width=125, help="When its last process began, in UTC."),
    }


def _show_favourites(summaries: Sequence[Summary]) -> None:
    known = {each.name for each in summaries}
    chosen = [name for name in st.session_state.get(FAVOURITES, []) if name in known]
    left, right = st.columns([2, 8], vertical_alignment="center")
    label = "Compare favourites" if len(chosen) < 2 else f"Compare {len(chosen)} favourites"
    if left.button(label, type="primary", disabled=len(chosen) < 2, key="compare", width="stretch"):
        go_to("compare", runs=chosen)
    if chosen:
        right.caption("Favourites: " + ", ".join(map(plain, chosen)))
    else:
        right.caption("Tick runs in the table: they are your favourites until you close this tab.")


def _show_damage(summaries: Sequence[Summary]) -> None:
    for each in summaries:
        if each.problem:
            st.warning(f"**{plain(each.name)}** {plain(each.problem)}", icon=":material/broken_image:")
        elif each.status == Status.ABANDONED:
            st.info(f"**{plain(each.name)}** is abandoned: {plain(each.reason)}.", icon=":material/link_off:")

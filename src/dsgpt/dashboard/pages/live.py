"""Runs while they train: the page follows them by itself, from their first step to their end."""

from collections.abc import Sequence
from pathlib import Path

import streamlit as st

from dsgpt.common.errors import UserError
from dsgpt.common.files import printable
from dsgpt.dashboard import curves, formats
from dsgpt.dashboard import live as watched
from dsgpt.dashboard.curves import lines
from dsgpt.dashboard.figures import figure, show_table
from dsgpt.dashboard.formats import plain
from dsgpt.dashboard.live import PANELS, ProcessUse, Watched, process_use, recent_samples
from dsgpt.dashboard.runs import current_folder, own_file
from dsgpt.dashboard.summaries import Summary, contents_of, in_order, steps_of, summaries_of
from dsgpt.record.schema import LOG_FILE
from dsgpt.training.status import Status

POINTS = 400
"""Of a curve; fewer where many runs are watched, so that the page costs the same."""
SHORTEST_PAUSE, PAUSE_OF_A_RUN = 2.0, 1.0
"""Seconds between two looks at the files: the first at least, the second for each run under watch."""
USES = "process uses"
"""In the session's state: what each process had used at the last look."""


def show() -> None:
    """Show the page."""
    folder = current_folder()
    names = contents_of(folder).runs
    left, right = st.columns([7, 3])
    chosen = left.multiselect(
        "Runs",
        names,
        key="watch",
        bind="query-params",
        max_selections=watched.AT_ONCE,
        placeholder="All that are running, or else the newest",
    )
    window = right.slider("Smoothing (steps)", 1, 200, 1, key="window")
    count = len(watched.to_watch(in_order(summaries_of(folder)), chosen))
    pause = max(SHORTEST_PAUSE, PAUSE_OF_A_RUN * count)
    st.fragment(_look, run_every=pause)(folder, chosen, window, count)


def _look(folder: Path, chosen: Sequence[str], window: int, expected: int) -> None:
    """Show the runs as they are now. Streamlit calls this again and again, while the page is open."""
    summaries = watched.to_watch(in_order(summaries_of(folder)), chosen)
    if not summaries:
        st.info("No run has started in this folder yet. The page shows the first one when it does.")
        return
    if len(summaries) != expected:
        st.rerun()  # another number of runs has another pause
    runs = _read(folder, summaries)
    if not chosen and all(each.status != Status.RUNNING for each in summaries):
        st.caption("No run is training now. This is the newest; a new run appears here by itself.")
    if len(runs) == 1:
        _show_one(runs[0])
    else:
        _show_many(runs)
    _show_hardware(folder, runs)
    _show_panels(runs, window)
    for run in runs:
        _show_log(folder, run, only=len(runs) == 1)


def _show_log(folder: Path, run: Watched, *, only: bool) -> None:
    """The end of what the run has printed."""
    try:
        path = own_file(folder / run.summary.name, LOG_FILE)
        text = "" if path is None else watched.last_lines(path)
    except (UserError, OSError) as error:
        text = str(error)
    if text:
        with st.expander(f"train.log of {plain(run.label)}", expanded=only, key=f"log-{run.summary.name}"):
            st.code(printable(text), language=None, wrap_lines=True)


def _read(folder: Path, summaries: Sequence[Summary]) -> list[Watched]:
    short = watched.labels_of(summaries)
    earlier: dict[str, ProcessUse] = st.session_state.get(USES, {})
    uses = {each.name: use for each in summaries if (use := process_use(each.signs.process)) is not None}
    st.session_state[USES] = uses
    found = []
    for summary in summaries:
        steps = None
        try:
            steps = steps_of(folder, summary.name)
        except UserError as error:
            st.warning(f"**{plain(summary.name)}** {plain(str(error))}")
        if summary.problem:
            st.warning(f"**{plain(summary.name)}** {plain(summary.problem)}")
        if steps is not None and steps.damaged:
            st.warning(f"**{plain(summary.name)}** {steps.damaged} damaged lines of metrics.jsonl are left out.")
        use = uses.get(summary.name)
        run = Watched(
            label=short[summary.name],
            summary=summary,
            steps=steps,
            cores=use.cores_since(earlier.get(summary.name)) if use else None,
            memory_bytes=use.memory_bytes if use else None,
        )
        found.append(run)
    return found


def _show_one(run: Watched) -> None:
    summary = run.summary
    st.markdown(f"**{plain(run.label)}** is **{summary.status.value}**: {plain(summary.reason)}")
    st.progress(summary.progress or 0.0, text=plain(run.progress_line()))
    columns = st.columns(5 if run.memory_bytes is None else 6)
    columns[0].metric("Training loss", formats.loss(summary.train_loss))
    columns[1].metric("Validation loss", formats.loss(summary.val_loss))
    columns[2].metric("Tokens/s", formats.count(run.throughput))
    columns[3].metric("Learning rate", _short(run.last("lr")))
    columns[4].metric("Gradient norm", _short(run.last("grad_norm")))
    if run.memory_bytes is not None:
        columns[5].metric("Rank 0", formats.memory(run.memory_bytes), help="Resident memory of its process.")
        columns[5].caption("" if run.cores is None else f"{run.cores:.2f} cores busy")


def _short(value: float | None) -> str:
    return formats.UNKNOWN if value is None else f"{value:.3g}"


def _show_many(runs: Sequence[Watched]) -> None:
    column = st.column_config
    number = column.NumberColumn
    st.dataframe(
        watched.table_of(runs),
        hide_index=True,
        key="watched",
        column_config={
            "progress": column.ProgressColumn(format="percent", min_value=0.0, max_value=1.0, width="small"),
            "step": number(format="localized"),
            "train loss": number(format="%.4f"),
            "val loss": number(format="%.4f"),
            "tokens/s": number(format="%.0f"),
            "learning rate": number(format="%.3e"),
            "gradient norm": number(format="%.3f"),
            "cores": number(format="%.2f", help="That rank 0's process keeps busy, on this machine."),
            "memory (GB)": number(format="%.2f", help="Resident, of rank 0's process, on this machine."),
        },
        alt="Every watched run with its state, progress, losses and speed",
    )


def _show_hardware(folder: Path, runs: Sequence[Watched]) -> None:
    """The GPUs of the runs, as the runs have sampled them."""
    samples = {run.label: own for run in runs if (own := recent_samples(folder / run.summary.name))}
    if not samples:
        return
    st.header("GPUs")
    show_table(watched.gpu_table(samples), key="gpus", name="GPUs now")
    for key, heading in (("utilisation", "utilisation (%)"), ("power", "power (W)")):
        series = watched.gpu_series(samples, heading)
        _show_curves(series, [*samples], x="seconds before now", y=heading, key=key, level=3)


def _show_panels(runs: Sequence[Watched], window: int) -> None:
    names = [run.label for run in runs]
    for row in (PANELS[:2], PANELS[2:]):
        for place, panel in zip(st.columns(2), row, strict=True):
            with place:
                series = watched.panel_series(runs, panel, window=window)
                _show_curves(series, names, x="optimizer steps", y=panel.title, key=panel.column, level=2)


def _show_curves(
    series: Sequence[curves.Series], names: Sequence[str], *, x: str, y: str, key: str, level: int
) -> None:
    figure(
        lines(names, x=x, y=y),
        points=curves.points(series, most=max(100, POINTS // max(1, len(series)) * 2)),
        numbers=lambda: curves.numbers(series, x=x, y=y),
        title=y[0].upper() + y[1:],
        alternative=curves.described(series, y=y),
        key=key,
        level=level,
        keeps_zoom=True,
    )

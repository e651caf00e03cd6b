"""The page "Live": runs while they train. It follows them by itself, from their first step to their end."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import streamlit as st

from dsgpt.common.errors import UserError
from dsgpt.common.files import is_regular_file, printable
from dsgpt.common.json_files import JsonError, parse_json
from dsgpt.common.text import byte_size
from dsgpt.dashboard import reading, ui
from dsgpt.dashboard.reading import Steps, Summary
from dsgpt.record.runs import smoothed
from dsgpt.record.schema import HARDWARE_FILE, LOG_FILE, Fields
from dsgpt.training.status import Status

AT_ONCE = 10
"""Runs that are watched together."""
POINTS = 400
"""Points of a curve; fewer where many runs are watched, so that the page costs the same."""
SHORTEST_PAUSE, PAUSE_OF_A_RUN = 2.0, 1.0
"""Seconds between two looks at the files: the first at least, the second for each run under watch."""
PROCESSES = "processes"
"""Key in the session's state: rank 0's process of each run, which counts its time since the last look."""
LOG_LINES, LOG_BYTES = 20, 1 << 14
"""Most lines, and bytes, of the end of a log."""
PANELS = (
    {"loss": "training loss (nats per token)", "tokens_per_sec": "throughput (tokens/s)"},
    {"lr": "learning rate", "grad_norm": "gradient norm"},
)
"""Rows of pictures: columns of ``Steps``, and their titles."""
_SAMPLES_BYTES = 1 << 18
"""Bytes of the end of a file of samples: their last minutes."""
FIGURES = {"utilisation": ("utilisation (%)", 100.0), "memory_used_bytes": ("memory (GB)", 1e-9)}
FIGURES |= {"power_watts": ("power (W)", 1.0), "temperature_celsius": ("temperature (°C)", 1.0)}
FIGURES |= {"sm_clock_mhz": ("clock (MHz)", 1.0)}
"""Keys of a GPU in ``hardware.jsonl`` that are shown, their headings, and the factors to the units there."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A run under watch."""

    label: str
    summary: Summary
    steps: Steps | None
    """Steps of the run; None before the first."""
    cores: float | None
    """Cores that rank 0's process kept busy since the last look; None on another machine."""
    memory_bytes: float | None
    """Resident, of the same process."""

    def last(self, column: str) -> float | None:
        """The value of the last step; None if it is unknown."""
        values = self.steps.train[column][-1:] if self.steps else ()
        return next((float(value) for value in values if not np.isnan(value)), None)

    @property
    def left(self) -> str | None:
        """The time until the last step, while it runs."""
        if self.steps is None or self.summary.status != Status.RUNNING:
            return None
        left = reading.seconds_left(self.steps, self.summary.recorded.total_steps)
        return None if left is None else ui.seconds(round(left))

    @property
    def throughput(self) -> float | None:
        """Median tokens per second of the last steps."""
        recent = self.steps.train["tokens_per_sec"][-20:] if self.steps else np.array([])
        return None if np.isnan(recent).all() else float(np.nanmedian(recent))


def show() -> None:
    """Show the page."""
    folder = reading.current_folder()
    left, right = st.columns([7, 3])
    names, hint = reading.contents(folder).runs, "All that are running, or else the newest"
    chosen = left.multiselect("Runs", names, key="watch", bind="query-params", max_selections=AT_ONCE, placeholder=hint)
    window = right.slider("Smoothing (steps)", 1, 200, 1, key="window")
    count = len(to_watch(folder, chosen))
    st.fragment(_look, run_every=max(SHORTEST_PAUSE, PAUSE_OF_A_RUN * count))(folder, chosen, window, count)


def to_watch(folder: Path, chosen: Sequence[str]) -> list[Summary]:
    """The chosen runs; else all that run; else the newest. At most ``AT_ONCE``."""
    summaries = reading.in_order(reading.summaries_of(folder))
    wanted = [each for each in summaries if each.name in chosen]
    return (wanted or [each for each in summaries if each.status == Status.RUNNING] or summaries[:1])[:AT_ONCE]


def _look(folder: Path, chosen: Sequence[str], window: int, expected: int) -> None:
    """Show the runs as they are now. Streamlit calls this again and again, while the page is open."""
    summaries = to_watch(folder, chosen)
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
    if samples := {run.label: found for run in runs if (found := recent_samples(folder / run.summary.name))}:
        _show_gpus(samples)
    for row in PANELS:
        for place, (column, title) in zip(st.columns(2), row.items(), strict=True):
            series = []
            for run in runs:
                if run.steps is not None and len(run.steps.train["step"]):
                    values = smoothed(run.steps.train[column], window=1 if column == "lr" else window)
                    series.append(ui.Series(name=run.label, x=run.steps.train["step"], y=values))
            with place:
                _show_curves(series, [run.label for run in runs], x="optimizer steps", y=title, key=column, level=2)
    for run in runs:
        _show_log(folder, run, only=len(runs) == 1)


def _read(folder: Path, summaries: Sequence[Summary]) -> list[Watched]:
    earlier: dict[str, psutil.Process] = st.session_state.get(PROCESSES, {})
    st.session_state[PROCESSES] = processes = dict[str, psutil.Process]()
    runs = []
    for label, summary in zip(reading.labels([each.name for each in summaries]).values(), summaries, strict=True):
        name, steps, cores, resident = summary.name, None, None, None
        try:
            steps = reading.steps_of(folder, name)
        except UserError as error:
            st.warning(f"**{ui.plain(name)}** {ui.plain(str(error))}")
        if summary.problem:
            st.warning(f"**{ui.plain(name)}** {ui.plain(summary.problem)}")
        if steps is not None and steps.damaged:
            st.warning(f"**{ui.plain(name)}** {steps.damaged} damaged lines of metrics.jsonl are left out.")
        try:
            if summary.signs.process is not None:
                before, process = earlier.get(name), psutil.Process(summary.signs.process)
                processes[name] = process = before if before == process else process
                resident, busy = process.memory_info().rss, process.cpu_percent() / 100
                cores = busy if process is before else None  # of a new process there is no time yet
        except psutil.Error:  # it has ended, or may not be asked
            pass
        runs.append(Watched(label=label, summary=summary, steps=steps, cores=cores, memory_bytes=resident))
    return runs


def _show_one(run: Watched) -> None:
    summary = run.summary
    st.markdown(f"**{ui.plain(run.label)}** is **{summary.status.value}**: {ui.plain(summary.reason)}")
    done, total = summary.step, summary.recorded.total_steps
    progress = "no step yet"
    if done is not None:
        step = f"step {done:,.0f}" + (f" of {total:,.0f}" if total else "")
        progress = ", ".join(filter(None, (step, run.left and f"{run.left} left", summary.recorded.plan)))
    st.progress(summary.progress or 0.0, text=ui.plain(progress))
    places = st.columns(5 if run.memory_bytes is None else 6)
    places[0].metric("Training loss", ui.written(summary.train_loss, "{:.4f}"))
    places[1].metric("Validation loss", ui.written(summary.val_loss, "{:.4f}"))
    places[2].metric("Tokens/s", ui.written(run.throughput, "{:,.0f}"))
    places[3].metric("Learning rate", ui.written(run.last("lr"), "{:.3g}"))
    places[4].metric("Gradient norm", ui.written(run.last("grad_norm"), "{:.3g}"))
    if run.memory_bytes is not None:
        places[5].metric("Rank 0", byte_size(run.memory_bytes), help="Resident memory of its process.")
        places[5].caption("" if run.cores is None else f"{run.cores:.2f} cores busy")
    st.caption(summary.recorded.goodput_in_words)


def _show_many(runs: Sequence[Watched]) -> None:
    number, formats = st.column_config.NumberColumn, {"step": "localized", "train loss": "%.4f", "val loss": "%.4f"}
    formats |= {"tokens/s": "%.0f", "learning rate": "%.3e", "gradient norm": "%.3f"}
    rows = []
    for run in runs:
        now, memory = run.summary, run.memory_bytes / 1e9 if run.memory_bytes else None
        row = {"run": run.label, "state": now.status.value, "progress": now.progress, "step": now.step}
        row |= {"left": run.left, "train loss": now.train_loss, "val loss": now.val_loss, "tokens/s": run.throughput}
        row |= {"learning rate": run.last("lr"), "gradient norm": run.last("grad_norm")}
        rows.append(row | {"cores": run.cores, "memory (GB)": memory})
    look: dict[str, Any] = {"progress": ui.progress_column("small")}
    look |= {heading: number(format=form) for heading, form in formats.items()}
    look["cores"] = number(format="%.2f", help="That rank 0's process keeps busy, on this machine.")
    look["memory (GB)"] = number(format="%.2f", help="Resident, of rank 0's process, on this machine.")
    words = "Every watched run with its state, progress, losses and speed"
    st.dataframe(ui.columns(rows), hide_index=True, key="watched", column_config=look, alt=words)


def recent_samples(run_dir: Path) -> list[tuple[float, str, dict[str, float | None]]]:
    """The samples of the last minutes of every GPU of a run, oldest first.

    Lines that are no sample are left out, and so are files that cannot be read.

    Returns:
        The time in seconds since 1970, the GPU, and its figures by the headings of ``FIGURES``.
    """
    samples = []
    for path in sorted(run_dir.glob("hardware*.jsonl")):
        machine = path.name.removeprefix("hardware").removesuffix(".jsonl")
        if not HARDWARE_FILE.fullmatch(path.name) or not is_regular_file(path):
            continue
        try:
            lines = reading.end_of(path, _SAMPLES_BYTES).split(b"\n")
        except OSError:
            continue
        for line in lines:
            with suppress(JsonError):  # the first and the last line may be parts
                sample = Fields(parse_json(line), notes=[])
                time = sample.number("time")
                for place, gpu in enumerate(sample.sections("gpus") if time is not None else ()):
                    values = [(heading, gpu.number(key), unit) for key, (heading, unit) in FIGURES.items()]
                    figures = {heading: None if value is None else value * unit for heading, value, unit in values}
                    samples.append((time or 0.0, f"GPU {place}{machine}", figures))
    return sorted(samples, key=lambda sample: sample[:2])


def _show_gpus(samples: Mapping[str, Sequence[tuple[float, str, dict[str, float | None]]]]) -> None:
    """The GPUs of the runs, as the runs have sampled them: each now, and the mean of a run's over the last minutes."""
    st.header("GPUs")
    last = {(label, gpu): figures for label, of_run in samples.items() for _, gpu, figures in of_run}
    rows = [{"run": label, "GPU": gpu, **figures} for (label, gpu), figures in last.items()]
    ui.show_table(ui.columns(rows), key="gpus", name="GPUs now")
    for key, heading in (("utilisation", "utilisation (%)"), ("power", "power (W)")):
        series = []
        for label, of_run in samples.items():
            at: dict[int, list[float]] = {}
            for time, _, figures in of_run:
                if (value := figures[heading]) is not None:
                    at.setdefault(int(time), []).append(value)
            if times := sorted(at):
                x, y = [float(time - times[-1]) for time in times], [float(np.mean(at[time])) for time in times]
                series.append(ui.Series(name=label, x=np.array(x), y=np.array(y)))
        _show_curves(series, [*samples], x="seconds before now", y=heading, key=key, level=3)


def _show_curves(series: Sequence[ui.Series], names: Sequence[str], *, x: str, y: str, key: str, level: int) -> None:
    most = max(100, POINTS // max(1, len(series)) * 2)
    title = y[0].upper() + y[1:]
    ui.show_curves(series, names, x=x, y=y, title=title, key=key, most=most, level=level, keeps_zoom=True)


def _show_log(folder: Path, run: Watched, *, only: bool) -> None:
    """The end of what the run has printed, as a terminal would show it: what a progress bar overwrote is left out."""
    text = ""
    try:
        if path := reading.own_file(folder / run.summary.name, LOG_FILE):
            lines = reading.end_of(path, LOG_BYTES).decode(errors="replace").rstrip().split("\n")[-LOG_LINES:]
            shown = "\n".join(line.rstrip("\r").rpartition("\r")[2].expandtabs() for line in lines)
            text = "".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in shown)
    except (UserError, OSError) as error:
        text = str(error)
    if text:
        with st.expander(f"train.log of {ui.plain(run.label)}", expanded=only, key=f"log-{run.summary.name}"):
            st.code(printable(text), language=None, wrap_lines=True)

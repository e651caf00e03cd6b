"""What the live page shows, and runs of several seeds as one."""

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from dsgpt.charts.comparison import ROWS
from dsgpt.common.errors import is_number
from dsgpt.common.files import is_regular_file
from dsgpt.common.json_files import JsonError, parse_json
from dsgpt.common.text import NO_DIFFERENCE, no_difference
from dsgpt.dashboard import curves, formats
from dsgpt.dashboard.curves import Series, Table
from dsgpt.dashboard.steps import Steps, Values, smoothed
from dsgpt.dashboard.summaries import Summary, seconds_left
from dsgpt.record.equal_work import inference_stamps, judge
from dsgpt.record.fields import is_figure
from dsgpt.record.runs import Run
from dsgpt.record.work import NOTED
from dsgpt.training.status import Status

# What the GPUs and the first process of a run are doing now.

_FILE = re.compile(r"hardware(-\d+)?\.jsonl")
_TAIL_BYTES = 1 << 18
FIGURES = {
    "utilisation": "utilisation (%)",
    "memory_used_bytes": "memory (GB)",
    "power_watts": "power (W)",
    "temperature_celsius": "temperature (°C)",
    "sm_clock_mhz": "clock (MHz)",
}
"""Keys of a GPU in ``hardware.jsonl`` that are shown, and their headings."""
_UNITS = {"utilisation": 100.0, "memory_used_bytes": 1e-9}


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """One GPU at one time."""

    time: float
    """Seconds since 1970."""
    gpu: str
    figures: dict[str, float | None]
    """By heading of ``FIGURES``."""


@dataclass(frozen=True, kw_only=True)
class ProcessUse:
    """What a process has used."""

    process: int
    at: float
    """When this was read: a clock in seconds."""
    cpu_sec: float
    memory_bytes: int

    def cores_since(self, earlier: "ProcessUse | None") -> float | None:
        """Cores that it kept busy since ``earlier``; None without an earlier reading of this process."""
        if earlier is None or earlier.process != self.process or self.at <= earlier.at:
            return None
        return (self.cpu_sec - earlier.cpu_sec) / (self.at - earlier.at)


def recent_samples(run_dir: Path) -> list[GpuSample]:
    """The samples of the last minutes of every GPU of a run, oldest first.

    Lines that are no sample are left out, and so are files that cannot be read.
    """
    files = [path for path in sorted(run_dir.glob("hardware*.jsonl")) if _FILE.fullmatch(path.name)]
    found = [sample for path in files if is_regular_file(path) for sample in _samples(path)]
    return sorted(found, key=lambda sample: (sample.time, sample.gpu))


def _samples(path: Path) -> Iterator[GpuSample]:
    machine = path.name.removeprefix("hardware").removesuffix(".jsonl")
    for line in _last_lines(path):
        try:
            value = parse_json(line)
        except JsonError:
            continue
        if not isinstance(value, dict) or not is_number(value.get("time")) or not isinstance(value.get("gpus"), list):
            continue
        for place, gpu in enumerate(value["gpus"]):
            if isinstance(gpu, dict):
                yield GpuSample(time=value["time"], gpu=f"GPU {place}{machine}", figures=_figures(gpu))


def _last_lines(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, 2) - _TAIL_BYTES)
            file.seek(start)
            lines = file.read(_TAIL_BYTES).split(b"\n")[:-1]
    except OSError:
        return []
    return lines[1:] if start else lines


def _figures(gpu: dict[str, Any]) -> dict[str, float | None]:
    found = {key: gpu[key] if is_number(gpu.get(key)) and is_figure(gpu[key]) else None for key in FIGURES}
    return {FIGURES[key]: None if value is None else value * _UNITS.get(key, 1.0) for key, value in found.items()}


def latest(samples: Sequence[GpuSample]) -> list[GpuSample]:
    """The last sample of each GPU."""
    return [*{sample.gpu: sample for sample in samples}.values()]


def process_use(process: int | None) -> ProcessUse | None:
    """What a process of this machine has used; None if there is none, or if it may not be asked."""
    if process is None:
        return None
    try:
        asked = psutil.Process(process)
        spent, memory = asked.cpu_times(), asked.memory_info().rss
    except psutil.Error:
        return None
    return ProcessUse(process=process, at=time.monotonic(), cpu_sec=spent.user + spent.system, memory_bytes=memory)


# What the live page shows of runs at one instant.

AT_ONCE = 10
"""Runs that are watched together."""
LOG_LINES, LOG_BYTES = 20, 1 << 14
"""Of the end of a log, at most."""


@dataclass(frozen=True)
class Panel:
    """A picture of the live page."""

    column: str
    """Of a step in ``Steps``."""
    title: str
    """With its unit."""
    smooth: bool = True
    """Whether the reader's smoothing is for it."""


PANELS = (
    Panel("loss", "training loss (nats per token)"),
    Panel("tokens_per_sec", "throughput (tokens/s)"),
    Panel("lr", "learning rate", smooth=False),
    Panel("grad_norm", "gradient norm"),
)


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A run under watch."""

    label: str
    summary: Summary
    steps: Steps | None
    """None before the first."""
    cores: float | None = None
    """That rank 0's process kept busy since the last look; None on another machine."""
    memory_bytes: float | None = None
    """Resident, of the same process."""

    def last(self, column: str) -> float | None:
        """The value of the last step; None if it is unknown."""
        if self.steps is None or not len(self.steps.train[column]):
            return None
        value = float(self.steps.train[column][-1])
        return None if np.isnan(value) else value

    @property
    def left(self) -> float | None:
        """Seconds until the last step, while it runs."""
        if self.steps is None or self.summary.status != Status.RUNNING:
            return None
        return seconds_left(self.steps, self.summary.recorded.total_steps)

    @property
    def throughput(self) -> float | None:
        """Median tokens per second of the last steps."""
        if self.steps is None:
            return None
        recent = self.steps.train["tokens_per_sec"][-20:]
        recent = recent[~np.isnan(recent)]
        return float(np.median(recent)) if len(recent) else None

    def progress_line(self) -> str:
        """``step 412 of 800, 3 min 05 s left``."""
        done, total = self.summary.step, self.summary.recorded.total_steps
        if done is None:
            return "no step yet"
        parts = [f"step {done:,.0f}" + (f" of {total:,.0f}" if total else "")]
        if self.left is not None:
            parts.append(f"{formats.seconds(round(self.left))} left")
        return ", ".join(filter(None, (*parts, self.summary.recorded.plan)))


def last_lines(path: Path) -> str:
    """The end of a log, as a terminal would show it: what a progress bar has overwritten is left out.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
        lines = file.read(LOG_BYTES).decode(errors="replace").rstrip().split("\n")[-LOG_LINES:]
    shown = (line.rstrip("\r").rpartition("\r")[2].expandtabs() for line in lines)
    return "\n".join("".join(each if each.isprintable() else "\ufffd" for each in line) for line in shown)


def to_watch(summaries: Sequence[Summary], chosen: Sequence[str]) -> list[Summary]:
    """The chosen runs; else all that run; else the newest. At most ``AT_ONCE``."""
    wanted = [each for each in summaries if each.name in chosen]
    running = [each for each in summaries if each.status == Status.RUNNING]
    return (wanted or running or list(summaries[:1]))[:AT_ONCE]


def table_of(watched: Sequence[Watched]) -> Table:
    """A row for each run."""
    return {
        "run": [each.label for each in watched],
        "state": [each.summary.status.value for each in watched],
        "progress": [each.summary.progress for each in watched],
        "step": [each.summary.step for each in watched],
        "left": [formats.seconds(round(each.left)) if each.left is not None else None for each in watched],
        "train loss": [each.summary.train_loss for each in watched],
        "val loss": [each.summary.val_loss for each in watched],
        "tokens/s": [each.throughput for each in watched],
        "learning rate": [each.last("lr") for each in watched],
        "gradient norm": [each.last("grad_norm") for each in watched],
        "cores": [each.cores for each in watched],
        "memory (GB)": [each.memory_bytes / 1e9 if each.memory_bytes else None for each in watched],
    }


def panel_series(watched: Sequence[Watched], panel: Panel, *, window: int) -> list[Series]:
    """The curves of a panel, in full."""
    found = []
    for each in watched:
        if each.steps is not None and len(each.steps.train["step"]):
            values = each.steps.train[panel.column]
            shown = smoothed(values, window=window) if panel.smooth else values
            found.append(Series(name=each.label, x=each.steps.train["step"], y=shown))
    return found


def gpu_table(samples: Mapping[str, Sequence[GpuSample]]) -> Table:
    """A row for each GPU of each run, as it was at its last sample."""
    rows = [(label, sample) for label, own in samples.items() for sample in latest(own)]
    headings = dict.fromkeys(heading for _, sample in rows for heading in sample.figures)
    return {
        "run": [label for label, _ in rows],
        "GPU": [sample.gpu for _, sample in rows],
        **{heading: [sample.figures.get(heading) for _, sample in rows] for heading in headings},
    }


def gpu_series(samples: Mapping[str, Sequence[GpuSample]], heading: str) -> list[Series]:
    """The mean of a run's GPUs over the last minutes, in seconds before the last sample."""
    found = []
    for label, own in samples.items():
        at: dict[int, list[float]] = {}
        for sample in own:
            value = sample.figures.get(heading)
            if value is not None:
                at.setdefault(int(sample.time), []).append(value)
        seconds = sorted(at)
        if seconds:
            x = np.array([float(second - seconds[-1]) for second in seconds])
            found.append(Series(name=label, x=x, y=np.array([float(np.mean(at[second])) for second in seconds])))
    return found


def labels_of(summaries: Sequence[Summary]) -> Mapping[str, str]:
    """Short names of the watched runs."""
    return curves.labels([each.name for each in summaries])


# Runs that differ in the seed alone, shown as one: the mean of each figure, and its range.


def by_seed(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs in their order; those of the same work and setup but for the seed are one group."""
    groups: list[list[Run]] = []
    for run in runs:
        own = next((group for group in groups if all(_seed_alone(each, run) for each in group)), None)
        if own is None:
            groups.append([run])
        else:
            own.append(run)
    return groups


def _seed_alone(one: Run, other: Run) -> bool:
    seed, other_seed = one.work["seed"], other.work["seed"]
    if None in (seed, other_seed) or seed == other_seed or _setups(one) != _setups(other):
        return False
    same = replace(other, work={**other.work, "seed": seed})
    return judge([one, same]).answer == "yes" and not inference_stamps([one, other])


def _setups(run: Run) -> set[frozenset[tuple[str, str | None]]]:
    return {frozenset((k, v) for k, v in each.setup.items() if k not in NOTED) for each in run.segments}


def mean_run(group: Sequence[Run]) -> Run:
    """The mean of every figure that all runs of a group have; a group of one is its run."""
    first = group[0]
    if len(group) == 1:
        return first
    figures: dict[str, Any] = {}
    for field in fields(Run):
        if field.type == float | None:
            values = [getattr(run, field.name) for run in group]
            figures[field.name] = None if None in values else float(np.mean(values))
    latencies = [latency for run in group for latency in run.latency_range or ()]
    return replace(
        first,
        **figures,
        name=f"{first.name} (mean of {len(group)} seeds)",
        status=next((run.status for run in group if run.status != "completed"), first.status),
        segments=tuple(segment for run in group for segment in run.segments),
        work={**first.work, "seed": ", ".join(sorted((run.work["seed"] for run in group), key=int))},
        latency_range=(min(latencies), max(latencies)) if latencies else None,
        notes=tuple(f"{run.name}: {note}" for run in group for note in run.notes),
    )


def aligned(group: Sequence[Steps]) -> list[Steps]:
    """Each with the steps and the validations that all have."""
    if len(group) == 1:
        return [*group]
    train, validation = (
        reduce(np.intersect1d, [getattr(each, part)["step"] for each in group]) for part in ("train", "validation")
    )
    return [replace(each, train=_at(train, each.train), validation=_at(validation, each.validation)) for each in group]


def _at(steps: Values, columns: Mapping[str, Values]) -> dict[str, Values]:
    places = np.isin(columns["step"], steps)
    return {name: values[places] for name, values in columns.items()}


def mean_steps(group: Sequence[Steps]) -> Steps:
    """The mean of every column of aligned steps."""
    if len(group) == 1:
        return group[0]
    train = {name: np.mean([each.train[name] for each in group], axis=0) for name in group[0].train}
    validation = {name: np.mean([each.validation[name] for each in group], axis=0) for name in group[0].validation}
    return replace(group[0], train=train, validation=validation)


def band(group: Sequence[Series], *, name: str) -> Series:
    """The mean of curves of aligned steps, and their least and most; a group of one is its curve."""
    if len(group) == 1:
        return group[0]
    y = np.stack([each.y for each in group])
    x = np.mean([each.x for each in group], axis=0)
    return Series(name=name, x=x, y=y.mean(axis=0), low=y.min(axis=0), high=y.max(axis=0))


def with_ranges(rows: Sequence[Sequence[str]], groups: Sequence[Sequence[Run]]) -> list[list[str]]:
    """The rows of ``reports.comparison.result_rows``, with the range of what was measured beside each mean.

    Means whose ranges overlap have no difference.
    """
    measured = {row.label: row for row in ROWS}
    found = [[*cells] for cells in rows]
    for cells in found:
        row, base = measured.get(cells[0]), None
        for place, group in enumerate(groups, start=1):
            values = [value for run in group if row and (value := row.value(run)) is not None]
            if row is None or len(group) == 1 or len(values) < len(group):
                continue
            least, most = min(values), max(values)
            cells[place] += f" ({row.form(least)} to {row.form(most)})"
            if place == 1:
                base = least, most
            elif base and no_difference(least, most, than=base):
                cells[len(groups) + place - 1] = NO_DIFFERENCE
    return found

"""What the live page shows of runs at one instant. Imports no Streamlit."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsgpt.dashboard import curves, formats
from dsgpt.dashboard.curves import Series, Table
from dsgpt.dashboard.hardware import GpuSample, latest
from dsgpt.dashboard.sampling import smoothed
from dsgpt.dashboard.steps import Steps
from dsgpt.dashboard.summaries import Summary, seconds_left
from dsgpt.training.status import Status

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

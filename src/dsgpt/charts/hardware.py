"""What GPUs were doing over time: ``hardware.jsonl`` of a run, and its chart."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from dsgpt.charts.comparison import shorten
from dsgpt.charts.style import Frame, frame, legend_height, look, number_axis
from dsgpt.record.runs import read_objects
from dsgpt.record.schema import Fields

PATTERN = "hardware*.jsonl"
"""A file per machine."""
PAUSE_SEC = 60
"""A longer time without a sample is between two processes of a run: it is left out."""
ABSENT = "no run folder has samples of GPUs (hardware.jsonl)"
CAPTION = (
    "Line: mean of the run's GPUs (of their power: sum); band: from the lowest to the highest GPU. Utilisation is the "
    "share of time in which a kernel ran, however small."
)


@dataclass(frozen=True)
class Sample:
    """All GPUs of a run in one second."""

    time: float
    """Seconds since the first sample, without pauses."""
    utilisation: tuple[float, ...]
    """Of each GPU, from 0 to 1."""
    power: tuple[float, ...]
    """In watts."""


def read_samples(folder: Path) -> list[Sample]:
    """The samples in a run folder, by second; of all machines.

    Raises:
        UserError: a file cannot be read.
    """
    seconds: dict[int, dict[str, Mapping[str, Any]]] = {}
    for file in sorted(folder.glob(PATTERN)):
        for line in read_objects(file, []):
            fields = Fields(line, notes=[])
            time = fields.number("time")
            for gpu in fields.sections("gpus") if time is not None else ():
                values = {key: gpu.number(key) for key in ("utilisation", "power_watts")}
                seconds.setdefault(int(time or 0), {})[gpu.text("uuid") or ""] = values
    ordered, elapsed, samples = sorted(seconds), 0.0, []
    gaps = (later - earlier for earlier, later in pairwise([ordered[0], *ordered] if ordered else []))
    for second, gap in zip(ordered, gaps, strict=True):
        elapsed += gap if gap <= PAUSE_SEC else 1
        gpus = seconds[second].values()
        known = [tuple(gpu[key] for gpu in gpus if gpu[key] is not None) for key in ("utilisation", "power_watts")]
        samples.append(Sample(elapsed, known[0], known[1]))
    return samples


def utilisation_chart(folders: Mapping[str, Path], *, warnings: Sequence[str], captions: Sequence[str]) -> Frame | str:
    """Utilisation and power over time of every run that was sampled.

    Args:
        folders: of the runs, by name.
        warnings: in a box above the panels.
        captions: below them.
    """
    found = {name: samples for name, folder in folders.items() if (samples := read_samples(folder))}
    if not any(sample.utilisation for samples in found.values() for sample in samples):
        return ABSENT
    powered = any(sample.power for samples in found.values() for sample in samples)
    picture = frame(
        "GPUs over time",
        warnings=warnings,
        captions=[CAPTION, *captions],
        height=(3.0 if not powered else 5.6) + legend_height(len(found)),
    )
    panels = picture.body.subplots(2 if powered else 1, 1, squeeze=False, sharex=True)[:, 0]
    _draw(panels[0], found, lambda sample: [100 * value for value in sample.utilisation], statistics.fmean)
    panels[0].set(ylabel="% of time with a kernel", ylim=(0, 105))
    if powered:
        _draw(panels[1], found, lambda sample: sample.power, sum)
        panels[1].set(ylabel="watts, all GPUs")
        panels[1].set_ylim(bottom=0)
    panels[-1].set(xlabel="seconds since the first sample")
    handles = []
    for index, name in enumerate(found):
        line = look(index, count=len(found)).line | {"marker": ""}
        handles.append(Line2D([], [], **line, label=shorten(name, 34)))
    picture.body.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False, handlelength=4)
    return picture


def _draw(
    axes: Axes,
    found: Mapping[str, Sequence[Sample]],
    values: Callable[[Sample], Sequence[float]],
    together: Callable[[Sequence[float]], float],
) -> None:
    """A line for each run; a band where its GPUs differ and the line is their mean."""
    for index, samples in enumerate(found.values()):
        style = look(index, count=len(found))
        known = [(sample.time, list(values(sample))) for sample in samples if values(sample)]
        x = [time for time, _ in known]
        axes.plot(x, [together(gpus) for _, gpus in known], **style.line | {"marker": ""})
        if together is statistics.fmean:
            low, high = [min(gpus) for _, gpus in known], [max(gpus) for _, gpus in known]
            axes.fill_between(x, low, high, color=style.colour, alpha=0.2, linewidth=0)
    number_axis(axes.xaxis, 6)
    number_axis(axes.yaxis)
    axes.set_xlim(left=0)
    sns.despine(ax=axes)

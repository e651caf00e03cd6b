"""Bar panels: one horizontal bar per run or cell, from zero, labelled with its value."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import seaborn as sns
from matplotlib.axes import Axes

from dsgpt.charts.comparison import decimals, gigabytes, shorten
from dsgpt.charts.options import current
from dsgpt.charts.style import behind_text, look, note_inside, number_axis
from dsgpt.record.runs import TOO_SHORT, Run

BAR_WIDTH = 0.62
"""Of the distance between two rows."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A bar, in the units of its axis."""

    name: str
    value: float | None
    """None draws ``label`` as a remark, without a bar."""
    label: str
    low: float | None = None
    high: float | None = None
    """The smallest and the largest of several measurements, drawn as a line over the bar."""
    group: int | None = None
    """Rows of one group look alike; None for a look of its own."""


def draw_rows(axes: Axes, rows: Sequence[Row], *, label_width: int = 30) -> None:
    """Draw the bars, the first on top. Titles are the caller's."""
    values = [row.value or 0.0 for row in rows]
    places = [str(index) for index in range(len(rows))]
    looks = [look(index if row.group is None else row.group, count=len(rows)) for index, row in enumerate(rows)]
    palette = [each.colour for each in looks]
    sns.barplot(x=values, y=places, hue=places, palette=palette, saturation=1, width=BAR_WIDTH, legend=False, ax=axes)
    top = max([*values, *(row.high or 0.0 for row in rows)]) or 1.0
    for place, (container, row, each) in enumerate(zip(axes.containers, rows, looks, strict=True)):
        if row.value is None:
            note_inside(axes, row.label, x=top * 0.015, y=place)
            continue
        container[0].set(hatch=each.hatch, hatchcolor=each.hatch_colour)
        end = row.value
        if row.low is not None and row.high is not None and row.low < row.high:
            axes.hlines(place, row.low, row.high, color=current().ink, lw=2.2)
            end = max(end, row.high)
        axes.text(end + top * 0.015, place, row.label, va="center", bbox=behind_text())
    axes.set_xlim(0, top * 1.2)
    name_rows(axes, [row.name for row in rows], label_width=label_width)
    number_axis(axes.xaxis, 5)
    if all(row.value is None for row in rows):
        axes.set_xticks([])


def in_two_lines(name: str, width: int) -> str:
    """``name`` in at most two lines of ``width`` characters; cut in the middle if its words do not fit."""
    lines = textwrap.wrap(name, width, break_long_words=False, break_on_hyphens=False)
    fits = len(lines) <= 2 and all(len(line) <= width for line in lines)
    return "\n".join(lines) if fits else shorten(name, width)


def name_rows(axes: Axes, names: Sequence[str], *, label_width: int = 30) -> None:
    """Write a name beside each row, and leave only the lines that help to read values."""
    axes.set_yticks(range(len(names)), [in_two_lines(name, label_width) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set(ylabel="")
    axes.grid(visible=False, axis="y")
    sns.despine(ax=axes, left=True)


NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Bars:
    """One measured quantity of every run."""

    title: str
    axis: str
    """What the axis shows, unit included."""
    value: Callable[[Run], float | None]
    form: Callable[[float], str]
    better: str = "less is better"
    scale: float = 1.0
    """Units of ``value`` per unit of the axis."""


TRAINING_TIME = Bars("Training time", "seconds of training steps", lambda run: run.train_time, decimals(1))
THROUGHPUT = Bars(
    title="Training throughput",
    axis="tokens per second, all devices",
    value=lambda run: run.tokens_per_sec,
    form=decimals(0),
    better="more is better",
)
LATENCY = Bars("Inference latency", "seconds, batch 1", lambda run: run.inference_latency, decimals(3))
INFERENCE = Bars(
    title="Inference throughput",
    axis="tokens per second, batch 1",
    value=lambda run: run.inference_tokens_per_sec,
    form=decimals(1),
    better="more is better",
)
GPU_MEMORY = Bars("Peak GPU memory", "GB allocated on rank 0's GPU", lambda run: run.gpu_memory, gigabytes, scale=1e9)
HOST_MEMORY = Bars(
    "Peak host memory", "GB resident (RSS) in rank 0's process", lambda run: run.host_memory, gigabytes, scale=1e9
)


def memory_bars(runs: Sequence[Run]) -> list[Bars]:
    """GPU memory if any run recorded it, and host memory if a run recorded only that: never both in one panel."""
    panels = [GPU_MEMORY] if any(run.gpu_memory is not None for run in runs) else []
    if any(run.gpu_memory is None and run.host_memory is not None for run in runs) or not panels:
        panels.append(HOST_MEMORY)
    return panels


def draw_bars(axes: Axes, bars: Bars, runs: Sequence[Run], *, label_width: int = 30) -> None:
    """Draw one bar per run, the first run on top; a run without the value gets a note instead of a bar."""
    draw_rows(axes, [_row(bars, run) for run in runs], label_width=label_width)
    axes.set(title=bars.title, xlabel=f"{bars.axis}\n({bars.better})")


def _row(bars: Bars, run: Run) -> Row:
    value = bars.value(run)
    if value is None:
        return Row(name=run.name, value=None, label=_missing(bars, run))
    return Row(name=run.name, value=value / bars.scale, label=bars.form(value))


def _missing(bars: Bars, run: Run) -> str:
    """Why there is no bar."""
    return TOO_SHORT if bars is THROUGHPUT and run.too_short_to_time else NOT_RECORDED

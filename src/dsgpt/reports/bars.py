"""Bar panels: one horizontal bar per run, from zero, labelled with its value."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from dsgpt.reports.comparison import decimals, gibibytes, shorten
from dsgpt.reports.runs import TOO_SHORT, Run
from dsgpt.reports.style import BEHIND_TEXT, INK, look, note_inside

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
GPU_MEMORY = Bars(
    "Peak GPU memory", "GiB allocated on rank 0's GPU", lambda run: run.gpu_memory, gibibytes, scale=2**30
)
HOST_MEMORY = Bars(
    "Peak host memory", "GiB resident (RSS) in rank 0's process", lambda run: run.host_memory, gibibytes, scale=2**30
)


def memory_bars(runs: Sequence[Run]) -> list[Bars]:
    """GPU memory if any run recorded it, and host memory if a run recorded only that: never both in one panel."""
    panels = [GPU_MEMORY] if any(run.gpu_memory is not None for run in runs) else []
    if any(run.gpu_memory is None and run.host_memory is not None for run in runs) or not panels:
        panels.append(HOST_MEMORY)
    return panels


def draw_bars(axes: Axes, bars: Bars, runs: Sequence[Run], *, label_width: int = 30) -> None:
    """Draw one bar per run, the first run on top; a run without the value gets a note instead of a bar."""
    values = [bars.value(run) for run in runs]
    heights = [(value or 0.0) / bars.scale for value in values]
    rows = [str(index) for index in range(len(runs))]
    looks = [look(index, count=len(runs)) for index in range(len(runs))]
    palette = [each.colour for each in looks]
    sns.barplot(x=heights, y=rows, hue=rows, palette=palette, saturation=1, width=0.62, legend=False, ax=axes)
    top = max(heights) or 1.0
    for row, (container, value, each) in enumerate(zip(axes.containers, values, looks, strict=True)):
        if value is None:
            note_inside(axes, _missing(bars, runs[row]), x=top * 0.015, y=row)
            continue
        container[0].set(hatch=each.hatch, hatchcolor=each.hatch_colour)
        axes.text(heights[row] + top * 0.015, row, bars.form(value), va="center", color=INK, bbox=BEHIND_TEXT)
    axes.set_xlim(0, top * 1.2)
    axes.set_yticks(range(len(runs)), [shorten(run.name, label_width) for run in runs])
    axes.set(title=bars.title, xlabel=f"{bars.axis}\n({bars.better})", ylabel="")
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.grid(visible=False, axis="y")
    sns.despine(ax=axes, left=True)
    if all(value is None for value in values):
        axes.set_xticks([])


def _missing(bars: Bars, run: Run) -> str:
    """Why there is no bar."""
    return TOO_SHORT if bars is THROUGHPUT and run.too_short_to_time else NOT_RECORDED

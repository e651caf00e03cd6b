"""Bar panels: one horizontal bar per run, from zero, labelled with its value."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from dsgpt.reports.comparison import decimals, gigabytes
from dsgpt.reports.rows import Row, draw_rows
from dsgpt.reports.runs import TOO_SHORT, Run

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

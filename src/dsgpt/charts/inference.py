"""The charts of inference: latency against throughput."""

from collections.abc import Sequence

import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from dsgpt.charts.comparison import INFERENCE_NOISE, shorten
from dsgpt.charts.options import current
from dsgpt.charts.style import Frame, Look, frame, legend_height, look, number_axis
from dsgpt.common.text import counted, machine_words
from dsgpt.record.equal_work import inference_stamps
from dsgpt.record.runs import Run
from dsgpt.record.suites import TITLES, Concurrency, Engine

# The chart of inference: latency against throughput.

ABSENT = "no run recorded both its inference latency and throughput"


def latency_chart(runs: Sequence[Run], *, warnings: Sequence[str], captions: Sequence[str]) -> Frame | str:
    """Tokens per second over latency, a point for each run that has both; below and to the right is worse."""
    points = [(run.inference_latency, run.inference_tokens_per_sec) for run in runs]
    if not any(latency and speed for latency, speed in points):
        return ABSENT
    picture = frame(
        "Inference: latency against throughput",
        warnings=[*warnings, *inference_stamps(runs)],
        captions=["Greedy generation from one prompt, with a key-value cache.", INFERENCE_NOISE, *captions],
        height=3.6 + legend_height(len(runs)),
    )
    axes = picture.body.subplots()
    handles = []
    for index, (run, (latency, speed)) in enumerate(zip(runs, points, strict=True)):
        style = look(index, count=len(runs))
        label = shorten(run.name, 34)
        mark = style.line | {"linestyle": "", "markeredgecolor": current().background}
        size = style.marker_size + 3
        if latency and speed:
            axes.plot([latency], [speed], **mark, markersize=size, zorder=2 + index / len(runs))
            label += f": {latency:,.3g} s, {speed:,.4g} tokens/s"
        else:
            label += " (not recorded)"
        handles.append(Line2D([], [], **mark, markersize=8, label=label))
    axes.set_xlim(0, 1.15 * max(latency or 0 for latency, _ in points))
    axes.set_ylim(0, 1.15 * max(speed or 0 for _, speed in points))
    number_axis(axes.xaxis, 6)
    number_axis(axes.yaxis, 6)
    axes.set(
        xlabel="seconds to the last new token, batch 1 (less is better)",
        ylabel="tokens per second (more is better)",
    )
    sns.despine(ax=axes)
    picture.body.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False)
    return picture


# The chart of many requests at once: latency against throughput, a line for each engine.

CAPTION = (
    "A point is a concurrency: the most requests that an engine works on at once. More of them arrive per second, at "
    "the same instants for every engine; the others wait in a queue, which the latency includes. The marker is the "
    "median of the requests, the line above it ends at the 95th percentile."
)


def concurrency_chart(record: Concurrency) -> Frame:
    """Median and 95th percentile of the latency over tokens per second; below and to the right is better."""
    picture = frame(
        "Many requests at once: latency against throughput",
        warnings=_warnings(record.engines),
        captions=[CAPTION, _footer(record)],
        height=4.2 + legend_height(len(record.engines)),
    )
    axes = picture.body.subplots()
    handles = []
    for index, engine in enumerate(record.engines):
        style = look(index, count=len(record.engines))
        _draw(axes, engine, style)
        handles.append(Line2D([], [], **style.line, label=TITLES.get(engine.name, engine.name)))
    axes.set_yscale("log")
    axes.set_xlim(0, None)
    axes.margins(x=0.08)
    number_axis(axes.xaxis)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(
        xlabel="tokens per second of all requests (more is better)",
        ylabel="seconds from arrival to last token (less is better)",
    )
    axes.spines[["top", "right"]].set_visible(False)
    picture.body.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False, handlelength=3.5)
    return picture


def _draw(axes: Axes, engine: Engine, style: Look) -> None:
    loads = engine.by_concurrency
    x = [load.tokens_per_sec.median for load in loads.values()]
    y = [load.latency_sec.p50 for load in loads.values()]
    axes.plot(x, y, **style.line, markersize=style.marker_size, markeredgecolor=current().background, zorder=3)
    axes.vlines(x, y, [load.latency_sec.p95 for load in loads.values()], color=style.colour, lw=1.2, alpha=0.6)
    for slots, right, up in zip(loads, x, y, strict=True):
        axes.annotate(slots, (right, up), (5, -11), textcoords="offset points", fontsize=8.5, color=style.colour)


def _warnings(engines: Sequence[Engine]) -> list[str]:
    """A warning for each engine that failed or generated other ids."""
    failed = [f"FAILED: {engine.name}: {engine.failure}" for engine in engines if engine.failure]
    return failed + [
        f"OTHER TOKENS: {engine.name}: {engine.answers - engine.same_ids} of {engine.answers} answers are not those of "
        "this project"
        for engine in engines
        if engine.same_ids < engine.answers
    ]


def _footer(record: Concurrency) -> str:
    """The model, the trace, the machine and the date."""
    repeats = f"{counted(record.repeats, 'repeat')}"
    return (
        f"{record.checkpoint}, fp32, greedy; {record.requests} requests with {record.new_tokens:,} new tokens, "
        f"{repeats}, {record.timestamp_utc[:10]}; machine: {machine_words(record.hardware)}."
    )

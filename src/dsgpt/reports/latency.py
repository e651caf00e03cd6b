"""The chart of inference: latency against throughput."""

from collections.abc import Sequence
from typing import Any

import seaborn as sns
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from dsgpt.reports.comparison import INFERENCE_NOISE, shorten
from dsgpt.reports.equal_work import inference_stamps
from dsgpt.reports.runs import Run
from dsgpt.reports.style import Frame, frame, look
from dsgpt.reports.themes import current

ABSENT = "no run recorded both its inference latency and throughput"


def latency_chart(runs: Sequence[Run], *, warnings: Sequence[str], captions: Sequence[str]) -> Frame | str:
    """Tokens per second over latency, a point for each run that has both; below and to the right is worse."""
    points = [(run.inference_latency, run.inference_tokens_per_sec) for run in runs]
    if not any(latency and speed for latency, speed in points):
        return ABSENT
    columns = 2
    picture = frame(
        title="Inference: latency against throughput",
        warnings=[*warnings, *inference_stamps(runs)],
        captions=["Greedy generation from one prompt, with a key-value cache.", INFERENCE_NOISE, *captions],
        width=9.0,
        height=3.6 + 0.26 * -(-len(runs) // columns),
    )
    axes = picture.body.subplots()
    handles = []
    for index, (run, (latency, speed)) in enumerate(zip(runs, points, strict=True)):
        style = look(index, count=len(runs))
        label = shorten(run.name, 34)
        mark: dict[str, Any] = {
            "color": style.colour,
            "marker": style.marker,
            "ls": "",
            "markeredgecolor": current().background,
        }
        size = style.marker_size + 3
        if latency and speed:
            axes.plot([latency], [speed], **mark, markersize=size, zorder=2 + index / len(runs))
            label += f": {latency:,.3g} s, {speed:,.4g} tokens/s"
        else:
            label += " (not recorded)"
        handles.append(Line2D([], [], **mark, markersize=8, label=label))
    axes.set_xlim(0, 1.15 * max(latency or 0 for latency, _ in points))
    axes.set_ylim(0, 1.15 * max(speed or 0 for _, speed in points))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.set(
        xlabel="seconds to the last new token, batch 1 (less is better)",
        ylabel="tokens per second (more is better)",
    )
    sns.despine(ax=axes)
    picture.body.legend(handles=handles, loc="outside lower left", ncols=columns, frameon=False)
    return picture

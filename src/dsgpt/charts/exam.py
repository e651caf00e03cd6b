"""The chart of the planner's exam: predicted beside measured seconds of a step, on logarithmic axes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.lines import Line2D

from dsgpt.charts.style import Frame, Texts, current, legend_height, look

_BAND = 1.2
"""Half width of the grey band, a factor."""
_LEAST = 5
"""Sources with fewer rows are drawn as one."""


def exam_chart(rows: Sequence[Mapping[str, Any]], *, date: str) -> Frame | str:
    """A point for each row that others measured, coloured by its source; the record is of ``date``."""
    sources = defaultdict[str, list[tuple[float, float]]](list)
    for row in rows:
        if row["ratio"]:
            sources[row["source"]].append((row["measured"], row["measured"] * row["ratio"]))
    if not sources:
        return "the record has no predicted rows"
    named = sorted(
        (name for name, points in sources.items() if len(points) >= _LEAST), key=lambda name: -len(sources[name])
    )
    others = [point for name, points in sources.items() if name not in named for point in points]
    drawn = {name: sources[name] for name in named} | ({"others": others} if others else {})
    footer = f"{sum(map(len, drawn.values()))} rows; {date}."
    caption = f"Both axes are logarithmic. On the line both are equal; the band is a factor of {_BAND:g}."
    picture = Texts(footer=footer).frame(
        "Seconds of a step: predicted, and measured by others",
        caption,
        height=5.4 + legend_height(len(drawn), columns=4),
    )
    axes, handles = picture.body.subplots(), []
    for index, (name, points) in enumerate(drawn.items()):
        style = look(index, count=len(drawn))
        mark: dict[str, Any] = {"color": style.colour, "marker": style.marker, "linestyle": "", "markersize": 4.5}
        axes.plot(*zip(*points, strict=True), **mark, markeredgecolor=current().background, markeredgewidth=0.4)
        handles.append(Line2D([], [], **mark, label=f"{name} ({len(points)})"))
    ends = [
        extreme(value for points in drawn.values() for point in points for value in point) for extreme in (min, max)
    ]
    axes.plot(ends, ends, color=current().ink, lw=1, zorder=1)
    axes.fill_between(
        ends, [end / _BAND for end in ends], [end * _BAND for end in ends], color=current().grid, zorder=0
    )
    axes.set(xscale="log", yscale="log", xlabel="measured seconds", ylabel="predicted seconds")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    picture.legend(handles, columns=4)
    return picture

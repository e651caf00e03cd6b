"""One horizontal bar per run or cell, from zero, labelled with its value."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from dsgpt.reports.comparison import shorten
from dsgpt.reports.style import behind_text, look, note_inside
from dsgpt.reports.themes import current

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
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
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

"""The style of all pictures, their bars, and how they become files."""

import io
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from dsgpt.charts.comparison import shorten
from dsgpt.charts.themes import LIGHT, Theme
from dsgpt.common.files import write_atomic

# The style of all pictures: colours for the colour-blind, and hatches, dashes and markers for grey print.

DOTS_PER_INCH = 150
ZOOMED = "axis does not start at 0"
BAR_WIDTH = 0.62
"""Width of a bar, as a share of the distance between two rows."""
_NO_METADATA: dict[str, dict[str, None]] = {"png": {"Software": None}, "svg": {"Creator": None, "Date": None}}
STAMP_LINE_INCHES, CAPTION_LINE_INCHES = 0.175, 0.165
_CLIP_ID = re.compile(rb"\bp[0-9a-f]{10}\b")
"""Matplotlib hashes the place of a panel, of which the last digits differ from call to call, so these are numbered."""
_HATCHES = ("", "///", "..", "xxx", "\\\\\\", "---", "+++", "|||", "o")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<")
_DASHES = ((0, ()), (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
_CURRENT: ContextVar[Theme] = ContextVar("theme", default=LIGHT)


current = _CURRENT.get
"""The theme of the picture that is being drawn."""


@dataclass(frozen=True)
class Look:
    """Colour, marker and line of one run in every picture."""

    colour: tuple[float, float, float]
    hatch: str
    hatch_colour: str
    """Dark on light bars; light on dark bars of a light theme."""
    marker: str
    dashes: tuple[int, tuple[float, ...]]
    width: float
    """Line width in points. Later runs are thinner, so that curves that coincide are all visible."""
    marker_size: float
    """Size in points. Smaller for later runs, so that points that coincide are all visible."""

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of Matplotlib for a line of this look."""
        return {"color": self.colour, "linestyle": self.dashes, "linewidth": self.width, "marker": self.marker}


def look(index: int, *, count: int) -> Look:
    """The look of run ``index`` of ``count``.

    The lists have 5, 8 and 9 entries, so the same look returns only after many runs.
    """
    theme = current()
    colour = to_rgb(theme.palette[index % len(theme.palette)])
    brightness = sum(weight * part for weight, part in zip((0.299, 0.587, 0.114), colour, strict=True))
    earlier = 1 - index / (count - 1) if count > 1 else 0.0
    return Look(
        colour=colour,
        hatch=_HATCHES[index % len(_HATCHES)],
        hatch_colour=theme.ink if theme is LIGHT and brightness > 0.6 else theme.background,
        marker=_MARKERS[index % len(_MARKERS)],
        dashes=_DASHES[index % len(_DASHES)],
        width=1.3 + 2.2 * earlier if count > 1 else 1.8,
        marker_size=6 + 5 * earlier,
    )


@contextmanager
def quiet_style(theme: Theme) -> Iterator[None]:
    """A context with the project's style, independent of the user's matplotlibrc; outside nothing changes."""
    before = _CURRENT.set(theme)
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.use("Agg")
        sns.set_theme(context="notebook", style="whitegrid", font="DejaVu Sans", font_scale=0.85)
        colours: dict[str, tuple[Any, ...]] = {
            "background": ("axes.facecolor", "figure.facecolor", "patch.edgecolor", "savefig.facecolor"),
            "edge": ("axes.edgecolor", "xtick.color", "ytick.color"),
            "ink": ("axes.labelcolor", "text.color", "xtick.labelcolor", "ytick.labelcolor"),
            "grid": ("grid.color",),
        }
        mpl.rcParams.update({name: getattr(theme, colour) for colour, names in colours.items() for name in names})
        mpl.rcParams.update({"axes.spines.right": False, "axes.spines.top": False, "axes.titleweight": "bold"})
        mpl.rcParams["hatch.linewidth"] = 1.1
        mpl.rcParams["svg.hashsalt"] = "dsgpt"  # ids of parts of an SVG would be random
        mpl.rcParams["text.parse_math"] = False  # a run may be called $a$
        try:
            yield
        finally:
            _CURRENT.reset(before)


@dataclass(frozen=True)
class Frame:
    """A figure with its texts above and below, and the space for its panels."""

    figure: Figure
    body: SubFigure

    def panels(self, rows: int, **more: Any) -> list[Axes]:
        """``rows`` panels below each other; ``more`` is for Matplotlib's ``subplots``."""
        return [*self.body.subplots(rows, 1, squeeze=False, **more)[:, 0]]

    def legend(self, handles: Sequence[Artist], *, columns: int = 2, **more: Any) -> None:
        """A legend below the panels; ``more`` is for Matplotlib's ``legend``."""
        self.body.legend(handles=handles, loc="outside lower left", ncols=columns, frameon=False, **more)


Chart = Callable[[], Frame | str]
"""Draws a chart in the current theme, or says what the records lack for it."""


@dataclass(frozen=True)
class Texts:
    """Words that all charts of the same records have around their panels."""

    warnings: Sequence[str] = ()
    """Warnings, in a box above the panels."""
    footer: str = ""
    """The last caption below them: the records, the machine and the date."""

    def frame(
        self, title: str, *captions: str, height: float, width: float = 9.0, warnings: Sequence[str] = ()
    ) -> Frame:
        """A figure of ``width`` inches whose panels get ``height`` inches, with more captions and warnings."""
        theme = current()
        stamp = _wrapped([*self.warnings, *warnings], width=int(width * 11.5))
        caption = _wrapped([*captions, self.footer], width=int(width * 15))
        above = 0.5 + (STAMP_LINE_INCHES * (stamp.count("\n") + 1) + 0.25 if stamp else 0)
        below = 0.2 + CAPTION_LINE_INCHES * (caption.count("\n") + 1)
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.06, wspace=0.02)
        figure = Figure(figsize=(width, above + height + below), dpi=DOTS_PER_INCH, layout=layout)
        FigureCanvasAgg(figure)
        head, body, foot = figure.subfigures(3, 1, squeeze=False, height_ratios=[above, height, below])[:, 0]
        head.text(0.18 / width, 1 - 0.13 / above, title, ha="left", va="top", fontsize=13, fontweight="bold")
        if stamp:
            box = {"boxstyle": "square,pad=0.45", "facecolor": theme.warning, "edgecolor": theme.ink, "linewidth": 1.4}
            place = (0.26 / width, 1 - 0.54 / above)
            head.text(*place, stamp, ha="left", va="top", fontsize=9, fontweight="bold", bbox=box, linespacing=1.3)
        words = {"ha": "left", "va": "bottom", "fontsize": 8.5, "color": theme.quiet, "linespacing": 1.3}
        foot.text(0.18 / width, 0.1 / below, caption, **words)
        return Frame(figure, body)


def file_bytes(figure: Figure, form: str) -> bytes:
    """The figure as ``png`` or ``svg``, without software name, time or random ids: equal figures give equal bytes.

    The letters of an SVG are outlines, which look the same everywhere.
    """
    buffer, ids = io.BytesIO(), dict[bytes, bytes]()
    figure.savefig(buffer, format=form, metadata=_NO_METADATA[form])
    if form == "png":
        return buffer.getvalue()
    return _CLIP_ID.sub(lambda match: ids.setdefault(match[0], b"clip%d" % len(ids)), buffer.getvalue())


def save(figure: Figure, path: Path) -> None:
    """Write the figure whole or not at all, a PNG or SVG by the ending of ``path``."""
    write_atomic(path, file_bytes(figure, path.suffix.removeprefix(".")))


def legend_height(entries: int, *, columns: int = 2) -> float:
    """Inches of a legend below the panels."""
    return 0.26 * -(-entries // columns)


def number_axis(axis: Axis, parts: int | None = None, *, whole: bool = False) -> None:
    """Write numbers with thousands separators; with ``parts``, at most that many round ones, or only whole ones."""
    if parts is not None:
        axis.set_major_locator(MaxNLocator(parts, integer=whole, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(lambda value, _: f"{value:,.10g}")


def behind_text() -> dict[str, Any]:
    """A background for numbers, so that grid lines do not cross them."""
    return {"facecolor": current().background, "edgecolor": "none", "pad": 1.0}


def note_inside(axes: Axes, text: str, **place: Any) -> Text:
    """A remark inside the axes, in place of what cannot be drawn."""
    place |= {"style": "italic", "color": current().quiet, "fontsize": 9, "va": "center", "bbox": behind_text()}
    return axes.text(s=text, **place)


def _wrapped(lines: Sequence[str], *, width: int) -> str:
    """The lines, wrapped at ``width`` characters; each is cut after four rows, so that all have room."""
    rows = []
    for line in lines:
        broken = textwrap.wrap(line, width, break_on_hyphens=False)
        rows += broken if len(broken) <= 4 else [*broken[:3], "… and more: see comparison.md"]
    return "\n".join(rows)


# Rows of bars: one horizontal bar per run or cell, from zero, labelled with its value.


@dataclass(frozen=True, kw_only=True)
class Row:
    """A bar, in the units of its axis."""

    name: str
    value: float | None
    """Length of the bar; None draws ``label`` as a remark, without a bar."""
    label: str
    low: float | None = None
    high: float | None = None
    """The smallest and the largest of several measurements, drawn as a line over the bar."""
    group: int | None = None
    """Rows of one group look alike; None for a look of its own."""


def draw_rows(axes: Axes, rows: Sequence[Row], *, label_width: int = 30) -> None:
    """Draw the bars, the first on top. Titles are the caller's."""
    values = [row.value or 0.0 for row in rows]
    looks = [look(index if row.group is None else row.group, count=len(rows)) for index, row in enumerate(rows)]
    bars = axes.barh(range(len(rows)), values, color=[each.colour for each in looks], height=BAR_WIDTH)
    top = max([*values, *(row.high or 0.0 for row in rows)]) or 1.0
    for place, (bar, row, each) in enumerate(zip(bars, rows, looks, strict=True)):
        if row.value is None:
            note_inside(axes, row.label, x=top * 0.015, y=place)
            continue
        bar.set(hatch=each.hatch, hatchcolor=each.hatch_colour)
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


def name_rows(axes: Axes, names: Sequence[str], *, label_width: int = 30) -> None:
    """Write a name beside each row, and leave only the lines that help to read values.

    A name takes at most two lines of ``label_width`` characters; it is cut in the middle if its words do not fit.
    """
    labels = []
    for name in names:
        lines = textwrap.wrap(name, label_width, break_long_words=False, break_on_hyphens=False)
        fits = len(lines) <= 2 and all(len(line) <= label_width for line in lines)
        labels.append("\n".join(lines) if fits else shorten(name, label_width))
    axes.set_yticks(range(len(names)), labels)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set(ylabel="")
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)

"""The style of all pictures, and how they become files."""

import io
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from dsgpt.charts.options import LIGHT, RGB, Theme, current, drawn_in, rgb

# The style of all pictures: colours for the colour-blind, and hatches, dashes and markers for grey print.

DOTS_PER_INCH = 150
STAMP_LINE_INCHES, CAPTION_LINE_INCHES = 0.175, 0.165
_CLIP_ID = re.compile(rb"\bp[0-9a-f]{10}\b")
"""Matplotlib hashes the place of a panel, of which the last digits differ from call to call, so these are numbered."""
_HATCHES = ("", "///", "..", "xxx", "\\\\\\", "---", "+++", "|||", "o")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<")
_DASHES = ((0, ()), (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))


@dataclass(frozen=True)
class Look:
    """How one run is drawn in every picture."""

    colour: RGB
    hatch: str
    hatch_colour: str
    """Dark on light bars, light on dark bars."""
    marker: str
    dashes: tuple[int, tuple[float, ...]]
    width: float
    """Line width in points. Later runs are thinner, so that curves that coincide are all visible."""
    marker_size: float
    """In points. Smaller for later runs, so that points that coincide are all visible."""

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of Matplotlib for a line of this look."""
        return {"color": self.colour, "linestyle": self.dashes, "linewidth": self.width, "marker": self.marker}


def look(index: int, *, count: int) -> Look:
    """The look of run ``index`` of ``count``.

    The lists have 5, 8 and 9 entries, so the same look returns only after many runs.
    """
    theme = current()
    colour = rgb(theme.palette[index % len(theme.palette)])
    brightness = sum(weight * part for weight, part in zip((0.299, 0.587, 0.114), colour, strict=True))
    earlier = 1 - index / (count - 1) if count > 1 else 0.0
    return Look(
        colour=colour,
        hatch=_HATCHES[index % len(_HATCHES)],
        hatch_colour=theme.dark_hatch if brightness > 0.6 else theme.light_hatch,
        marker=_MARKERS[index % len(_MARKERS)],
        dashes=_DASHES[index % len(_DASHES)],
        width=1.3 + 2.2 * earlier if count > 1 else 1.8,
        marker_size=6 + 5 * earlier,
    )


@contextmanager
def quiet_style(theme: Theme) -> Iterator[None]:
    """A context with the project's style, independent of the user's matplotlibrc; outside nothing changes."""
    with mpl.rc_context(), drawn_in(theme):
        mpl.rcdefaults()
        mpl.use("Agg")
        sns.set_theme(context="notebook", style="whitegrid", font="DejaVu Sans", font_scale=0.85)
        mpl.rcParams.update(
            {
                "axes.edgecolor": theme.edge,
                "axes.facecolor": theme.background,
                "axes.labelcolor": theme.ink,
                "axes.titleweight": "bold",
                "figure.facecolor": theme.background,
                "savefig.facecolor": theme.background,
                "grid.color": theme.grid,
                "hatch.linewidth": 1.1,
                "patch.edgecolor": theme.background,
                "svg.hashsalt": "dsgpt",  # ids of parts of an SVG would be random
                "text.color": theme.ink,
                "text.parse_math": False,  # a run may be called $a$
                "xtick.color": theme.edge,
                "xtick.labelcolor": theme.ink,
                "ytick.color": theme.edge,
                "ytick.labelcolor": theme.ink,
            }
        )
        yield


@dataclass(frozen=True)
class Frame:
    """A figure with its texts above and below, and the space for its panels."""

    figure: Figure
    body: SubFigure


def frame(title: str, *, warnings: Sequence[str], captions: Sequence[str], height: float, width: float = 9.0) -> Frame:
    """A figure of ``width`` inches whose panels get ``height`` inches, with title, boxed ``warnings`` and captions."""
    theme = current()
    stamp = _wrapped(warnings, width=int(width * 11.5))
    caption = _wrapped(captions, width=int(width * 15))
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


def png_bytes(figure: Figure) -> bytes:
    """The figure as PNG, without software name or time: the same input gives the same bytes."""
    return _saved(figure, "png", {"Software": None})


def svg_bytes(figure: Figure) -> bytes:
    """The figure as SVG, its letters as outlines that look the same everywhere: the same input gives the same bytes."""
    ids: dict[bytes, bytes] = {}

    def number(found: re.Match[bytes]) -> bytes:
        return ids.setdefault(found[0], b"clip%d" % len(ids))

    return _CLIP_ID.sub(number, _saved(figure, "svg", {"Creator": None, "Date": None}))


def _saved(figure: Figure, form: str, metadata: dict[str, None]) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, metadata=metadata)
    return buffer.getvalue()


FORMATS = {"png": png_bytes, "svg": svg_bytes}
"""By file ending."""


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
    return axes.text(
        **place, s=text, style="italic", color=current().quiet, fontsize=9, va="center", bbox=behind_text()
    )


def _wrapped(lines: Sequence[str], *, width: int) -> str:
    """The lines, wrapped at ``width`` characters; each is cut after four rows, so that all have room."""
    rows = []
    for line in lines:
        broken = textwrap.wrap(line, width, break_on_hyphens=False)
        rows += broken if len(broken) <= 4 else [*broken[:3], "… and more: see comparison.md"]
    return "\n".join(rows)


# From charts to files: every theme and format of each, and why others are not drawn.

Chart = Callable[[], Frame | str]
"""Draws a chart in the current theme, or says what the records lack for it."""


@dataclass(frozen=True)
class Drawn:
    """The files of some charts."""

    files: dict[str, bytes] = field(default_factory=dict)
    """By file name."""
    absent: dict[str, str] = field(default_factory=dict)
    """By chart, why it was not drawn."""


def draw(
    charts: Mapping[str, Chart], *, themes: Sequence[Theme] = (LIGHT,), formats: Sequence[str] = ("png",)
) -> Drawn:
    """Draw all ``charts``; equal records give equal bytes on one machine.

    Args:
        charts: by name.
        themes: of the pictures.
        formats: keys of ``style.FORMATS``.
    """
    drawn = Drawn()
    for theme in themes:
        with quiet_style(theme):
            for name, chart in charts.items():
                picture = chart()
                if isinstance(picture, str):
                    drawn.absent[name] = picture
                    continue
                for form in formats:
                    drawn.files[file_name(name, theme, form)] = FORMATS[form](picture.figure)
    return drawn


def file_name(chart: str, theme: Theme, form: str) -> str:
    """``overview.png``; of the dark theme ``overview-dark.png``."""
    return f"{chart}{'' if theme is LIGHT else f'-{theme.name}'}.{form}"

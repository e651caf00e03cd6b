"""The charts of a step: how its time is distributed, and how much of it is communication."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from dsgpt.reports.footprint import quantile
from dsgpt.reports.lines import ZOOMED
from dsgpt.reports.measured import Measured
from dsgpt.reports.rows import BAR_WIDTH, Row, draw_rows, name_rows
from dsgpt.reports.style import Frame, Look, frame, look, note_inside
from dsgpt.reports.themes import current

NO_TIMES = "no run recorded the times of its steps"
NO_TRAFFIC = "no run recorded what it sent"
TIMES = (
    "Steps after the warm-up. Box: the middle half of the steps, with the median; line: from the fastest 5% to the "
    "slowest 5%; dots: the fastest and the slowest."
)
TRAFFIC = "Bytes count what the rank that sends most sends, if collectives are rings."


def step_times_chart(rows: Sequence[Measured], *, warnings: Sequence[str], captions: Sequence[str]) -> Frame | str:
    """A box of the step times of each run or cell."""
    times = [sorted(row.footprint.step_times_sec or ()) for row in rows]
    if not any(times):
        return NO_TIMES
    picture = frame(
        title="Time of a step",
        warnings=warnings,
        captions=[TIMES, *captions],
        width=9.0,
        height=1.0 + 0.48 * len(rows),
    )
    axes = picture.body.subplots()
    longest = max(values[-1] for values in times if values)
    unit, scale = ("seconds", 1.0) if longest >= 2 else ("milliseconds", 1000.0)
    for place, (row, values) in enumerate(zip(rows, times, strict=True)):
        if values:
            _box(axes, [value * scale for value in values], place, look(row.group, count=len(rows)))
    name_rows(axes, [row.name for row in rows])
    low, high = axes.get_xlim()
    axes.set_xlim(max(0.0, low), high)
    for place, (row, values) in enumerate(zip(rows, times, strict=True)):
        if not values:
            note_inside(axes, row.lacking, x=low + 0.02 * (high - low), y=place)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    start = "" if axes.get_xlim()[0] == 0 else f"; {ZOOMED}"
    axes.set(xlabel=f"{unit} per optimizer step (less is better{start})")
    return picture


def _box(axes: Axes, values: Sequence[float], place: int, style: Look) -> None:
    """A box of sorted values, with the median above it."""
    ink = current().ink
    stats = {
        name: quantile(values, share)
        for name, share in (("whislo", 0.05), ("q1", 0.25), ("med", 0.5), ("q3", 0.75), ("whishi", 0.95))
    }
    line = {"color": ink, "linewidth": 1.1}
    drawn = axes.bxp(
        [stats | {"fliers": [values[0], values[-1]]}],
        positions=[place],
        widths=BAR_WIDTH * 0.8,
        orientation="horizontal",
        patch_artist=True,
        boxprops={"facecolor": style.colour, "edgecolor": ink, "linewidth": 0.8},
        medianprops={"color": ink, "linewidth": 2},
        whiskerprops=line,
        capprops=line,
        flierprops={"marker": ".", "markersize": 5, "markerfacecolor": ink, "markeredgecolor": ink},
    )
    drawn["boxes"][0].set(hatch=style.hatch, hatchcolor=style.hatch_colour)
    median = stats["med"]
    text = f"median {median:,.{0 if median >= 1000 else 1 if median >= 10 else 2}f}"
    axes.annotate(text, (median, place), xytext=(0, 14), textcoords="offset points", ha="center", fontsize=8)


def communication_chart(rows: Sequence[Measured], *, warnings: Sequence[str], captions: Sequence[str]) -> Frame | str:
    """What a step sends, and the share of its time that this takes where it was measured."""
    sent = [_sent_row(row) for row in rows]
    shares = [_share_row(row) for row in rows]
    panels = [
        (bars, label)
        for bars, label in (
            (sent, "MB sent per step by a rank (less is better)"),
            (shares, "% of a step that waits for communication (less is better)"),
        )
        if any(bar.value is not None for bar in bars)
    ]
    if not panels:
        return NO_TRAFFIC
    picture = frame(
        title="Communication of a step",
        warnings=warnings,
        captions=[*([TRAFFIC] if panels[0][0] is sent else []), *captions],
        width=9.0,
        height=len(panels) * (0.9 + 0.4 * len(rows)),
    )
    for axes, (bars, label) in zip(picture.body.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        draw_rows(axes, bars)
        axes.set(xlabel=label)
    return picture


def _sent_row(row: Measured) -> Row:
    sent = row.sent_bytes_per_step
    if sent is None:
        return Row(name=row.name, value=None, label=row.lacking)
    return Row(name=row.name, value=sent / 1e6, label=f"{sent / 1e6:,.1f}" if sent else "nothing", group=row.group)


def _share_row(row: Measured) -> Row:
    share = row.communication_share
    if share is None:
        return Row(name=row.name, value=None, label=row.lacking)
    return Row(name=row.name, value=share * 100, label=f"{share:.1%}", group=row.group)

"""The charts of a rank: its memory, and where the time of its steps goes."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from dsgpt.charts.bars import BAR_WIDTH, Row, draw_rows, name_rows
from dsgpt.charts.curves import ZOOMED
from dsgpt.charts.options import current
from dsgpt.charts.style import Frame, Look, behind_text, frame, look, note_inside, number_axis
from dsgpt.record.runs import OTHER, PARTS, Footprint, quantile
from dsgpt.record.suites import Measured

# The chart of memory: what it holds, predicted beside measured.

REST = "activations and all else"
"""Measured beyond the model state; PyTorch's allocator does not know what it is."""
WHOLE = "all tensors"
"""Measured as a whole."""
COLOURS = ("weights", "gradients", "optimizer", "master weights", "activations", OTHER, PARTS[-2], REST, WHOLE)
"""The parts in the order of the theme's colours."""
ABSENT = "no record has model state or a predicted peak"
MEASURED = "Model state: measured on the rank that holds most, while the optimizer steps."
TENSORS = "Predicted and measured: tensors of the rank that needed most, at the peak of a step."
ALLOCATED = "Activations and all else: what PyTorch allocated beyond it at rank 0's peak."
PREDICTED = "Predicted: tensors of rank 0 at the peak of a step."
RESIDENT = "The resident set of a process is another quantity: it holds Python, libraries and freed memory too."


def memory_chart(rows: Sequence[Measured], *, warnings: Sequence[str], captions: Sequence[str]) -> Frame | str:
    """Stacked bars of each run or cell, predicted beside measured; on CPUs also its peak resident set."""
    prints = [row.footprint for row in rows]
    if not any(each.model_state or each.predicted or each.peak_kind == "tensors" for each in prints):
        return ABSENT
    resident = any(each.peak_kind == "resident" for each in prints)
    pairs = any(each.predicted for each in prints)
    heights = [1.5 + (0.62 if pairs else 0.4) * len(rows), *([0.9 + 0.36 * len(rows)] if resident else [])]
    picture = frame(
        "Memory of a rank, and what it holds",
        warnings=warnings,
        captions=[_caption(prints, resident=resident), *captions],
        height=sum(heights),
    )
    panels = picture.body.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    unit, size = unit_of([sum((each.predicted or each.model_state or {}).values()) for each in prints])
    _draw_stacks(panels[0], rows, unit=unit, size=size, pairs=pairs)
    if resident:
        _draw_resident(panels[1], rows)
    handles = _handles(rows, pairs=pairs)
    picture.body.legend(handles=handles, loc="outside lower left", ncols=4, frameon=False)
    return picture


def _caption(prints: Sequence[Footprint], *, resident: bool) -> str:
    counted = any(each.peak_kind == "tensors" for each in prints)
    said = {
        MEASURED: any(each.model_state for each in prints),
        TENSORS: counted,
        ALLOCATED: any(each.rest for each in prints),
        PREDICTED: not counted and any(each.predicted for each in prints),
        RESIDENT: resident,
    }
    return " ".join(text for text, applies in said.items() if applies)


def unit_of(sizes: Sequence[float]) -> tuple[str, float]:
    """GB or MB, and the bytes of one: the largest unit of which the largest size has at least two."""
    return ("GB", 1e9) if max(sizes, default=0.0) >= 2e9 else ("MB", 1e6)


def _draw_stacks(axes: Axes, rows: Sequence[Measured], *, unit: str, size: float, pairs: bool) -> None:
    top = max(sum(parts.values()) for row in rows for parts in (_measured(row), row.footprint.predicted or {})) / size
    for place, row in enumerate(rows):
        predicted, measured = row.footprint.predicted, _measured(row)
        if pairs:
            _stack(axes, predicted or {}, place - 0.19, top=top, size=size, word="predicted", hatched=True)
        if measured:
            word = "measured" if {REST, WHOLE} & measured.keys() else "of model state measured"
            _stack(axes, measured, place + (0.19 if pairs else 0), top=top, size=size, word=word, thin=pairs)
        elif not predicted:
            note_inside(axes, row.lacking, x=top * 0.015, y=place)
    axes.set_xlim(0, top * 1.36)
    name_rows(axes, [row.name for row in rows])
    number_axis(axes.xaxis, 5)
    axes.set(xlabel=f"{unit} of tensors of a rank (less is better)")


def _stack(
    axes: Axes,
    parts: Mapping[str, float],
    place: float,
    *,
    top: float,
    size: float,
    word: str,
    hatched: bool = False,
    thin: bool = True,
) -> None:
    """One stacked bar with its total; nothing without parts."""
    end = 0.0
    for name in (*PARTS, REST, WHOLE):
        if (value := parts.get(name, 0.0) / size) > 0:
            axes.barh(place, value, left=end, height=0.34 if thin else BAR_WIDTH, **_look(name, hatched=hatched))
            end += value
    if parts:
        text = f"{end:,.{1 if top < 100 else 0}f} {word}"
        axes.text(end + top * 0.012, place, text, va="center", fontsize=8.5, bbox=behind_text())


def _look(name: str, *, hatched: bool) -> dict[str, Any]:
    theme = current()
    colour = theme.edge if name == WHOLE else theme.palette[COLOURS.index(name)]
    look: dict[str, Any] = {"facecolor": colour, "edgecolor": theme.background, "linewidth": 0.6}
    return {**look, "hatch": "////", "hatchcolor": theme.background} if hatched else look


def _measured(row: Measured) -> dict[str, float]:
    """The model state, and what else was allocated where that is known."""
    if row.footprint.peak_kind == "tensors" and row.footprint.peak is not None:
        return {WHOLE: row.footprint.peak}
    found = dict(row.footprint.model_state or {})
    rest = row.footprint.rest
    return found | {REST: rest} if found and rest else found


def _draw_resident(axes: Axes, rows: Sequence[Measured]) -> None:
    peaks = [row.footprint.peak if row.footprint.peak_kind == "resident" else None for row in rows]
    unit, size = unit_of([peak for peak in peaks if peak is not None])
    bars = [
        Row(name=row.name, value=None, label=row.lacking)
        if peak is None
        else Row(name=row.name, value=peak / size, label=f"{peak / size:,.{2 if unit == 'GB' else 0}f}")
        for row, peak in zip(rows, peaks, strict=True)
    ]
    draw_rows(axes, bars)
    for bar in axes.patches:  # the colours above mean parts of memory
        bar.set(facecolor=current().quiet, hatch="")
    axes.set(xlabel=f"{unit} resident (RSS) in rank 0's process, at its peak")


def _handles(rows: Sequence[Measured], *, pairs: bool) -> list[Patch]:
    """The parts that are drawn, and how predictions are told from measurements."""
    stacks = [parts for row in rows for parts in (_measured(row), row.footprint.predicted or {})]
    drawn = {name for parts in stacks for name, size in parts.items() if size > 0}
    handles = [Patch(label=name, **_look(name, hatched=False)) for name in (*PARTS, REST, WHOLE) if name in drawn]
    if pairs:
        grey: dict[str, Any] = {"facecolor": current().quiet, "edgecolor": current().background}
        handles += [Patch(**grey, hatch="////", label="predicted"), Patch(**grey, label="measured")]
    return handles


# The charts of a step: how its time is distributed, and how much of it is communication.

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
    picture = frame("Time of a step", warnings=warnings, captions=[TIMES, *captions], height=1.0 + 0.48 * len(rows))
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
    number_axis(axes.xaxis, 6)
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
        "Communication of a step",
        warnings=warnings,
        captions=[*([TRAFFIC] if panels[0][0] is sent else []), *captions],
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

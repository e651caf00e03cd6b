"""The chart of memory: what it holds, predicted beside measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from dsgpt.reports.footprint import OTHER, PARTS, Footprint
from dsgpt.reports.measured import Measured
from dsgpt.reports.rows import BAR_WIDTH, Row, draw_rows, name_rows
from dsgpt.reports.style import Frame, behind_text, frame, note_inside
from dsgpt.reports.themes import current

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
        title="Memory of a rank, and what it holds",
        warnings=warnings,
        captions=[_caption(prints, resident=resident), *captions],
        width=9.0,
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
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
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

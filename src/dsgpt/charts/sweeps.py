"""The charts of a sweep."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from dsgpt.charts.bars import Row, draw_rows
from dsgpt.charts.comparison import decimals, shorten
from dsgpt.charts.memory import communication_chart, memory_chart, step_times_chart
from dsgpt.charts.options import current
from dsgpt.charts.style import Chart, Frame, frame, legend_height, look
from dsgpt.common.text import counted, machine_words
from dsgpt.record.suites import (
    NOT_RECORDED,
    Comparison,
    Spread,
    Sweep,
    SweepCell,
    failure,
    groups_of,
    of_cells,
    strategy_of,
)

# The charts of comparisons in a sweep: speed-up over devices beside the ideal, and efficiency.

NO_SCALING = "no strategy trained on several numbers of devices"
NO_EFFICIENCY = "no comparison has a speed-up"
LOGARITHMIC_FROM = 4
"""From this ratio of the most to the fewest devices, axes are logarithmic: the ideal stays a straight line."""
LEGEND_COLUMNS = 4
KINDS = {
    "same training": "the same training on all",
    "weak scaling": "the global batch grows with them",
}
"""Kinds of comparisons that have a speed-up over devices, and what is said of them."""
CAPTION = (
    "Speed-up: tokens per second over those of the baseline in the same repeat; median, and a line from the smallest "
    "to the largest."
)
WEAK = "Weak scaling gives every device the same number of tokens: it is not the same training."


@dataclass(frozen=True)
class Point:
    """A cell at its number of devices."""

    devices: int
    speed_up: Spread


@dataclass(frozen=True)
class Series:
    """The cells of one strategy, by their number of devices."""

    name: str
    points: tuple[Point, ...]
    anchored: bool
    """Whether the line starts at the baseline, because the strategy did not run on as few devices."""


def series_of(sweep: Sweep, comparison: Comparison) -> list[Series]:
    """The strategies of a comparison that have a speed-up, without its baseline."""
    base = sweep.cell(comparison.baseline)
    points: dict[str, dict[int, Point]] = {}
    for one in comparison.cells:
        if one.speed_up is not None:
            devices = sweep.cell(one.cell).devices
            points.setdefault(strategy_of(one.cell), {})[devices] = Point(devices, one.speed_up)
    return [
        Series(name, tuple(found[count] for count in sorted(found)), anchored=base.devices not in found)
        for name, found in points.items()
    ]


def scaling_chart(sweep: Sweep, *, warnings: Sequence[str], captions: Sequence[str]) -> Frame | str:
    """Speed-up over devices, a panel for each comparison that has several numbers of devices."""
    found = [(comparison, series_of(sweep, comparison)) for comparison in sweep.comparisons if comparison.kind in KINDS]
    if not any(len(each.points) > 1 for _, series in found for each in series):
        return NO_SCALING
    panels = [
        (comparison, series)
        for comparison, series in found
        if any(point.devices != sweep.cell(comparison.baseline).devices for each in series for point in each.points)
    ]
    groups, drawn = groups_of(sweep), {each.name for _, series in panels for each in series}
    names = {name: place for name, place in groups.items() if name in drawn}
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    picture = frame(
        "Speed-up over devices, beside the ideal",
        warnings=warnings,
        captions=[*_captions(comparison for comparison, _ in panels), *captions],
        height=3.9 * rows + legend_height(len(names) + 2, columns=LEGEND_COLUMNS),
    )
    places = list(picture.body.subplots(rows, columns, squeeze=False).flat)
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    for axes, (comparison, series) in zip(places, panels, strict=False):
        _draw_lines(axes, series, names=names, base=sweep.cell(comparison.baseline).devices)
        axes.set(title=comparison.name.capitalize(), xlabel=f"devices\n({KINDS[comparison.kind]})")
    picture.body.legend(
        handles=_handles(names), loc="outside lower left", ncols=LEGEND_COLUMNS, frameon=False, handlelength=3.5
    )
    return picture


def _draw_lines(axes: Axes, series: Sequence[Series], *, names: Mapping[str, int], base: int) -> None:
    ink = current().ink
    counts = sorted({base, *(point.devices for each in series for point in each.points)})
    axes.plot(counts, [count / base for count in counts], color=current().quiet, lw=1.4, ls=(0, (4, 3)), zorder=1.5)
    axes.plot([base], [1.0], color=ink, marker="D", markersize=7, ls="", zorder=4)
    for each in series:
        style, place = look(names[each.name], count=max(names.values()) + 1), list(names).index(each.name)
        points = ([(base, 1.0)] if each.anchored else []) + [(p.devices, p.speed_up.median) for p in each.points]
        # Points of equal devices stand side by side, so that their ranges are all visible.
        shift = 1 + 0.05 * ((place + 0.5) / len(names) - 0.5)
        x = [count if (count, value) == (base, 1.0) else count * shift for count, value in points]
        line = style.line | {"markersize": style.marker_size, "markeredgecolor": current().background}
        axes.plot(x, [value for _, value in points], **line, zorder=2 + place / len(names))
        for point in each.points:
            axes.vlines(
                point.devices * shift, point.speed_up.smallest, point.speed_up.largest, color=style.colour, lw=1.6
            )
    axes.set_ylabel("speed-up over the baseline")
    if counts[-1] >= LOGARITHMIC_FROM * counts[0]:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    else:
        axes.set_ylim(0, None)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.10g}x")
    axes.xaxis.set_major_locator(FixedLocator(counts))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)


def _handles(names: Mapping[str, int]) -> list[Line2D]:
    handles = [
        Line2D([], [], color=current().quiet, lw=1.4, ls=(0, (4, 3)), label="ideal"),
        Line2D([], [], color=current().ink, marker="D", ls="", markersize=7, label="baseline"),
    ]
    for name, group in names.items():
        style = look(group, count=max(names.values()) + 1)
        handles.append(Line2D([], [], **style.line, label=shorten(name, 24)))
    return handles


def _captions(comparisons: Iterable[Comparison]) -> list[str]:
    return [CAPTION, *([WEAK] if any(comparison.kind == "weak scaling" for comparison in comparisons) else [])]


def efficiency_chart(sweep: Sweep, *, warnings: Sequence[str], captions: Sequence[str]) -> Frame | str:
    """Speed-up per device, a panel for each comparison that has one."""
    panels = [
        comparison
        for comparison in sweep.comparisons
        if comparison.kind in KINDS and any(one.efficiency is not None for one in comparison.cells)
    ]
    if not panels:
        return NO_EFFICIENCY
    heights = [0.9 + 0.4 * len(comparison.cells) for comparison in panels]
    picture = frame(
        "Efficiency: speed-up per device",
        warnings=warnings,
        captions=[*_captions(panels), *captions],
        height=sum(heights),
    )
    places = picture.body.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, comparison in zip(places, panels, strict=True):
        draw_rows(axes, efficiency_rows(sweep, comparison))
        axes.axvline(100, color=current().quiet, lw=1.4, ls=(0, (4, 3)), zorder=1.5)
        axes.set_xlim(0, max(axes.get_xlim()[1], 128))
        name = comparison.name.capitalize()
        axes.set(title=name, xlabel=f"% of the ideal, against {comparison.baseline} (more is better)")
    return picture


def efficiency_rows(sweep: Sweep, comparison: Comparison) -> list[Row]:
    """A bar for each cell of a comparison, in percent."""
    base, groups, rows = sweep.cell(comparison.baseline).devices, groups_of(sweep), []
    for one in comparison.cells:
        cell = sweep.cell(one.cell)
        if one.efficiency is None or one.speed_up is None:
            why = failure(cell) or ("no speed" if one.comparable else "not comparable")
            rows.append(Row(name=one.cell, value=None, label=why))
            continue
        group, per_device = groups[strategy_of(one.cell)], 100 * base / cell.devices
        rows.append(
            Row(
                name=one.cell,
                value=100 * one.efficiency,
                label=f"{one.efficiency:.0%} ({one.speed_up.median:.2f}x)",
                low=one.speed_up.smallest * per_device,
                high=one.speed_up.largest * per_device,
                group=group,
            )
        )
    return rows


SPREAD = "Bars are medians of the repeats; a line over a bar goes from the smallest to the largest."


def charts_of_sweep(sweep: Sweep, *, name: str) -> dict[str, Chart]:
    """Every chart by its name, which begins with the name of the sweep."""
    rows = of_cells(sweep)
    texts = {"warnings": sweep_stamps(sweep), "captions": [sweep_footer(sweep, name=name)]}
    charts: dict[str, Chart] = {
        "throughput": partial(_throughput, sweep, **texts),
        "scaling": partial(scaling_chart, sweep, **texts),
        "efficiency": partial(efficiency_chart, sweep, **texts),
        "memory": partial(memory_chart, rows, **texts),
        "communication": partial(communication_chart, rows, **texts),
        "step_times": partial(step_times_chart, rows, **texts),
        "money": partial(_money, sweep, **texts),
    }
    return {f"{name}_{chart}": draw for chart, draw in charts.items()}


def sweep_stamps(sweep: Sweep) -> list[str]:
    """Warnings: cells that did other work than what they are compared with, and turns that have no result."""
    lines = [
        f"NOT COMPARED: {one.cell}: {one.same_work}"
        for comparison in sweep.comparisons
        for one in comparison.cells
        if not one.comparable and sweep.cell(one.cell).done() and sweep.cell(comparison.baseline).done()
    ]
    partly = [
        f"{cell.name}: {len(cell.done())} of {len(cell.turns)} turns are done" for cell in sweep.cells if cell.failures
    ]
    return [*lines, *([f"NOT ALL TURNS: {'; '.join(partly)}"] if partly else [])]


def sweep_footer(sweep: Sweep, *, name: str) -> str:
    """The sweep, its machine and its date."""
    repeats = f"{counted(sweep.repeats, 'repeat')}"
    return (
        f"sweep {name}: suite {sweep.suite}, {len(sweep.cells)} cells, {repeats}, {sweep.timestamp_utc[:10]}; "
        f"machine: {machine_words(sweep.hardware)}."
    )


def cell_rows(sweep: Sweep, value: Callable[[SweepCell], Spread | None], form: Callable[[float], str]) -> list[Row]:
    """A bar for each cell."""
    groups, rows = groups_of(sweep), []
    for cell in sweep.cells:
        spread = value(cell)
        if spread is None:
            rows.append(Row(name=cell.name, value=None, label=failure(cell) or NOT_RECORDED))
        else:
            row = Row(
                name=cell.name,
                value=spread.median,
                label=form(spread.median),
                low=spread.smallest,
                high=spread.largest,
                group=groups[strategy_of(cell.name)],
            )
            rows.append(row)
    return rows


def _bars(rows: Sequence[Row], *, title: str, axis: str, warnings: Sequence[str], captions: Sequence[str]) -> Frame:
    picture = frame(title, warnings=warnings, captions=captions, height=1.0 + 0.4 * len(rows))
    axes = picture.body.subplots()
    draw_rows(axes, rows)
    axes.set(xlabel=axis)
    return picture


def _throughput(sweep: Sweep, *, warnings: Sequence[str], captions: Sequence[str]) -> Frame | str:
    rows = cell_rows(sweep, lambda cell: cell.tokens_per_sec, decimals(0))
    if all(row.value is None for row in rows):
        return "no cell has a throughput"
    axis = "tokens per second, all devices (more is better)"
    return _bars(rows, title="Training throughput", axis=axis, warnings=warnings, captions=[SPREAD, *captions])


def _money(sweep: Sweep, *, warnings: Sequence[str], captions: Sequence[str]) -> Frame | str:
    rows = cell_rows(sweep, lambda cell: cell.cost, lambda value: f"{value:,.4g}")
    if all(row.value is None for row in rows):
        return "the sweep had no --price"
    if unequal := sweep.unequal_tokens():
        warnings = [*warnings, f"NOT EQUAL WORK: {unequal}"]
    price = f"of all devices' training time, at {sweep.price_per_device_hour:g} for a device hour (less is better)"
    return _bars(rows, title="Cost of the training", axis=price, warnings=warnings, captions=[SPREAD, *captions])

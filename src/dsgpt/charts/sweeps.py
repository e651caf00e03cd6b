"""The charts of suites: of the comparisons in a sweep, of many requests at once, and of the planner's exam."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from dsgpt.charts.comparison import shorten
from dsgpt.charts.memory import communication_chart, memory_chart, step_times_chart
from dsgpt.charts.style import Chart, Frame, Row, Texts, current, draw_rows, legend_height, look, number_axis
from dsgpt.common.text import counted, grouped, machine_words
from dsgpt.record import suites

# The charts of comparisons in a sweep: speed-up over devices beside the ideal, and efficiency.

LOGARITHMIC_FROM = 4
"""Ratio of the most to the fewest devices from which axes are logarithmic: the ideal stays a straight line."""
LEGEND_COLUMNS = 4
KINDS = {"same training": "the same training on all", "weak scaling": "the global batch grows with them"}
"""Kinds of comparisons that have a speed-up over devices, and what is said of them."""
CAPTION = (
    "Speed-up: tokens per second over those of the baseline in the same repeat; median, and a line from the smallest "
    "to the largest."
)
WEAK = "Weak scaling gives every device the same number of tokens: it is not the same training."


def speed_ups_of(sweep: suites.Sweep, comparison: suites.Comparison) -> dict[str, dict[int, suites.Spread]]:
    """The speed-ups of a comparison by strategy and, ascending, by number of devices; without its baseline."""
    speed_ups: dict[str, dict[int, suites.Spread]] = {}
    for one in sorted(comparison.cells, key=lambda one: sweep.cell(one.cell).devices):
        if one.speed_up is not None:
            speed_ups.setdefault(suites.strategy_of(one.cell), {})[sweep.cell(one.cell).devices] = one.speed_up
    return speed_ups


def scaling_chart(sweep: suites.Sweep, texts: Texts) -> Frame | str:
    """Speed-up over devices, a panel for each comparison that has several numbers of devices."""
    compared = [(each, speed_ups_of(sweep, each)) for each in sweep.comparisons if each.kind in KINDS]
    if not any(len(by_devices) > 1 for _, speed_ups in compared for by_devices in speed_ups.values()):
        return "no strategy trained on several numbers of devices"
    panels = [each for each in compared if {*chain(*each[1].values())} - {sweep.cell(each[0].baseline).devices}]
    drawn = {name for _, speed_ups in panels for name in speed_ups}
    names = {name: place for name, place in suites.groups_of(sweep).items() if name in drawn}
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    height = 3.9 * rows + legend_height(len(names) + 2, columns=LEGEND_COLUMNS)
    captions = _captions(comparison for comparison, _ in panels)
    picture = texts.frame("Speed-up over devices, beside the ideal", *captions, height=height)
    places = list(picture.body.subplots(rows, columns, squeeze=False).flat)
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    for axes, (comparison, speed_ups) in zip(places, panels, strict=False):
        _draw_lines(axes, speed_ups, names=names, base=sweep.cell(comparison.baseline).devices)
        axes.set(title=comparison.name.capitalize(), xlabel=f"devices\n({KINDS[comparison.kind]})")
    base = Line2D([], [], color=current().ink, marker="D", ls="", markersize=7, label="baseline")
    handles = [Line2D([], [], **_ideal(), label="ideal"), base]
    for name, group in names.items():
        handles.append(Line2D([], [], **look(group, count=max(names.values()) + 1).line, label=shorten(name, 24)))
    picture.legend(handles, columns=LEGEND_COLUMNS, handlelength=3.5)
    return picture


def _ideal() -> dict[str, Any]:
    """The look of the line of the ideal."""
    return {"color": current().quiet, "lw": 1.4, "ls": (0, (4, 3))}


def _draw_lines(
    axes: Axes, speed_ups: Mapping[str, Mapping[int, suites.Spread]], *, names: Mapping[str, int], base: int
) -> None:
    counts = sorted({base, *chain(*speed_ups.values())})
    axes.plot(counts, [count / base for count in counts], **_ideal(), zorder=1.5)
    axes.plot([base], [1.0], color=current().ink, marker="D", markersize=7, ls="", zorder=4)
    for name, by_devices in speed_ups.items():
        style, place = look(names[name], count=max(names.values()) + 1), list(names).index(name)
        points = [] if base in by_devices else [(base, 1.0)]  # a line of none on as few devices starts at the baseline
        points += [(count, spread.median) for count, spread in by_devices.items()]
        # Points of equal devices stand side by side, so that their ranges are all visible.
        shift = 1 + 0.05 * ((place + 0.5) / len(names) - 0.5)
        x = [count if (count, value) == (base, 1.0) else count * shift for count, value in points]
        line = style.line | {"markersize": style.marker_size, "markeredgecolor": current().background}
        axes.plot(x, [value for _, value in points], **line, zorder=2 + place / len(names))
        for count, spread in by_devices.items():
            axes.vlines(count * shift, spread.smallest, spread.largest, color=style.colour, lw=1.6)
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


def _captions(comparisons: Iterable[suites.Comparison]) -> list[str]:
    return [CAPTION, *([WEAK] if any(comparison.kind == "weak scaling" for comparison in comparisons) else [])]


def efficiency_chart(sweep: suites.Sweep, texts: Texts) -> Frame | str:
    """Speed-up per device, a panel for each comparison that has one."""
    panels = [each for each in sweep.comparisons if each.kind in KINDS]
    panels = [each for each in panels if any(one.efficiency is not None for one in each.cells)]
    if not panels:
        return "no comparison has a speed-up"
    heights = [0.9 + 0.4 * len(comparison.cells) for comparison in panels]
    picture = texts.frame("Efficiency: speed-up per device", *_captions(panels), height=sum(heights))
    for axes, comparison in zip(picture.panels(len(panels), height_ratios=heights), panels, strict=True):
        draw_rows(axes, efficiency_rows(sweep, comparison))
        axes.axvline(100, **_ideal(), zorder=1.5)
        axes.set_xlim(0, max(axes.get_xlim()[1], 128))
        name = comparison.name.capitalize()
        axes.set(title=name, xlabel=f"% of the ideal, against {comparison.baseline} (more is better)")
    return picture


def efficiency_rows(sweep: suites.Sweep, comparison: suites.Comparison) -> list[Row]:
    """A bar for each cell of a comparison, in percent."""
    base, groups, rows = sweep.cell(comparison.baseline).devices, suites.groups_of(sweep), []
    for one in comparison.cells:
        cell = sweep.cell(one.cell)
        label = suites.failure(cell) or ("no speed" if one.comparable else "not comparable")
        row = Row(name=one.cell, value=None, label=label, group=groups[suites.strategy_of(one.cell)])
        if one.efficiency is not None and one.speed_up is not None:
            ends = [100 * base / cell.devices * end for end in (one.speed_up.smallest, one.speed_up.largest)]
            label = f"{one.efficiency:.0%} ({one.speed_up.median:.2f}x)"
            row = replace(row, value=100 * one.efficiency, label=label, low=ends[0], high=ends[1])
        rows.append(row)
    return rows


SPREAD = "Bars are medians of the repeats; a line over a bar goes from the smallest to the largest."


def charts_of_sweep(sweep: suites.Sweep, *, name: str) -> dict[str, Chart]:
    """Every chart by its name, which begins with the name of the sweep."""
    warnings = [
        f"NOT COMPARED: {one.cell}: {one.same_work}"
        for comparison in sweep.comparisons
        for one in comparison.cells
        if not one.comparable and sweep.cell(one.cell).done() and sweep.cell(comparison.baseline).done()
    ]
    partly = [cell for cell in sweep.cells if cell.failures]
    turns = [f"{cell.name}: {len(cell.done())} of {len(cell.turns)} turns are done" for cell in partly]
    warnings += [f"NOT ALL TURNS: {'; '.join(turns)}"] if turns else []
    footer = (
        f"sweep {name}: suite {sweep.suite}, {len(sweep.cells)} cells, {counted(sweep.repeats, 'repeat')}, "
        f"{sweep.timestamp_utc[:10]}; machine: {machine_words(sweep.hardware)}."
    )
    rows, texts = suites.of_cells(sweep), Texts(warnings, footer)
    unequal = [f"NOT EQUAL WORK: {tokens}"] if (tokens := sweep.unequal_tokens()) else []
    marked = replace(texts, warnings=[*texts.warnings, *unequal])
    speed = ("Training throughput", "tokens per second, all devices (more is better)", "no cell has a throughput")
    paid = f"of all devices' training time, at {sweep.price_per_device_hour or 0:g} for a device hour (less is better)"
    cost = ("Cost of the training", paid, "the sweep had no --price")
    charts: dict[str, Chart] = {
        "throughput": partial(_cells_chart, sweep, texts, "tokens_per_sec", "{:,.0f}".format, speed),
        "scaling": partial(scaling_chart, sweep, texts),
        "efficiency": partial(efficiency_chart, sweep, texts),
        "memory": partial(memory_chart, rows, texts),
        "communication": partial(communication_chart, rows, texts),
        "step_times": partial(step_times_chart, rows, texts),
        "money": partial(_cells_chart, sweep, marked, "cost", "{:,.4g}".format, cost),
    }
    return {f"{name}_{chart}": draw for chart, draw in charts.items()}


def _cells_chart(
    sweep: suites.Sweep, texts: Texts, figure: str, form: Callable[[float], str], words: tuple[str, str, str]
) -> Frame | str:
    """A bar for each cell, as long as its ``figure``, a field of ``SweepCell``.

    ``words`` are the title, the axis, and what is said if no cell has the figure.
    """
    title, axis, absent = words
    groups, rows = suites.groups_of(sweep), []
    for cell in sweep.cells:
        spread: suites.Spread | None = getattr(cell, figure)
        label = form(spread.median) if spread else suites.failure(cell) or suites.NOT_RECORDED
        value, low, high = (spread.median, spread.smallest, spread.largest) if spread else (None, None, None)
        group = groups[suites.strategy_of(cell.name)]
        rows.append(Row(name=cell.name, value=value, label=label, low=low, high=high, group=group))
    if all(row.value is None for row in rows):
        return absent
    picture = texts.frame(title, SPREAD, height=1.0 + 0.4 * len(rows))
    axes = picture.body.subplots()
    draw_rows(axes, rows)
    axes.set(xlabel=axis)
    return picture


# The chart of many requests at once: latency against throughput, a line for each engine.

REQUESTS = (
    "A point is a concurrency: the most requests that an engine works on at once. More of them arrive per second, at "
    "the same instants for every engine; the others wait in a queue, which the latency includes. The marker is the "
    "median of the requests, the line above it ends at the 95th percentile."
)


def concurrency_chart(record: suites.Concurrency) -> Frame:
    """Median and 95th percentile of the latency over tokens per second; below and to the right is better."""
    engines, repeats = record.engines, counted(record.repeats, "repeat")
    footer = (
        f"{record.checkpoint}, fp32, greedy; {record.requests} requests with {record.new_tokens:,} new tokens, "
        f"{repeats}, {record.timestamp_utc[:10]}; machine: {machine_words(record.hardware)}."
    )
    warnings = [f"FAILED: {engine.name}: {engine.failure}" for engine in engines if engine.failure]
    warnings += [
        f"OTHER TOKENS: {engine.name}: {engine.answers - engine.same_ids} of {engine.answers} answers are not those of "
        "this project"
        for engine in engines
        if engine.same_ids < engine.answers
    ]
    height, title = 4.2 + legend_height(len(engines)), "Many requests at once: latency against throughput"
    picture = Texts(warnings, footer).frame(title, REQUESTS, height=height)
    axes, handles = picture.body.subplots(), []
    for index, engine in enumerate(engines):
        style, loads = look(index, count=len(engines)), engine.by_concurrency
        x = [load.tokens_per_sec.median for load in loads.values()]
        y = [load.latency_sec.p50 for load in loads.values()]
        axes.plot(x, y, **style.line, markersize=style.marker_size, markeredgecolor=current().background, zorder=3)
        axes.vlines(x, y, [load.latency_sec.p95 for load in loads.values()], color=style.colour, lw=1.2, alpha=0.6)
        for slots, right, up in zip(loads, x, y, strict=True):
            axes.annotate(slots, (right, up), (5, -11), textcoords="offset points", fontsize=8.5, color=style.colour)
        handles.append(Line2D([], [], **style.line, label=suites.TITLES.get(engine.name, engine.name)))
    axes.set_yscale("log")
    axes.set_xlim(0, None)
    axes.margins(x=0.08)
    number_axis(axes.xaxis)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("tokens per second of all requests (more is better)")
    axes.set_ylabel("seconds from arrival to last token (less is better)")
    picture.legend(handles, handlelength=3.5)
    return picture


# The chart of the planner's exam: predicted beside measured seconds of a step, on logarithmic axes.

_BAND = 1.2
"""Half width of the grey band, a factor."""
_LEAST = 5
"""Sources with fewer rows are drawn as one."""


def exam_chart(rows: Sequence[Mapping[str, Any]], *, date: str) -> Frame | str:
    """A point for each row that others measured, coloured by its source; the record is of ``date``."""
    pairs = [(row["source"], (row["measured"], row["measured"] * row["ratio"])) for row in rows if row["ratio"]]
    sources = grouped(pairs)
    if not sources:
        return "the record has no predicted rows"
    named = sorted((name for name in sources if len(sources[name]) >= _LEAST), key=lambda name: -len(sources[name]))
    others = [point for name, points in sources.items() if name not in named for point in points]
    drawn = {name: sources[name] for name in named} | ({"others": others} if others else {})
    caption = f"Both axes are logarithmic. On the line both are equal; the band is a factor of {_BAND:g}."
    height, title = 5.4 + legend_height(len(drawn), columns=4), "Seconds of a step: predicted, and measured by others"
    picture = Texts(footer=f"{sum(map(len, drawn.values()))} rows; {date}.").frame(title, caption, height=height)
    axes, handles = picture.body.subplots(), []
    for index, (name, points) in enumerate(drawn.items()):
        style = look(index, count=len(drawn))
        mark: dict[str, Any] = {"color": style.colour, "marker": style.marker, "linestyle": "", "markersize": 4.5}
        axes.plot(*zip(*points, strict=True), **mark, markeredgecolor=current().background, markeredgewidth=0.4)
        handles.append(Line2D([], [], **mark, label=f"{name} ({len(points)})"))
    seconds = [value for points in drawn.values() for point in points for value in point]
    ends = [min(seconds), max(seconds)]
    axes.plot(ends, ends, color=current().ink, lw=1, zorder=1)
    low, high = [end / _BAND for end in ends], [end * _BAND for end in ends]
    axes.fill_between(ends, low, high, color=current().grid, zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="measured seconds", ylabel="predicted seconds")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    picture.legend(handles, columns=4)
    return picture

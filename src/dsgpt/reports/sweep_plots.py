"""The charts of a sweep."""

from collections.abc import Callable, Sequence
from functools import partial

from dsgpt.common.measured import machine_words
from dsgpt.reports.comparison import decimals
from dsgpt.reports.drawing import Chart
from dsgpt.reports.measured import NOT_RECORDED, failure, groups_of, of_cells, strategy_of
from dsgpt.reports.memory import memory_chart
from dsgpt.reports.rows import Row, draw_rows
from dsgpt.reports.scaling import efficiency_chart, scaling_chart
from dsgpt.reports.step_times import communication_chart, step_times_chart
from dsgpt.reports.style import Frame, frame
from dsgpt.reports.sweeps import Spread, Sweep, SweepCell

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
    repeats = f"{sweep.repeats} repeat{'s' * (sweep.repeats != 1)}"
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
    picture = frame(
        title=title,
        warnings=warnings,
        captions=captions,
        width=9.0,
        height=1.0 + 0.4 * len(rows),
    )
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

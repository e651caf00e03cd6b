"""The page "Compare": any runs side by side, their figures and losses, and whether they are the same training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import streamlit as st

from dsgpt.charts.comparison import ROWS, result_rows, speed_up, work_rows
from dsgpt.common.errors import UserError
from dsgpt.common.text import NO_DIFFERENCE, UNKNOWN, byte_size, dollars, no_difference
from dsgpt.dashboard import reading, ui
from dsgpt.dashboard.overview import FAVOURITES, asked_price
from dsgpt.dashboard.reading import Steps
from dsgpt.dashboard.ui import Series, Table, Values
from dsgpt.record import equal_work
from dsgpt.record.equal_work import inference_stamps, judge
from dsgpt.record.runs import Run, smoothed, window_of
from dsgpt.record.suites import TITLES, Concurrency, Sweep, read_concurrency, read_sweep, strategy_of
from dsgpt.record.work import NOTED

MOST_RUNS = 8
"""Most runs in a comparison; the palette has as many colours."""
COLUMNS = {"steps": "step", "tokens": "tokens"}
"""Columns of losses against these; against time and money it is the training time."""
ROOM = 1.2
"""Length of the axis in units of the longest bar, with room for the value behind it."""
LEAST_DIFFERENCE = 1e-8
"""Place of a difference that is exactly 0: a logarithmic axis has no 0. It is below fp32's rounding of a loss."""


def show() -> None:
    """Show the page."""
    folder = reading.current_folder()
    there = reading.contents(folder)
    kinds = ["Runs"] + (["Sweeps"] if there.sweeps else []) + (["Many requests"] if there.concurrency else [])
    kind = kinds[0]
    if len(kinds) > 1:
        kind = st.segmented_control("Compare", kinds, default=kinds[0], key="kind", required=True)
    if kind != "Runs":
        try:
            if kind == "Sweeps":
                _show_sweep(read_sweep(reading.inside(folder, st.selectbox("Sweep", there.sweeps, key="sweep"))))
            else:
                name = st.selectbox("Record", there.concurrency, key="concurrency")
                _show_concurrency(read_concurrency(reading.inside(folder, name)))
        except UserError as error:
            st.warning(ui.plain(str(error)))
    elif there.runs:
        _show_runs(folder, sorted(there.runs, key=reading.is_reference))
    else:
        st.info("There is no run to compare yet: Overview says how to make one.")


def _show_runs(folder: Path, names: Sequence[str]) -> None:
    chosen = _choose(folder, names)
    short, recorded = reading.labels(chosen), dict[str, Run]()
    for name in chosen:
        record = reading.recorded_of(folder, name)
        if record.run is None:
            st.warning(f"**{ui.plain(name)}** {ui.plain(record.problem or 'has no record yet')}")
        else:
            recorded[name] = replace(record.run, name=short[name])
    above = st.container()
    if not recorded:
        st.info("Choose two or more runs. The first is the baseline.")
        return
    groups = by_seed([*recorded.values()])
    together = "Show runs that differ in the seed alone as their mean"
    if len(groups) == len(recorded) or not st.toggle(together, key="seeds"):
        groups = [[run] for run in recorded.values()]
    means = [mean_run(group) for group in groups]
    price = _show_bars(means)
    with above:
        read = _read_steps(folder, recorded)
        steps = {
            mean.name: aligned([read[run.name] for run in group])
            for mean, group in zip(means, groups, strict=True)
            if all(run.name in read for run in group)
        }
        averages = {name: mean_steps(group) for name, group in steps.items()}
        runs = [reading.with_steps(run, averages[run.name]) if run.name in averages else run for run in means]
        _show_verdict(runs)
    if steps:
        _show_losses(runs, steps, price)
        _show_difference(runs, averages)
    st.header("All figures")
    results = with_ranges(result_rows(runs), groups)
    ui.show_table(as_table(results, first="figure"), key="results", name="figures of the runs")
    with st.expander("What was trained, and how"):
        ui.show_table(as_table(work_rows(runs), first="fact"), key="work", name="work of the runs")
    notes = [(run.name, note) for run in runs for note in run.notes]
    if notes:
        with st.expander("Notes on the records"):
            for name, note in notes:
                st.markdown(f"**{ui.plain(name)}** {ui.plain(note)}")


def _choose(folder: Path, names: Sequence[str]) -> list[str]:
    """The runs that the address names, else the favourites, else those of the first answer, else the newest two."""
    if "runs" not in st.session_state:
        asked = [name for name in st.query_params.get_all("runs") if name in names]
        first = asked or [name for name in st.session_state.get(FAVOURITES, []) if name in names]
        if not first:
            summaries = reading.own(reading.summaries_of(folder))
            first = [each.name for each in summaries[:2]]
            for answer in reading.own_answers(summaries)[:1]:
                first = [answer.baseline.name, *[run.name for run in answer.runs if run is not answer.baseline][:2]]
        st.session_state["runs"] = first[:MOST_RUNS]
    chosen: list[str] = st.multiselect(
        "Runs (the first is the baseline)", names, key="runs", max_selections=MOST_RUNS, placeholder="Choose runs"
    )
    st.query_params["runs"] = chosen
    return chosen


def _read_steps(folder: Path, named: Mapping[str, Run]) -> dict[str, Steps]:
    """The steps of the runs that have some, by the names under which the runs are shown."""
    read: dict[str, Steps] = {}
    for name, run in named.items():
        try:
            with st.spinner(f"Reading the steps of {ui.plain(name)}", show_time=True):
                steps = reading.steps_of(folder, name)
            if steps is not None and len(steps.train["step"]):
                read[run.name] = steps
        except UserError as error:
            st.warning(f"**{ui.plain(name)}** {ui.plain(str(error))}")
    return read


def _show_verdict(runs: Sequence[Run]) -> None:
    if len(runs) < 2:
        return
    verdict, text = judge(runs), "  \n".join(ui.plain(equal_work.equal_loss_line(runs[0], other)) for other in runs[1:])
    if verdict.answer == "yes":
        st.success(f"**The same work.**  \n{text}", icon=":material/check:")
    else:
        reason = "; ".join(part for part in (verdict.differences_text(), verdict.unknown_text()) if part)
        st.warning(f"**{verdict.mark}**: {ui.plain(reason)}  \n{text}", icon=":material/warning:")
    for line in (*equal_work.stamps(runs), *inference_stamps(runs)):
        st.warning(ui.plain(line))


# One figure of all runs, as bars.


class Measure(NamedTuple):
    """A figure of a run."""

    title: str
    """Title of the measure, with its unit."""
    value: Callable[[Run, Run], float | None]
    """The value, from the baseline and the run."""
    form: Callable[[float], str]
    compares: bool = False
    """Whether it is a ratio to the baseline, which only equal work allows."""


def efficiency(base: Run, run: Run) -> float | None:
    """The speed-up per device, of the devices of the baseline; 1 is ideal."""
    ratio = speed_up(base, run)
    return ratio * base.device_count / run.device_count if ratio and base.device_count and run.device_count else None


def _memory(base: Run, run: Run) -> float | None:
    """Peak memory in GB, of the same kind for all runs: allocated by PyTorch on GPUs, otherwise resident in rank 0."""
    size = run.gpu_memory if base.gpu_memory is not None else run.host_memory
    return None if size is None else size / 1e9


MEASURES = {
    "time": Measure("training time (s)", lambda _, run: run.train_time, ui.seconds),
    "throughput": Measure("tokens/s, all devices", lambda _, run: run.tokens_per_sec, "{:,.0f} tokens/s".format),
    "speed-up": Measure("speed-up in training time", speed_up, "{:.2f}x".format, compares=True),
    "efficiency": Measure("speed-up per device", efficiency, "{:.0%}".format, compares=True),
    "memory": Measure("peak memory of rank 0 (GB)", _memory, lambda value: byte_size(value * 1e9)),
    "latency": Measure("inference latency, batch 1 (s)", lambda _, run: run.inference_latency, ui.seconds),
}


def _show_bars(runs: Sequence[Run]) -> float | None:
    """Show one figure of all runs; returns the price of a device hour."""
    left, right = st.columns([7, 3])
    price, measures = asked_price(right), {**MEASURES}
    if price:
        measures["money"] = Measure("cost of all devices ($)", lambda _, run: reading.cost(run, price), dollars)
    name = left.segmented_control("Figure", list(measures), default="time", key="figure", required=True)
    measure = measures.get(name, measures["time"])
    marks = [judge([runs[0], run]).mark for run in runs[1:]] if measure.compares else []
    unequal = ", ".join(dict.fromkeys(mark for mark in marks if mark))
    names, values = [run.name for run in runs], [measure.value(runs[0], run) for run in runs]
    shown = [UNKNOWN if value is None else measure.form(value) for value in values]
    ui.figure(
        bars(names, x=measure.title, values=values),
        points={"run": names, "value": values, "label": shown},
        numbers={"run": names, measure.title: values},
        title=measure.title[0].upper() + measure.title[1:] + (f" ({unequal})" if unequal else ""),
        alternative="; ".join(f"{name} {text}" for name, text in zip(names, shown, strict=True)),
        key="bars",
        level=2,
    )
    return price


def bars(names: Sequence[str], *, x: str, values: Sequence[Any], groups: Sequence[str] = ()) -> dict[str, Any]:
    """A horizontal bar from 0 for each name, which is above it; the fields are ``run``, ``value`` and ``label``.

    Args:
        names: of the runs, from the top.
        x: title of the axis, with its unit.
        values: of the bars; None where there is none.
        groups: by the field ``group``, bars of one group have one colour; without, each has its own.
    """
    run = {"field": "run", "type": "nominal", "sort": list(names), "title": None}
    most = max((value for value in values if value), default=None)
    scale = {"zero": True} if most is None else {"zero": True, "domainMax": ROOM * most}
    base = {
        "y": {**run, "axis": None},
        "x": {"field": "value", "type": "quantitative", "title": x, "scale": scale, "axis": ui.NUMBERS},
        "tooltip": [{**run, "title": "run"}, {"field": "value", "type": "quantitative", "title": x, "format": ",.6~g"}],
    }
    colour = {**ui.look(names, names)["color"], "legend": None}
    if groups:
        colour |= {"field": "group", "scale": {"domain": list(dict.fromkeys(groups))}}
    text = {"type": "text", "align": "left"}
    bar = {"mark": {"type": "bar", "height": 16, "yOffset": 8}, "encoding": {**base, "color": colour}}
    value = {"mark": {**text, "dx": 5, "dy": 8}, "encoding": {**base, "text": {"field": "label"}}}
    mark = {**text, "dy": -11, "limit": {"expr": "width"}}
    name = {"mark": mark, "encoding": {**base, "x": {"value": 0}, "text": run}}
    return {"height": {"step": 44}, "layer": [bar, value, name]}


# Losses against steps, tokens, time or money, and the difference of two runs.


def _show_losses(runs: Sequence[Run], steps: Mapping[str, Sequence[Steps]], price: float | None) -> None:
    st.header("Loss")
    left, middle, right = st.columns([3, 4, 3])
    kind = left.segmented_control("Loss", ["training", "validation"], default="training", key="loss", required=True)
    names = {"steps": "optimizer steps", "tokens": "tokens", "time": "training time (s)"}
    if price:
        names["money"] = "cost of all devices ($)"
    axis = middle.segmented_control("Against", list(names), default="steps", key="axis", required=True)
    validation, column, x = kind == "validation", COLUMNS.get(axis, "train_time_sec"), names[axis]
    usual = max(window_of(len(group[0].train["step"])) for group in steps.values())
    window = right.slider("Smoothing (steps)", 1, 200, min(200, usual), key="smoothing", disabled=validation)
    series = []
    for run in runs:
        if run.name not in steps or (axis == "money" and run.device_count is None):
            continue
        factor = (price or 0.0) * (run.device_count or 0.0) / 3600 if axis == "money" else 1.0
        seeds = []
        for each in steps[run.name]:
            part = each.validation if validation else each.train
            losses = part["val_loss"] if validation else smoothed(part["loss"], window=window)
            seeds.append(Series(name=run.name, x=part[column] * factor, y=losses))
        series.append(band(seeds, name=run.name))
    y = f"{kind} loss (nats per token)"
    title = f"{kind.capitalize()} loss against {x}"
    ui.show_curves(series, [run.name for run in runs], x=x, y=y, title=title, key="losses")


def _show_difference(runs: Sequence[Run], steps: Mapping[str, Steps]) -> None:
    base, *others = runs
    compared = [run.name for run in others if run.name in steps]
    if base.name not in steps or not compared:
        return
    series, theirs = [], steps[base.name].train
    for name in compared:
        ours = steps[name].train
        common, own, other = np.intersect1d(ours["step"], theirs["step"], assume_unique=True, return_indices=True)
        distance = np.abs(ours["loss"][own] - theirs["loss"][other])
        series.append(Series(name=name, x=common, y=np.maximum(distance, LEAST_DIFFERENCE)))
    tolerance = equal_work.LOSS_TOLERANCE.get(base.work["precision"], equal_work.LOSS_TOLERANCE_OTHERWISE)
    x, y, names = "optimizer steps", "distance (nats per token)", [run.name for run in runs]
    title = "Are they the same training? Distance of each training loss from the baseline's"
    picture = {"logarithmic": True, "rules": {"the same training stays below": tolerance}, "drawn": compared}
    ui.show_curves(series, names, x=x, y=y, title=title, key="difference", picture=picture)
    st.caption(
        "Rounding alone begins near 1e-6 and grows slowly. Training on other data is above 1e-2 soon. "
        f"Equal losses are drawn at {LEAST_DIFFERENCE:g}."
    )


def as_table(rows: Sequence[Sequence[str]], *, first: str) -> Table:
    """Rows of ``charts.comparison``, the first of which is the header, as columns; equal headings get a number."""
    header, *body = rows
    table: dict[str, list[str]] = {}
    for place, heading in enumerate(header):
        name = heading or first
        table[name if name not in table else f"{name} ({place})"] = [row[place] for row in body]
    return table


# Records of suites: sweeps, and many requests at once.


def _show_sweep(sweep: Sweep) -> None:
    if not sweep.comparisons:
        st.info("This sweep compares no cells.")
        return
    by_name = {each.name: each for each in sweep.comparisons}
    comparison = by_name[st.selectbox("Comparison", list(by_name), key="comparison")]
    if comparison.kind != "same training":
        st.warning(f"**Not equal work**: this is a comparison of {ui.plain(comparison.kind)}.")
    compared, rows = {each.cell: each for each in comparison.cells}, []
    for cell in map(sweep.cell, dict.fromkeys([comparison.baseline, *compared])):
        each = compared.get(cell.name)
        ratio = each.speed_up if each else None
        row: dict[str, Any] = {"cell": cell.name, "devices": cell.devices}
        row["tokens/s"] = float(round(cell.tokens_per_sec.median)) if cell.tokens_per_sec else None
        row["speed-up"] = 1.0 if each is None else ratio and ratio.median
        row |= {"smallest": ratio and ratio.smallest, "largest": ratio and ratio.largest}
        row["judged"] = NO_DIFFERENCE if ratio and no_difference(ratio.smallest, ratio.largest) else ""
        row |= {"efficiency": each.efficiency if each else 1.0, "work": each.same_work if each else "baseline"}
        rows.append(row | {"loss minus baseline": each and each.loss_difference, "failures": len(cell.failures)})
    table = ui.columns(rows)
    cells, ratios = table["cell"], table["speed-up"]
    groups = [strategy_of(cell) for cell in cells]
    shown = ["not comparable" if ratio is None else f"{ratio:.2f}x" for ratio in ratios]
    ui.figure(
        bars(cells, x="speed-up (median of the repeats)", values=ratios, groups=groups),
        points={"run": cells, "group": groups, "value": ratios, "label": shown},
        numbers=table,
        title=f"Speed-up over {comparison.baseline}",
        alternative="; ".join(f"{cell} {text}" for cell, text in zip(cells, shown, strict=True)),
        key="sweep-bars",
        level=2,
    )
    ui.show_table(table, key="sweep-table", name=f"sweep {sweep.suite}")


def _show_concurrency(record: Concurrency) -> None:
    rows = []
    for engine in record.engines:
        for at_once, load in engine.by_concurrency.items():
            row: dict[str, Any] = {"engine": TITLES.get(engine.name, engine.name)}
            row["requests at once"] = float(at_once) if at_once.isdecimal() else None
            row |= {"tokens/s": load.tokens_per_sec.median, "latency, median (s)": load.latency_sec.p50}
            row |= {"latency, 95% (s)": load.latency_sec.p95, "first token, 95% (s)": load.ttft_sec.p95}
            row["peak memory (GB)"] = load.peak_memory_bytes / 1e9 if load.peak_memory_bytes else None
            rows.append(row)
    table = ui.columns(rows)
    if not table:
        st.info("This record has no figures.")
        return
    engines, x, y = list(dict.fromkeys(table["engine"])), table["tokens/s"], table["latency, 95% (s)"]
    ui.figure(
        ui.lines(engines, x="tokens/s", y="latency, 95% (s)", from_zero=True, ordered=True),
        points={"run": table["engine"], "x": x, "y": y, "order": table["requests at once"]},
        numbers=table,
        title="Latency that 95% of the requests do not exceed, against throughput",
        alternative=f"Engines: {', '.join(engines)}; the table has every figure.",
        key="concurrency-lines",
        level=2,
    )
    ui.show_table(table, key="concurrency-table", name="many requests")


# Runs that differ in the seed alone, shown as one: the mean of each figure, and its range.


def by_seed(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs in their order; those of the same work and setup but for the seed are one group."""

    def setups(run: Run) -> set[frozenset[tuple[str, str | None]]]:
        return {frozenset(item for item in each.setup.items() if item[0] not in NOTED) for each in run.segments}

    def alike(one: Run, other: Run) -> bool:
        seed, other_seed = one.work["seed"], other.work["seed"]
        if None in (seed, other_seed) or seed == other_seed or setups(one) != setups(other):
            return False
        same = replace(other, work={**other.work, "seed": seed})
        return judge([one, same]).answer == "yes" and not inference_stamps([one, other])

    return reading.grouped(runs, lambda group, run: all(alike(each, run) for each in group))


def mean_run(group: Sequence[Run]) -> Run:
    """The mean of every figure that all runs of a group have; a group of one is its run."""
    first = group[0]
    if len(group) == 1:
        return first
    figures: dict[str, Any] = {}
    for field in fields(Run):
        if field.type == float | None:
            values = [getattr(run, field.name) for run in group]
            figures[field.name] = None if None in values else float(np.mean(values))
    latencies = [latency for run in group for latency in run.latency_range or ()]
    figures["latency_range"] = (min(latencies), max(latencies)) if latencies else None
    figures["work"] = {**first.work, "seed": ", ".join(sorted((run.work["seed"] for run in group), key=int))}
    figures["status"] = next((run.status for run in group if run.status != "completed"), first.status)
    segments = tuple(segment for run in group for segment in run.segments)
    notes = tuple(f"{run.name}: {note}" for run in group for note in run.notes)
    return replace(first, **figures, name=f"{first.name} (mean of {len(group)} seeds)", segments=segments, notes=notes)


def aligned(group: Sequence[Steps]) -> list[Steps]:
    """Each with the steps and the validations that all have."""
    train, validation = (
        reduce(np.intersect1d, [getattr(each, part)["step"] for each in group]) for part in ("train", "validation")
    )
    return [replace(each, train=_at(train, each.train), validation=_at(validation, each.validation)) for each in group]


def _at(steps: Values, columns: Mapping[str, Values]) -> dict[str, Values]:
    places = np.isin(columns["step"], steps)
    return {name: values[places] for name, values in columns.items()}


def mean_steps(group: Sequence[Steps]) -> Steps:
    """The mean of every column of aligned steps."""
    train = {name: np.mean([each.train[name] for each in group], axis=0) for name in group[0].train}
    validation = {name: np.mean([each.validation[name] for each in group], axis=0) for name in group[0].validation}
    return replace(group[0], train=train, validation=validation)


def band(group: Sequence[Series], *, name: str) -> Series:
    """The mean of curves of aligned steps, and their least and most; a group of one is its curve."""
    if len(group) == 1:
        return group[0]
    y = np.stack([each.y for each in group])
    x = np.mean([each.x for each in group], axis=0)
    return Series(name=name, x=x, y=y.mean(axis=0), low=y.min(axis=0), high=y.max(axis=0))


def with_ranges(rows: Sequence[Sequence[str]], groups: Sequence[Sequence[Run]]) -> list[list[str]]:
    """The rows of ``charts.comparison.result_rows``, with the range of what was measured beside each mean.

    Means whose ranges overlap have no difference.
    """
    measured = {row.label: row for row in ROWS}
    ranged = [[*cells] for cells in rows]
    for cells in ranged:
        row, base = measured.get(cells[0]), None
        for place, group in enumerate(groups, start=1):
            values = [value for run in group if row and (value := row.value(run)) is not None]
            if row is None or len(group) == 1 or len(values) < len(group):
                continue
            least, most = min(values), max(values)
            cells[place] += f" ({row.form(least)} to {row.form(most)})"
            if place == 1:
                base = least, most
            elif base and no_difference(least, most, than=base):
                cells[len(groups) + place - 1] = NO_DIFFERENCE
    return ranged

"""Any runs side by side: their figures, their losses, and whether they are the same training."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import streamlit as st

from dsgpt.charts.comparison import result_rows, work_rows
from dsgpt.common.errors import UserError
from dsgpt.dashboard import curves
from dsgpt.dashboard import curves as measures
from dsgpt.dashboard import live as seeds
from dsgpt.dashboard.curves import bars, lines
from dsgpt.dashboard.figures import figure, show_table
from dsgpt.dashboard.formats import plain
from dsgpt.dashboard.pages.overview import FAVOURITES, PRICE
from dsgpt.dashboard.runs import current_folder, inside, is_reference
from dsgpt.dashboard.steps import Steps
from dsgpt.dashboard.summaries import (
    answers,
    contents_of,
    newest,
    own,
    recorded_of,
    runs_with_records,
    steps_of,
    summaries_of,
    with_steps,
)
from dsgpt.record.equal_work import (
    LOSS_TOLERANCE,
    LOSS_TOLERANCE_OTHERWISE,
    equal_loss_line,
    inference_stamps,
    judge,
    partial_stamps,
    setup_stamps,
)
from dsgpt.record.runs import Run, window_of
from dsgpt.record.suites import read_concurrency
from dsgpt.record.sweeps import read_sweep, strategy_of

MOST_RUNS = 8
"""As many colours has the palette."""


def show() -> None:
    """Show the page."""
    folder = current_folder()
    found = contents_of(folder)
    kinds = ["Runs"] + (["Sweeps"] if found.sweeps else []) + (["Many requests"] if found.concurrency else [])
    kind = kinds[0]
    if len(kinds) > 1:
        kind = st.segmented_control("Compare", kinds, default=kinds[0], key="kind", required=True)
    if kind == "Sweeps":
        _show_sweep(folder, found.sweeps)
    elif kind == "Many requests":
        _show_concurrency(folder, found.concurrency)
    elif found.runs:
        _show_runs(folder, sorted(found.runs, key=is_reference))
    else:
        st.info("There is no run to compare yet: Overview says how to make one.")


def _show_runs(folder: Path, names: Sequence[str]) -> None:
    chosen = _choose(folder, names)
    recorded, above = _read(folder, chosen), st.container()
    if not recorded:
        st.info("Choose two or more runs. The first is the baseline.")
        return
    groups = _grouped([*recorded.values()])
    price = _show_bars([seeds.mean_run(group) for group in groups])
    with above:
        runs, steps = _with_steps(folder, recorded, groups)
        _show_verdict(runs)
    if steps:
        _show_losses(runs, steps, price)
        _show_difference(runs, {name: seeds.mean_steps(group) for name, group in steps.items()})
    st.header("All figures")
    results = seeds.with_ranges(result_rows(runs), groups)
    show_table(measures.as_table(results, first="figure"), key="results", name="figures of the runs")
    with st.expander("What was trained, and how"):
        show_table(measures.as_table(work_rows(runs), first="fact"), key="work", name="work of the runs")
    notes = [(run.name, note) for run in runs for note in run.notes]
    if notes:
        with st.expander("Notes on the records"):
            for name, note in notes:
                st.markdown(f"**{plain(name)}** {plain(note)}")


def _choose(folder: Path, names: Sequence[str]) -> list[str]:
    """The runs that the address names, else the favourites, else those of the first answer."""
    if "runs" not in st.session_state:
        asked = [name for name in st.query_params.get_all("runs") if name in names]
        favourites = [name for name in st.session_state.get(FAVOURITES, []) if name in names]
        st.session_state["runs"] = (asked or favourites or _default(folder))[:MOST_RUNS]
    chosen: list[str] = st.multiselect(
        "Runs (the first is the baseline)", names, key="runs", max_selections=MOST_RUNS, placeholder="Choose runs"
    )
    st.query_params["runs"] = chosen
    return chosen


def _default(folder: Path) -> list[str]:
    summaries = own(summaries_of(folder))
    found = answers(runs_with_records(summaries))
    if not found:
        return [each.name for each in summaries[:2]]
    answer = newest(found)
    return [answer.baseline.name, *[run.name for run in answer.runs if run is not answer.baseline][:2]]


def _read(folder: Path, names: Sequence[str]) -> dict[str, Run]:
    """By the name of each run, the run under its short name. What cannot be read is named."""
    short, found = curves.labels(names), {}
    for name in names:
        recorded = recorded_of(folder, name)
        if recorded.run is None:
            st.warning(f"**{plain(name)}** {plain(recorded.problem or 'has no record yet')}")
        else:
            found[name] = replace(recorded.run, name=short[name])
    return found


def _grouped(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs that are shown as one: if the user asks for it, those that differ in the seed alone."""
    groups = seeds.by_seed(runs)
    if len(groups) < len(runs) and st.toggle("Show runs that differ in the seed alone as their mean", key="seeds"):
        return groups
    return [[run] for run in runs]


def _with_steps(
    folder: Path, named: Mapping[str, Run], groups: Sequence[Sequence[Run]]
) -> tuple[list[Run], dict[str, list[Steps]]]:
    """The runs of the groups with the losses of their steps, and by their names the steps of each seed."""
    found: dict[str, Steps] = {}
    for name, run in named.items():
        try:
            with st.spinner(f"Reading the steps of {plain(name)}", show_time=True):
                steps = steps_of(folder, name)
        except UserError as error:
            st.warning(f"**{plain(name)}** {plain(str(error))}")
            steps = None
        if steps is not None and len(steps.train["step"]):
            found[run.name] = steps
    means = [seeds.mean_run(group) for group in groups]
    parts = {
        mean.name: seeds.aligned([found[run.name] for run in group])
        for mean, group in zip(means, groups, strict=True)
        if all(run.name in found for run in group)
    }
    runs = [with_steps(mean, seeds.mean_steps(parts[mean.name])) if mean.name in parts else mean for mean in means]
    return runs, parts


def _show_verdict(runs: Sequence[Run]) -> None:
    if len(runs) < 2:
        return
    verdict = judge(runs)
    losses = [equal_loss_line(runs[0], other) for other in runs[1:]]
    text = "  \n".join(map(plain, losses))
    if verdict.answer == "yes":
        st.success(f"**The same work.**  \n{text}", icon=":material/check:")
    else:
        reason = "; ".join(part for part in (verdict.differences_text(), verdict.unknown_text()) if part)
        st.warning(f"**{verdict.mark}**: {plain(reason)}  \n{text}", icon=":material/warning:")
    for line in (*partial_stamps(runs), *setup_stamps(runs), *inference_stamps(runs)):
        st.warning(plain(line))


def _show_bars(runs: Sequence[Run]) -> float | None:
    """Show one figure of all runs; returns the price of a device hour."""
    left, right = st.columns([7, 3])
    price: float | None = right.number_input(
        "Price of a device hour ($)",
        min_value=0.0,
        value=None,
        step=0.1,
        key=PRICE,
        placeholder="unknown",
        persist_state="session",
    )
    known = measures.measures(price)
    name = left.segmented_control("Figure", list(known), default="time", key="figure", required=True)
    measure = known.get(name, known["time"])
    marks = [judge([runs[0], run]).mark for run in runs[1:]] if measure.compares else []
    unequal = ", ".join(dict.fromkeys(mark for mark in marks if mark))
    points = measures.bar_points(runs, measure)
    table = {"run": points["run"], measure.title: points["value"]}
    said = "; ".join(f"{run} {label}" for run, label in zip(points["run"], points["label"], strict=True))
    title = measure.title[0].upper() + measure.title[1:] + (f" ({unequal})" if unequal else "")
    names = [run.name for run in runs]
    figure(
        bars(names, x=measure.title, values=points["value"]),
        points=points,
        numbers=table,
        title=title,
        alternative=said,
        key="bars",
        level=2,
    )
    return price


def _show_losses(runs: Sequence[Run], steps: Mapping[str, Sequence[Steps]], price: float | None) -> None:
    st.header("Loss")
    left, middle, right = st.columns([3, 4, 3])
    kind = left.segmented_control("Loss", ["training", "validation"], default="training", key="loss", required=True)
    known = curves.axes(price)
    axis = known[middle.segmented_control("Against", list(known), default="steps", key="axis", required=True)]
    validation = kind == "validation"
    usual = max(window_of(len(group[0].train["step"])) for group in steps.values())
    window = right.slider("Smoothing (steps)", 1, 200, min(200, usual), key="smoothing", disabled=validation)
    series = []
    for run in runs:
        factor = curves.money_per_second(price, run.device_count) if axis.title.startswith("cost") else 1.0
        if run.name in steps and factor is not None:
            own = [
                curves.loss_series(
                    run.name, each, validation=validation, axis=axis, factor=factor, window=1 if validation else window
                )
                for each in steps[run.name]
            ]
            series.append(seeds.band(own, name=run.name))
    y = f"{kind} loss (nats per token)"
    figure(
        lines([run.name for run in runs], x=axis.title, y=y, band=any(each.low is not None for each in series)),
        points=curves.points(series),
        numbers=lambda: curves.numbers(series, x=axis.title, y=y),
        title=f"{kind.capitalize()} loss against {axis.title}",
        alternative=curves.described(series, y=y),
        key="losses",
    )


def _show_difference(runs: Sequence[Run], steps: Mapping[str, Steps]) -> None:
    base, *others = runs
    compared = [run for run in others if run.name in steps]
    if base.name not in steps or not compared:
        return
    series = [curves.difference(run.name, steps[run.name], steps[base.name]) for run in compared]
    tolerance = LOSS_TOLERANCE.get(base.work["precision"], LOSS_TOLERANCE_OTHERWISE)
    y = "distance (nats per token)"
    figure(
        lines(
            [run.name for run in runs],
            x="optimizer steps",
            y=y,
            logarithmic=True,
            rules={"the same training stays below": tolerance},
            drawn=[run.name for run in compared],
        ),
        points=curves.points(series),
        numbers=lambda: curves.numbers(series, x="optimizer steps", y=y),
        title="Are they the same training? Distance of each training loss from the baseline's",
        alternative=curves.described(series, y=y),
        key="difference",
    )
    st.caption(
        "Rounding alone begins near 1e-6 and grows slowly. Training on other data is above 1e-2 soon. "
        f"Equal losses are drawn at {curves.LEAST_DIFFERENCE:g}."
    )


def _show_sweep(folder: Path, names: Sequence[str]) -> None:
    name = st.selectbox("Sweep", names, key="sweep")
    try:
        sweep = read_sweep(inside(folder, name))
    except UserError as error:
        st.warning(plain(str(error)))
        return
    if not sweep.comparisons:
        st.info("This sweep compares no cells.")
        return
    by_name = {each.name: each for each in sweep.comparisons}
    comparison = by_name[st.selectbox("Comparison", list(by_name), key="comparison")]
    if comparison.kind != "same training":
        st.warning(f"**Not equal work**: this is a comparison of {plain(comparison.kind)}.")
    table = measures.comparison_table(sweep, comparison)
    cells = [str(cell) for cell in table["cell"]]
    groups, ratios = [strategy_of(cell) for cell in cells], table["speed-up"]
    shown = ["not comparable" if ratio is None else f"{ratio:.2f}x" for ratio in ratios]
    figure(
        bars(cells, x="speed-up (median of the repeats)", values=ratios, groups=groups),
        points={"run": cells, "group": groups, "value": ratios, "label": shown},
        numbers=table,
        title=f"Speed-up over {comparison.baseline}",
        alternative="; ".join(f"{cell} {text}" for cell, text in zip(cells, shown, strict=True)),
        key="sweep-bars",
        level=2,
    )
    show_table(table, key="sweep-table", name=f"sweep {sweep.suite}")


def _show_concurrency(folder: Path, names: Sequence[str]) -> None:
    name = st.selectbox("Record", names, key="concurrency")
    try:
        table = measures.concurrency_table(read_concurrency(inside(folder, name)))
    except UserError as error:
        st.warning(plain(str(error)))
        return
    engines, at_once = list(dict.fromkeys(map(str, table["engine"]))), table["requests at once"]
    figure(
        lines(engines, x="tokens/s", y="latency, 95% (s)", from_zero=True, ordered=True),
        points={"run": table["engine"], "x": table["tokens/s"], "y": table["latency, 95% (s)"], "order": at_once},
        numbers=table,
        title="Latency that 95% of the requests do not exceed, against throughput",
        alternative=f"Engines: {', '.join(engines)}; the table has every figure.",
        key="concurrency-lines",
        level=2,
    )
    show_table(table, key="concurrency-table", name="many requests")

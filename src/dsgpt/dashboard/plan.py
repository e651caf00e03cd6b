"""The page "Plan and cost": what a training needs, in memory, time and money, and the best setup for it.

A plan is a command line of ``src/plan.py``, carried out here without writing anything.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import streamlit as st

from dsgpt.common.errors import Problems, UserError
from dsgpt.common.files import is_regular_file, is_utf8, link_between
from dsgpt.common.text import dollars, estimate
from dsgpt.config.options import PRECISIONS
from dsgpt.dashboard import reading, ui
from dsgpt.dashboard.split import CHOICES, COUNTS
from dsgpt.model.config import PRESETS
from dsgpt.planner import plan as planning
from dsgpt.planner.hardware import PRICES as TABLE
from dsgpt.planner.hardware import gpus, read_prices
from dsgpt.planner.options import CALIBRATION, HEADROOM, PlanOptions, read_plan_options, words_of
from dsgpt.planner.plan import Plan
from dsgpt.planner.rates import read_calibration
from dsgpt.planner.request import fixed_setup, read_request
from dsgpt.planner.search import Judged, best_of, recommendation_files, search

_TOKENS = (1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11, 3e11)
_BEST = "Search for the best"
_SEARCHES = 16
"""Results in memory, over all sessions."""


@dataclass(frozen=True, kw_only=True)
class MachineChoice:
    """A machine that can be planned for."""

    name: str
    flags: dict[str, Any]
    """Fields of ``PlanOptions`` that name it."""
    devices: int | None = None
    """Devices that were measured; None for a GPU of the table, of which there are as many as wanted."""

    def __str__(self) -> str:
        return self.name if self.devices is None else f"{self.name}: measured"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The answer of ``src/plan.py`` to a command line."""

    plan: Plan
    """Plan of the setup that was asked for, or of the recommended one."""
    advice: tuple[str, ...] = ()
    """Setups that would fit, if the plan does not."""
    searched: tuple[Judged, ...] = ()
    """Every way that was searched; empty if one setup was asked for."""


def show() -> None:
    """Show the page."""
    options = _options()
    if options.recommend:
        st.caption("The search plans every strategy, split and micro batch: a few seconds.")
    try:
        calibration = options.machine
        version = calibration.stat().st_mtime_ns if calibration and calibration.exists() else 0
        done = planned(words_of(options), version=version)
    except UserError as error:
        st.error(ui.refusal(error))
    else:
        if done.plan.fits:
            _show_plan(done)
        else:  # no time and no price: nobody can train so
            st.caption(ui.plain(planning.usable_in_words(done.plan)))
            for line in done.advice:
                st.warning(ui.plain(line))
            st.error(f"### DOES NOT FIT\n{ui.plain(planning.needs_in_words(done.plan))}")
    st.header("The same on a command line")
    st.code(shlex.join([".venv/bin/python", "src/plan.py", *words_of(options)]), language=None, wrap_lines=True)


def _show_plan(done: Planned) -> None:
    plan = done.plan
    _show_answer(plan)
    if done.searched:
        st.header(f"Recommended: {ui.plain(plan.name)}")
        files, folder = recommendation_files(plan), plan.request.options.into
        save = f"Save the files in the folder `{folder}` of the repository."
        st.write(f"{save} Then `sh {folder}/train.sh` starts the training.")
        for column, (path, content) in zip(st.columns(len(files)), files.items(), strict=True):
            with column:
                label, key = f"Download {path.name}", f"plan-file-{path.name}"
                ui.download(label, content, file=path.name, key=key, width="stretch")
        recipe, command, _ = files.values()
        with st.expander("The command"):
            st.code(command.decode(), language=None, wrap_lines=True)
        with st.expander("The recipe"):
            st.code(recipe.decode(), language="json")
        ranked = sum(each.fits for each in done.searched)
        with st.expander(f"All {len(done.searched)} ways that were planned; {ranked} are within the limits"):
            ui.show_table(ways_table(done.searched), key="plan-ways", name="Ways to train")
    st.header("Clouds side by side")
    if offers := offers_table(done):
        ui.figure(
            RANGES,
            points={name: offers[name] for name in ("offer", "US dollars", "at least", "at most", "price")},
            numbers=offers,
            title="Cost of the training, US dollars",
            alternative="For each offer a line from the least to the most that the training may cost, and the likely "
            "cost.",
            key="plan-offers",
        )
        dates = sorted(set(offers["list price of"]))
        notice = read_prices(plan.request.options.prices or TABLE).notice
        st.caption(ui.plain(f"List prices of {' to '.join(dict.fromkeys((dates[0], dates[-1])))}. {notice}"))
    else:
        st.write(f"No list price of {ui.plain(plan.machine.name)} is known. Give your price above.")
    st.header("What it is made of")
    unit, scale = ("milliseconds", 1e3) if plan.step.seconds < 1 else ("seconds", 1.0)
    pictures = (
        ("memory", f"Memory of rank {plan.rank}, GB", "GB", parts_table(plan.peak.parts, "GB", scale=1e-9)),
        ("step", f"A step, {unit}", unit, parts_table(plan.step.parts, unit, scale=scale)),
        ("training", "The training, hours", "hours", parts_table(plan.run.parts, "hours", scale=1 / 3600)),
    )
    for column, (name, title, unit, table) in zip(st.columns(3), pictures, strict=True):
        with column:
            ui.figure(
                ui.parts("part", unit, unit=unit, sort="-x", tickCount=4),
                points={"part": table["part"], unit: table[unit]},
                numbers=table,
                title=title,
                alternative=f"{title}: a bar for each part. The table has the figures.",
                key=f"plan-parts-{name}",
            )
    if not done.searched:
        with st.expander("The same setup on every GPU of the table"):
            st.caption("Times are likely ones at assumed rates; costs are those of the cheapest offer.")
            if st.toggle("Plan them all", key="plan-others"):
                table = gpus_table(done)
                ui.show_table(table, key="plan-gpus", name="The same setup on every GPU")


# What is asked for.


def machines(folder: Path) -> tuple[list[MachineChoice], list[str]]:
    """Every machine, measured ones first; and why a calibration cannot be used.

    Args:
        folder: of runs. Its ``calibration.json`` is what ``src/plan.py --calibrate`` writes. Each record of
            ``benchmark.py plan`` in ``reference`` holds a calibration, and steps to which its rates are fitted.
    """
    measured: list[MachineChoice] = []
    broken: list[str] = []
    for path in (folder / CALIBRATION.name, *sorted(folder.glob("reference/*/plan.json"))):
        if is_regular_file(path) and is_utf8(path) and link_between(folder, path) is None:
            try:
                calibration = read_calibration(path)
            except UserError as error:
                broken += error.problems
                continue
            name = f"{calibration.machine}, {calibration.timestamp_utc[:10]}"
            fitted = {} if path.name == CALIBRATION.name else {"measured": (path,)}
            count = max(each.devices for each in calibration.ceilings)
            measured.append(MachineChoice(name=name, flags={"machine": path, **fitted}, devices=count))
    return [*measured, *(MachineChoice(name=key, flags={"gpu": key}) for key in gpus())], broken


def _options() -> PlanOptions:
    """The flags that the widgets stand for."""
    choices, broken = machines(reading.current_folder())
    for line in broken:
        st.warning(ui.plain(line))
    one, two, three = st.columns(3)
    sizes = list(PRESETS)
    model = one.selectbox("Model size", sizes, index=sizes.index("small"), key="plan-model")
    default = next(place for place, each in enumerate(choices) if each.name == "a100-80gb")
    machine = two.selectbox("Machine", choices, index=default, key="plan-machine")
    counts = [number for number in COUNTS if machine.devices is None or number <= machine.devices]
    count = three.select_slider("Devices", counts, value=min(8, counts[-1]), key="plan-count") if counts[1:] else 1
    four, five, six = st.columns(3)
    strategies = {_BEST: None} | CHOICES
    strategy = strategies[four.selectbox("Strategy", list(strategies), index=4, key="plan-strategy")]
    words = {each: f"{each / 1e9:g} billion" if each >= 1e9 else f"{each / 1e6:g} million" for each in _TOKENS}
    label, key = "Tokens of the training", "plan-tokens"
    tokens = five.select_slider(label, _TOKENS, value=1e10, format_func=words.__getitem__, key=key)
    total = ui.ask_number(six, "Sequences in a step", 1, 4096, key="plan-batch", empty="the recipe's")
    flags = machine.flags | {"model_size": model, "gpus": count, "tokens": tokens, "global_batch_size": total}
    one, two = st.columns(2)
    if strategy is None:
        flags["recommend"] = True
        flags["budget"] = ui.ask_number(one, "Budget, US dollars", 1.0, 1e9, key="plan-budget", empty="no limit")
        hours = ui.ask_number(two, "Deadline, hours", 0.1, 1e6, key="plan-deadline", empty="no limit")
        flags["deadline"] = hours and hours * 3600
    else:
        flags["strategy"] = strategy
        micro = ui.ask_number(one, "Micro batch, sequences", 1, 1024, key="plan-micro", empty="up to 8")
        flags["micro_batch_size_per_gpu"] = micro
        two.caption("Recompute blocks in the backward pass")
        flags["activation_checkpointing"] = two.toggle("Activation checkpointing", key="plan-again")
    with st.expander("Precision, machines, prices, checkpoints"):
        one, two, three = st.columns(3)
        flags["precision"] = one.selectbox("Precision", PRECISIONS, key="plan-precision")
        share = "Headroom, percent of the memory"
        flags["headroom"] = three.number_input(share, 0.0, 90.0, HEADROOM, key="plan-headroom")
        flags["seq_length"] = ui.ask_number(two, "Sequence, tokens", 1, 1 << 20, key="plan-length", empty="the model's")
        hours = ui.ask_number(one, "Hours between interruptions", 0.01, 1e6, key="plan-mtbf", empty="none")
        flags["mtbf"] = hours and hours * 3600
        if hours is None:
            flags["save_every"] = three.number_input("Steps between checkpoints", 0, 1 << 30, 500, key="plan-save")
        yours = "Your price, US dollars per GPU and hour"
        flags["price_per_gpu_hour"] = ui.ask_number(one, yours, 0.01, 1e4, key="plan-price", empty="list prices")
        if flags["price_per_gpu_hour"] is None:
            flags["spot"] = two.toggle("Judge by spot prices", key="plan-spot")
        if machine.devices is None:
            together, network = "GPUs of a machine", "Network between machines, Gbit/s"
            flags["gpus_per_machine"] = ui.ask_number(two, together, 1, 64, key="plan-together", empty="")
            flags["network_gbps"] = ui.ask_number(three, network, 1.0, 1e5, key="plan-network", empty="100")
            host = "Host memory of a machine, GB"
            flags["host_memory_gb"] = ui.ask_number(one, host, 1.0, 1e6, key="plan-host", empty="twice the GPUs'")
    return PlanOptions(**flags)


# The plan.


@st.cache_resource(max_entries=_SEARCHES, show_spinner="Planning")
def planned(words: Sequence[str], *, version: int = 0) -> Planned:  # noqa: ARG001 - part of the key
    """The answer of ``src/plan.py`` to these words; nothing is written.

    Args:
        words: as on a command line.
        version: of the calibration: another one gives another plan.

    Raises:
        UserError: it would refuse them, or nothing fits; every mistake, a line each.
    """
    options, problems = read_plan_options(words)
    request = read_request(options, problems)
    prices = read_prices(options.prices or TABLE)
    if options.recommend:
        searched = search(request, prices)
        return Planned(plan=best_of(searched, request), searched=tuple(searched))
    plan = planning.plan_of(fixed_setup(request, problems), request, prices)
    return Planned(plan=plan, advice=tuple(planning.what_would_fit(plan)))


def _show_answer(plan: Plan) -> None:
    """The first screen: does it fit, how fast, how long, how much."""
    used, cost = plan.peak.total / plan.usable_bytes, plan.costs[0] if plan.costs else None
    fits = f"fits: {used:.0%}, rank {plan.rank}. {planning.usable_in_words(plan)}"
    rate, slow, fast = map(plan.tokens_per_sec, (plan.step.seconds, plan.step.most, plan.step.least))
    price, offer = "unknown", "no list price: give yours"
    if cost:
        price = dollars(cost.usd)
        least_to_most = planning.between(cost.least, cost.most, dollars)
        offer = f"{least_to_most} on {cost.offer}, price of {cost.known_on or 'yours'}"
    span = planning.between(plan.run.least, plan.run.most, estimate)
    memory = ("Memory of a device", planning.size(plan.peak.total), fits)
    speed = ("Tokens/s", f"{rate:,.0f}", planning.between(slow, fast, "{:,.0f}".format))
    ui.show_metrics(memory, speed, ("Training", estimate(plan.run.seconds), span), ("Cost", price, offer))
    for line in plan.notes:
        st.warning(ui.plain(line))
    mfu = "" if plan.mfu is None else f" Model FLOPs utilisation: {plan.mfu:.0%}."
    rates = f"Rates: {ui.plain(plan.machine.basis)}.{mfu}"
    if plan.machine.assumed:
        said = f" {plan.evidence.words.capitalize()} (docs/exam.md)." if plan.evidence else ""
        st.info(f"**Not measured.** {rates}{said}", icon=":material/straighten:")
    else:
        st.success(f"**Measured.** {rates}", icon=":material/speed:")
    for line in planning.saves_in_words(plan):
        st.caption(ui.plain(line.strip()))
    for line in map(planning.assumption_in_words, plan.assumptions):
        st.caption(ui.plain(f"Assumed: {line}."))
    setup = plan.setup
    st.caption(
        f"{ui.plain(setup.strategy_name)}, {setup.precision}, micro batch {setup.micro_batch_size}, "
        f"{setup.gradient_accumulation_steps} accumulated, {setup.data_parallel_size} data ranks, "
        f"{plan.run.steps:,} steps of {plan.tokens_per_step:,} tokens. Overlap: {ui.plain(plan.step.overlap)}."
    )


_COST = {"field": "US dollars", "type": "quantitative", "title": "US dollars", "scale": {"zero": True}}
_OFFER = {"field": "offer", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 260}}
_PRICE = {"field": "price", "type": "nominal", "legend": {"orient": "top", "title": None}}
_RANGE = {"x": {**_COST, "field": "at least"}, "x2": {"field": "at most"}, "y": _OFFER, "color": {"field": "price"}}
_LINE = {"type": "rule", "strokeWidth": 7, "opacity": 0.4, "strokeCap": "round"}
_POINT = {"type": "point", "filled": True, "size": 90, "opacity": 1, "tooltip": {"content": "data"}}
_LIKELY = {"mark": _POINT, "encoding": {"x": _COST, "y": _OFFER, "color": _PRICE}}
RANGES: dict[str, Any] = {"layer": [{"mark": _LINE, "encoding": _RANGE}, _LIKELY], "height": {"step": 30}}
"""A line from the least to the most of each offer, and a point at the likely cost, in Vega-Lite."""


def offers_table(done: Planned) -> ui.Table:
    """Cost of the training on each offer, with the date and the source of its price; the cheapest first.

    List prices are those on demand and spot; a price of the user's own is the only one.
    """
    plan, options = done.plan, done.plan.request.options
    if options.price_per_gpu_hour is not None:
        costs = [("yours", cost) for cost in plan.costs]
    else:
        costs = []
        for kind, spot in (("on demand", False), ("spot", True)):
            again = replace(plan, request=replace(done.plan.request, options=replace(options, spot=spot)))
            costs += [(kind, cost) for cost in again.costs]
    rows = []
    for kind, cost in sorted(costs, key=lambda each: each[1].usd):
        row = {"offer": cost.offer, "price": kind, "instances": cost.instances}
        row |= {"US dollars an hour": round(cost.usd_per_hour, 2), "US dollars": round(cost.usd, 2)}
        row |= {"at least": round(cost.least, 2), "at most": round(cost.most, 2)}
        rows.append(row | {"list price of": cost.known_on or "your own", "source": cost.source or ""})
    return ui.columns(rows)


def parts_table(amounts: Mapping[str, float], unit: str, *, scale: float = 1.0) -> ui.Table:
    """Parts of a figure, each times ``scale``, in ``unit``; parts that are 0 are left out."""
    shown = {name.replace("_", " "): scale * value for name, value in amounts.items() if value}
    whole = sum(shown.values())
    return {"part": list(shown), unit: list(shown.values()), "share": [value / whole for value in shown.values()]}


def ways_table(searched: Iterable[Judged]) -> ui.Table:
    """Every way to train that was searched: those within the limits, the fastest first, then the others with why."""
    rows = []
    for judged in searched:
        plan = judged.plan if judged.fits else None
        row = {"way": judged.name, "micro batch": plan and plan.setup.micro_batch_size}
        row |= {"peak, bytes": plan and plan.peak.total}
        rows.append(row | _figures(plan) | {"why not": judged.reason})
    return ui.columns(rows)


def gpus_table(done: Planned) -> ui.Table:
    """The setup that was asked for on each GPU of the table: its plan, or why it is refused."""
    options, rows = done.plan.request.options, []
    prices = read_prices(options.prices or TABLE)
    for gpu in gpus():
        problems, other = Problems(), replace(options, gpu=gpu, instance=None, machine=None, measured=())
        plan: Plan | None = None
        try:
            request = read_request(other, problems)
            found = planning.plan_of(fixed_setup(request, problems), request, prices)
            plan, fits = (found, "yes") if found.fits else (None, "no")
        except UserError as error:
            fits = error.problems[0]
        row = {"GPU": gpu, "precision": plan.setup.precision if plan else None, "fits": fits, **_figures(plan)}
        row["at least, hours"] = round(plan.run.least / 3600, 2) if plan else None
        row["at most, hours"] = round(plan.run.most / 3600, 2) if plan else None
        rows.append(row | {"offer": plan.costs[0].offer if plan and plan.costs else ""})
    return ui.columns(rows)


def _figures(plan: Plan | None) -> dict[str, Any]:
    """Speed, time and cost; of a way that is out of reach None."""
    cost = plan.costs[0] if plan and plan.costs else None
    return {
        "tokens/s": round(plan.tokens_per_sec(plan.step.seconds)) if plan else None,
        "training, hours": round(plan.run.seconds / 3600, 2) if plan else None,
        "US dollars": round(cost.usd, 2) if cost else None,
        "list price of": (cost.known_on or "your own") if cost else "",
    }

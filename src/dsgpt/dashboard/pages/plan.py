"""What a training needs: memory, time and money, and the best setup for it."""

from pathlib import Path
from typing import Any

import streamlit as st

from dsgpt.common.errors import UserError
from dsgpt.common.text import REPOSITORY
from dsgpt.config.options import PRECISIONS
from dsgpt.dashboard.figures import figure, show_table
from dsgpt.dashboard.formats import plain
from dsgpt.dashboard.plans import (
    RANGES,
    MachineChoice,
    Planned,
    bars,
    command_line,
    gpus_table,
    machines,
    offers,
    offers_table,
    on_other_gpus,
    parts_table,
    planned,
    recommended_files,
    ways_table,
)
from dsgpt.dashboard.runs import current_folder, refusal
from dsgpt.dashboard.split import CHOICES, Choice
from dsgpt.model.config import PRESETS
from dsgpt.planner.hardware import PRICES as TABLE
from dsgpt.planner.hardware import read_prices
from dsgpt.planner.options import HEADROOM, PlanOptions, words_of
from dsgpt.planner.plan import (
    Plan,
    assumption_in_words,
    between,
    dollars,
    duration,
    needs_in_words,
    size,
    strategy_name,
    usable_in_words,
)

_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_TOKENS = (1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11, 3e11)
_BEST = "Search for the best"
_SEARCHES = 16
"""Results that are kept, over all sessions."""


def show() -> None:
    """Show the page."""
    options = _options()
    words = words_of(options)
    if options.recommend:
        st.caption("The search plans every strategy, split and micro batch: a few seconds.")
    try:
        done = _planned(tuple(words), _calibrated(options.machine))
    except UserError as error:
        st.error(refusal(error))
        _command(options)
        return
    if not done.plan.fits:
        _does_not_fit(done)
        _command(options)
        return
    _answer(done)
    if done.best is not None:
        _recommended(done)
    _costs(done)
    _made_of(done.plan)
    if done.best is None:
        _others(done)
    _command(options)


@st.cache_resource(max_entries=_SEARCHES, show_spinner="Planning")
def _planned(words: tuple[str, ...], calibrated: int) -> Planned:  # noqa: ARG001 - a part of the key
    return planned(words, repository=REPOSITORY)


def _calibrated(path: Path | None) -> int:
    """When the calibration was written: another one is another plan."""
    return path.stat().st_mtime_ns if path and path.exists() else 0


def _options() -> PlanOptions:
    """The flags that the widgets stand for."""
    known, broken = machines(current_folder())
    for line in broken:
        st.warning(plain(line))
    one, two, three = st.columns(3)
    sizes = list(PRESETS)
    model = one.selectbox("Model size", sizes, index=sizes.index("small"), key="plan-model")
    default = next(place for place, each in enumerate(known) if each.name == "a100-80gb")
    machine = two.selectbox("Machine", known, index=default, format_func=_named, key="plan-machine")
    counts = [number for number in _COUNTS if machine.devices is None or number <= machine.devices]
    count = three.select_slider("Devices", counts, value=min(8, counts[-1]), key="plan-count") if counts[1:] else 1
    four, five, six = st.columns(3)
    strategies = {_BEST: None} | {choice.name: choice for choice in CHOICES}
    strategy = strategies[four.selectbox("Strategy", list(strategies), index=4, key="plan-strategy")]
    tokens = five.select_slider("Tokens of the training", _TOKENS, value=1e10, format_func=_short, key="plan-tokens")
    total = six.number_input("Sequences in a step", 1, 4096, None, key="plan-batch", placeholder="the recipe's")
    flags = dict(machine.flags) | {"model_size": model, "gpus": count, "tokens": tokens, "global_batch_size": total}
    more = _limits() if strategy is None else _fixed(strategy)
    return PlanOptions(**(flags | more | _details(machine)))


def _named(machine: MachineChoice) -> str:
    return f"{machine.name}: measured" if machine.is_measured else machine.name


def _short(tokens: float) -> str:
    """``10 billion``."""
    unit, name = (1e9, "billion") if tokens >= 1e9 else (1e6, "million")
    return f"{tokens / unit:g} {name}"


def _limits() -> dict[str, Any]:
    one, two = st.columns(2)
    budget = one.number_input("Budget, US dollars", 1.0, 1e9, None, key="plan-budget", placeholder="no limit")
    hours = two.number_input("Deadline, hours", 0.1, 1e6, None, key="plan-deadline", placeholder="no limit")
    return {"recommend": True, "budget": budget, "deadline": None if hours is None else hours * 3600}


def _fixed(choice: Choice) -> dict[str, Any]:
    one, two = st.columns(2)
    micro = one.number_input("Micro batch, sequences", 1, 1024, None, key="plan-micro", placeholder="up to 8")
    two.caption("Recompute blocks in the backward pass")
    again = two.toggle("Activation checkpointing", key="plan-again")
    return {
        "strategy": Path(choice.recipe).stem if choice.run_type == "optimized" else choice.run_type,
        "micro_batch_size_per_gpu": micro,
        "activation_checkpointing": again,
    }


def _details(machine: MachineChoice) -> dict[str, Any]:
    with st.expander("Precision, machines, prices, checkpoints"):
        one, two, three = st.columns(3)
        headroom = three.number_input("Headroom, percent of the memory", 0.0, 90.0, HEADROOM, key="plan-headroom")
        found: dict[str, Any] = {"precision": one.selectbox("Precision", PRECISIONS, key="plan-precision")}
        found["seq_length"] = two.number_input(
            "Sequence, tokens", 1, 1 << 20, None, key="plan-length", placeholder="the model's"
        )
        found["save_every"] = three.number_input("Steps between checkpoints", 0, 1 << 30, 500, key="plan-save")
        found["headroom"] = headroom
        price = one.number_input(
            "Your price, US dollars per GPU and hour", 0.01, 1e4, None, key="plan-price", placeholder="list prices"
        )
        found["price_per_gpu_hour"] = price
        if price is None:
            found["spot"] = two.toggle("Judge by spot prices", key="plan-spot")
        if not machine.is_measured:
            found["gpus_per_machine"] = two.number_input("GPUs of a machine", 1, 64, None, key="plan-together")
            found["network_gbps"] = three.number_input(
                "Network between machines, Gbit/s", 1.0, 1e5, None, key="plan-network", placeholder="100"
            )
            found["host_memory_gb"] = one.number_input(
                "Host memory of a machine, GB", 1.0, 1e6, None, key="plan-host", placeholder="twice the GPUs'"
            )
    return found


def _does_not_fit(done: Planned) -> None:
    """No time and no price: nobody can train so."""
    st.caption(plain(usable_in_words(done.plan)))
    for line in done.advice:
        st.warning(plain(line))
    st.error(f"### DOES NOT FIT\n{plain(needs_in_words(done.plan))}")


def _answer(done: Planned) -> None:
    """The first screen: does it fit, how fast, how long, how much."""
    plan = done.plan
    used = plan.peak.total / plan.usable_bytes
    speeds = between(
        plan.tokens_per_sec(plan.step.most), plan.tokens_per_sec(plan.step.least), lambda each: f"{each:,.0f}"
    )
    cost = plan.costs[0] if plan.costs else None
    figures = (
        (
            "Memory of a device",
            size(plan.peak.total),
            f"fits: {used:.0%}, rank {plan.rank}. {usable_in_words(plan)}",
        ),
        ("Tokens/s", f"{plan.tokens_per_sec(plan.step.seconds):,.0f}", speeds),
        ("Training", duration(plan.run.seconds), between(plan.run.least, plan.run.most, duration)),
        (
            "Cost",
            dollars(cost.usd) if cost else "unknown",
            f"{between(cost.least, cost.most, dollars)} on {cost.offer}, price of {cost.known_on or 'yours'}"
            if cost
            else "no list price: give yours",
        ),
    )
    for column, (label, value, more) in zip(st.columns(4), figures, strict=True):
        column.metric(label, value)
        column.caption(plain(more))
    for line in plan.notes:
        st.warning(plain(line))
    _basis(plan)


def _basis(plan: Plan) -> None:
    mfu = "" if plan.mfu is None else f" Model FLOPs utilisation: {plan.mfu:.0%}."
    if plan.machine.assumed:
        st.info(f"**Not measured.** Rates: {plain(plan.machine.basis)}.{mfu}", icon=":material/straighten:")
    else:
        st.success(f"**Measured.** Rates: {plain(plan.machine.basis)}.{mfu}", icon=":material/speed:")
    for line in map(assumption_in_words, plan.assumptions):
        st.caption(plain(f"Assumed: {line}."))
    setup = plan.setup
    st.caption(
        f"{plain(strategy_name(setup))}, {setup.precision}, micro batch {setup.micro_batch_size}, "
        f"{setup.gradient_accumulation_steps} accumulated, {setup.data_parallel_size} data ranks, "
        f"{plan.run.steps:,} steps of {plan.tokens_per_step:,} tokens. Overlap: {plain(plan.step.overlap)}."
    )


def _recommended(done: Planned) -> None:
    assert done.best is not None
    st.header(f"Recommended: {plain(done.best.name)}")
    files = recommended_files(done)
    folder = done.request.options.into
    st.write(
        f"Save the files in the folder `{folder}` of the repository. Then `sh {folder}/train.sh` starts the training."
    )
    for column, (path, content) in zip(st.columns(len(files)), files.items(), strict=True):
        column.download_button(
            f"Download {path.name}",
            content,
            file_name=path.name,
            key=f"plan-file-{path.name}",
            on_click="ignore",
            icon=":material/download:",
            width="stretch",
        )
    recipe, command, _ = files
    with st.expander("The command"):
        st.code(files[command].decode(), language=None, wrap_lines=True)
    with st.expander("The recipe"):
        st.code(files[recipe].decode(), language="json")
    ranked = sum(each.fits for each in done.found)
    with st.expander(f"All {len(done.found)} ways that were planned; {ranked} are within the limits"):
        show_table(ways_table(done.found), key="plan-ways", name="Ways to train")


def _costs(done: Planned) -> None:
    st.header("Clouds side by side")
    table = offers_table(offers(done))
    if not table["offer"]:
        name = plain(done.plan.machine.name)
        st.write(f"No list price of {name} is known. Give your price above.")
        return
    points = {
        "offer": [f"{offer}" for offer in table["offer"]],
        "usd": table["US dollars"],
        "least": table["at least"],
        "most": table["at most"],
        "price": table["price"],
    }
    figure(
        RANGES | {"height": {"step": 30}},
        points=points,
        numbers=table,
        title="Cost of the training, US dollars",
        alternative="For each offer a line from the least to the most that the training may cost, and the likely cost.",
        key="plan-offers",
    )
    dates = sorted(set(table["list price of"]))
    notice = read_prices(done.request.options.prices or TABLE).notice
    st.caption(plain(f"List prices of {' to '.join(dict.fromkeys((dates[0], dates[-1])))}. {notice}"))


def _made_of(plan: Plan) -> None:
    st.header("What it is made of")
    unit, scale = ("milliseconds", 1e3) if plan.step.seconds < 1 else ("seconds", 1.0)
    parts = (
        ("memory", f"Memory of rank {plan.rank}, GB", parts_table(plan.peak.parts, "GB", scale=1e-9)),
        ("step", f"A step, {unit}", parts_table(plan.step.parts, unit, scale=scale)),
        ("training", "The training, hours", parts_table(plan.run.parts, "hours", scale=1 / 3600)),
    )
    for column, (name, title, table) in zip(st.columns(3), parts, strict=True):
        size_of = list(table)[1]
        with column:
            figure(
                bars(size_of),
                points={"part": table["part"], size_of: table[size_of]},
                numbers=table,
                title=title,
                alternative=f"{title}: a bar for each part. The table has the figures.",
                key=f"plan-parts-{name}",
            )


def _others(done: Planned) -> None:
    with st.expander("The same setup on every GPU of the table"):
        st.caption("Times are likely ones at assumed rates; costs are those of the cheapest offer.")
        if st.toggle("Plan them all", key="plan-others"):
            table = gpus_table(on_other_gpus(done, repository=REPOSITORY))
            show_table(table, key="plan-gpus", name="The same setup on every GPU")


def _command(options: PlanOptions) -> None:
    st.header("The same on a command line")
    st.code(command_line(options), language=None, wrap_lines=True)

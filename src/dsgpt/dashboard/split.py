"""The page "How it is split": what each rank holds and sends, and why. All figures are the planner's."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import streamlit as st

from dsgpt.common.errors import Problems, UserError
from dsgpt.common.text import REPOSITORY, byte_size
from dsgpt.config.options import PRECISIONS
from dsgpt.dashboard import pictures, ui
from dsgpt.model.config import PRESETS
from dsgpt.planner.formulas import Placed, copied, most_sent_bytes, placed_traffic
from dsgpt.planner.hardware import PriceTable, gpus
from dsgpt.planner.options import PlanOptions, executed
from dsgpt.planner.plan import Plan, plan_of
from dsgpt.planner.pytorch_formulas import Copied
from dsgpt.planner.request import RECIPES, fixed_setup, read_request
from dsgpt.planner.setup import Setup
from dsgpt.planner.step_time import bubble_fraction

COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of ranks, or of GPUs, to choose from."""
_MOST_DRAWN = 8
CHOICES = {"DDP": "ddp", "FSDP": "fsdp", "ZeRO-0": "zero0", "ZeRO-1": "zero1", "ZeRO-2": "zero2"}
CHOICES |= {"ZeRO-2, offload": "zero2_offload", "ZeRO-3": "zero3", "ZeRO-3, offload": "zero3_offload"}
CHOICES |= {"ZeRO-3, NVMe": "zero3_nvme", "ZeRO++": "zeropp", "Tensor parallel": "tensor"}
CHOICES |= {"Sequence parallel": "sequence", "Pipeline parallel": "pipeline", "3D: pipeline and tensor": "3d"}
CHOICES |= {"One device": "baseline"}
"""Strategies that can be picked, and their words for ``--strategy`` of ``src/plan.py``."""


def split_of(strategy: str, **flags: Any) -> Plan:
    """The plan of a strategy by its own recipe. Its time is not asked for, and has no price.

    Args:
        strategy: one of the values of ``CHOICES``.
        flags: of ``src/plan.py``, by field of ``PlanOptions``.

    Raises:
        UserError: training would refuse it; every mistake, a line each.
    """
    run_type, recipe = executed(strategy)
    path, problems = REPOSITORY / RECIPES / f"{recipe}.json", Problems()
    request = read_request(PlanOptions(deepspeed_config=path, run_type=run_type, tokens=1.0, **flags), problems)
    return plan_of(fixed_setup(request, problems), request, PriceTable(notice="", prices=[]))


def show() -> None:
    """Show the page."""
    st.caption("Every figure is computed by the planner's formulas from the recipe below. Nothing here is measured.")
    strategy, flags = _asked()
    try:
        split = split_of(strategy, **flags)
    except UserError as error:
        st.error(f"This combination is refused.\n\n{ui.refusal(error)}")
    else:
        _show_split(split)
    run_type, recipe = executed(strategy)
    path = RECIPES / f"{recipe}.json"
    with st.expander(f"The recipe: {path.as_posix()}, executed as {run_type}"):
        st.code((REPOSITORY / path).read_text(encoding="utf-8"), language="json")


def _asked() -> tuple[str, dict[str, Any]]:
    """The strategy, and the flags of ``src/plan.py`` that the widgets stand for."""
    one, two, three, four = st.columns(4)
    more = st.expander("Batch, length and precision")
    five, six, seven, eight = more.columns(4)
    strategy = CHOICES[one.selectbox("Strategy", list(CHOICES), index=3, key="split-strategy")]
    total = ui.ask_number(five, "Global batch, sequences", 1, 4096, key="split-global", empty="the recipe's")
    micro = ui.ask_number(six, "Micro batch, sequences", 1, 1024, key="split-micro", empty="up to 8")
    again = "Activation checkpointing: recompute each block in the backward pass"
    return strategy, {
        "model_size": two.selectbox("Model size", list(PRESETS), index=list(PRESETS).index("small"), key="split-model"),
        "gpus": three.select_slider("Ranks", COUNTS, value=4, key="split-ranks", help="Processes, one for each GPU."),
        "gpu": four.selectbox("GPU", list(gpus()), index=list(gpus()).index("a100-80gb"), key="split-gpu"),
        "global_batch_size": total,
        "micro_batch_size_per_gpu": micro,
        "seq_length": ui.ask_number(seven, "Sequence, tokens", 1, 1 << 20, key="split-length", empty="the model's"),
        "precision": eight.selectbox("Precision", PRECISIONS, key="split-precision"),
        "activation_checkpointing": more.checkbox(again, key="split-again"),
    }


def _show_split(split: Plan) -> None:
    """The figures of a setup, what explains them, and the two pictures with their numbers."""
    setup, used = split.setup, split.peak.total / split.usable_bytes
    micro, batches, ranks = setup.micro_batch_size, setup.gradient_accumulation_steps, setup.data_parallel_size
    fits = f"{used:.0%} of what fits" if used <= 1 else f"does not fit: {used:.0%} of the room"
    work = f"micro batch {micro} x {batches} accumulated x {ranks} data ranks"
    st.markdown(f"**{ui.plain(setup.strategy_name)}** in {setup.precision}, {setup.seq_length:,} tokens a sequence")
    step = ("Sequences in a step", f"{micro * batches * ranks:,}", work)
    sent = ("Sent by a rank in a step", byte_size(most_sent_bytes(setup)), "if collectives are rings")
    ui.show_metrics(step, (f"Peak memory of rank {split.rank}", byte_size(split.peak.total), fits), sent)
    for heading, sentences in explanations(setup):
        st.markdown(f"**{heading}.** {sentences}")

    st.header("Who holds what")
    st.caption(SENTENCES["Who holds what"])
    states = pictures.state_by_rank(setup, ranks=setup.world_size)
    svg = pictures.state_svg(states[:_MOST_DRAWN], ranks=len(states), theme=ui.page_theme())
    ui.drawing(svg, key="split-held-picture", name=f"who-holds-what-{setup.strategy_name}")
    with st.expander("Numbers: what each rank holds"):
        rows = []
        for each in states:
            for block in each.blocks:
                row = {"rank": each.rank, "holds": each.words, "kind": block.kind, "bytes": block.size}
                row |= {"without a split, bytes": block.whole, "share": block.size / block.whole}
                rows.append(row | {"where": block.place})
        ui.show_table(ui.columns(rows), key="split-held", name="What each rank holds")
    with st.expander(f"Numbers: the peak of rank {split.rank}"):
        st.caption(f"The moment with the most memory is: {split.peak.moment}. `src/plan.py` prints the same.")
        parts = {name.replace("_", " "): count for name, count in split.peak.parts.items() if count}
        table: dict[str, list[Any]] = {"part": [*parts, "all"], "bytes": [*parts.values(), split.peak.total]}
        ui.show_table(table, key="split-peak", name="Peak memory")

    st.header("What is sent in a step")
    st.caption(SENTENCES["What is sent in a step"])
    try:
        svg = pictures.step_svg(pictures.step_lines(setup), ui.page_theme())
        ui.drawing(svg, key="split-step-picture", name=f"step-{setup.strategy_name}")
    except ValueError as error:
        st.info(ui.plain(str(error)))
    if copies := copied_rows(setup):
        with st.expander("Numbers: what offload copies"):
            ui.show_table(ui.columns(copies), key="split-copied", name="What offload copies in a step")
    if not (rows := sent_rows(setup)):
        st.write("A single rank sends nothing.")
        return
    with st.expander("Numbers: every operation"):
        st.caption(SENTENCES["Every operation"])
        ui.show_table(ui.columns(rows), key="split-sent", name="What is sent in a step")


# The tables below the pictures.


def sent_rows(setup: Setup) -> list[dict[str, Any]]:
    """Traffic of a rank of each pipeline stage in a step, a row for each kind of operation at each place.

    Micro batches that send the same are one row.
    """
    rows = []
    for rank in setup.first_ranks:
        of_stage = {"stage": setup.stage(rank)} if setup.sizes.pipeline > 1 else {}
        for same in _alike(placed_traffic(setup, rank=rank), "what", "operation", "axis", "payload_bytes"):
            traffic = same[0].traffic
            row: dict[str, Any] = {"when": _when(same[0]), "operation": pictures.operation_name(traffic)}
            row |= {"among": f"{traffic.group_size} {traffic.axis} ranks", "times": len(same)}
            row["payload, bytes"] = traffic.payload_bytes
            row["payload per step, bytes"] = traffic.payload_bytes * len(same)
            row["sent by a rank per step, bytes"] = sum(each.traffic.ring_bytes for each in same)
            rows.append({**of_stage, **row, "meanwhile": pictures.waits(same[0])})
    return rows


def copied_rows(setup: Setup) -> list[dict[str, Any]]:
    """Copies of offload in a step, a row for each kind at each place."""
    rows = []
    for same in _alike(copied(setup), "what", "link", "to_device", "size"):
        copy, times = same[0], len(same)
        row = {"when": _when(copy), "what": copy.what, "between": pictures.LINKS[copy.link, copy.to_device]}
        rows.append(row | {"times": times, "bytes": copy.size, "bytes per step": times * copy.size})
    return rows


Moved = TypeVar("Moved", Placed, Copied)


def _alike(moved: Iterable[Moved], *fields: str) -> Iterable[list[Moved]]:
    """Groups with equal ``fields`` at one moment, in the order of the first of each."""
    groups: dict[tuple[Any, ...], list[Moved]] = {}
    for each in moved:
        about: Any = each.traffic if isinstance(each, Placed) else each
        groups.setdefault((each.moment, *(getattr(about, field) for field in fields)), []).append(each)
    return groups.values()


def _when(moved: Placed | Copied) -> str:
    return moved.moment if moved.micro_batch is None else f"in the {moved.moment} pass"


# The sentences that explain a setup: what is divided, what is sent for that, and what it costs.

_PARTS = Path(__file__).with_name("split.md").read_text(encoding="utf-8").split("\n## ")[1:]
SENTENCES = {heading: " ".join(text.split()) for heading, _, text in (part.partition("\n") for part in _PARTS)}
"""Texts of ``split.md``, by heading."""


def explanations(setup: Setup) -> Iterator[tuple[str, str]]:
    """A heading and its sentences for each way in which this setup divides the work, in Markdown."""
    recipe, sizes, parts = setup.recipe, setup.sizes, list[str]()
    micro, batches, copies = setup.micro_batch_size, setup.gradient_accumulation_steps, setup.data_parallel_size
    facts: dict[str, Any] = {"micro": micro, "batches": batches, "es": "es" * (batches != 1), "copies": copies}
    facts |= {"readers": "copies of the model" if sizes.ranks_per_copy > 1 else "ranks", "of_rank": micro * batches}
    facts |= {"of_step": micro * batches * copies, "stage": recipe.zero_stage, "tensor": sizes.tensor}
    facts |= {"sequence": sizes.sequence, "pipeline": sizes.pipeline}
    facts["bubble"] = bubble_fraction(sizes.pipeline, batches)
    facts["moved"] = "The optimizer state lies"
    if recipe.offload_param != "none":
        facts["moved"] = "The optimizer state and, between their uses, the weights lie"
    facts["away"] = "files on a local drive" if recipe.offload_optimizer == "nvme" else "the memory of the host"
    if setup.world_size == 1:
        parts.append("One device")
    elif copies > 1 or setup.run_type != "optimized":
        parts.append("Data parallel")
    if setup.run_type == "ddp":
        parts.append("DDP:")
    elif setup.run_type == "fsdp":
        parts.append("FSDP:")
    elif setup.run_type == "optimized":
        parts.append(f"ZeRO-{recipe.zero_stage}:" if setup.zero_ranks > 1 else "ZeRO-{stage}")
        offloads = (recipe.offload_optimizer, recipe.offload_param) != ("none", "none")
        ways = {"Offload": offloads, "Tensor": sizes.tensor > 1, "Sequence": sizes.sequence > 1}
        parts += [way for way, is_used in (ways | {"Pipeline": sizes.pipeline > 1}).items() if is_used]
    if setup.activation_checkpointing:
        parts.append("Activation")
    for heading, sentences in SENTENCES.items():
        if heading.startswith(tuple(parts)):
            yield heading.format(**facts), sentences.format(**facts)

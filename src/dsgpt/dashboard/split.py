"""The page "How it is split": what each rank holds and sends, and why. All figures are the planner's."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import streamlit as st

from dsgpt.common.errors import Problems, UserError
from dsgpt.common.text import REPOSITORY
from dsgpt.config.options import PRECISIONS
from dsgpt.dashboard import ui
from dsgpt.dashboard.pictures import LINKS, Holding, holding_svg, holdings, operation_name, step_lines, step_svg, waits
from dsgpt.model.config import PRESETS
from dsgpt.planner.hardware import PriceTable, gpus
from dsgpt.planner.options import PlanOptions
from dsgpt.planner.plan import Plan, plan_of
from dsgpt.planner.request import RECIPES, fixed_setup, read_request
from dsgpt.planner.setup import Setup
from dsgpt.planner.step_time import bubble_fraction
from dsgpt.planner.strategies import Placed, copied, most_sent_bytes, placed_traffic
from dsgpt.planner.strategy import Copied

COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of ranks, or of GPUs, to choose from."""
_MOST_DRAWN = 8


class Choice(NamedTuple):
    """A strategy that can be picked."""

    name: str
    run_type: str
    recipe: str
    """The file's name in ``ds_configs``."""


CHOICES = (
    Choice("DDP", "ddp", "zero0.json"),
    Choice("FSDP", "fsdp", "zero0.json"),
    Choice("ZeRO-0", "optimized", "zero0.json"),
    Choice("ZeRO-1", "optimized", "zero1.json"),
    Choice("ZeRO-2", "optimized", "zero2.json"),
    Choice("ZeRO-2, offload", "optimized", "zero2_offload.json"),
    Choice("ZeRO-3", "optimized", "zero3.json"),
    Choice("ZeRO-3, offload", "optimized", "zero3_offload.json"),
    Choice("ZeRO-3, NVMe", "optimized", "zero3_nvme.json"),
    Choice("ZeRO++", "optimized", "zeropp.json"),
    Choice("Tensor parallel", "optimized", "tensor.json"),
    Choice("Sequence parallel", "optimized", "sequence.json"),
    Choice("Pipeline parallel", "optimized", "pipeline.json"),
    Choice("3D: pipeline and tensor", "optimized", "3d.json"),
    Choice("One device", "baseline", "zero0.json"),
)


def split_of(choice: Choice, *, repository: Path, **flags: Any) -> Plan:
    """The plan of the strategy. Its time is not asked for, and has no price.

    Args:
        choice: the strategy.
        repository: has the recipes.
        flags: of ``src/plan.py``, by field of ``PlanOptions``.

    Raises:
        UserError: training would refuse it; every mistake, a line each.
    """
    path = repository / RECIPES / choice.recipe
    options = PlanOptions(deepspeed_config=path, run_type=choice.run_type, tokens=1.0, **flags)
    problems = Problems()
    request = read_request(options, problems)
    return plan_of(fixed_setup(request, problems), request, PriceTable(notice="", prices=[]))


def show() -> None:
    """Show the page."""
    st.caption("Every figure is computed by the planner's formulas from the recipe below. Nothing here is measured.")
    choice, flags = _asked()
    try:
        split = split_of(choice, repository=REPOSITORY, **flags)
    except UserError as error:
        st.error(f"This combination is refused.\n\n{ui.refusal(error)}")
        _recipe(choice)
        return
    _summary(split)
    for heading, sentences in explanations(split.setup):
        st.markdown(f"**{heading}.** {sentences}")
    _held(split)
    _sent(split)
    _recipe(choice)


def _asked() -> tuple[Choice, dict[str, Any]]:
    """The strategy, and the flags of ``src/plan.py`` that the widgets stand for."""
    one, two, three, four = st.columns(4)
    choice = one.selectbox("Strategy", CHOICES, index=3, format_func=lambda each: each.name, key="split-strategy")
    model = two.selectbox("Model size", list(PRESETS), index=list(PRESETS).index("small"), key="split-model")
    ranks = three.select_slider("Ranks", COUNTS, value=4, key="split-ranks", help="Processes, one for each GPU.")
    gpu = four.selectbox("GPU", list(gpus()), index=list(gpus()).index("a100-80gb"), key="split-gpu")
    with st.expander("Batch, length and precision"):
        five, six, seven, eight = st.columns(4)
        total = ui.ask_number(five, "Global batch, sequences", 1, 4096, key="split-global", empty="the recipe's")
        micro = ui.ask_number(six, "Micro batch, sequences", 1, 1024, key="split-micro", empty="up to 8")
        length = ui.ask_number(seven, "Sequence, tokens", 1, 1 << 20, key="split-length", empty="the model's")
        precision = eight.selectbox("Precision", PRECISIONS, key="split-precision")
        again = st.checkbox("Activation checkpointing: recompute each block in the backward pass", key="split-again")
    return choice, {
        "model_size": model,
        "gpus": ranks,
        "gpu": gpu,
        "global_batch_size": total,
        "micro_batch_size_per_gpu": micro,
        "seq_length": length,
        "precision": precision,
        "activation_checkpointing": again,
    }


def _summary(split: Plan) -> None:
    setup, used = split.setup, split.peak.total / split.usable_bytes
    micro, batches, ranks = setup.micro_batch_size, setup.gradient_accumulation_steps, setup.data_parallel_size
    fits = f"{used:.0%} of what fits" if used <= 1 else f"does not fit: {used:.0%} of the room"
    work = f"micro batch {micro} x {batches} accumulated x {ranks} data ranks"
    name = ui.plain(setup.strategy_name)
    st.markdown(f"**{name}** in {setup.precision}, {setup.seq_length:,} tokens a sequence")
    ui.show_metrics(
        [
            ("Sequences in a step", f"{micro * batches * ranks:,}", work),
            (f"Peak memory of rank {split.rank}", ui.memory(split.peak.total), fits),
            ("Sent by a rank in a step", ui.memory(most_sent_bytes(setup)), "if collectives are rings"),
        ]
    )


def _held(split: Plan) -> None:
    st.header("Who holds what")
    st.caption(
        "True to scale in bytes. A filled box is what a rank holds at the moment of its peak, which is named below it. "
        "A dashed frame is what it would hold without the split. An empty box with a coloured edge is in the host's "
        "memory or in files. New gradients are those of the backward pass before they are added up or sent. Buckets "
        "and gathered weights are temporary."
    )
    setup = split.setup
    svg = holding_svg(holdings(setup, ranks=_MOST_DRAWN), ranks=setup.world_size, theme=ui.page_theme())
    ui.drawing(svg, key="split-held-picture", name=f"who-holds-what-{setup.strategy_name}")
    with st.expander("Numbers: what each rank holds"):
        rows = held_rows(holdings(setup, ranks=setup.world_size))
        ui.show_table(ui.columns(rows), key="split-held", name="What each rank holds")
    with st.expander(f"Numbers: the peak of rank {split.rank}"):
        st.caption(f"The moment with the most memory is: {split.peak.moment}. `src/plan.py` prints the same.")
        parts = {name.replace("_", " "): count for name, count in split.peak.parts.items() if count}
        table: dict[str, list[Any]] = {"part": [*parts, "all"], "bytes": [*parts.values(), split.peak.total]}
        ui.show_table(table, key="split-peak", name="Peak memory")


def _sent(split: Plan) -> None:
    st.header("What is sent in a step")
    setup = split.setup
    st.caption(
        "Time goes from left to right. The order and the bytes are those of the recipe; lengths are not seconds. What "
        "lies below a pass is sent during it, layer by layer. Point at a box for its sentence."
    )
    try:
        svg = step_svg(step_lines(setup), ui.page_theme())
    except ValueError as error:
        st.info(ui.plain(str(error)))
    else:
        ui.drawing(svg, key="split-step-picture", name=f"step-{setup.strategy_name}")
    if copies := copied_rows(setup):
        with st.expander("Numbers: what offload copies"):
            ui.show_table(ui.columns(copies), key="split-copied", name="What offload copies in a step")
    rows = sent_rows(setup)
    if not rows:
        st.write("A single rank sends nothing.")
        return
    with st.expander("Numbers: every operation"):
        st.caption(
            "The payload is the whole buffer of an operation. What a rank sends for it follows from the ring "
            "algorithm. Losses, norms and counters, a few bytes each, are left out."
        )
        ui.show_table(ui.columns(rows), key="split-sent", name="What is sent in a step")


def _recipe(choice: Choice) -> None:
    with st.expander(f"The recipe: {(RECIPES / choice.recipe).as_posix()}, executed as {choice.run_type}"):
        st.code((REPOSITORY / RECIPES / choice.recipe).read_text(encoding="utf-8"), language="json")


# The tables below the pictures.


def held_rows(held: Iterable[Holding]) -> list[dict[str, Any]]:
    """The figures of the picture of who holds what, a row for each block."""
    return [
        {
            "rank": each.rank,
            "holds": each.words,
            "kind": block.kind,
            "bytes": block.size,
            "without a split, bytes": block.whole,
            "share": block.size / block.whole,
            "where": block.place,
        }
        for each in held
        for block in each.blocks
    ]


def sent_rows(setup: Setup) -> list[dict[str, Any]]:
    """What a rank of each pipeline stage sends in a step, a row for each kind of operation at each place.

    Micro batches that send the same are one row.
    """
    rows = []
    for rank in setup.first_ranks:
        of_stage = {"stage": setup.stage(rank)} if setup.sizes.pipeline > 1 else {}
        for same in _alike(placed_traffic(setup, rank=rank), "what", "operation", "axis", "payload_bytes"):
            traffic = same[0].traffic
            row = {
                "operation": operation_name(traffic),
                "among": f"{traffic.group_size} {traffic.axis} ranks",
                "times": len(same),
                "payload, bytes": traffic.payload_bytes,
                "payload per step, bytes": sum(each.traffic.payload_bytes for each in same),
                "sent by a rank per step, bytes": sum(each.traffic.ring_bytes for each in same),
                "meanwhile": waits(same[0]),
            }
            rows.append({**of_stage, "when": _when(same[0]), **row})
    return rows


def copied_rows(setup: Setup) -> list[dict[str, Any]]:
    """What offload copies in a step, a row for each kind at each place."""
    return [
        {
            "when": _when(same[0]),
            "what": same[0].what,
            "between": LINKS[same[0].link, same[0].to_device],
            "times": len(same),
            "bytes": same[0].size,
            "bytes per step": sum(each.size for each in same),
        }
        for same in _alike(copied(setup), "what", "link", "to_device", "size")
    ]


Moved = TypeVar("Moved", Placed, Copied)


def _alike(moved: Iterable[Moved], *fields: str) -> Iterable[list[Moved]]:
    """Those of one moment whose ``fields`` are equal, together, in the order of the first of each."""
    groups: dict[tuple[Any, ...], list[Moved]] = {}
    for each in moved:
        about: Any = each.traffic if isinstance(each, Placed) else each
        groups.setdefault((each.moment, *(getattr(about, field) for field in fields)), []).append(each)
    return groups.values()


def _when(moved: Placed | Copied) -> str:
    return moved.moment if moved.micro_batch is None else f"in the {moved.moment} pass"


# The sentences that explain a setup: what is divided, what is sent for that, and what it costs.

_DDP = (
    "DDP: everything is whole",
    "Every rank holds all weights, gradients and optimizer state. Gradients are averaged once per step, during the "
    "backward pass of the last micro batch. More ranks save time, but no memory.",
)
_FSDP = (
    "FSDP: everything is a shard",
    "Each rank holds one part of the weights, gradients and optimizer state. A block's weights are gathered before it "
    "computes and freed after it. Gradients are reduced to the rank that steps on them. This sends more than DDP and "
    "holds the least.",
)
_ZERO = {
    0: (
        "ZeRO-0: everything is whole",
        "DeepSpeed's data parallelism. Every rank holds all of the state, and gradients are averaged once per step, "
        "after the last backward pass.",
    ),
    1: (
        "ZeRO-1: the optimizer state is a shard",
        "Each rank keeps the optimizer state of one part of the model and steps only on that part. After the step "
        "every rank gathers the new weights of the others. It sends about as much as DDP, because an all-reduce is a "
        "reduce and a gather.",
    ),
    2: (
        "ZeRO-2: gradients are a shard as well",
        "After each backward pass a rank keeps only the gradients of its own part. So they are sent in every micro "
        "batch, not once per step: accumulation makes ZeRO-2 send more than ZeRO-1.",
    ),
    3: (
        "ZeRO-3: the weights are a shard as well",
        "No rank holds the model. A layer's weights are gathered before its forward and its backward pass, and freed "
        "after each, in every micro batch. Parameters below `stage3_param_persistence_threshold` stay whole: sending "
        "them would take longer than it saves.",
    ),
}
_RECOMPUTATION = (
    "Activation checkpointing",
    "A forward pass keeps only the input of each block. The backward pass computes the block once more. It costs a "
    "third of the computing and saves most of the activations.",
)


def explanations(setup: Setup) -> Iterator[tuple[str, str]]:
    """A heading and its sentences for each way in which this setup divides the work, in Markdown."""
    micro, batches, copies = setup.micro_batch_size, setup.gradient_accumulation_steps, setup.data_parallel_size
    if setup.world_size == 1:
        yield (
            "One device",
            f"One rank holds everything and sends nothing. It computes {batches} micro batch{'es' * (batches != 1)} of "
            f"{micro} sequences, adds up their gradients, and steps once.",
        )
    elif copies > 1 or setup.run_type != "optimized":
        yield (
            "Data parallel",
            f"{copies} {'copies of the model' if setup.sizes.ranks_per_copy > 1 else 'ranks'} read different "
            f"sequences: {micro * batches} each, {micro * batches * copies} in a step. Every rank must step with the "
            "average of all gradients, so gradients are sent in every step. The number of ranks does not change the "
            "global batch, so the training stays the same.",
        )
    if setup.run_type == "ddp":
        yield _DDP
    elif setup.run_type == "fsdp":
        yield _FSDP
    elif setup.run_type == "optimized":
        stage = setup.recipe.zero_stage
        nothing = (
            f"ZeRO-{stage} has nothing to divide",
            "ZeRO divides state among ranks that hold the same parameters. Here no two ranks do, so each keeps all of "
            "the state of its own parameters. With more ranks it would be divided.",
        )
        yield _ZERO[stage] if setup.zero_ranks > 1 else nothing
        yield from _of_deepspeed(setup)
    if setup.activation_checkpointing:
        yield _RECOMPUTATION


def _of_deepspeed(setup: Setup) -> Iterator[tuple[str, str]]:
    """Offload, and the ways to split the model."""
    recipe, sizes, batches = setup.recipe, setup.sizes, setup.gradient_accumulation_steps
    if recipe.offload_optimizer != "none" or recipe.offload_param != "none":
        state = "The optimizer state lies"
        if recipe.offload_param != "none":
            state = "The optimizer state and, between their uses, the weights lie"
        where = "files on a local drive" if recipe.offload_optimizer == "nvme" else "the memory of the host"
        yield (
            "Offload",
            f"{state} in {where}. The CPU steps. Gradients go to the host and new weights come back in every step, "
            "over the link between device and host, which is far slower than the device's memory.",
        )
    if sizes.tensor > 1:
        yield (
            "Tensor parallel",
            f"{sizes.tensor} neighbouring ranks hold a part of every matrix and compute the same sequences. They sum "
            "activations twice per block in the forward pass and twice in the backward pass, and wait for each sum. "
            "So tensor ranks belong on one machine. Embeddings and LayerNorms stay whole.",
        )
    if sizes.sequence > 1:
        yield (
            "Sequence parallel (Ulysses)",
            f"{sizes.sequence} ranks hold all weights and read different positions of the same sequences. For "
            "attention they exchange positions for heads, four all-to-alls per block in each direction. Activations "
            "of a rank are a part; ZeRO divides the state over these ranks too.",
        )
    if sizes.pipeline > 1:
        yield (
            "Pipeline parallel (1F1B)",
            f"{sizes.pipeline} stages hold different layers. A micro batch passes through all of them; only one "
            f"residual stream goes from stage to stage. With {batches} micro batches a stage waits for "
            f"{bubble_fraction(sizes.pipeline, batches):.0%} of the time that the passes take: the bubble, "
            "(p - 1) / (m + p - 1). The first and the last stage both hold the tied embedding and sum its gradients.",
        )

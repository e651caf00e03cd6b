"""How a model, its gradients and its optimizer state are split over ranks, and what they send."""

from typing import Any

import streamlit as st

from dsgpt.common.errors import UserError
from dsgpt.common.text import REPOSITORY
from dsgpt.config.options import PRECISIONS
from dsgpt.dashboard.figures import drawing, page_theme, show_table
from dsgpt.dashboard.formats import columns, memory, plain
from dsgpt.dashboard.pictures import holding_svg, holdings, step_lines, step_svg
from dsgpt.dashboard.runs import refusal
from dsgpt.dashboard.split import CHOICES, RECIPES, Choice, Split, copied_rows, held_rows, lessons, sent_rows, split_of
from dsgpt.model.config import PRESETS
from dsgpt.planner.hardware import gpus
from dsgpt.planner.plan import strategy_name
from dsgpt.planner.traffic import sent_bytes

_RANKS = (1, 2, 4, 8, 16, 32, 64)
_MOST_DRAWN = 8


def show() -> None:
    """Show the page."""
    st.caption("Every figure is computed by the planner's formulas from the recipe below. Nothing here is measured.")
    choice, flags = _asked()
    try:
        split = split_of(choice, repository=REPOSITORY, **flags)
    except UserError as error:
        st.error(f"This combination is refused.\n\n{refusal(error)}")
        _recipe(choice)
        return
    _summary(split)
    for heading, sentences in lessons(split.setup):
        st.markdown(f"**{heading}.** {sentences}")
    _held(split)
    _sent(split)
    _recipe(choice)


def _asked() -> tuple[Choice, dict[str, Any]]:
    """The strategy, and the flags of ``src/plan.py`` that the widgets stand for."""
    one, two, three, four = st.columns(4)
    choice = one.selectbox("Strategy", CHOICES, index=3, format_func=lambda each: each.name, key="split-strategy")
    model = two.selectbox("Model size", list(PRESETS), index=list(PRESETS).index("small"), key="split-model")
    ranks = three.select_slider("Ranks", _RANKS, value=4, key="split-ranks", help="Processes, one for each GPU.")
    gpu = four.selectbox("GPU", list(gpus()), index=list(gpus()).index("a100-80gb"), key="split-gpu")
    with st.expander("Batch, length and precision"):
        five, six, seven, eight = st.columns(4)
        total = five.number_input(
            "Global batch, sequences", 1, 4096, None, key="split-global", placeholder="the recipe's"
        )
        micro = six.number_input("Micro batch, sequences", 1, 1024, None, key="split-micro", placeholder="up to 8")
        length = seven.number_input("Sequence, tokens", 1, 1 << 20, None, key="split-length", placeholder="the model's")
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


def _summary(split: Split) -> None:
    setup, used = split.setup, split.peak.total / split.usable_bytes
    micro, batches, ranks = setup.micro_batch_size, setup.gradient_accumulation_steps, setup.data_parallel_size
    most = max(sent_bytes(setup, rank=rank) for rank in setup.first_ranks)
    fits = f"{used:.0%} of what fits" if split.fits else f"does not fit: {used:.0%} of the room"
    figures = (
        (
            "Sequences in a step",
            f"{micro * batches * ranks:,}",
            f"micro batch {micro} x {batches} accumulated x {ranks} data ranks",
        ),
        (f"Peak memory of rank {split.rank}", memory(split.peak.total), fits),
        ("Sent by a rank in a step", memory(most), "if collectives are rings"),
    )
    name = plain(strategy_name(setup))
    st.markdown(f"**{name}** in {setup.precision}, {setup.seq_length:,} tokens a sequence")
    for column, (label, value, more) in zip(st.columns(3), figures, strict=True):
        column.metric(label, value)
        column.caption(more)


def _held(split: Split) -> None:
    st.header("Who holds what")
    st.caption(
        "True to scale in bytes. A filled box is what a rank holds at the moment of its peak, which is named below it. "
        "A dashed frame is what it would hold without the split. An empty box with a coloured edge is in the host's "
        "memory or in files. New gradients are those of the backward pass before they are added up or sent. Buckets "
        "and gathered weights are temporary."
    )
    setup = split.setup
    svg = holding_svg(holdings(setup, ranks=_MOST_DRAWN), ranks=setup.world_size, theme=page_theme())
    drawing(svg, key="split-held-picture", name=f"who-holds-what-{strategy_name(setup)}")
    with st.expander("Numbers: what each rank holds"):
        rows = held_rows(holdings(setup, ranks=setup.world_size))
        show_table(columns(rows), key="split-held", name="What each rank holds")
    with st.expander(f"Numbers: the peak of rank {split.rank}"):
        st.caption(f"The moment with the most memory is: {split.peak.moment}. `src/plan.py` prints the same.")
        parts = {name.replace("_", " "): count for name, count in split.peak.parts.items() if count}
        table: dict[str, list[Any]] = {"part": [*parts, "all"], "bytes": [*parts.values(), split.peak.total]}
        show_table(table, key="split-peak", name="Peak memory")


def _sent(split: Split) -> None:
    st.header("What is sent in a step")
    setup = split.setup
    st.caption(
        "Time goes from left to right. The order and the bytes are those of the recipe; lengths are not seconds. What "
        "lies below a pass is sent during it, layer by layer. Point at a box for its sentence."
    )
    try:
        svg = step_svg(step_lines(setup), page_theme())
    except ValueError as error:
        st.info(plain(str(error)))
    else:
        drawing(svg, key="split-step-picture", name=f"step-{strategy_name(setup)}")
    if copies := copied_rows(setup):
        with st.expander("Numbers: what offload copies"):
            show_table(columns(copies), key="split-copied", name="What offload copies in a step")
    rows = sent_rows(setup)
    if not rows:
        st.write("A single rank sends nothing.")
        return
    with st.expander("Numbers: every operation"):
        st.caption(
            "The payload is the whole buffer of an operation. What a rank sends for it follows from the ring "
            "algorithm. Losses, norms and counters, a few bytes each, are left out."
        )
        show_table(columns(rows), key="split-sent", name="What is sent in a step")


def _recipe(choice: Choice) -> None:
    with st.expander(f"The recipe: {(RECIPES / choice.recipe).as_posix()}, executed as {choice.run_type}"):
        st.code((REPOSITORY / RECIPES / choice.recipe).read_text(encoding="utf-8"), language="json")

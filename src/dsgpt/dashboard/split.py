"""What the page "How it is split" explains, and its sentences."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgpt.common.errors import Problems
from dsgpt.dashboard.pictures import LINKS, Block, Holding, operation_name, waits
from dsgpt.planner.memory import Peak
from dsgpt.planner.options import PlanOptions
from dsgpt.planner.plan import fullest_rank, usable_bytes
from dsgpt.planner.request import fixed_setup, read_request
from dsgpt.planner.setup import Setup
from dsgpt.planner.step_order import Copied, Placed, copied, placed_traffic
from dsgpt.planner.step_time import bubble_fraction

# What the page "How it is split" explains: strategies of the shipped recipes, resolved as ``src/plan.py`` does.

RECIPES = Path("ds_configs")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A strategy that can be picked."""

    name: str
    run_type: str
    recipe: str
    """The file's name in ``ds_configs``."""


CHOICES = (
    Choice(name="DDP", run_type="ddp", recipe="zero0.json"),
    Choice(name="FSDP", run_type="fsdp", recipe="zero0.json"),
    Choice(name="ZeRO-0", run_type="optimized", recipe="zero0.json"),
    Choice(name="ZeRO-1", run_type="optimized", recipe="zero1.json"),
    Choice(name="ZeRO-2", run_type="optimized", recipe="zero2.json"),
    Choice(name="ZeRO-2, offload", run_type="optimized", recipe="zero2_offload.json"),
    Choice(name="ZeRO-3", run_type="optimized", recipe="zero3.json"),
    Choice(name="ZeRO-3, offload", run_type="optimized", recipe="zero3_offload.json"),
    Choice(name="ZeRO-3, NVMe", run_type="optimized", recipe="zero3_nvme.json"),
    Choice(name="ZeRO++", run_type="optimized", recipe="zeropp.json"),
    Choice(name="Tensor parallel", run_type="optimized", recipe="tensor.json"),
    Choice(name="Sequence parallel", run_type="optimized", recipe="sequence.json"),
    Choice(name="Pipeline parallel", run_type="optimized", recipe="pipeline.json"),
    Choice(name="3D: pipeline and tensor", run_type="optimized", recipe="3d.json"),
    Choice(name="One device", run_type="baseline", recipe="zero0.json"),
)


@dataclass(frozen=True, kw_only=True)
class Split:
    """A setup, and how much of a device its fullest rank needs."""

    setup: Setup
    rank: int
    """That needs the most memory."""
    peak: Peak
    usable_bytes: int
    """Of a device, for tensors."""

    @property
    def fits(self) -> bool:
        """Whether its peak does."""
        return self.peak.total <= self.usable_bytes


def split_of(choice: Choice, *, repository: Path, **flags: Any) -> Split:
    """The strategy, resolved.

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
    request = read_request(options, problems, repository=repository)
    setup = fixed_setup(request, problems)
    rank, peak = fullest_rank(setup, request.machine.kind)
    return Split(setup=setup, rank=rank, peak=peak, usable_bytes=usable_bytes(request.machine))


def held_rows(held: Sequence[Holding]) -> list[dict[str, Any]]:
    """The figures of the picture of who holds what, a row for each block."""
    return [_held_row(each, block) for each in held for block in each.blocks]


def _held_row(each: Holding, block: Block) -> dict[str, Any]:
    return {
        "rank": each.rank,
        "holds": each.words,
        "kind": block.kind,
        "bytes": block.size,
        "without a split, bytes": block.whole,
        "share": block.size / block.whole,
        "where": block.place,
    }


def sent_rows(setup: Setup) -> list[dict[str, Any]]:
    """What a rank of each pipeline stage sends in a step, a row for each kind of operation at each place.

    Micro batches that send the same are one row.
    """
    return [row for rank in setup.first_ranks for row in _sent_rows(setup, rank)]


def copied_rows(setup: Setup) -> list[dict[str, Any]]:
    """What offload copies in a step, a row for each kind at each place."""
    rows: dict[tuple[Any, ...], list[Copied]] = {}
    for each in copied(setup):
        rows.setdefault((each.moment, each.what, each.link, each.to_device, each.size), []).append(each)
    return [
        {
            "when": same[0].moment if same[0].micro_batch is None else f"in the {same[0].moment} pass",
            "what": same[0].what,
            "between": LINKS[same[0].link, same[0].to_device],
            "times": len(same),
            "bytes": same[0].size,
            "bytes per step": sum(each.size for each in same),
        }
        for same in rows.values()
    ]


def _sent_rows(setup: Setup, rank: int) -> list[dict[str, Any]]:
    rows: dict[tuple[Any, ...], list[Placed]] = {}
    for each in placed_traffic(setup, rank=rank):
        traffic = each.traffic
        key = (each.moment, traffic.what, traffic.operation, traffic.axis, traffic.payload_bytes)
        rows.setdefault(key, []).append(each)
    return [
        {
            **({"stage": setup.stage(rank)} if setup.sizes.pipeline > 1 else {}),
            "when": same[0].moment if same[0].micro_batch is None else f"in the {same[0].moment} pass",
            "operation": operation_name(same[0].traffic),
            "among": f"{same[0].traffic.group_size} {same[0].traffic.axis} ranks",
            "times": len(same),
            "payload, bytes": same[0].traffic.payload_bytes,
            "payload per step, bytes": sum(each.traffic.payload_bytes for each in same),
            "sent by a rank per step, bytes": sum(each.traffic.ring_bytes for each in same),
            "meanwhile": waits(setup, same[0]),
        }
        for same in rows.values()
    ]


# The sentences that explain a setup: what is divided, what is sent for that, and what it costs.


def lessons(setup: Setup) -> list[tuple[str, str]]:
    """A heading and its sentences for each way in which this setup divides the work, in Markdown."""
    return list(_lessons(setup))


def _lessons(setup: Setup) -> Iterator[tuple[str, str]]:
    if setup.world_size == 1:
        yield _alone(setup)
    elif setup.data_parallel_size > 1 or setup.run_type != "optimized":
        yield _data(setup)
    if setup.run_type == "ddp":
        yield _DDP
    elif setup.run_type == "fsdp":
        yield _FSDP
    elif setup.run_type == "optimized":
        yield _ZERO[setup.recipe.zero_stage] if setup.zero_ranks > 1 else _nothing_to_divide(setup)
        yield from _offload(setup)
        yield from _split_model(setup)
    if setup.activation_checkpointing:
        yield _RECOMPUTATION


def _alone(setup: Setup) -> tuple[str, str]:
    batches = setup.gradient_accumulation_steps
    return "One device", (
        f"One rank holds everything and sends nothing. It computes {batches} micro batch{'es' * (batches != 1)} of "
        f"{setup.micro_batch_size} sequences, adds up their gradients, and steps once."
    )


def _data(setup: Setup) -> tuple[str, str]:
    copies = setup.data_parallel_size
    sequences = setup.micro_batch_size * setup.gradient_accumulation_steps
    return "Data parallel", (
        f"{copies} {'copies of the model' if setup.sizes.ranks_per_copy > 1 else 'ranks'} read different sequences: "
        f"{sequences} each, {sequences * copies} in a step. Every rank must step with the average of all gradients, so "
        "gradients are sent in every step. The number of ranks does not change the global batch, so the training stays "
        "the same."
    )


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


def _nothing_to_divide(setup: Setup) -> tuple[str, str]:
    stage = setup.recipe.zero_stage
    return f"ZeRO-{stage} has nothing to divide", (
        "ZeRO divides state among ranks that hold the same parameters. Here no two ranks do, so each keeps all of the "
        "state of its own parameters. With more ranks it would be divided."
    )


def _offload(setup: Setup) -> Iterator[tuple[str, str]]:
    recipe = setup.recipe
    if recipe.offload_optimizer == "none" and recipe.offload_param == "none":
        return
    with_weights = recipe.offload_param != "none"
    kept = (
        "The optimizer state and, between their uses, the weights lie" if with_weights else "The optimizer state lies"
    )
    where = "files on a local drive" if recipe.offload_optimizer == "nvme" else "the memory of the host"
    yield (
        "Offload",
        (
            f"{kept} in {where}. The CPU steps. Gradients go to the host and new weights "
            "come back in every step, over the link between device and host, which is far slower than the device's "
            "memory."
        ),
    )


def _split_model(setup: Setup) -> Iterator[tuple[str, str]]:
    sizes, batches = setup.sizes, setup.gradient_accumulation_steps
    if sizes.tensor > 1:
        yield (
            "Tensor parallel",
            (
                f"{sizes.tensor} neighbouring ranks hold a part of every matrix and compute the same sequences. They "
                "sum activations twice per block in the forward pass and twice in the backward pass, and wait for each "
                "sum. So tensor ranks belong on one machine. Embeddings and LayerNorms stay whole."
            ),
        )
    if sizes.sequence > 1:
        yield (
            "Sequence parallel (Ulysses)",
            (
                f"{sizes.sequence} ranks hold all weights and read different positions of the same sequences. For "
                "attention they exchange positions for heads, four all-to-alls per block in each direction. "
                "Activations of a rank are a part; ZeRO divides the state over these ranks too."
            ),
        )
    if sizes.pipeline > 1:
        waiting = bubble_fraction(sizes.pipeline, batches)
        yield (
            "Pipeline parallel (1F1B)",
            (
                f"{sizes.pipeline} stages hold different layers. A micro batch passes through all of them; only one "
                f"residual stream goes from stage to stage. With {batches} micro batches a stage waits for "
                f"{waiting:.0%} of the time that the passes take: the bubble, (p - 1) / (m + p - 1). The first and the "
                "last stage both hold the tied embedding and sum its gradients."
            ),
        )

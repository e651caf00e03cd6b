"""Where in an optimizer step a rank computes, sends, and copies to its host.

Where in an optimizer step a rank computes and sends: the passes in order, and the traffic of each of them. The parts
add up to ``step_traffic``. A pipeline runs its micro batches as DeepSpeed's ``TrainSchedule`` does: one forward pass,
then one backward pass in turn (1F1B, Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from dsgpt.planner.setup import (
    FULL,
    ParameterSize,
    Setup,
    flat_groups,
    fsdp_elements,
    model_parameters,
    persistent,
    zero_piece,
)
from dsgpt.planner.traffic import Traffic, gathered, gathered_forward, step_traffic
from dsgpt.planner.work import stepped_elements

FORWARD, BACKWARD = "forward", "backward"
BEFORE_STEP, DURING_STEP, AFTER_STEP = "before the step", "during the step", "after the step"


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The forward or the backward pass of one micro batch."""

    kind: str
    """``forward`` or ``backward``."""
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Traffic at its place in the step."""

    moment: str
    """``forward``, ``backward``, ``before the step`` or ``after the step``."""
    micro_batch: int | None
    """None outside of passes."""
    traffic: Traffic
    """With the payload of this place."""


def passes(setup: Setup, *, rank: int = 0) -> list[Pass]:
    """The passes of ``rank`` in one optimizer step, in order."""
    if setup.sizes.pipeline > 1:
        return _one_forward_one_backward(
            setup.stage(rank), stages=setup.sizes.pipeline, micro_batches=setup.gradient_accumulation_steps
        )
    return [
        Pass(kind=kind, micro_batch=number)
        for number in range(setup.gradient_accumulation_steps)
        for kind in (FORWARD, BACKWARD)
    ]


def _one_forward_one_backward(stage: int, *, stages: int, micro_batches: int) -> list[Pass]:
    """A stage begins with as many forward passes as stages follow it, and then alternates."""
    ahead = min(stages - stage, micro_batches)
    found = [Pass(kind=FORWARD, micro_batch=number) for number in range(ahead)]
    for number in range(micro_batches):
        found.append(Pass(kind=BACKWARD, micro_batch=number))
        if number + ahead < micro_batches:
            found.append(Pass(kind=FORWARD, micro_batch=number + ahead))
    return found


def placed_traffic(setup: Setup, *, rank: int = 0) -> list[Placed]:
    """What ``rank`` sends in one optimizer step, and where in it."""
    return [
        Placed(moment=moment, micro_batch=micro_batch, traffic=replace(traffic, payload_bytes=payload))
        for traffic in step_traffic(setup, rank=rank)
        for (moment, micro_batch), payload in _dealt(traffic.payload_bytes, _weights(setup, traffic, rank)).items()
    ]


Place = tuple[str, int | None]
"""Moment and micro batch."""


def _dealt(payload: int, weights: Mapping[Place, int]) -> dict[Place, int]:
    """``payload`` in proportion to ``weights``, of which it is a multiple."""
    whole = sum(weights.values())
    return {place: payload * share // whole for place, share in weights.items() if share}


def _weights(setup: Setup, traffic: Traffic, rank: int) -> dict[Place, int]:
    """The share of ``traffic`` at each place."""
    if traffic.what == "activations":
        forward, backward = _activations(setup, traffic, rank)
        return _each_pass(setup, forward, backward)
    if traffic.what == "weights":
        return _gathers(setup)
    last = setup.gradient_accumulation_steps - 1
    if traffic.axis == "pipeline":
        return {(BEFORE_STEP, None): 1}
    if setup.run_type != "optimized":
        return {(BACKWARD, last): 1}
    zero = setup.recipe.zero_optimization
    if zero.stage >= 2:
        return _each_pass(setup, 0, 1)
    overlaps = zero.stage == 1 and zero.overlap_comm and not setup.uses_bf16_optimizer
    return {(BACKWARD, last): 1} if overlaps else {(BEFORE_STEP, None): 1}


def _each_pass(setup: Setup, forward: int, backward: int) -> dict[Place, int]:
    """These shares in the passes of every micro batch."""
    shares = {FORWARD: forward, BACKWARD: backward}
    numbers = range(setup.gradient_accumulation_steps)
    return {(kind, number): share for number in numbers for kind, share in shares.items()}


def _activations(setup: Setup, traffic: Traffic, rank: int) -> tuple[int, int]:
    """Shares of the forward and of the backward pass; recomputation belongs to the latter."""
    stage, again = setup.stage(rank), int(setup.activation_checkpointing)
    has_next, has_previous = int(stage < setup.sizes.pipeline - 1), int(stage > 0)
    if traffic.axis == "pipeline":
        return has_next, has_previous
    if traffic.axis == "sequence":
        return 1, 1 + again
    if traffic.operation == "all_gather":  # of what a stage receives, and again of what it sent
        return has_previous, 2 * has_next
    return 2, 2 + again


def _gathers(setup: Setup) -> dict[Place, int]:
    """Elements of weights that are gathered at each place."""
    if setup.run_type == "fsdp":
        return fsdp_gathers(setup)
    if setup.recipe.zero_stage < 3:
        return {(AFTER_STEP, None): 1}

    def pieces(parameters: list[ParameterSize]) -> int:
        return sum(zero_piece(part, setup.zero_ranks) for part in parameters)

    forward = pieces(gathered_forward(setup))
    each = _each_pass(setup, forward, pieces(gathered(setup)) - forward)
    return each | {(AFTER_STEP, None): pieces(persistent(setup.recipe.zero_optimization, setup.held(0)))}


def fsdp_gathers(setup: Setup) -> dict[Place, int]:
    """Blocks in every pass if they are resharded after the forward pass, else once; the rest in the first pass."""
    whole = model_parameters(setup.model)
    blocks = [part for part in whole if part.name.startswith("blocks.")]
    rest = [part for part in whole if not part.name.startswith("blocks.")]
    size, first = fsdp_elements(blocks, setup.world_size), (FORWARD, 0)
    found: dict[Place, int] = {first: size + fsdp_elements(rest, setup.world_size)}
    return _each_pass(setup, size, size) | found if setup.recipe.dsgpt.fsdp.reshard_after_forward else found


# What a rank copies between its device and its host, or its files, in one optimizer step, and where in the step.


@dataclass(frozen=True, kw_only=True)
class Copied:
    """Bytes that are copied at one place of the step."""

    moment: str
    """As ``step_order.Placed`` has it, or ``during the step``."""
    micro_batch: int | None
    what: str
    """``gradients``, ``weights`` or ``optimizer state``."""
    link: str
    """``host``, or ``files`` of the host."""
    to_device: bool
    """Whether it goes towards the device; otherwise away from it."""
    size: int


def copied(setup: Setup, *, rank: int = 0) -> list[Copied]:
    """What offload makes ``rank`` copy; nothing without offload."""
    if setup.run_type == "fsdp":
        return list(_fsdp(setup, rank)) if setup.recipe.dsgpt.fsdp.cpu_offload else []
    if setup.run_type != "optimized" or setup.recipe.offload_optimizer == setup.recipe.offload_param == "none":
        return []
    return [each for each in (*_optimizer(setup, rank), *_parameters(setup)) if each.size]


def _fsdp(setup: Setup, rank: int) -> Iterator[Copied]:
    """The rank's shards to the device whenever weights are gathered, in fp32; gradients to the host once."""
    for (moment, number), elements in fsdp_gathers(setup).items():
        yield Copied(
            moment=moment, micro_batch=number, what="weights", link="host", to_device=True, size=FULL * elements
        )
    size, last = FULL * stepped_elements(setup, rank), setup.gradient_accumulation_steps - 1
    yield Copied(moment=BACKWARD, micro_batch=last, what="gradients", link="host", to_device=False, size=size)


def _optimizer(setup: Setup, rank: int) -> Iterator[Copied]:
    """Gradients to the host; new weights back; moments and master weights from files and back."""
    recipe, own = setup.recipe, stepped_elements(setup, rank)
    if recipe.offload_optimizer == "none":
        return
    last = setup.gradient_accumulation_steps - 1
    if recipe.zero_stage > 1:
        for number, out, back in _summed(setup, rank):
            for size, comes in ((back, True), (out, False)):
                yield Copied(
                    moment=BACKWARD, micro_batch=number, what="gradients", link="host", to_device=comes, size=size
                )
        yield Copied(moment=BACKWARD, micro_batch=last, what="gradients", link="host", to_device=False, size=FULL * own)
    else:
        yield Copied(
            moment=BEFORE_STEP, micro_batch=None, what="gradients", link="host", to_device=False, size=FULL * own
        )
    if recipe.offload_optimizer == "nvme":
        state = FULL * (1 + setup.moments) * own
        for comes in (True, False):
            yield Copied(
                moment=DURING_STEP, micro_batch=None, what="optimizer state", link="files", to_device=comes, size=state
            )
    if recipe.offload_param == "none":  # else they stay in the host until they are gathered
        size = setup.low * own
        yield Copied(moment=AFTER_STEP, micro_batch=None, what="weights", link="host", to_device=True, size=size)


def _summed(setup: Setup, rank: int) -> Iterator[tuple[int, int, int]]:
    """What adding up costs in each micro batch: its number, bytes to the host, and bytes back. Sums are in the host.

    * ZeRO-3: fp32 sums of the rank's part, which go to the device and back. Even the first one, which only replaces the
      sum, comes back (``partition_grads``).
    * ZeRO-2 in fp32 with several micro batches: whole parameters of which the rank has a part
      (``async_accumulate_grad_in_cpu_via_gpu``). In bf16 and fp16 it adds up on the device.
    """
    several = setup.gradient_accumulation_steps > 1
    if setup.recipe.zero_stage == 3:
        whole = FULL * stepped_elements(setup, rank)
    elif setup.precision == "fp32" and several:
        part = rank // setup.sizes.tensor % setup.zero_ranks
        whole = FULL * sum(group.touched(part) for group in flat_groups(setup.held(rank), setup.zero_ranks))
    else:
        return
    for number in range(setup.gradient_accumulation_steps):
        yield number, whole, whole if number or setup.recipe.zero_stage == 3 else 0


def _parameters(setup: Setup) -> Iterator[Copied]:
    """The rank's pieces of weights before every gather."""
    recipe = setup.recipe
    if recipe.offload_param == "none":
        return
    pieces = [sum(zero_piece(part, setup.zero_ranks) for part in parts) for parts in _of_passes(setup)]
    links = ("files", "host") if recipe.offload_param == "nvme" else ("host",)
    for number in range(setup.gradient_accumulation_steps):
        for moment, elements in zip((FORWARD, BACKWARD), pieces, strict=True):
            for link in links:
                size = setup.low * elements
                yield Copied(moment=moment, micro_batch=number, what="weights", link=link, to_device=True, size=size)


def _of_passes(setup: Setup) -> tuple[list[ParameterSize], list[ParameterSize]]:
    """What the forward pass gathers, and what the backward pass does."""
    forward = gathered_forward(setup)
    return forward, gathered(setup)[len(forward) :]

"""Where in an optimizer step a rank computes and sends: the passes in order, and the traffic of each of them.

The parts add up to ``step_traffic``. A pipeline runs its micro batches as DeepSpeed's ``TrainSchedule`` does: one
forward pass, then one backward pass in turn (1F1B, Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dsgpt.planning.communication import Traffic, step_traffic
from dsgpt.planning.gathering import gathered, gathered_forward
from dsgpt.planning.parameters import ParameterSize, model_parameters
from dsgpt.planning.setup import Setup
from dsgpt.planning.sharded import fsdp_elements, persistent, zero_piece

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

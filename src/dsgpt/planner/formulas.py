"""The formulas of a setup's strategy, and the model state, traffic, copies and passes of its ranks in order.

Traffic and copies have their places in the step. A pipeline runs its micro batches as DeepSpeed's ``TrainSchedule``
does: one forward pass, then one backward pass in turn (1F1B, Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
"""

from dataclasses import dataclass, replace

from dsgpt.planner.deepspeed_formulas import Bf16Optimizer, Zero0, Zero1, Zero2, Zero3
from dsgpt.planner.pytorch_formulas import BACKWARD, FORWARD, Baseline, Copied, Ddp, Fsdp, ModelState, Planned, Traffic
from dsgpt.planner.setup import Setup

_PYTORCH: dict[str, type[Planned]] = {"baseline": Baseline, "ddp": Ddp, "fsdp": Fsdp}
_ZERO: dict[int, type[Planned]] = {0: Zero0, 1: Zero1, 2: Zero2, 3: Zero3}


def strategy_of(setup: Setup) -> Planned:
    """The formulas of the setup's strategy. A new run type needs a class here."""
    if setup.run_type != "optimized":
        return _PYTORCH[setup.run_type](setup)
    return Bf16Optimizer(setup) if setup.uses_bf16_optimizer else _ZERO[setup.recipe.zero_stage](setup)


def model_state(setup: Setup, *, rank: int = 0) -> ModelState:
    """Model state of ``rank``, in bytes."""
    return strategy_of(setup).model_state(rank)


def largest_model_state(setup: Setup) -> ModelState:
    """Model state of the rank that has the most."""
    strategy = strategy_of(setup)
    return max(map(strategy.model_state, strategy.distinct_ranks), key=lambda state: state.total)


def step_traffic(setup: Setup, *, rank: int = 0) -> list[Traffic]:
    """Traffic of ``rank`` in one optimizer step, without groups of one rank, which send nothing."""
    every = strategy_of(setup).traffic(rank)
    return [traffic for traffic in every if traffic.group_size > 1 and traffic.payload_bytes]


def sent_bytes(setup: Setup, *, rank: int = 0) -> int:
    """Bytes that ``rank`` sends in one optimizer step."""
    return sum(traffic.ring_bytes for traffic in step_traffic(setup, rank=rank))


def most_sent_bytes(setup: Setup) -> int:
    """Bytes that the rank with the most traffic sends in one optimizer step."""
    return max(sent_bytes(setup, rank=rank) for rank in setup.first_ranks)


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
    """Number of the micro batch; None outside of passes."""
    traffic: Traffic
    """The traffic, with the payload of this place."""


def passes(setup: Setup, *, rank: int = 0) -> list[Pass]:
    """The passes of ``rank`` in one optimizer step, in order.

    A pipeline's stage begins with as many forward passes as stages follow it, and then alternates.
    """
    ahead = setup.micro_batches_in_flight(rank)
    order = [Pass(kind=FORWARD, micro_batch=number) for number in range(ahead)]
    for number in range(setup.gradient_accumulation_steps):
        order.append(Pass(kind=BACKWARD, micro_batch=number))
        if number + ahead < setup.gradient_accumulation_steps:
            order.append(Pass(kind=FORWARD, micro_batch=number + ahead))
    return order


def placed_traffic(setup: Setup, *, rank: int = 0) -> list[Placed]:
    """Traffic of ``rank`` with its place in the optimizer step; the parts add up to ``step_traffic``."""
    placed = []
    for traffic in step_traffic(setup, rank=rank):
        places = traffic.places(setup.gradient_accumulation_steps)
        whole = sum(places.values())
        for (moment, number), share in places.items():
            if share:
                there = replace(traffic, payload_bytes=traffic.payload_bytes * share // whole)
                placed.append(Placed(moment=moment, micro_batch=number, traffic=there))
    return placed


def copied(setup: Setup, *, rank: int = 0) -> list[Copied]:
    """Copies between device and host of ``rank`` in one optimizer step; empty without offload."""
    return [each for each in strategy_of(setup).copied(rank) if each.size]

"""Chooses the formulas of a setup, and answers what its ranks hold, compute, send and copy.

The passes of a step are in order, and traffic and copies stand at their places. A pipeline runs its micro batches as
DeepSpeed's ``TrainSchedule`` does: one forward pass, then one backward pass in turn (1F1B, Narayanan et al. 2021,
arXiv 2104.04473, section 2.2).
"""

from dataclasses import dataclass, replace

from dsgpt.planner.setup import Setup
from dsgpt.planner.strategy import BACKWARD, FORWARD, Baseline, Copied, Ddp, Fsdp, ModelState, Planned, Traffic
from dsgpt.planner.zero import Bf16Optimizer, Zero0, Zero1, Zero2
from dsgpt.planner.zero3 import Zero3

_PYTORCH: dict[str, type[Planned]] = {"baseline": Baseline, "ddp": Ddp, "fsdp": Fsdp}
_ZERO: dict[int, type[Planned]] = {0: Zero0, 1: Zero1, 2: Zero2, 3: Zero3}


def strategy_of(setup: Setup) -> Planned:
    """The formulas of the setup's strategy.

    Raises:
        ValueError: no class has formulas for its run type.
    """
    if setup.run_type != "optimized":
        if setup.run_type not in _PYTORCH:
            raise ValueError(f"run type {setup.run_type}: has no formulas: add a class to planner/strategies.py")
        return _PYTORCH[setup.run_type](setup)
    return Bf16Optimizer(setup) if setup.uses_bf16_optimizer else _ZERO[setup.recipe.zero_stage](setup)


def model_state(setup: Setup, *, rank: int = 0) -> ModelState:
    """The model state of ``rank``."""
    return strategy_of(setup).model_state(rank)


def largest_model_state(setup: Setup) -> ModelState:
    """The model state of the rank that has the most."""
    strategy = strategy_of(setup)
    return max(map(strategy.model_state, strategy.distinct_ranks), key=lambda state: state.total)


def step_traffic(setup: Setup, *, rank: int = 0) -> list[Traffic]:
    """What ``rank`` sends in one optimizer step. Groups of one rank send nothing and are left out."""
    found = strategy_of(setup).traffic(rank)
    return [traffic for traffic in found if traffic.group_size > 1 and traffic.payload_bytes]


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
    """None outside of passes."""
    traffic: Traffic
    """With the payload of this place."""


def passes(setup: Setup, *, rank: int = 0) -> list[Pass]:
    """The passes of ``rank`` in one optimizer step, in order.

    A pipeline's stage begins with as many forward passes as stages follow it, and then alternates.
    """
    ahead = setup.micro_batches_in_flight(rank)
    found = [Pass(kind=FORWARD, micro_batch=number) for number in range(ahead)]
    for number in range(setup.gradient_accumulation_steps):
        found.append(Pass(kind=BACKWARD, micro_batch=number))
        if number + ahead < setup.gradient_accumulation_steps:
            found.append(Pass(kind=FORWARD, micro_batch=number + ahead))
    return found


def placed_traffic(setup: Setup, *, rank: int = 0) -> list[Placed]:
    """What ``rank`` sends in one optimizer step, and where in it; the parts add up to ``step_traffic``."""
    found, strategy = [], strategy_of(setup)
    for traffic in step_traffic(setup, rank=rank):
        places = strategy.places(traffic, rank)
        whole = sum(places.values())
        for (moment, number), share in places.items():
            if share:
                there = replace(traffic, payload_bytes=traffic.payload_bytes * share // whole)
                found.append(Placed(moment=moment, micro_batch=number, traffic=there))
    return found


def copied(setup: Setup, *, rank: int = 0) -> list[Copied]:
    """What offload makes ``rank`` copy; nothing without offload."""
    return [each for each in strategy_of(setup).copied(rank) if each.size]

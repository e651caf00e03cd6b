"""Predicts the seconds of a step's collective operations, and which of them computation hides.

What overlaps on GPUs, by strategy:

* ``ddp``: gradients, with the backward pass of the last micro batch, except those of the embedding, which come last.
* ``fsdp``: weights of the next block and gradients of the previous one, with the computation of a block.
* ZeRO 1 and 2: gradients, with the backward pass, if ``overlap_comm`` is true; weights never.
* ZeRO 3: weights and gradients, if ``overlap_comm`` is true.
* ZeRO 0, tensor, sequence and pipeline parallelism: nothing.

On a CPU nothing overlaps: the thread that sends needs the core that computes.
"""

import math
from dataclasses import dataclass

from dsgpt.planning.communication import Traffic, gradient_width, step_traffic
from dsgpt.planning.gathering import gathered
from dsgpt.planning.parameters import EMBEDDING, model_parameters, total
from dsgpt.planning.rates import Rates, at_ranks
from dsgpt.planning.setup import FULL, Setup

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """Seconds of a step's communication."""

    once: float
    """That the step waits for, without the activations of a pipeline's stages."""
    per_micro_batch: float
    """Of activations, for each micro batch: they delay the other stages of a pipeline too."""
    hidden: float
    """That computation hides."""


def exposed_communication(
    setup: Setup, rates: Rates, *, rank: int, devices: int, overlaps: bool, forward: float, backward: float
) -> Exposed:
    """The communication of ``rank`` in one optimizer step.

    Args:
        setup: the training.
        rates: of the machine.
        rank: whose operations.
        devices: of one machine.
        overlaps: whether the device computes while it sends: GPUs do.
        forward: seconds that the rank computes in the forward pass of a micro batch.
        backward: the same for the backward pass.
    """
    once = per_micro_batch = hidden = 0.0
    for traffic in step_traffic(setup, rank=rank):
        seconds = _seconds(setup, rates, traffic, rank=rank, devices=devices)
        if traffic.what == "activations":
            per_micro_batch += seconds / setup.gradient_accumulation_steps
            continue
        behind = _hidden(setup, traffic, seconds, forward=forward, backward=backward) if overlaps else 0.0
        hidden += behind
        once += seconds - behind
    return Exposed(once=once, per_micro_batch=per_micro_batch, hidden=hidden)


def overlap_in_words(setup: Setup, *, overlaps: bool) -> str:
    """What the prediction hides behind computation."""
    zero = setup.recipe.zero_optimization
    if not overlaps:
        return "nothing overlaps: on a CPU, sending needs the core that computes"
    if setup.run_type == "ddp":
        return "gradients overlap with the backward pass of the last micro batch, except the embedding's"
    if setup.run_type == "fsdp":
        return "weights and gradients overlap with the computation of blocks"
    if setup.run_type == "optimized" and zero.overlap_comm and zero.stage in {1, 2}:
        return "gradients overlap with the backward pass (overlap_comm); weights do not"
    if setup.run_type == "optimized" and zero.overlap_comm and zero.stage == 3:
        return "weights and gradients overlap with computation (overlap_comm)"
    return "nothing overlaps"


def can_overlap(setup: Setup, traffic: Traffic) -> bool:
    """Whether ``traffic`` is sent while the device computes, on a device that can do both: GPUs."""
    if setup.run_type != "optimized":
        return True
    zero = setup.recipe.zero_optimization
    if not zero.overlap_comm or traffic.axis != "data":
        return False
    return zero.stage == 3 or (zero.stage in {1, 2} and traffic.what == "gradients")


def _hidden(setup: Setup, traffic: Traffic, seconds: float, *, forward: float, backward: float) -> float:
    """Seconds of ``traffic`` that computation hides."""
    if not can_overlap(setup, traffic):
        return 0.0
    stage, micro_batches = setup.recipe.zero_stage, setup.gradient_accumulation_steps
    blocks = setup.model.n_layer / (setup.model.n_layer + 1)  # one of the pieces is the embedding's
    if setup.run_type == "ddp":
        last = next(part.numel for part in model_parameters(setup.model) if part.name == EMBEDDING)
        share = 1 - last / total(model_parameters(setup.model))
        return min(seconds * share, backward)
    if setup.run_type == "fsdp":
        computing = (forward + backward) * micro_batches / 2 if traffic.what == "weights" else backward
        return min(seconds * blocks, computing)
    if stage == 3:
        return min(seconds * blocks, (forward + backward) * micro_batches / 2)
    return min(seconds * blocks, backward * (micro_batches if stage == 2 else 1))


def _seconds(setup: Setup, rates: Rates, traffic: Traffic, *, rank: int, devices: int) -> float:
    """The time to send all of ``traffic`` in a ring, and to begin each of its operations."""
    rate = bus_rate(setup, rates, traffic, devices=devices)
    begun = calls(setup, traffic, rank=rank) * at_ranks(rates.collective_sec, traffic.group_size)
    precision = "fp32" if traffic.summed_width == FULL else setup.precision
    return rates.slowness_of(traffic.operation, precision) * traffic.ring_bytes / rate + begun


def bus_rate(setup: Setup, rates: Rates, traffic: Traffic, *, devices: int) -> float:
    """Bytes that a rank sends per second in this group.

    A ring over several machines passes their network once for each group that has ranks on the same machines. Machines
    take the ranks in turn. Stages follow each other, so on several machines some neighbours, and the first and the last
    stage, are on two of them, and all stages wait for those.
    """
    sizes = setup.sizes
    stride = {"data": sizes.tensor, "sequence": sizes.tensor, "tensor": 1}.get(
        traffic.axis, setup.world_size // sizes.pipeline
    )
    inside = at_ranks(rates.bus, traffic.group_size)
    shared = traffic.axis != "pipeline" and devices % (stride * traffic.group_size) == 0
    if shared or setup.world_size <= devices:
        return inside
    return min(inside, rates.network / min(stride, devices))


def calls(setup: Setup, traffic: Traffic, *, rank: int) -> int:
    """Collective operations in a step that send ``traffic``."""
    micro_batches, blocks = setup.gradient_accumulation_steps, setup.blocks(rank)
    if traffic.what == "activations":
        again = setup.activation_checkpointing
        each = {"tensor": (4 + again) * blocks, "sequence": (8 + 4 * again) * blocks, "pipeline": 2}[traffic.axis]
        return each * micro_batches
    if traffic.axis == "pipeline":
        return 1
    if setup.run_type == "ddp":
        return math.ceil(traffic.payload_bytes / (setup.recipe.dsgpt.ddp.bucket_cap_mb * MIB))
    if setup.run_type == "fsdp":
        times = 2 * micro_batches if setup.recipe.dsgpt.fsdp.reshard_after_forward and traffic.what == "weights" else 1
        return times * blocks + 1
    return _zero_calls(setup, traffic)


def _zero_calls(setup: Setup, traffic: Traffic) -> int:
    """With the recipe's bucket: a smaller one that holds all gradients sends no more messages."""
    zero, micro_batches = setup.recipe.zero_optimization, setup.gradient_accumulation_steps
    if traffic.what == "weights":
        return micro_batches * len(gathered(setup)) // 2 + 1 if zero.stage == 3 else 2
    times = micro_batches if zero.stage >= 2 else 1
    return times + math.ceil(traffic.payload_bytes / (gradient_width(setup) * zero.reduce_bucket_size))

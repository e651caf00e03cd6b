"""Predicts the seconds of an optimizer step and of a whole training.

Predicts the seconds of a step's collective operations, and which of them computation hides. What overlaps on GPUs, by
strategy:

* ``ddp``: gradients, with the backward pass of the last micro batch, except those of the embedding, which come last.
* ``fsdp``: weights of the next block and gradients of the previous one, with the computation of a block.
* ZeRO 1 and 2: gradients, with the backward pass, if ``overlap_comm`` is true; weights never.
* ZeRO 3: weights and gradients, if ``overlap_comm`` is true.
* ZeRO 0, tensor, sequence and pipeline parallelism: nothing.

On a CPU nothing overlaps: the thread that sends needs the core that computes.

Predicts the seconds of an optimizer step: a roofline of every operation, from the rates of a machine. Each block, the
head with its loss, each collective operation, and the optimizer take the time of their FLOPs and bytes at the
machine's rates, plus a constant for every operation. ``dsgpt.planner.step_time`` says which communication overlaps
with computation. In a pipeline of p stages and m micro batches, a step takes m + p - 1 times as long as the slowest
stage needs for one micro batch. The other p - 1 are the bubble (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
``--compile`` is not modelled.
"""

import math
from dataclasses import dataclass
from enum import Enum

from dsgpt.planner.rates import Machine, Rates, at_ranks
from dsgpt.planner.setup import FULL, Setup, model_parameters, total
from dsgpt.planner.strategies import copied, step_traffic, strategy_of
from dsgpt.planner.strategy import Traffic
from dsgpt.planner.work import (
    OpCounts,
    block_backward,
    block_forward,
    embedding,
    head_and_loss,
    validation_forward,
)


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
    strategy = strategy_of(setup)
    for traffic in step_traffic(setup, rank=rank):
        seconds = _seconds(setup, rates, traffic, rank=rank, devices=devices)
        if traffic.what == "activations":
            per_micro_batch += seconds / setup.gradient_accumulation_steps
            continue
        hides = overlaps and strategy.can_overlap(traffic)
        behind = strategy.hidden(traffic, seconds, forward=forward, backward=backward) if hides else 0.0
        hidden += behind
        once += seconds - behind
    return Exposed(once=once, per_micro_batch=per_micro_batch, hidden=hidden)


def _seconds(setup: Setup, rates: Rates, traffic: Traffic, *, rank: int, devices: int) -> float:
    """The time to send all of ``traffic`` in a ring, and to begin each of its operations."""
    rate = bus_rate(setup, rates, traffic, devices=devices)
    begun = strategy_of(setup).calls(traffic, rank) * at_ranks(rates.collective_sec, traffic.group_size)
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


_ASSUMED_OPERATION_SEC = 4e-6
"""Seconds of each of them on the host of a GPU: as on a CPU. Nobody measured it; see ``Hooks``."""


class Hooks(Enum):
    """How much of the time of ZeRO-3's hooks a step on GPUs takes, which nobody measured."""

    HIDDEN = "the GPU always has enough to do"
    BESIDE = "the host runs ahead of the GPU until it is the slower one: a step takes the longer time of the two"
    ADDED = "the GPU waits for every hook"


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of one optimizer step."""

    parts: dict[str, float]
    """Seconds by what they are; they add up to ``seconds``."""
    least: float
    """Seconds at the fastest rates that the machine may have."""
    most: float
    """Seconds at the slowest."""
    hidden: float
    """Seconds of communication that computation hides; not in ``parts``."""
    validation_micro_batch: float
    """Seconds to validate on one micro batch."""
    overlap: str
    """What overlaps, in words."""
    assumed: bool
    """Whether the rates are assumed, not measured."""

    @property
    def seconds(self) -> float:
        """The likely time."""
        return sum(self.parts.values())

    @property
    def low(self) -> float:
        """``least``."""
        return self.least

    @property
    def high(self) -> float:
        """``most``."""
        return self.most


def predict_step(setup: Setup, machine: Machine) -> StepTime:
    """The time of a step on ``machine``, whose rates must have the setup's precision."""
    overlaps = machine.kind != "cpu"
    likely = _slowest_stage(setup, machine.rates, machine, Hooks.BESIDE)
    host, overlap = _host_seconds(setup, machine), strategy_of(setup).overlap_in_words
    if not overlaps:
        overlap = "nothing overlaps: on a CPU, sending needs the core that computes"
    if host:
        overlap += f"; the host needs {host:.2g} s for ZeRO-3's hooks (assumed) beside the GPU, and may delay it"
    return StepTime(
        parts=likely.parts,
        least=sum(_slowest_stage(setup, machine.fastest, machine, Hooks.HIDDEN).parts.values()),
        most=sum(_slowest_stage(setup, machine.slowest, machine, Hooks.ADDED).parts.values()),
        hidden=likely.hidden,
        validation_micro_batch=likely.validation,
        overlap=overlap,
        assumed=machine.assumed,
    )


def bubble_fraction(stages: int, micro_batches: int) -> float:
    """The share of a step in which a stage waits for the others: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (micro_batches + stages - 1)


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """The step of one rank."""

    parts: dict[str, float]
    hidden: float
    validation: float


def _slowest_stage(setup: Setup, rates: Rates, machine: Machine, hooks: Hooks) -> _Rank:
    ranks = [_rank(setup, rates, machine, rank, hooks) for rank in setup.first_ranks]
    return max(ranks, key=lambda rank: sum(rank.parts.values()))


def _rank(setup: Setup, rates: Rates, machine: Machine, rank: int, hooks: Hooks) -> _Rank:
    """The step of ``rank``, as if the other stages of its pipeline were not slower."""
    micro_batches, stages, strategy = setup.gradient_accumulation_steps, setup.sizes.pipeline, strategy_of(setup)
    work = _micro_batch(setup, rank, kind=machine.kind)
    seconds = {name: each.seconds(rates, setup) for name, each in work.items()}
    sent = exposed_communication(
        setup,
        rates,
        rank=rank,
        devices=machine.devices,
        overlaps=machine.kind != "cpu",
        forward=seconds["forward"],
        backward=seconds["backward"] + seconds["recomputation"],
    )
    found = {name: micro_batches * each for name, each in seconds.items()}
    found["gradients"] = strategy.gradient_bytes(rank, kind=machine.kind) / rates.memory
    if machine.kind == "cpu":
        found["gradients"] += strategy.low_arithmetic_bytes(rank) / rates.elementwise[setup.precision]
    found["norm and clipping"] = strategy.norm_bytes(rank) / rates.memory
    on_host = rates.host_memory if strategy.steps_on_host else rates.memory  # with offload the host steps
    found["optimizer"] = strategy.optimizer_bytes(rank) / on_host
    found["offload"] = _offload(setup, rates, machine, rank)
    found["communication"] = sent.once + micro_batches * sent.per_micro_batch
    found["bubble"] = (stages - 1) * (sum(seconds.values()) + sent.per_micro_batch)
    if host := _host_seconds(setup, machine):
        passes = sum(found[name] for name in (*seconds, "communication"))
        found["hooks"] = {Hooks.HIDDEN: 0.0, Hooks.BESIDE: max(0.0, host - passes), Hooks.ADDED: host}[hooks]
    validation = validation_forward(setup, setup.blocks(rank), kind=machine.kind).seconds(rates, setup)
    return _Rank(
        parts={name: each for name, each in found.items() if each},
        hidden=sent.hidden,
        validation=validation + sent.per_micro_batch / 3,
    )


def _micro_batch(setup: Setup, rank: int, *, kind: str) -> dict[str, OpCounts]:
    """The work of one micro batch."""
    blocks, stage, last = setup.blocks(rank), setup.stage(rank), setup.sizes.pipeline - 1
    strategy = strategy_of(setup)
    per_tensor = strategy.operations_per_tensor * len(setup.parameters(rank))
    hooks = strategy.hook_operations if kind == "cpu" else 0
    ends = (stage == 0) + (stage == last)
    embeddings = embedding(setup).times(ends / 4)
    return {
        "forward": block_forward(setup).times(blocks) + embeddings,
        "backward": block_backward(setup).times(blocks) + embeddings + OpCounts(kernels=per_tensor),
        "hooks": OpCounts(kernels=hooks),
        "recomputation": block_forward(setup).times(blocks if setup.activation_checkpointing else 0),
        "head and loss": head_and_loss(setup, kind=kind) if stage == last else OpCounts(),
    }


def _host_seconds(setup: Setup, machine: Machine) -> float:
    """Of ZeRO-3's hooks in a step, on the host of a GPU."""
    if machine.kind == "cpu":
        return 0.0
    return strategy_of(setup).hook_operations * setup.gradient_accumulation_steps * _ASSUMED_OPERATION_SEC


def _offload(setup: Setup, rates: Rates, machine: Machine, rank: int) -> float:
    """Gradients to the host, new weights back, weights of every gather, and moments and weights through files."""
    found = copied(setup, rank=rank)
    linked, filed = (sum(each.size for each in found if each.link == link) for link in ("host", "files"))
    return linked / rates.host_link + filed * min(machine.devices, setup.world_size) / rates.disk


# Predicts the time of a whole training: its steps, validations, checkpoints and start.

START_SEC = 60.0
"""Assumed seconds until the first step: launcher, imports, process group, compiled operations."""


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long a training is."""

    tokens: float
    """Of the whole training."""
    eval_every: int = 0
    """Steps between validations; there is one at the end in any case."""
    val_tokens: float = 0.0
    """Of a validation; 0 leaves validations out."""
    save_every: int = 0
    """Steps between checkpoints; there is one at the end in any case."""


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """Seconds of a training by what they are, at the likely rates; and all of them at the fastest and the slowest."""

    steps: int
    """Optimizer steps."""
    parts: dict[str, float]
    """``steps``, ``validation``, ``checkpoints`` and ``start``."""
    least: float
    most: float

    @property
    def seconds(self) -> float:
        """The likely time."""
        return sum(self.parts.values())


def run_time(setup: Setup, machine: Machine, step: StepTime, length: Length) -> RunTime:
    """The time of a training whose steps take ``step``."""
    global_batch = setup.micro_batch_size * setup.gradient_accumulation_steps * setup.data_parallel_size
    steps = max(1, math.floor(length.tokens / (global_batch * setup.seq_length)))
    validations = _times(steps, length.eval_every) if length.val_tokens else 0
    saves = _times(steps, length.save_every)
    validation = validations * _validation_micro_batches(setup, length) * step.validation_micro_batch
    written = checkpoint_bytes(setup)
    parts = {
        "steps": steps * step.seconds,
        "validation": validation,
        "checkpoints": saves * written / machine.rates.disk,
        "start": START_SEC,
    }

    def bounded(step_seconds: float, disk: float) -> float:
        return steps * step_seconds + validation * step_seconds / step.seconds + saves * written / disk + START_SEC

    return RunTime(
        steps=steps,
        parts={name: seconds for name, seconds in parts.items() if seconds},
        least=bounded(step.least, machine.fastest.disk),
        most=bounded(step.most, machine.slowest.disk),
    )


def _times(steps: int, every: int) -> int:
    """How often something happens that is done every so many steps, and after the last one in any case."""
    return math.ceil(steps / every) if every else 1


def checkpoint_bytes(setup: Setup) -> int:
    """Bytes of a checkpoint: the weights and the optimizer's moments in fp32, written by one process."""
    return FULL * (1 + setup.moments) * total(model_parameters(setup.model))


def _validation_micro_batches(setup: Setup, length: Length) -> float:
    """Micro batches that a rank validates on, the bubble of a pipeline included."""
    own = length.val_tokens / (setup.data_parallel_size * setup.micro_batch_size * setup.seq_length)
    return own + setup.sizes.pipeline - 1

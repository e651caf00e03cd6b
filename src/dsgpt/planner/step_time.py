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
from dsgpt.planner.setup import EMBEDDING, FULL, Setup, model_parameters, total
from dsgpt.planner.step_order import copied
from dsgpt.planner.traffic import Traffic, gathered, gradient_width, step_traffic
from dsgpt.planner.work import (
    Work,
    block_backward,
    block_forward,
    embedding,
    gradient_bytes,
    head_and_loss,
    low_arithmetic_bytes,
    norm_bytes,
    optimizer_bytes,
    validation_forward,
)

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


_PER_TENSOR = {"baseline": 1, "ddp": 2, "fsdp": 4, "optimized": 8}
"""Operations for each parameter in a micro batch beside its products: hooks, casts, copies to buckets."""
_ZERO3_OPERATIONS = 100
"""Operations for each parameter in each pass over the blocks under ZeRO-3: its hooks look up, gather, wait for and
release parameters in Python. On a CPU nothing else runs."""
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
    overlap, host = overlap_in_words(setup, overlaps=overlaps), _host_seconds(setup, machine)
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
    micro_batches, stages = setup.gradient_accumulation_steps, setup.sizes.pipeline
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
    found["gradients"] = gradient_bytes(setup, rank, kind=machine.kind) / rates.memory
    low = low_arithmetic_bytes(setup, rank, kind=machine.kind)
    found["gradients"] += low / rates.elementwise[setup.precision]
    found["norm and clipping"] = norm_bytes(setup, rank) / rates.memory
    found["optimizer"] = _optimizer(setup, rates, rank)
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


def _micro_batch(setup: Setup, rank: int, *, kind: str) -> dict[str, Work]:
    """The work of one micro batch."""
    blocks, stage, last = setup.blocks(rank), setup.stage(rank), setup.sizes.pipeline - 1
    held = len(setup.held(rank))
    per_tensor = _PER_TENSOR[setup.run_type] * held
    hooks = _zero3_operations(setup) if kind == "cpu" else 0
    ends = (stage == 0) + (stage == last)
    return {
        "forward": block_forward(setup).times(blocks) + embedding(setup).times(ends / 4),
        "backward": block_backward(setup).times(blocks) + embedding(setup).times(ends / 4) + Work(kernels=per_tensor),
        "hooks": Work(kernels=hooks),
        "recomputation": block_forward(setup).times(blocks if setup.activation_checkpointing else 0),
        "head and loss": head_and_loss(setup, kind=kind) if stage == last else Work(),
    }


def _zero3_operations(setup: Setup) -> int:
    """Of the hooks of ZeRO-3 in a micro batch; else 0."""
    if setup.run_type != "optimized" or setup.recipe.zero_stage != 3:
        return 0
    return _ZERO3_OPERATIONS * (3 if setup.activation_checkpointing else 2) * len(setup.held(0))


def _host_seconds(setup: Setup, machine: Machine) -> float:
    """Of ZeRO-3's hooks in a step, on the host of a GPU."""
    if machine.kind == "cpu":
        return 0.0
    return _zero3_operations(setup) * setup.gradient_accumulation_steps * _ASSUMED_OPERATION_SEC


def _optimizer(setup: Setup, rates: Rates, rank: int) -> float:
    """The optimizer's step; with offload the host does it."""
    on_host = setup.recipe.dsgpt.fsdp.cpu_offload if setup.run_type == "fsdp" else _offloads(setup)
    return optimizer_bytes(setup, rank) / (rates.host_memory if on_host else rates.memory)


def _offloads(setup: Setup) -> bool:
    return setup.run_type == "optimized" and setup.recipe.offload_optimizer != "none"


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

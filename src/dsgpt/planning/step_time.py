"""Predicts the seconds of an optimizer step: a roofline of every operation, from the rates of a machine.

Each block, the head with its loss, each collective operation, and the optimizer take the time of their FLOPs and bytes
at the machine's rates, plus a constant for every operation. ``dsgpt.planning.transfers`` says which communication
overlaps with computation. In a pipeline of p stages and m micro batches, a step takes m + p - 1 times as long as the
slowest stage needs for one micro batch: the other p - 1 are the bubble (Narayanan et al. 2021, arXiv 2104.04473,
section 2.2). ``--compile`` is not modelled.
"""

from dataclasses import dataclass
from enum import Enum

from dsgpt.planning.host_link import copied
from dsgpt.planning.passes import gradient_bytes, low_arithmetic_bytes, norm_bytes, optimizer_bytes
from dsgpt.planning.rates import Machine, Rates
from dsgpt.planning.setup import Setup
from dsgpt.planning.transfers import exposed_communication, overlap_in_words
from dsgpt.planning.work import Work, block_backward, block_forward, embedding, head_and_loss, validation_forward

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

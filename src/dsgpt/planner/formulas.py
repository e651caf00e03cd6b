"""The formulas of a setup's strategy, what its ranks hold, send and do in a step, and the most memory that one needs.

Traffic and copies have their places in the step. A pipeline runs its micro batches as DeepSpeed's ``TrainSchedule``
does: one forward pass, then one backward pass in turn (1F1B, Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

A step has moments at which memory can be highest: the loss, the beginning and the end of the backward pass, the
reduction of gradients, the optimizer's step. The peak of a step is the largest of them, in a step after the first. A
training also starts, saves and evaluates. The strategy says what exists then besides model state and activations.

Activations are what a forward pass keeps, what the loss needs, what a backward pass adds. For a block without dropout,
they are in units of the residual stream (B, T, C) of a rank, with T tensor peers. The outputs of both LayerNorms, of
the attention's residual sum and of the block are 1 each. Queries, keys and values are 3/T, the attention's output 1/T,
the MLP's inner layer before and after GELU 4/T each: 4 + 12/T. Those are the 16 numbers of Korthikanti et al. 2022
(arXiv 2205.05198, section 4.1), whose 34 bytes are 16 numbers in 16 bits and two dropout masks. Their quadratic term
does not exist: fused attention keeps one number per token and head of its scores.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from dsgpt.planner import pytorch_formulas
from dsgpt.planner.deepspeed_formulas import Bf16Optimizer, Zero0, Zero1, Zero2, Zero3
from dsgpt.planner.pytorch_formulas import Baseline, Ddp, Fsdp, Planned
from dsgpt.planner.setup import FULL, Setup

_PYTORCH: dict[str, type[Planned]] = {"baseline": Baseline, "ddp": Ddp, "fsdp": Fsdp}
_ZERO: dict[int, type[Planned]] = {0: Zero0, 1: Zero1, 2: Zero2, 3: Zero3}


def strategy_of(setup: Setup) -> Planned:
    """The formulas of the setup's strategy. A new run type needs a class here."""
    if setup.run_type != "optimized":
        return _PYTORCH[setup.run_type](setup)
    return Bf16Optimizer(setup) if setup.uses_bf16_optimizer else _ZERO[setup.recipe.zero_stage](setup)


def model_state(setup: Setup, *, rank: int = 0) -> pytorch_formulas.ModelState:
    """Model state of ``rank``, in bytes."""
    return strategy_of(setup).model_state(rank)


def largest_model_state(setup: Setup) -> pytorch_formulas.ModelState:
    """Model state of the rank that has the most."""
    strategy = strategy_of(setup)
    return max(map(strategy.model_state, strategy.distinct_ranks), key=lambda state: state.total)


def step_traffic(setup: Setup, *, rank: int = 0) -> list[pytorch_formulas.Traffic]:
    """Traffic of ``rank`` in one optimizer step, without groups of one rank, which send nothing."""
    known: dict[int, list[pytorch_formulas.Traffic]] = setup.computed
    if rank not in known:
        every = strategy_of(setup).traffic(rank)
        known[rank] = [traffic for traffic in every if traffic.group_size > 1 and traffic.payload_bytes]
    return known[rank]


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
    traffic: pytorch_formulas.Traffic
    """The traffic, with the payload of this place."""


def passes(setup: Setup, *, rank: int = 0) -> list[Pass]:
    """The passes of ``rank`` in one optimizer step, in order.

    A pipeline's stage begins with as many forward passes as stages follow it, and then alternates.
    """
    ahead = setup.micro_batches_in_flight(rank)
    order = [Pass(kind=pytorch_formulas.FORWARD, micro_batch=number) for number in range(ahead)]
    for number in range(setup.gradient_accumulation_steps):
        order.append(Pass(kind=pytorch_formulas.BACKWARD, micro_batch=number))
        if number + ahead < setup.gradient_accumulation_steps:
            order.append(Pass(kind=pytorch_formulas.FORWARD, micro_batch=number + ahead))
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


def copied(setup: Setup, *, rank: int = 0) -> list[pytorch_formulas.Copied]:
    """Copies between device and host of ``rank`` in one optimizer step; empty without offload."""
    return [each for each in strategy_of(setup).copied(rank) if each.size]


FIXED_BYTES = {"cuda": 600_000_000, "cpu": 700_000_000}
"""Bytes of a device that no tensor can fill: CUDA's context and NCCL's buffers; the process without tensors."""
HOST_SHARE = 0.8
"""Share of a host's memory that offload can fill, beside processes, data and the cache of its files."""

# The most tensor memory that a rank needs in a training, or in a step of it, and what it is made of.

STEP = ("forward", "loss", "backward", "reduction", "step")
"""The moments of a training step."""
EVALUATION = "evaluation"
MOMENTS = ("start", *STEP, "save", EVALUATION)
"""Moments of a training."""


PARTS = (
    *("weights", "master", "optimizer", "gradients", "new_gradients"),
    *("gathered", "buckets", "activations", "logits", "other"),
)
"""Parts of a peak; ``docs/records.md`` describes each."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment with the most memory."""

    moment: str
    """Name of the moment, one of ``MOMENTS``."""
    parts: dict[str, int]
    """Bytes of each of ``PARTS``."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self.parts.values())

    def as_dict(self) -> dict[str, Any]:
        """The peak as records have it."""
        return {"moment": self.moment, "parts": self.parts, "total": self.total}


def peak_memory(setup: Setup, *, rank: int = 0, device: str = "cpu", among: Collection[str] = MOMENTS) -> Peak:
    """The moment at which ``rank`` needs the most memory of its device.

    Args:
        setup: the training.
        rank: of all ranks.
        device: ``cpu``, where offloaded state is in the same memory, or ``cuda``.
        among: the moments that count; ``STEP`` for the peak of a training step.
    """
    strategy = strategy_of(setup)
    state, moments = strategy.model_state(rank), strategy.moments(rank, device)
    away = {} if device == "cpu" else state.off_device
    resident = {  # all the time, as gradients are not
        "weights": state.parameters - away.get("parameters", 0),
        "optimizer": state.optimizer - away.get("optimizer", 0),
        "master": state.master - away.get("master", 0),
    }
    evaluation = next(moment for moment in moments if moment.name == EVALUATION)
    start = pytorch_formulas.Moment(name="start", parts={"other": strategy.start_bytes(rank, device)})
    save = pytorch_formulas.Moment(name="save", parts={**evaluation.parts, "gathered": 0})
    peaks = [
        Peak(moment=moment.name, parts=dict.fromkeys(PARTS, 0) | resident | _transient(setup, moment, rank, device))
        for moment in [start, *moments, save]
        if moment.name in among and (moment.name != "loss" or setup.computes_loss(rank))
    ]
    return max(peaks, key=lambda peak: peak.total)


def worst_peak(setup: Setup, *, device: str = "cpu", among: Collection[str] = MOMENTS) -> tuple[int, Peak]:
    """The rank that needs the most memory, and its peak."""
    ranks = strategy_of(setup).distinct_ranks
    peaks = {rank: peak_memory(setup, rank=rank, device=device, among=among) for rank in ranks}
    return max(peaks.items(), key=lambda each: each[1].total)


def _transient(setup: Setup, moment: pytorch_formulas.Moment, rank: int, device: str) -> dict[str, int]:
    """The parts of a moment besides model state."""
    parts, stream, activations = dict(moment.parts), stream_bytes(setup), 0
    if moment.name == "start":
        return parts | {"optimizer": 0}
    if setup.sizes.pipeline > 1:
        activations += stream * (3 if setup.stage(rank) else 1)  # received activations, and gradients
        parts["logits"] = kept_logits_bytes(setup) if setup.computes_loss(rank) else 0
    if moment.name in {"step", "save"}:
        return parts | {"activations": activations}
    # what the forward pass keeps of each block, with ids and the embedding's output
    of_block = int(setup.checkpoints_kept * stream) if setup.activation_checkpointing else block_bytes(setup)
    passed = stream + moment.blocks * of_block + 2 * _ID * setup.tokens
    activations += passed * (setup.micro_batches_in_flight(rank) if moment.blocks else 1)
    if moment.name == "forward":
        parts["activations"] = activations + block_gradient_bytes(setup)
    elif moment.name == EVALUATION:
        parts["activations"] = activations + 2 * stream
        parts["logits"] = logits_bytes(setup, device=device, gradients=False) if setup.computes_loss(rank) else 0
    elif moment.name == "loss":
        parts["activations"] = activations + 2 * stream  # the last LayerNorm's output and its gradient
        parts["logits"] = logits_bytes(setup, device=device)
        if not plain_loss(setup):  # the gradient of the head, in fp32 if those of several chunks are added up
            width = FULL if _rows(setup, device) < setup.tokens else setup.low
            parts["new_gradients"] = parts.get("new_gradients", 0) + width * setup.embedding_elements
    else:
        # of a block that is recomputed not its output; and that of the last block has been freed by then
        recomputed = block_bytes(setup) - 2 * stream if setup.activation_checkpointing else 0
        parts["activations"] = activations + stream + recomputed + block_gradient_bytes(setup)
        if setup.kernels == "eager":  # whose forward pass returns the logits
            parts["logits"] = setup.low * setup.tokens * setup.logits
    return parts


# Activations.

CHUNK = {"cpu": 32 << 20, "cuda": 256 << 20}
"""``model.linear_cross_entropy.CHUNKS``: most logits at a time. A test holds them together."""
CACHED = 256 << 10
"""``model.linear_cross_entropy.CACHED``: most logits in a step of the softmax on a CPU."""
_ID = 8
"""Bytes of a token id."""
_EAGER = 12 + 3
"""Streams that Hugging Face's GPT-2 keeps more: those between the operations of GELU, its factors, tanh and sum; keys,
values and queries once more, which wait as a cache for generation."""
_MOMENTS = 2
"""Numbers that a LayerNorm keeps per token: mean and inverse deviation."""


def stream_bytes(setup: Setup) -> int:
    """One residual stream of a micro batch, (B, T, C), in the precision of the activations."""
    return setup.low * setup.tokens * setup.model.n_embd


def block_bytes(setup: Setup) -> int:
    """Bytes that the forward pass of a block keeps, its output included."""
    stream, tensor = stream_bytes(setup), setup.sizes.tensor
    split = 12 + (1 if setup.sizes.sequence > 1 else 0)  # the output before all-to-all; other copies replace theirs
    if setup.selective:  # the sums, the result of attention, half of what products put out
        return 2 * stream + (2 * stream + 7 * stream // 2) // tensor
    statistics = FULL * setup.tokens * (2 * _MOMENTS + setup.model.n_head // tensor)  # the softmax has one per head
    scores = int((2 * setup.low + 1) * setup.scores)  # of the softmax and of dropout, and its mask
    separate = 0
    if setup.kernels == "eager":
        separate = _EAGER * stream // tensor
        if setup.precision == "fp16" and setup.run_type != "optimized":  # autocast: powers, softmax and sums in fp32
            separate += separate + 2 * stream + setup.low * setup.scores
    return 4 * stream + split * stream // tensor + statistics + scores + separate


def block_gradient_bytes(setup: Setup) -> int:
    """The most that a block's backward pass adds: the gradient of the MLP's inner layer."""
    return 4 * stream_bytes(setup) // setup.sizes.tensor


def logits_bytes(setup: Setup, *, device: str, gradients: bool = True) -> int:
    """The logits of a chunk and the steps of its softmax, with their ``gradients`` or without.

    Without chunks: the softmax of all tokens, its gradient and that of the loss, in fp32; and in a pipeline, which
    keeps what its last stage put out, the logits of two micro batches. A GPU casts a chunk in bf16 to fp32 before its
    softmax, of which it makes a second one; only for fp16 has PyTorch one operation (``log_softmax`` in ATen).
    """
    vocabulary = setup.logits
    if plain_loss(setup):
        copies = 3 if gradients and not setup.fused_adam else 2  # Megatron computes the gradient in the softmax's place
        return copies * FULL * setup.tokens * vocabulary + kept_logits_bytes(setup)
    rows = _rows(setup, device)
    if device == "cuda":
        softmax = FULL * (1 + (setup.low != FULL)) * rows * vocabulary
    else:
        step = max(1, CACHED // vocabulary)
        copies = 1 + (rows > step) + (setup.low != FULL)  # of this step, the one before, and the cast to fp32
        softmax = FULL * copies * min(rows, step) * vocabulary
    return max(setup.low * rows * vocabulary + softmax, _product_bytes(setup, device) if gradients else 0)


def kept_logits_bytes(setup: Setup) -> int:
    """Logits that the last stage of a pipeline keeps all the time."""
    return 2 * setup.low * setup.tokens * setup.logits if setup.sizes.pipeline > 1 else 0


def _product_bytes(setup: Setup, device: str) -> int:
    """A chunk's logits and its part of the head's gradient, in the low precision, which is added to the sum in fp32.

    On a CPU the part is cast to fp32 first, except the first one, which is copied.
    """
    rows, head = _rows(setup, device), setup.logits * setup.model.n_embd
    if setup.low == FULL or rows == setup.tokens:
        return 0
    later = min(rows, setup.tokens - rows)
    vocabulary, cast = setup.logits, FULL * head if device == "cpu" else 0
    return setup.low * head + max(setup.low * rows * vocabulary, setup.low * later * vocabulary + cast)


def plain_loss(setup: Setup) -> bool:
    """Whether the loss is PyTorch's cross-entropy of all logits."""
    return setup.precision == "fp16" or setup.sizes.pipeline > 1


def _rows(setup: Setup, device: str) -> int:
    return min(setup.tokens, max(1, CHUNK[device] * setup.sizes.tensor // setup.model.vocab_size))

"""Predicts the most tensor memory that a rank needs, from the moments at which it can be highest.

The moments of a training at which a rank's memory can be highest, for every strategy. A moment names what exists
besides model state and activations: gradients, buckets, gathered weights. Letters: P elements of a rank's parameters,
E those of the embedding, w bytes of a number in the precision of the activations.

Predicts the most tensor memory that a rank needs in a training, or in a step of it, and what it is made of. A step has
moments at which memory can be highest: the loss, the beginning and the end of the backward pass, the reduction of
gradients, the optimizer's step. The peak of a step is the largest of them, in a step after the first. A training also
starts, saves and evaluates.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from dsgpt.planner.model_state import model_state
from dsgpt.planner.setup import (
    EMBEDDING,
    FULL,
    ParameterSize,
    Setup,
    Shards,
    flat_groups,
    fsdp_elements,
    model_parameters,
    parts,
    total,
)
from dsgpt.planner.traffic import gathered, most_gathered
from dsgpt.planner.work import (
    block_gradient_bytes,
    head_gradient_bytes,
    kept_bytes,
    kept_logits_bytes,
    logits_bytes,
    recomputed_bytes,
    stream_bytes,
)

STEP = ("forward", "loss", "backward", "reduction", "step")
"""The moments of a training step."""
EVALUATION = "evaluation"
MOMENTS = ("start", *STEP, "save", EVALUATION)
"""Those of a training."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A moment of a training."""

    name: str
    """One of ``MOMENTS``."""
    blocks: int = 0
    """How many blocks have activations."""
    parts: Mapping[str, int]
    """Bytes by the names of ``peak_memory.PARTS``."""


def embedding_bytes(setup: Setup) -> int:
    """wE: the gradient of the embedding, dense for the lookup too, in the precision of the activations."""
    return setup.low * setup.model.padded_vocab_size * setup.model.n_embd


def bucket_bytes(setup: Setup, width: int) -> int:
    """DeepSpeed's buffer for gradients to reduce, which has its full size all the time; two that overlap."""
    if not setup.contiguous_gradients:
        return 0
    return width * setup.reduce_bucket_size * (2 if setup.recipe.zero_optimization.overlap_comm else 1)


@dataclass(frozen=True, kw_only=True)
class Fill:
    """A bucket of ZeRO-2 or 3 when it is reduced."""

    elements: int
    blocks: int
    """How many blocks still have activations then."""
    has_embedding: bool
    """Whether the bucket has the embedding's gradient; until it comes, the head's part of it waits outside."""


def bucket_fills(setup: Setup, held: Sequence[ParameterSize]) -> Iterator[Fill]:
    """The buckets of a backward pass. Gradients come in the reverse order of the parameters.

    One that is larger than a bucket is reduced by itself.
    """
    limit, elements, last = setup.reduce_bucket_size, 0, held[-1]
    for part in reversed(held):
        if elements and elements + part.numel > limit:
            blocks = int(part.name.split(".")[1]) + 1 if part.name.startswith("blocks.") else 0
            yield Fill(elements=elements, blocks=blocks, has_embedding=False)
            elements = 0
        elements += part.numel if part.numel <= limit else 0
        last = part
    yield Fill(elements=elements, blocks=0, has_embedding=last.name == EMBEDDING and last.numel <= limit)


def start(setup: Setup, rank: int, *, device: str) -> Moment:
    """While the optimizer is built: weights and master weights exist, and what they are made from.

    * ZeRO-0 in bf16 and fp16: all of the model state, because DeepSpeed takes a step on gradients of zero.
    * ZeRO-1 and 2: the rank's part of the weights, cloned, before it is cast to fp32 and moved to its place; later, if
      nothing is offloaded, gradients of zero. The weights are made flat in one more copy, on a GPU only if it has room
      for that (``flatten_on_accelerator`` of ``DeepSpeedZeroOptimizer``), but always by ``BF16_Optimizer``.
    * ZeRO-3: the embedding, whole, in fp32 and in the precision of the run (``zero.Init``).
    """
    other, stage = 0, setup.recipe.zero_stage
    if setup.run_type == "optimized" and stage == 3:
        other = (FULL + setup.low) * setup.model.largest_parameter()
    elif setup.run_type == "optimized" and stage == 0 and setup.low != FULL:
        state = model_state(setup, rank=rank)
        other = state.gradients + state.optimizer
    elif setup.run_type == "optimized" and stage:
        groups = flat_groups(setup.held(rank), setup.zero_ranks)
        other = setup.low * max(group.part for group in groups)
        if setup.recipe.offload_optimizer == "none":
            other = max(other, FULL * parts(groups))
        if device == "cpu" or setup.uses_bf16_optimizer:
            other = max(other, setup.low * max(group.padded for group in groups))
    return Moment(name="start", parts={"other": other})


def save(setup: Setup, between: Mapping[str, int]) -> Moment:
    """While a checkpoint is written: a parameter and its moments, whole, in fp32, and those of the next one.

    Every rank gathers them on its device. The main rank looks for values that are not finite, with 7 bytes a number.
    ZeRO-3 may still have the embedding gathered, from an evaluation.

    Args:
        setup: the training.
        between: bytes of the parts that exist between two steps.
    """
    sizes = [part.numel for part in model_parameters(setup.model)]
    split = setup.recipe.zero_stage > 0 or setup.sizes.tensor > 1 or setup.sizes.pipeline > 1
    gathers = setup.run_type == "fsdp" or (setup.run_type == "optimized" and split)
    each = FULL * (1 + setup.moments) if gathers else 0
    whole = max(each * size + max(each * following, 7 * size) for size, following in pairwise([*sizes, 0]))
    if setup.run_type == "optimized" and setup.recipe.zero_stage == 3:
        whole += embedding_bytes(setup)
    return Moment(name="save", parts={**between, "gathered": whole})


# The moments of a step under the strategies of PyTorch.


def baseline(setup: Setup, *, device: str) -> list[Moment]:
    """Sums in fp32 of several micro batches: 4P. A micro batch's gradients: wP, the embedding's twice for a moment.

    In bf16 and fp16 they are added to the sums when all exist. On a CPU, adding casts each of them to fp32 first.
    """
    layers, held = setup.model.n_layer, setup.held(0)
    new, embedding, several = setup.low * total(held), embedding_bytes(setup), setup.gradient_accumulation_steps > 1
    sums, separate = FULL * total(held), setup.low != FULL
    earlier = sums if several else 0
    backward = 2 * embedding if several and not separate else new + embedding
    cast = FULL * setup.model.largest_parameter() if several and separate and device == "cpu" else 0
    return [
        Moment(name="loss", blocks=layers, parts={"gradients": earlier}),
        Moment(name="backward", blocks=layers, parts={"gradients": earlier, "new_gradients": embedding}),
        Moment(name="reduction", parts={"gradients": earlier, "new_gradients": backward}),
        Moment(name="step", parts={"gradients": sums, "new_gradients": new if separate else 0, "other": cast}),
        Moment(name="evaluation", parts={}),
    ]


def ddp(setup: Setup, *, device: str) -> list[Moment]:  # noqa: ARG001 - of all strategies
    """Buckets for all gradients: wP, besides sums in fp32 of several micro batches: 4P.

    A bucket is reduced in fp32. Its copy replaces the sum of its gradients, if there is one, when it is complete.
    """
    layers, held = setup.model.n_layer, setup.held(0)
    embedding, several = embedding_bytes(setup), setup.gradient_accumulation_steps > 1
    buckets, separate = setup.low * total(held), setup.low != FULL
    if not setup.recipe.dsgpt.ddp.gradient_as_bucket_view:
        buckets *= 2
    earlier = {"buckets": buckets, "gradients": FULL * total(held) if several else 0}
    reduced = FULL * (_last_bucket(setup, held) if several else total(held)) if separate else 0
    pending = embedding if separate else 2 * embedding
    last = earlier | {"new_gradients": pending, "other": reduced}
    stepped = earlier | {"gradients": FULL * total(held) if separate or several else 0}
    return [
        Moment(name="loss", blocks=layers, parts=earlier),
        Moment(name="backward", blocks=layers, parts=earlier | {"new_gradients": embedding}),
        Moment(name="reduction", parts=last),
        Moment(name="step", parts=stepped),
        Moment(name="evaluation", parts={"buckets": buckets}),
    ]


def _last_bucket(setup: Setup, held: list[ParameterSize]) -> int:
    """Elements of DDP's last bucket, which has the embedding. A bucket ends as soon as it has its size."""
    limit = setup.recipe.dsgpt.ddp.bucket_cap_mb * 2**20 / setup.low
    elements = 0
    for part, following in pairwise([*reversed(held), None]):
        assert part is not None
        elements += part.numel
        if elements >= limit and following is not None:
            elements = 0
    return elements


def fsdp(setup: Setup, *, device: str) -> list[Moment]:
    """The root's weights whole, those of a block and of the next one; whole gradients until the last micro batch.

    A block's gradients are reduced from a buffer that is freed when those of the next block are reduced. On a CPU, gloo
    copies what it gathers and scatters.
    """
    ranks, layers, recipe = setup.world_size, setup.model.n_layer, setup.recipe.dsgpt.fsdp
    root, block = _whole_elements(setup)
    several, copies = setup.gradient_accumulation_steps > 1, 1 if device == "cpu" else 0
    width = FULL if recipe.reduce_dtype == "fp32" else setup.low
    embedding = embedding_bytes(setup)
    away = recipe.cpu_offload and device == "cuda"
    shards, root_shard = (0, 0) if away else (FULL * layers * block // ranks, FULL * root // ranks)
    kept = layers if not recipe.reshard_after_forward else 1
    earlier = width * (layers * block + root) if several else 0
    flight = 0 if not recipe.reshard_after_forward else (1 + copies) * block
    gathered = setup.low * (root + kept * block + flight)
    one_less = width * ((layers - 1) * block + root) if several else 0
    return [
        Moment(name="loss", blocks=layers, parts={"gradients": earlier, "gathered": setup.low * (root + kept * block)}),
        Moment(
            name="backward",
            blocks=layers - 1,
            parts={
                "gradients": one_less + FULL * block // ranks,
                "gathered": gathered,
                "buckets": width * block,
                "new_gradients": embedding,
            },
        ),
        Moment(
            name="reduction",
            parts={
                "gradients": shards + (width * root if several else 0),
                "gathered": setup.low * root,
                "buckets": width * block,
                "new_gradients": 2 * embedding,
            },
        ),
        Moment(
            name="step",
            parts={"gradients": shards + root_shard, "buckets": (1 + copies) * width * root},
        ),
        Moment(name="evaluation", parts={"gathered": setup.low * (root + kept * block)}),
    ]


def _whole_elements(setup: Setup) -> tuple[int, int]:
    """Elements of the root's parameters and of a block's, with FSDP's padding."""
    ranks, whole = setup.world_size, model_parameters(setup.model)
    root = [part for part in whole if not part.name.startswith("blocks.")]
    block = [part for part in whole if part.name.startswith("blocks.0.")]
    return ranks * fsdp_elements(root, ranks), ranks * fsdp_elements(block, ranks)


# The moments of a step under ZeRO-0, 1 and 2.

_AT_ONCE = 500_000_000
"""Elements that DeepSpeed's engine reduces at a time where no stage of ZeRO does it (``MEMORY_OPT_ALLREDUCE_SIZE``)."""


def zero0(setup: Setup, rank: int, *, device: str) -> list[Moment]:
    """Gradients once: wP, and a flat copy of them to reduce. In bf16 and fp16 another one in fp32: 4P.

    This package adds up micro batches in fp32 then, on a CPU with a cast of each gradient.
    """
    held = setup.held(rank)
    several, separate = setup.gradient_accumulation_steps > 1, setup.low != FULL
    new, embedding = setup.low * total(held), _embedding(setup, held)
    earlier = FULL * total(held) if several else 0
    cast = FULL * max(part.numel for part in held) if several and separate and device == "cpu" else 0
    flat = setup.low * min(_AT_ONCE, total(held))
    end = 2 * embedding if several and not separate else new + embedding
    state = model_state(setup, rank=rank)
    return [
        *_before(setup, rank, {"gradients": earlier}),
        Moment(name="reduction", parts={"gradients": earlier, "new_gradients": end}),
        Moment(name="step", parts={"gradients": earlier, "new_gradients": new, "other": cast}),
        Moment(name="step", parts={"gradients": new, "buckets": flat}),
        Moment(name="step", parts={"gradients": state.gradients, "other": _unfused(setup, held)}),
        Moment(name="evaluation", parts={}),
    ]


def bf16_optimizer(setup: Setup, rank: int, *, device: str) -> list[Moment]:  # noqa: ARG001 - of all strategies
    """ZeRO-1 in bf16: fp32 sums of all gradients, 4P, all the time. They are reduced from copies in fp32 and bf16.

    Sequence ranks reduce them in fp32, which needs no copy in bf16.
    """
    held = setup.held(rank)
    several, bf16 = setup.gradient_accumulation_steps > 1, setup.recipe.bf16
    sums = FULL * sum(group.padded for group in flat_groups(held, setup.zero_ranks))
    new, embedding = setup.low * total(held), _embedding(setup, held)
    if bf16 is not None and bf16.immediate_grad_update:
        new = embedding
    earlier = {"gradients": sums, "new_gradients": new if several else 0}
    flat = min(_AT_ONCE, total(held)) if setup.world_size > 1 else 0
    width = FULL + (setup.low if setup.sizes.sequence == 1 else 0)
    end = new + (2 if several else 1) * embedding
    return [
        *_before(setup, rank, earlier),
        Moment(name="reduction", parts={"gradients": sums, "new_gradients": end}),
        Moment(name="step", parts={"gradients": sums, "new_gradients": new, "buckets": width * flat}),
        Moment(name="step", parts={"gradients": sums, "new_gradients": new, "other": _unfused(setup, held)}),
        Moment(name="evaluation", parts={"gradients": sums}),
    ]


def zero1(setup: Setup, rank: int, *, device: str) -> list[Moment]:
    """Gradients of several micro batches: wP, in 16-bit precision in fp32. At the end they go through the bucket."""
    held = setup.held(rank)
    several, embedding = setup.gradient_accumulation_steps > 1, _embedding(setup, held)
    new, bucket = setup.low * total(held), bucket_bytes(setup, FULL)
    earlier = {"gradients": FULL * total(held) if several else 0, "buckets": bucket if several else 0}
    end = 2 * embedding if several else new + embedding
    base = _offload_buffers(setup, held, device)
    state = model_state(setup, rank=rank)
    away = state.off_device.get("gradients", 0)  # in the host, which keeps the memory
    stepped = state.gradients - (away if device == "cuda" else 0)
    found = [
        *_before(setup, rank, earlier, bucket=bucket),
        Moment(name="reduction", parts=earlier | {"new_gradients": end, "buckets": bucket}),
        Moment(name="step", parts={"gradients": _flattened(setup, rank, stepped)}),
        Moment(name="step", parts={"gradients": stepped, "other": _unfused(setup, held)}),
        Moment(name="evaluation", parts={"gradients": away if device == "cpu" else 0}),
    ]
    return [_with(moment, base) for moment in found]


def zero2(setup: Setup, rank: int, *, device: str) -> list[Moment]:
    """A full bucket is reduced at once, from a flat copy, into the sums of this rank's part."""
    held, embedding, state = setup.held(rank), _embedding(setup, setup.held(rank)), model_state(setup, rank=rank)
    away = state.off_device.get("gradients", 0)  # in the host, which keeps the memory
    stepped = state.gradients - (away if device == "cuda" else 0)
    first, later = _sums(setup, rank, stepped, device)
    several = setup.gradient_accumulation_steps > 1
    bucket, base = bucket_bytes(setup, setup.low), _offload_buffers(setup, held, device)
    found = [*_before(setup, rank, {"gradients": later if several else first}, bucket=bucket)]
    for number, fill in enumerate(bucket_fills(setup, held)):
        begun = later if several or number or setup.low != FULL else first
        waits = 0 if fill.has_embedding else embedding
        moved = bucket + setup.low * fill.elements
        now = {"gradients": begun, "new_gradients": waits, "buckets": moved}
        found.append(Moment(name="reduction", blocks=fill.blocks, parts=now))
    found.append(Moment(name="step", parts={"gradients": stepped}))
    found.append(Moment(name="evaluation", parts={"gradients": away if device == "cpu" else 0}))
    return [_with(moment, base) for moment in found]


def _before(setup: Setup, rank: int, earlier: dict[str, int], *, bucket: int = 0) -> list[Moment]:
    """The loss and the beginning of the backward pass, with what earlier micro batches left.

    The bucket is allocated when the first gradient comes.
    """
    blocks, is_last = setup.blocks(rank), setup.stage(rank) == setup.sizes.pipeline - 1
    head = embedding_bytes(setup) if is_last else 0
    new = {"new_gradients": earlier.get("new_gradients", 0) + head, "buckets": max(bucket, earlier.get("buckets", 0))}
    return [
        Moment(name="loss", blocks=blocks, parts=earlier),
        Moment(name="backward", blocks=blocks, parts=earlier | new),
    ]


def _with(moment: Moment, more: dict[str, int]) -> Moment:
    """``moment`` with ``more`` parts that always exist."""
    parts = dict(moment.parts)
    return Moment(
        name=moment.name,
        blocks=moment.blocks,
        parts=parts | {name: parts.get(name, 0) + size for name, size in more.items()},
    )


def _embedding(setup: Setup, held: list[ParameterSize]) -> int:
    """WE on ranks that have the embedding."""
    return embedding_bytes(setup) if any(part.name == EMBEDDING for part in held) else 0


def _flattened(setup: Setup, rank: int, stepped: int) -> int:
    """Gradients in fp32 when the flat copy of the largest group has been made, before its own are freed."""
    if setup.precision != "fp32" or setup.recipe.offload_optimizer != "none":
        return stepped
    groups, part = flat_groups(setup.held(rank), setup.zero_ranks), rank // setup.sizes.tensor % setup.zero_ranks
    copies = (0 if group.is_one_piece(part) else group.part for group in groups)
    return max(stepped, FULL * (sum(group.touched(part) for group in groups) + max(copies)))


def _unfused(setup: Setup, held: list[ParameterSize]) -> int:
    """Two numbers per weight of a group while PyTorch's AdamW steps in several operations, as it does in pipelines."""
    if setup.sizes.pipeline == 1 or setup.recipe.optimizer.type != "AdamW":
        return 0
    return 2 * FULL * max(group.part for group in flat_groups(held, setup.zero_ranks))


def _sums(setup: Setup, rank: int, stepped: int, device: str) -> tuple[int, int]:
    """Bytes of reduced gradients that ZeRO-2 keeps, before and after a backward pass has reduced the first bucket.

    In fp32 they are of whole parameters that the rank's part touches, in bf16 and fp16 of the part alone, in fp32. With
    offload the host has memory for a copy of them all the time, which on a CPU is in the same memory; the sums are as
    large as in the step.
    """
    groups = flat_groups(setup.held(rank), setup.zero_ranks)
    part = rank // setup.sizes.tensor % setup.zero_ranks
    if setup.recipe.offload_optimizer != "none":
        return FULL * parts(groups) if device == "cpu" else 0, stepped
    if setup.precision != "fp32":
        return 0, FULL * parts(groups)
    return 0, FULL * sum(group.touched(part) for group in groups)


def _offload_buffers(setup: Setup, held: list[ParameterSize], device: str) -> dict[str, int]:
    """With offload, a buffer as large as the largest parameter; in the host one more, and one for the new weights."""
    if setup.recipe.offload_optimizer == "none":
        return {}
    largest = setup.low * max(part.numel for part in held)
    if device == "cuda":
        return {"other": largest}
    return {"other": 2 * largest + setup.low * parts(flat_groups(held, setup.zero_ranks))}


# The moments of a step under ZeRO-3.


def zero3(setup: Setup, rank: int, *, device: str) -> list[Moment]:
    """Gathered weights, a flat buffer of this rank's gradients, the bucket; in the step a second copy of the gradients.

    Weights that are gathered together stay in the buffer of their all-gather until the last of them has been used. So
    they exist twice during the forward pass, and the embedding once more if it has been freed. On a CPU those that are
    being gathered exist twice as well, because gloo copies them. A full bucket is reduced from a copy in the order of
    the ranks, and gloo makes one more.
    """
    held, layers, zero = setup.held(rank), setup.model.n_layer, setup.recipe.zero_optimization
    shards, embedding = Shards.of(setup, held), embedding_bytes(setup)
    stepped = FULL * (shards.own + max(shards.sub_groups))
    sums = FULL * shards.own
    if setup.recipe.offload_optimizer != "none":  # both copies exist in the host all the time
        sums = stepped = 2 * sums if device == "cpu" else 0
    base = {"gradients": sums, "buckets": bucket_bytes(setup, setup.low)}
    whole = setup.low * most_gathered(setup)
    together = setup.low * min(zero.stage3_prefetch_bucket_size, most_gathered(setup))
    freed = embedding if [part.name for part in gathered(setup)].count(EMBEDDING) > 1 else 0
    buffers = freed + (whole if device == "cpu" else together)
    copies = 2 if device == "cpu" else 1
    found = [
        Moment(name="forward", blocks=layers, parts=base | {"gathered": whole + buffers}),
        Moment(name="loss", blocks=layers, parts=base | {"gathered": whole}),
        Moment(name="backward", blocks=layers, parts=base | {"gathered": whole, "new_gradients": embedding}),
        Moment(name="step", parts=base | {"gradients": stepped}),
        Moment(name="evaluation", parts=base | {"gathered": whole}),
    ]
    for fill in bucket_fills(setup, held):
        buckets = base["buckets"] + copies * setup.low * fill.elements
        waits = 0 if fill.has_embedding else embedding
        parts = {"buckets": buckets, "new_gradients": waits, "gathered": min(whole, embedding)}
        found.append(Moment(name="reduction", blocks=fill.blocks, parts=base | parts))
    return found


PARTS = (
    "weights",
    "master",
    "optimizer",
    "gradients",
    "new_gradients",
    "gathered",
    "buckets",
    "activations",
    "logits",
    "other",
)
"""What a peak is made of; ``docs/records.md`` describes each."""
_LARGEST_SEARCHED = 1 << 20
"""Sequences of a micro batch beyond which no larger one is looked for."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment with the most memory."""

    moment: str
    """One of ``moments.MOMENTS``."""
    parts: dict[str, int]
    """Bytes of each of ``PARTS``."""

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())

    def as_dict(self) -> dict[str, Any]:
        """As records hold it."""
        return {"moment": self.moment, "parts": self.parts, "total": self.total}


def peak_memory(setup: Setup, *, rank: int = 0, device: str = "cpu", among: Collection[str] = MOMENTS) -> Peak:
    """The moment at which ``rank`` needs the most memory of its device.

    Args:
        setup: the training.
        rank: of all ranks.
        device: ``cpu``, where offloaded state is in the same memory, or ``cuda``.
        among: the moments that count; ``moments.STEP`` for the peak of a training step.
    """
    held = _held(setup, rank, device)
    peaks = [
        Peak(moment=moment.name, parts=dict.fromkeys(PARTS, 0) | held | _transient(setup, moment, rank, device))
        for moment in _reached(setup, rank, device)
        if moment.name in among
    ]
    return max(peaks, key=lambda peak: peak.total)


def worst_peak(setup: Setup, *, device: str = "cpu", among: Collection[str] = MOMENTS) -> tuple[int, Peak]:
    """The rank that needs the most memory, and its peak."""
    deals_unevenly = setup.run_type == "optimized" and setup.recipe.zero_stage in {1, 2}
    ranks = range(0, setup.world_size, setup.sizes.tensor) if deals_unevenly else setup.first_ranks
    peaks = {rank: peak_memory(setup, rank=rank, device=device, among=among) for rank in ranks}
    worst = max(peaks, key=lambda rank: peaks[rank].total)
    return worst, peaks[worst]


def largest_micro_batch(setup: Setup, *, limit_bytes: int, device: str) -> int | None:
    """The most sequences of a micro batch with which every rank's peak is within ``limit_bytes``; None if not even 1.

    The accumulation stays as it is, so the global batch changes.
    """

    def fits(micro: int) -> bool:
        _, peak = worst_peak(replace(setup, micro_batch_size=micro), device=device)
        return peak.total <= limit_bytes

    if not fits(1):
        return None
    low, high = 1, 2
    while high <= _LARGEST_SEARCHED and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _held(setup: Setup, rank: int, device: str) -> dict[str, int]:
    """Model state that exists all the time; gradients do not."""
    state = model_state(setup, rank=rank)
    sizes = {"parameters": state.parameters, "optimizer": state.optimizer, "master": state.master}
    elsewhere = {} if device == "cpu" else state.off_device
    names = {"parameters": "weights", "optimizer": "optimizer", "master": "master"}
    return {names[key]: size - elsewhere.get(key, 0) for key, size in sizes.items()}


def _moments(setup: Setup, rank: int, device: str) -> list[Moment]:
    if setup.run_type != "optimized":
        return {"baseline": baseline, "ddp": ddp, "fsdp": fsdp}[setup.run_type](setup, device=device)
    of_stage = {0: zero0, 1: zero1, 2: zero2, 3: zero3}[setup.recipe.zero_stage]
    if setup.uses_bf16_optimizer:
        of_stage = bf16_optimizer
    return of_stage(setup, rank, device=device)


def _reached(setup: Setup, rank: int, device: str) -> Iterator[Moment]:
    """The moments that the rank goes through; only the last pipeline stage computes a loss."""
    found = _moments(setup, rank, device)
    evaluation = next(moment for moment in found if moment.name == EVALUATION)
    for moment in [start(setup, rank, device=device), *found, save(setup, evaluation.parts)]:
        if moment.name != "loss" or _computes_loss(setup, rank):
            yield moment


def _computes_loss(setup: Setup, rank: int) -> bool:
    return setup.stage(rank) == setup.sizes.pipeline - 1


def _transient(setup: Setup, moment: Moment, rank: int, device: str) -> dict[str, int]:
    """The parts of a moment besides model state."""
    parts, stream, kept = dict(moment.parts), stream_bytes(setup), 0
    if moment.name == "start":
        return parts | {"optimizer": 0}
    if setup.sizes.pipeline > 1:
        kept += stream * (3 if setup.stage(rank) else 1)  # received activations, and gradients
        parts["logits"] = kept_logits_bytes(setup) if _computes_loss(setup, rank) else 0
    if moment.name in {"step", "save"}:
        return parts | {"activations": kept}
    kept += kept_bytes(setup, moment.blocks) * (setup.micro_batches_in_flight(rank) if moment.blocks else 1)
    if moment.name == "forward":
        parts["activations"] = kept + block_gradient_bytes(setup)
    elif moment.name == EVALUATION:
        parts["activations"] = kept + 2 * stream
        computed = _computes_loss(setup, rank)
        parts["logits"] = logits_bytes(setup, device=device, gradients=False) if computed else 0
    elif moment.name == "loss":
        parts["activations"] = kept + 2 * stream  # the last LayerNorm's output and its gradient
        parts["logits"] = logits_bytes(setup, device=device)
        parts["new_gradients"] = parts.get("new_gradients", 0) + head_gradient_bytes(setup, device=device)
    else:
        parts["activations"] = kept + stream + recomputed_bytes(setup) + block_gradient_bytes(setup)
    return parts

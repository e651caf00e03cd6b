"""The moments of a step under ZeRO-0, 1 and 2. See ``dsgpt.planning.moments`` for the letters."""

from dsgpt.planning.flat_groups import flat_groups, parts
from dsgpt.planning.model_state import model_state
from dsgpt.planning.moments import Moment, bucket_bytes, bucket_fills, embedding_bytes
from dsgpt.planning.parameters import EMBEDDING, ParameterSize, total
from dsgpt.planning.setup import FULL, Setup

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

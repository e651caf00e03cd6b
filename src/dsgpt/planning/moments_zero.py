"""The moments of a step under ZeRO-0, 1 and 2. See ``dsgpt.planning.moments`` for the letters."""

from dsgpt.planning.flat_groups import flat_groups
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
    held, blocks = setup.held(rank), setup.blocks(rank)
    several, separate = setup.gradient_accumulation_steps > 1, setup.low != FULL
    new, embedding = setup.low * total(held), _embedding(setup, held)
    earlier = FULL * total(held) if several else 0
    cast = FULL * max(part.numel for part in held) if several and separate and device == "cpu" else 0
    flat = setup.low * min(_AT_ONCE, total(held)) if setup.zero_ranks > 1 else 0
    end = 2 * embedding if several and not separate else new + embedding
    state = model_state(setup, rank=rank)
    return [
        *_before(blocks, embedding, {"gradients": earlier}),
        Moment(name="reduction", parts={"gradients": earlier, "new_gradients": end}),
        Moment(name="step", parts={"gradients": earlier, "new_gradients": new, "other": cast}),
        Moment(name="step", parts={"gradients": new, "buckets": flat}),
        Moment(name="step", parts={"gradients": state.gradients}),
    ]


def bf16_optimizer(setup: Setup, rank: int, *, device: str) -> list[Moment]:  # noqa: ARG001 - of all strategies
    """ZeRO-1 in bf16: fp32 sums of all gradients, 4P, all the time. They are reduced from copies in fp32 and bf16."""
    held, blocks = setup.held(rank), setup.blocks(rank)
    several, bf16 = setup.gradient_accumulation_steps > 1, setup.recipe.bf16
    sums = FULL * sum(group.padded for group in flat_groups(held, setup.zero_ranks))
    new, embedding = setup.low * total(held), _embedding(setup, held)
    if bf16 is not None and bf16.immediate_grad_update:
        new = embedding
    earlier = {"gradients": sums, "new_gradients": new if several else 0}
    flat = min(_AT_ONCE, total(held)) if setup.zero_ranks > 1 else 0
    end = new + (2 if several else 1) * embedding
    return [
        *_before(blocks, embedding, earlier),
        Moment(name="reduction", parts={"gradients": sums, "new_gradients": end}),
        Moment(name="step", parts={"gradients": sums, "new_gradients": new, "buckets": (FULL + setup.low) * flat}),
    ]


def zero1(setup: Setup, rank: int, *, device: str) -> list[Moment]:
    """Gradients of several micro batches: wP, in 16-bit precision in fp32. At the end they go through the bucket."""
    held, blocks = setup.held(rank), setup.blocks(rank)
    several, embedding = setup.gradient_accumulation_steps > 1, _embedding(setup, held)
    new, bucket = setup.low * total(held), bucket_bytes(setup, FULL)
    earlier = {"gradients": FULL * total(held) if several else 0, "buckets": bucket if several else 0}
    end = 2 * embedding if several else new + embedding
    base = _offload_buffers(setup, held, device)
    state = model_state(setup, rank=rank)
    stepped = 0 if device == "cuda" and "gradients" in state.off_device else state.gradients
    found = [
        *_before(blocks, embedding, earlier),
        Moment(name="reduction", parts=earlier | {"new_gradients": end, "buckets": bucket}),
        Moment(name="step", parts={"gradients": stepped}),
    ]
    return [_with(moment, base) for moment in found]


def zero2(setup: Setup, rank: int, *, device: str) -> list[Moment]:
    """A full bucket is reduced at once, from a flat copy, into the sums of this rank's part.

    In fp32 the sums are of whole parameters that the part touches, in bf16 and fp16 of the part alone, in fp32.
    """
    held, embedding = setup.held(rank), _embedding(setup, setup.held(rank))
    state = model_state(setup, rank=rank)
    sums, stepped = _sums(setup, rank), state.gradients
    if device == "cuda" and state.off_device:
        sums = stepped = 0
    bucket, base = bucket_bytes(setup, setup.low), _offload_buffers(setup, held, device)
    several = setup.gradient_accumulation_steps > 1
    earlier = {"gradients": sums if several else 0}
    found = [*_before(setup.blocks(rank), embedding, earlier)]
    for number, fill in enumerate(bucket_fills(setup, held)):
        begun = sums if several or number or setup.low != FULL else 0
        waits = 0 if fill.has_embedding else embedding
        parts = {"gradients": begun, "new_gradients": waits, "buckets": bucket + setup.low * fill.elements}
        found.append(Moment(name="reduction", blocks=fill.blocks, parts=parts))
    found.append(Moment(name="step", parts={"gradients": stepped}))
    return [_with(moment, base) for moment in found]


def _before(blocks: int, embedding: int, earlier: dict[str, int]) -> list[Moment]:
    """The loss and the beginning of the backward pass, with what earlier micro batches left."""
    backward = earlier | {"new_gradients": earlier.get("new_gradients", 0) + embedding}
    return [
        Moment(name="loss", blocks=blocks, parts=earlier),
        Moment(name="backward", blocks=blocks, parts=backward),
    ]


def _with(moment: Moment, more: dict[str, int]) -> Moment:
    """``moment`` with ``more`` parts that always exist."""
    return Moment(name=moment.name, blocks=moment.blocks, parts=dict(moment.parts) | more)


def _embedding(setup: Setup, held: list[ParameterSize]) -> int:
    """WE on ranks that have the embedding."""
    return embedding_bytes(setup) if any(part.name == EMBEDDING for part in held) else 0


def _sums(setup: Setup, rank: int) -> int:
    """Bytes of reduced gradients that ZeRO-2 keeps during the backward pass."""
    groups = flat_groups(setup.held(rank), setup.zero_ranks)
    part = rank // setup.sizes.tensor % setup.zero_ranks
    if setup.precision != "fp32":
        return FULL * sum(group.part for group in groups)
    return FULL * sum(group.touched(part) for group in groups)


def _offload_buffers(setup: Setup, held: list[ParameterSize], device: str) -> dict[str, int]:
    """With offload, buffers as large as the largest parameter on both sides."""
    if setup.recipe.offload_optimizer == "none":
        return {}
    return {"other": setup.low * max(part.numel for part in held) * (2 if device == "cpu" else 1)}

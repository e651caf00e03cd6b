"""The moments of a training step at which a rank's memory can be highest, for every strategy.

A moment names what exists besides model state and activations: gradients, buckets, gathered weights. Letters: P
elements of a rank's parameters, E those of the embedding, w bytes of a number in the precision of the activations.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dsgpt.planning.parameters import EMBEDDING, ParameterSize
from dsgpt.planning.setup import Setup


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A moment of a step."""

    name: str
    """``forward``, ``loss``, ``backward``, ``reduction`` or ``step``."""
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

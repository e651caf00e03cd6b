"""The moments of a training at which a rank's memory can be highest, for every strategy.

A moment names what exists besides model state and activations: gradients, buckets, gathered weights. Letters: P
elements of a rank's parameters, E those of the embedding, w bytes of a number in the precision of the activations.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dsgpt.planning.flat_groups import flat_groups, parts
from dsgpt.planning.model_state import model_state
from dsgpt.planning.parameters import EMBEDDING, ParameterSize, model_parameters
from dsgpt.planning.setup import FULL, Setup

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

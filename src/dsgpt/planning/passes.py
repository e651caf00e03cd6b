"""Bytes that a step reads and writes in passes over gradients and weights: sums, copies, norm, clipping, optimizer.

Letters: w bytes of a number in the precision of the activations, n ranks that reduce, a micro batches of a step. Counts
are bytes per element. They describe this package, PyTorch 2.13 and DeepSpeed 0.19.8.
"""

from dsgpt.planning.communication import gradient_width, step_traffic
from dsgpt.planning.flat_groups import flat_groups, parts
from dsgpt.planning.parameters import total
from dsgpt.planning.setup import FULL, Setup
from dsgpt.planning.sharded import Shards, fsdp_elements

_UNFUSED_ADAM = 20
"""Numbers that PyTorch's AdamW reads and writes for each weight in nine operations, as it does in pipelines."""


def stepped_elements(setup: Setup, rank: int) -> int:
    """Elements on which the optimizer of ``rank`` steps."""
    held = setup.held(rank)
    if setup.run_type == "fsdp":
        return fsdp_elements(held, setup.world_size)
    if setup.run_type != "optimized" or setup.recipe.zero_stage == 0:
        return total(held)
    if setup.recipe.zero_stage == 3:
        return Shards.of(setup, held).own
    return parts(flat_groups(held, setup.zero_ranks))


def gradient_bytes(setup: Setup, rank: int, *, kind: str) -> float:
    """Gradients added up, copied to buckets and back, and copies of gathered weights.

    In low precision every micro batch's gradients are added to a sum in fp32, w + 8; in fp32 those after the first are,
    12. On a GPU, whose memory is a hundred times as fast, only ZeRO's copies to buckets count, 2w.
    """
    elements, micro_batches = total(setup.held(rank)), setup.gradient_accumulation_steps
    adding = 12 * (micro_batches - 1) if setup.precision == "fp32" else (setup.low + 8) * micro_batches
    if kind == "cpu":
        return elements * (adding + _copied(setup)) + _gathered(setup, rank)
    copies = 0
    if setup.run_type == "optimized" and setup.recipe.zero_stage:
        copies = 2 * setup.low * _reductions(setup)
    return elements * (adding + copies)


def low_arithmetic_bytes(setup: Setup, rank: int, *, kind: str) -> int:
    """Arithmetic on gradients in 16-bit precision, which a CPU does at the rate of elementwise operations.

    DeepSpeed divides them by the ranks, 2w. ZeRO-0 also looks for their least and their largest, 2w.
    """
    if kind != "cpu" or setup.run_type != "optimized" or gradient_width(setup) == FULL:
        return 0
    searched = 2 * setup.low if setup.recipe.zero_stage == 0 else 0
    return total(setup.held(rank)) * (_divided(setup) + searched)


def norm_bytes(setup: Setup, rank: int) -> float:
    """The norm reads every gradient, 4 bytes; clipping reads and writes it again, 8 bytes."""
    return stepped_elements(setup, rank) * (FULL + (2 * FULL if setup.recipe.gradient_clipping else 0))


def optimizer_bytes(setup: Setup, rank: int) -> float:
    """The optimizer reads the gradient, reads and writes the weight and each moment: 28 bytes for Adam, fused.

    In low precision it also writes the weight in that precision.
    """
    numbers = 1 + 2 * (1 + setup.moments)
    if setup.sizes.pipeline > 1 and setup.recipe.optimizer.type == "AdamW":
        numbers = _UNFUSED_ADAM
    size = FULL * numbers + (0 if setup.precision == "fp32" else FULL + setup.low)
    return stepped_elements(setup, rank) * size


def _reductions(setup: Setup) -> int:
    """How often a step reduces each gradient."""
    is_each = setup.run_type == "optimized" and setup.recipe.zero_stage > 1
    return setup.gradient_accumulation_steps if is_each else 1


def _copied(setup: Setup) -> float:
    """Passes around the reductions of a step.

    * DDP: into the bucket, 2w; divided by the ranks in fp32, 8.
    * FSDP: into the buffer of the reduce-scatter, w + 4; the own part divided, 8/n.
    * ZeRO 0 to 3: see ``_zero_copied``.
    """
    if setup.run_type == "baseline":
        return 0
    if setup.run_type == "ddp":
        return 2 * setup.low + 2 * FULL
    if setup.run_type == "fsdp":
        return setup.low + FULL + 2 * FULL / setup.world_size
    return _zero_copied(setup)


def _zero_copied(setup: Setup) -> float:
    """Passes around the reductions of DeepSpeed.

    * ZeRO-0: a flat copy, 2w, and back, 2w. In low precision the sum of several micro batches is rounded, w + 4, and
      every gradient is copied to fp32, w + 4.
    * ZeRO-1: the same with a bucket, unless a rank is alone, and the own part in fp32 made flat, 8/n.
    * ZeRO-2: to the bucket and from it to a flat copy, 4w; the own part added to its sum, (w + 8)/n.
    * ZeRO-3: to the bucket, 2w; the own part added to its sum.
    * In fp32 the division by the ranks.
    """
    low, ranks, stage = setup.low, setup.zero_ranks, setup.recipe.zero_stage
    divided = _divided(setup) if gradient_width(setup) == FULL else 0
    if setup.uses_bf16_optimizer:
        return _bf16_optimizer_copied(setup) + divided
    if stage == 0:
        rounded = low + FULL if setup.gradient_accumulation_steps > 1 else 0
        return 4 * low + divided + (0 if setup.precision == "fp32" else rounded + low + FULL)
    if stage == 1:
        return (4 * low if ranks > 1 else 0) + divided + 2 * FULL / ranks
    return _reductions(setup) * ((4 if stage == 2 else 2) * low + (low + 2 * FULL) / ranks) + divided


def _bf16_optimizer_copied(setup: Setup) -> float:
    """``BF16_Optimizer``: a flat copy of the fp32 sums and back, 16; in between to bf16 and back, 2w + 8.

    Sequence ranks stay in fp32. With several micro batches the gradients in bf16 stay: each is set to zero, w, and
    later ones are added to it, 3w.
    """
    micro_batches, low = setup.gradient_accumulation_steps, setup.low
    kept = low * micro_batches + 3 * low * (micro_batches - 1) if micro_batches > 1 else 0
    if setup.world_size == 1:
        return kept
    return kept + 4 * FULL + (2 * low + 2 * FULL if gradient_width(setup) == low else 0)


def _divided(setup: Setup) -> int:
    """DeepSpeed divides what it reduces by the ranks: 2w."""
    is_alone = setup.world_size == 1 if setup.uses_bf16_optimizer else setup.zero_ranks == 1
    if is_alone and setup.recipe.zero_stage == 1:
        return 0
    return 2 * gradient_width(setup) * _reductions(setup)


def _gathered(setup: Setup, rank: int) -> float:
    """Under FSDP and ZeRO-3 each gather reads and writes the own part before, and all parts after it."""
    if setup.run_type != "fsdp" and (setup.run_type != "optimized" or setup.recipe.zero_stage != 3):
        return 0
    gathers = [each for each in step_traffic(setup, rank=rank) if each.operation == "all_gather"]
    return sum(2 * each.payload_bytes * (1 + 1 / each.group_size) for each in gathers)

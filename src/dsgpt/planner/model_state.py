"""Predicts the bytes of model state of a rank, for every strategy; ``dsgpt.telemetry.memory`` measures them.

The formulas describe this package, PyTorch 2.13 and DeepSpeed 0.19.8. Their letters:

* P: the parameters of a rank, padded embedding rows included;
* w: the bytes of a number in the precision of the activations, 4 in fp32, 2 in bf16 and fp16;
* m: the numbers that the optimizer keeps per weight, 2 for Adam;
* N: the ranks that share the state.

Buckets, activations and weights that are gathered for a layer are not model state; see ``ds_configs/README.md``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dsgpt.planner.setup import (
    FULL,
    FlatGroup,
    ParameterSize,
    Setup,
    Shards,
    flat_groups,
    fsdp_elements,
    parts,
    persistent,
    total,
    zero_piece,
)


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """Bytes of one rank."""

    parameters: int
    """The weights that the forward pass uses, as they are kept between steps."""
    gradients: int
    """While the optimizer steps, after most communication buffers have been freed."""
    optimizer: int
    """Moments, and torch's counter of steps, 4 bytes for each tensor that its Adam steps on."""
    master: int
    """fp32 weights in addition to the parameters."""
    off_device: Mapping[str, int] = field(default_factory=dict)
    """How much of each of the four is in host memory, or in files of the run, instead of on the device."""

    @property
    def total(self) -> int:
        """All four, wherever they are."""
        return self.parameters + self.gradients + self.optimizer + self.master

    @property
    def on_device(self) -> int:
        """What is on the device."""
        return self.total - sum(self.off_device.values())


def model_state(setup: Setup, *, rank: int = 0) -> ModelState:
    """The model state of ``rank``."""
    if setup.run_type in {"baseline", "ddp"}:
        return _whole(setup)
    if setup.run_type == "fsdp":
        return _fsdp(setup)
    stage, held = setup.recipe.zero_stage, setup.held(rank)
    if stage == 0:
        return _zero0(setup, held)
    if stage == 3:
        return _zero3(setup, held)
    groups, part = flat_groups(held, setup.zero_ranks), _zero_rank(setup, rank)
    if setup.uses_bf16_optimizer:
        return _zero1_bf16(setup, held, groups)
    return _zero12(setup, groups, part)


def largest_model_state(setup: Setup) -> ModelState:
    """The model state of the rank that has the most."""
    deals_unevenly = setup.run_type == "optimized" and setup.recipe.zero_stage in {1, 2}
    ranks = range(0, setup.world_size, setup.sizes.tensor) if deals_unevenly else setup.first_ranks
    return max((model_state(setup, rank=rank) for rank in ranks), key=lambda state: state.total)


def _zero_rank(setup: Setup, rank: int) -> int:
    """The index of ``rank`` among the ranks that share the same parameters; tensor peers are innermost."""
    return rank // setup.sizes.tensor % setup.zero_ranks


def _optimizer(setup: Setup, elements: int, *, tensors: int) -> int:
    """4m bytes per element, and Adam's counter for each tensor; DeepSpeed's CPU Adam counts in a Python number."""
    recipe = setup.recipe
    counts = recipe.optimizer.type == "AdamW" and not setup.uses_deepspeed_adam
    return setup.moments * FULL * elements + (FULL * tensors if counts else 0)


def _whole(setup: Setup) -> ModelState:
    """Baseline and DDP: wP of parameters, 4P of gradients, 4mP of moments; 4P of master weights unless in fp32.

    Gradients are summed in fp32.
    """
    held = setup.held(0)
    elements = total(held)
    return ModelState(
        parameters=setup.low * elements,
        gradients=FULL * elements,
        optimizer=_optimizer(setup, elements, tensors=len(held)),
        master=FULL * elements if setup.precision != "fp32" else 0,
    )


def _fsdp(setup: Setup) -> ModelState:
    """FSDP: 4P/N of parameters, 4P/N of gradients, 4mP/N of moments.

    Each parameter is padded to the same number of rows on every rank. The shards are fp32 in every precision: they are
    parameters and master copy in one.
    """
    held = setup.held(0)
    elements = fsdp_elements(held, setup.world_size)
    sizes = {
        "parameters": FULL * elements,
        "gradients": FULL * elements,
        "optimizer": _optimizer(setup, elements, tensors=len(held)),
    }
    return ModelState(**sizes, master=0, off_device=sizes if setup.recipe.dsgpt.fsdp.cpu_offload else {})


def _zero0(setup: Setup, held: list[ParameterSize]) -> ModelState:
    """ZeRO-0: as DDP in fp32. In bf16 and fp16 DeepSpeed has gradients in both precisions: wP + 4P."""
    elements, mixed = total(held), setup.precision != "fp32"
    return ModelState(
        parameters=setup.low * elements,
        gradients=(setup.low + FULL if mixed else FULL) * elements,
        optimizer=_optimizer(setup, elements, tensors=len(held)),
        master=FULL * elements if mixed else 0,
    )


def _zero1_bf16(setup: Setup, held: list[ParameterSize], groups: list[FlatGroup]) -> ModelState:
    """ZeRO-1 in bf16 (``BF16_Optimizer``): all gradients twice, 2P + 4P; 4mP/N of moments, 4P/N of master weights.

    With ``immediate_grad_update`` each bf16 gradient is freed as soon as it is added to the fp32 one.
    """
    whole, own = sum(group.padded for group in groups), parts(groups)
    bf16 = setup.recipe.bf16
    freed = bf16 is not None and bf16.immediate_grad_update
    return ModelState(
        parameters=setup.low * whole,
        gradients=(0 if freed else setup.low * total(held)) + FULL * whole,
        optimizer=_optimizer(setup, own, tensors=len(groups)),
        master=FULL * own,
    )


def _zero12(setup: Setup, groups: list[FlatGroup], rank: int) -> ModelState:
    """ZeRO-1 (fp32, fp16) and ZeRO-2: wP of parameters, 4mP/N of moments; 4P/N of master weights unless in fp32.

    With offload there are master weights in fp32, too (``step_on_weights``). In bf16 and fp16 only the copy of the
    gradients that the host steps on is in the host.
    """
    own, mixed = parts(groups), setup.precision != "fp32"
    parameters = setup.low * sum(group.padded for group in groups)
    optimizer, master = _optimizer(setup, own, tensors=len(groups)), FULL * own
    if setup.recipe.offload_optimizer == "none":
        gradients = _own_gradients(setup, groups, rank)
        return ModelState(
            parameters=parameters, gradients=gradients, optimizer=optimizer, master=master if mixed else 0
        )
    gradients = _offloaded_gradients(setup, groups, rank)
    moved = {"gradients": FULL * own if mixed else gradients, "optimizer": optimizer, "master": master}
    return ModelState(parameters=parameters, gradients=gradients, optimizer=optimizer, master=master, off_device=moved)


def _own_gradients(setup: Setup, groups: list[FlatGroup], rank: int) -> int:
    """About 2 x 4P/N in fp32: the reduced gradients, and the flat copy that the optimizer steps on.

    They are kept in one buffer of whole parameters: one that lies on the border of two ranks counts on both. The
    optimizer steps on one group after the other, and makes a flat copy only of that group. A part within a single
    parameter needs no copy. Without ``contiguous_gradients`` the group's own gradients are freed before its step. In
    bf16 and fp16 the reduced gradients are a flat fp32 buffer from the start: 4P/N.
    """
    if setup.precision != "fp32":
        return FULL * parts(groups)
    if setup.contiguous_gradients:
        copies = (0 if group.is_one_piece(rank) else group.part for group in groups)
        return FULL * (sum(group.touched(rank) for group in groups) + max(copies))
    most = waiting = 0  # while a group steps, the gradients of the groups after it wait
    for group in reversed(groups):
        most = max(most, waiting + (group.touched(rank) if group.is_one_piece(rank) else group.part))
        waiting += group.touched(rank)
    return FULL * most


def _offloaded_gradients(setup: Setup, groups: list[FlatGroup], rank: int) -> int:
    """4P/N in host memory, and at stage 2 their sum: in fp32 with several micro batches, of whole parameters.

    In bf16 and fp16 that sum is a flat buffer of the rank's part on the device (``_get_compact_grad_partition_buffer``
    of ``DeepSpeedZeroOptimizer``); in fp32 it is in the host. Stage 1 adds up whole gradients on the device: in fp32
    those are freed before the step. In bf16 and fp16 nearly all of them, except those of the last buckets, are freed
    only after it.
    """
    own, mixed = parts(groups), setup.precision != "fp32"
    if setup.recipe.zero_stage == 1:
        return FULL * (own + (sum(group.padded for group in groups) if mixed else 0))
    if mixed:
        return FULL * 2 * own
    if setup.gradient_accumulation_steps == 1:
        return FULL * own
    return FULL * (own + sum(group.touched(rank) for group in groups))


def _zero3(setup: Setup, held: list[ParameterSize]) -> ModelState:
    """ZeRO-3: wP/N of parameters, up to 8P/N of gradients, 4mP/N of moments, 4P/N of master weights.

    Parameters that persist are also held whole. There are two copies of the gradients. The optimizer steps on the
    second: one sub-group's at a time, or with offload all.
    With offload to NVMe, tensors that are large enough to be swapped are in files, which no measurement of memory sees.
    """
    shards = Shards.of(setup, held)
    ranks = setup.zero_ranks
    whole = 0  # a single rank's pieces are the parameters
    if ranks > 1:
        whole = sum(ranks * zero_piece(part, ranks) for part in persistent(setup.recipe.zero_optimization, held))
    offloaded = setup.recipe.offload_optimizer != "none"
    second = shards.own if offloaded else max(shards.sub_groups)
    sizes = {
        "parameters": setup.low * (shards.own + whole),
        "gradients": FULL * (shards.own + second),
        "optimizer": _optimizer(setup, shards.own, tensors=len(shards.sub_groups)),
        "master": FULL * shards.own,
    }
    stays = set() if offloaded else {"gradients", "optimizer", "master"}
    stays |= {"parameters"} if setup.recipe.offload_param == "none" else set()
    return ModelState(**sizes, off_device={name: size for name, size in sizes.items() if name not in stays})

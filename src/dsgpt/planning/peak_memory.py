"""Predicts the most tensor memory that a rank needs in a training step, and what it is made of."""

from dataclasses import dataclass
from typing import Any

from dsgpt.planning import activations as acts
from dsgpt.planning.flat_groups import flat_groups
from dsgpt.planning.gathering import most_gathered
from dsgpt.planning.model_state import model_state
from dsgpt.planning.parameters import model_parameters, total
from dsgpt.planning.setup import FULL, Setup
from dsgpt.planning.sharded import fsdp_elements


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


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment of a step with the most memory."""

    moment: str
    """``loss``, ``backward`` or ``step``."""
    parts: dict[str, int]
    """Bytes of each of ``PARTS``."""

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())

    def as_dict(self) -> dict[str, Any]:
        """As records hold it."""
        return {"moment": self.moment, "parts": self.parts, "total": self.total}


def peak_memory(setup: Setup, *, rank: int = 0, device: str = "cpu") -> Peak:
    """The moment at which ``rank`` needs the most memory of its device."""
    moments = (_loss(setup, rank, device), _backward(setup, rank, device), _step(setup, rank, device))
    return max(moments, key=lambda moment: moment.total)


def worst_peak(setup: Setup, *, device: str = "cpu") -> tuple[int, Peak]:
    """The rank that needs the most memory, and its peak."""
    ranks = range(0, setup.world_size, setup.sizes.tensor)
    peaks = {rank: peak_memory(setup, rank=rank, device=device) for rank in ranks}
    worst = max(peaks, key=lambda rank: peaks[rank].total)
    return worst, peaks[worst]


def _peak(moment: str, **parts: int) -> Peak:
    return Peak(moment=moment, parts=dict.fromkeys(PARTS, 0) | parts)


def _loss(setup: Setup, rank: int, device: str) -> Peak:
    stream = acts.stream_bytes(setup)
    return _peak(
        "loss",
        **_held(setup, rank),
        gathered=_gathered(setup),
        activations=acts.kept_bytes(setup, setup.blocks(rank)) + 2 * stream,
        logits=acts.logits_bytes(setup, device=device),
        new_gradients=acts.head_gradient_bytes(setup, device=device),
    )


def _backward(setup: Setup, rank: int, device: str) -> Peak:
    stream = acts.stream_bytes(setup)
    kept = acts.kept_bytes(setup, setup.blocks(rank)) + stream
    return _peak(
        "backward",
        **_held(setup, rank),
        gathered=_gathered(setup),
        buckets=_bucket(setup),
        activations=kept + acts.recomputed_bytes(setup) + acts.block_gradient_bytes(setup),
        new_gradients=acts.head_gradient_bytes(setup, device=device),
    )


def _step(setup: Setup, rank: int, device: str) -> Peak:
    """At the end of the backward pass: all gradients, and the embedding's from its lookup."""
    held, low = _held(setup, rank), setup.low
    lookup = low * setup.model.padded_vocab_size * setup.model.n_embd
    held["gradients"] = _final_gradients(setup, rank)
    return _peak("step", **held, buckets=_bucket(setup), new_gradients=lookup)


def _held(setup: Setup, rank: int) -> dict[str, int]:
    """Model state during forward and backward pass; gradients only where earlier micro batches or steps left some."""
    state = model_state(setup, rank=rank)
    found = {"weights": state.parameters, "optimizer": state.optimizer, "master": state.master}
    found = {
        name: 0 if key in state.off_device else size
        for (name, size), key in zip(found.items(), ("parameters", "optimizer", "master"), strict=True)
    }
    return {**found, "gradients": _earlier_gradients(setup, rank)}


def _earlier_gradients(setup: Setup, rank: int) -> int:
    held = setup.held(rank)
    elements, several = total(held), setup.gradient_accumulation_steps > 1
    if setup.run_type == "baseline":
        return FULL * elements if several else 0
    if setup.run_type == "ddp":
        buckets = setup.low * elements
        return buckets + (FULL * elements if several and setup.low != FULL else 0)
    if setup.run_type == "fsdp":
        return FULL * elements if several else 0
    stage = setup.recipe.zero_stage
    if stage == 0:
        return FULL * elements if several else 0
    if stage == 1 and setup.uses_bf16_optimizer:
        return FULL * sum(group.padded for group in flat_groups(held, setup.zero_ranks))
    if stage == 1 and setup.world_size == 1:
        return FULL * elements
    if stage == 3:
        return model_state(setup, rank=rank).gradients
    return FULL * elements if several and stage == 1 else 0


def _final_gradients(setup: Setup, rank: int) -> int:
    state, elements = model_state(setup, rank=rank), total(setup.held(rank))
    if setup.run_type in {"baseline", "ddp"} or setup.recipe.zero_stage == 0:
        return FULL * elements + (setup.low * elements if setup.low != FULL else 0)
    if setup.run_type == "fsdp":
        return state.gradients
    return max(state.gradients, _earlier_gradients(setup, rank)) + setup.low * elements


def _bucket(setup: Setup) -> int:
    """DeepSpeed's buffer for gradients to reduce, which has its full size even for a small model."""
    if setup.run_type != "optimized" or setup.recipe.zero_stage == 0 or setup.uses_bf16_optimizer:
        return 0
    zero = setup.recipe.zero_optimization
    if setup.recipe.zero_stage == 1 and setup.world_size == 1:
        return 0
    return setup.low * zero.reduce_bucket_size if zero.contiguous_gradients else 0


def _gathered(setup: Setup) -> int:
    """Weights of other ranks' shards that are whole at the loss."""
    if setup.run_type == "fsdp":
        whole = model_parameters(setup.model)
        root = [part for part in whole if not part.name.startswith("blocks.")]
        block = [part for part in whole if part.name.startswith("blocks.0.")]
        return (
            setup.low
            * setup.world_size
            * (fsdp_elements(root, setup.world_size) + fsdp_elements(block, setup.world_size))
        )
    if setup.run_type == "optimized" and setup.recipe.zero_stage == 3:
        return setup.low * most_gathered(setup) + _bucket(setup)
    return 0

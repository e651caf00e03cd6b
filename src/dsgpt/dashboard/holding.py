"""Who holds what: the bytes of every rank, whole or as a shard, and where they are."""

from collections.abc import Iterator
from dataclasses import dataclass

from dsgpt.advising.words import held_in_words, place_of
from dsgpt.planning.model_state import ModelState, model_state
from dsgpt.planning.parameters import model_parameters, total
from dsgpt.planning.peak_memory import Peak, peak_memory
from dsgpt.planning.setup import FULL, Setup

_STATE = {
    "weights": ("weights", "parameters"),
    "gradients": ("gradients", "gradients"),
    "optimizer state": ("optimizer", "optimizer"),
    "master weights": ("master", "master"),
}
"""Kinds of model state, each with its part of a peak and its field of ``ModelState``."""
_PASSING = {"activations": {"activations", "logits"}, "new gradients": {"gradients", "new_gradients"}}
"""Kinds that exist for a while, with their parts of a peak. All other parts are ``temporary``."""
KINDS = (*_STATE, *_PASSING, "temporary")
"""What a rank holds at its peak, as pictures stack it; temporary are buckets and gathered weights."""
_WHOLE = 0.99
"""Of the bytes without a split: what holds at least this share is whole, because shards have padding."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """What a rank holds of one kind."""

    kind: str
    """One of ``KINDS``."""
    size: int
    """Bytes."""
    whole: int
    """Bytes of this kind on a rank that holds all of the model; at least ``size``."""
    start: float
    """Where the shard begins, as a share of ``whole``."""
    place: str
    """``device``, ``host`` or ``files``."""

    @property
    def is_shard(self) -> bool:
        """Whether the rank holds only a part."""
        return self.size < _WHOLE * self.whole


@dataclass(frozen=True, kw_only=True)
class Holding:
    """All that one rank holds."""

    rank: int
    words: str
    """Its layers, shards and data, and the moment of its peak."""
    blocks: tuple[Block, ...]

    def total(self, *places: str) -> int:
        """Bytes in these places."""
        return sum(block.size for block in self.blocks if block.place in places)


def holdings(setup: Setup, *, ranks: int) -> list[Holding]:
    """What each of the first ``ranks`` ranks, with a GPU each, holds at its peak; on the device that adds up to it."""
    peaks = [peak_memory(setup, rank=rank, device="cuda") for rank in range(min(ranks, setup.world_size))]
    words = [f"{held_in_words(setup, rank)}, peak: {peak.moment}" for rank, peak in enumerate(peaks)]
    blocks = [tuple(_blocks(setup, rank, peak)) for rank, peak in enumerate(peaks)]
    return [Holding(rank=rank, words=words[rank], blocks=blocks[rank]) for rank in range(len(peaks))]


def _blocks(setup: Setup, rank: int, peak: Peak) -> Iterator[Block]:
    state, whole = model_state(setup, rank=rank), total(model_parameters(setup.model))
    widths, parts = _widths(setup, state), dict(peak.parts)
    for kind, (part, field) in _STATE.items():
        held, away = getattr(state, field), state.off_device.get(field, 0)
        here = parts.pop(part) if away < held else 0
        for size, place in ((here, "device"), (away, _elsewhere(setup, field))):
            frame = size  # no shard if it is not the model state's
            if size in {held - away, away}:
                frame = max(size, widths[kind] * whole)
            if size:
                start = min(_start(setup, rank, size, widths[kind]), 1 - size / frame)
                yield Block(kind=kind, size=size, whole=frame, start=start, place=place)
    passing = {kind: sum(parts.pop(name, 0) for name in names) for kind, names in _PASSING.items()}
    for kind, size in (passing | {"temporary": sum(parts.values())}).items():
        if size:
            yield Block(kind=kind, size=size, whole=size, start=0.0, place="device")


def _widths(setup: Setup, state: ModelState) -> dict[str, int]:
    """Bytes per parameter, of each kind."""
    return {
        "weights": FULL if setup.run_type == "fsdp" else setup.low,
        "gradients": FULL,
        "optimizer state": FULL * setup.moments,
        "master weights": FULL if state.master else 0,
    }


def _start(setup: Setup, rank: int, size: int, width: int) -> float:
    """Where the rank's part begins in the whole model: its stage, then its tensor shard, then its ZeRO shard."""
    place, sizes = place_of(setup, rank), setup.sizes
    stages = [total(stage) for stage in setup.stages]
    before, stage = sum(stages[: place.stage]), stages[place.stage]
    share = stage / sum(stages) / sizes.tensor
    start = before / sum(stages) + place.tensor_rank * share
    if size < _WHOLE * width * total(setup.held(rank)):
        start += rank // sizes.tensor % setup.zero_ranks * share / setup.zero_ranks
    return start


def _elsewhere(setup: Setup, field: str) -> str:
    """Where offload puts this part of the model state."""
    recipe = setup.recipe
    swapped = {"parameters": recipe.offload_param, "optimizer": recipe.offload_optimizer}
    swapped["master"] = recipe.offload_optimizer
    return "files" if setup.run_type == "optimized" and swapped.get(field) == "nvme" else "host"

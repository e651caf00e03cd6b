"""Who holds what: the bytes of every rank, whole or as a shard, and where they are."""

from collections.abc import Iterator
from dataclasses import dataclass

from dsgpt.advising.words import held_in_words, place_of
from dsgpt.planning.activations import kept_bytes
from dsgpt.planning.model_state import ModelState, model_state
from dsgpt.planning.parameters import model_parameters, total
from dsgpt.planning.setup import FULL, Setup

KINDS = ("weights", "gradients", "optimizer state", "master weights", "activations")
"""What a rank holds, as pictures stack it."""
_FIELDS = {
    "weights": "parameters",
    "gradients": "gradients",
    "optimizer state": "optimizer",
    "master weights": "master",
}
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
    """Its layers, shards and data."""
    blocks: tuple[Block, ...]

    def total(self, *places: str) -> int:
        """Bytes in these places."""
        return sum(block.size for block in self.blocks if block.place in places)


def holdings(setup: Setup, *, ranks: int) -> list[Holding]:
    """What each of the first ``ranks`` ranks holds: model state while the optimizer steps, and activations.

    Activations are those that the forward pass keeps for the backward pass, of all micro batches in flight.
    """
    shown = range(min(ranks, setup.world_size))
    return [Holding(rank=rank, words=held_in_words(setup, rank), blocks=tuple(_blocks(setup, rank))) for rank in shown]


def _blocks(setup: Setup, rank: int) -> Iterator[Block]:
    state, whole = model_state(setup, rank=rank), total(model_parameters(setup.model))
    widths = _widths(setup, state)
    for kind, field in _FIELDS.items():
        away = state.off_device.get(field, 0)
        for size, place in ((getattr(state, field) - away, "device"), (away, _elsewhere(setup, field))):
            if size:
                frame = max(size, widths[kind] * whole)
                start = min(_start(setup, rank, size, widths[kind]), 1 - size / frame)
                yield Block(kind=kind, size=size, whole=frame, start=start, place=place)
    kept = kept_bytes(setup, setup.blocks(rank)) * setup.micro_batches_in_flight(rank)
    yield Block(kind="activations", size=kept, whole=kept, start=0.0, place="device")


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

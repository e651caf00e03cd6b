"""The ways to train that ``--recommend`` searches: strategies of the shipped recipes, with every split of the model."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgpt.common.divisors import divisors
from dsgpt.config.recipe import PARALLEL_KEYS, Recipe, recipe_from

RECIPES = Path("ds_configs")
_STRATEGY_KEYS = (
    *("zero_optimization", *PARALLEL_KEYS, "aio", "dsgpt", "activation_checkpointing"),
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
)
"""Keys of a recipe that the search sets; all others stay as they are."""
_DATA_PARALLEL = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")


@dataclass(frozen=True, kw_only=True)
class Way:
    """A strategy, without the batch."""

    name: str
    """As records name strategies, with a remark where two differ in a detail."""
    run_type: str
    blocks: dict[str, Any]
    """What it needs in the recipe."""

    def recipe(self, base: Recipe, path: Path, **more: Any) -> Recipe:
        """``base`` with this strategy, and ``more`` keys, as the file ``path``."""
        kept = {key: value for key, value in base.raw.items() if key not in _STRATEGY_KEYS}
        return recipe_from(kept | self.blocks | more, path)


def way_of(strategy: str, *, repository: Path) -> Way:
    """The way that ``--strategy`` names."""
    plain = strategy in {"baseline", "ddp", "fsdp"}
    blocks = _blocks(repository, "zero0" if plain else strategy)
    return Way(name=strategy, run_type=strategy if plain else "optimized", blocks=blocks)


def ways(devices: int, *, together: int, repository: Path) -> Iterator[Way]:
    """Every way to train on ``devices``, the simplest first.

    Args:
        devices: GPUs of the training.
        together: GPUs of one machine; tensor and sequence peers are on the same one, so on several machines their
            number divides it.
        repository: has the shipped recipes.
    """
    if devices == 1:
        yield Way(name="baseline", run_type="baseline", blocks=_blocks(repository, "zero0"))
    else:
        yield Way(name="ddp", run_type="ddp", blocks=_blocks(repository, "zero0"))
        yield Way(name="fsdp", run_type="fsdp", blocks=_blocks(repository, "zero0"))
    for recipe in _DATA_PARALLEL[4:] if devices == 1 else _DATA_PARALLEL:
        yield Way(name=recipe.replace("_", "-"), run_type="optimized", blocks=_blocks(repository, recipe))
    inside = [size for size in _on_one_machine(devices, devices, together=together) if size > 1]
    for size in inside:
        blocks = _blocks(repository, "tensor") | {"tensor_parallel": {"autotp_size": size}}
        yield Way(name=f"tensor{size}-zero1", run_type="optimized", blocks=blocks)
    for size in inside:
        blocks = _blocks(repository, "sequence") | {"sequence_parallel_size": size}
        yield Way(name=f"sequence{size}-zero1", run_type="optimized", blocks=blocks)
    for stages in divisors(devices)[1:]:
        yield from _pipelines(stages, devices, together=together, repository=repository)


def _pipelines(stages: int, devices: int, *, together: int, repository: Path) -> Iterator[Way]:
    for tensor in _on_one_machine(devices // stages, devices, together=together):
        blocks = _blocks(repository, "pipeline")
        blocks["pipeline"] = blocks["pipeline"] | {"stages": stages}
        if tensor > 1:
            blocks["tensor_parallel"] = {"autotp_size": tensor}
        name = f"pipeline{stages}-" + (f"tensor{tensor}-" if tensor > 1 else "") + "zero1"
        yield Way(name=name, run_type="optimized", blocks=blocks)


def _on_one_machine(number: int, devices: int, *, together: int) -> list[int]:
    """The divisors of ``number`` with which groups of neighbouring ranks are never on two machines."""
    return [size for size in divisors(number) if devices <= together or together % size == 0]


def _blocks(repository: Path, name: str) -> dict[str, Any]:
    """What the shipped recipe ``name`` says about the strategy."""
    raw = json.loads((repository / RECIPES / f"{name}.json").read_text(encoding="utf-8"))
    return {key: raw[key] for key in ("zero_optimization", *PARALLEL_KEYS) if key in raw}

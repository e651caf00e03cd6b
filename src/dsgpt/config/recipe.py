"""The recipe: a DeepSpeed JSON that every strategy can execute. Reads, checks and writes recipes.

A recipe is read and checked in the same way for every strategy, so the same file works for the baseline on a
laptop and for DeepSpeed on a cluster. Imports neither torch nor DeepSpeed.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from dsgpt.common.errors import Problems
from dsgpt.common.json_files import JsonError, clipped, parse_json, read_bytes
from dsgpt.common.text import IN_CHECKOUT, REPOSITORY
from dsgpt.config.options import NAMES
from dsgpt.config.options import ExecutionOnly as Only
from dsgpt.config.recipe_blocks import IN_A_FILE, WITHOUT_UNKNOWN_KEYS, RecipeSettings, mistakes_of

# Recipes in files.

_MAX_BYTES = 1 << 20

DEEPSPEED_KEYS = (
    *("zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *("wall_clock_breakdown", "memory_breakdown", "dump_state", "aio"),
)
"""Keys that only DeepSpeed's engine uses. Other strategies ignore them.

The engine gets them as given, with four exceptions: ``zero_allow_untested_optimizer`` is always true, values for
offload are adapted, ``overlap_comm`` is false if it is absent, and ``reduce_bucket_size`` is at most the model's size.

The keys change how a step is computed, not its result, with one exception: Zero++'s ``zero_quantized_weights`` and
``zero_quantized_gradients`` in ``zero_optimization`` round what ranks send, which changes the training.
"""

PARALLEL_KEYS = ("tensor_parallel", "pipeline", "sequence_parallel_size")
"""Keys that split the model or its sequences over ranks under DeepSpeed. Strategies configure DeepSpeed from them."""


_SETTINGS = TypeAdapter(RecipeSettings)


@dataclass(frozen=True, kw_only=True)
class Recipe(RecipeSettings):
    """A checked recipe file."""

    path: Annotated[Path, NAMES]
    sha256: Annotated[str, NAMES]
    raw: Annotated[dict[str, Any], Only("the JSON as given; its keys are judged one by one")] = field(repr=False)
    """The JSON as given."""

    @property
    def deepspeed_only(self) -> tuple[str, ...]:
        """Keys in the file that only DeepSpeed uses."""
        return tuple(key for key in self.raw if key in DEEPSPEED_KEYS + PARALLEL_KEYS)


def sound_recipe(path: Path) -> Recipe:
    """The recipe in a file without mistakes.

    Raises:
        UserError: it has some; a line each.
    """
    problems = Problems()
    recipe = read_recipe(path, problems)
    problems.raise_if_any()
    assert recipe is not None
    return recipe


def read_recipe(path: Path, problems: Problems) -> Recipe | None:
    """Read and check a whole recipe.

    Mistakes go to ``problems``. The recipe without the wrong entries is returned nevertheless, so that the other checks
    can run; None if what is left is not a recipe. An installed package finds ``ds_configs/NAME.json`` among its files.
    """
    shipped = not IN_CHECKOUT and path.parts[:1] == ("ds_configs",) and not path.exists()
    try:
        data = read_bytes(REPOSITORY / path if shipped else path, max_bytes=_MAX_BYTES)
    except JsonError as error:
        problems.add(f"--deepspeed_config {path}: cannot be read ({error}); recipes are in ds_configs/")
        return None
    try:
        raw = parse_json(data)
    except JsonError as error:
        problems.add(f"--deepspeed_config {path}: is not valid JSON: {error}")
        return None
    if not isinstance(raw, dict):
        problems.add(f"--deepspeed_config {path}: must be an object in braces, not {clipped(raw)}")
        return None
    for context in (IN_A_FILE, WITHOUT_UNKNOWN_KEYS):  # unknown keys alone make a block invalid
        try:
            settings = _SETTINGS.validate_python(raw, context=context)
        except ValidationError as error:
            lines = (f"{': '.join(map(str, (path, *each.place)))} {each.text}" for each in mistakes_of(error))
            problems.add(*lines)  # once, also those that both contexts have
            settings = None
    while settings is None:
        try:
            settings = _SETTINGS.validate_python(raw, context=WITHOUT_UNKNOWN_KEYS)
        except ValidationError as error:
            removed = [_remove(raw, each.place) for each in mistakes_of(error)]
            if not any(removed):  # a required key is missing
                return None
    return Recipe(path=path, sha256=hashlib.sha256(data).hexdigest(), raw=raw, **vars(settings))


def recipe_from(raw: dict[str, Any], path: Path) -> Recipe:
    """The recipe that ``raw``, which this program made, would be in the file ``path``."""
    settings = _SETTINGS.validate_python(raw, context=IN_A_FILE)
    return Recipe(path=path, sha256=hashlib.sha256(recipe_text(raw).encode()).hexdigest(), raw=raw, **vars(settings))


def recipe_text(raw: dict[str, Any]) -> str:
    """The text of a recipe file."""
    return json.dumps(raw, indent=2) + "\n"


def _remove(block: dict[str, Any], place: tuple[int | str, ...]) -> bool:
    """Remove the entry at ``place``, or else the innermost block around it that exists; False if none does."""
    key, *rest = place
    if key not in block:
        return False
    if not (rest and isinstance(block[key], dict) and _remove(block[key], tuple(rest))):
        del block[key]
    return True


def merged(recipe: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``recipe`` with ``changes`` laid over it, object by object; None removes a key."""
    result = dict(recipe)
    for key, value in changes.items():
        below = result.get(key)
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result

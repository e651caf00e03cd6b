"""Setups of a tiny model, for tests of formulas."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from small_run import REPOSITORY

from dsgpt.common.errors import Problems
from dsgpt.config.recipe import read_recipe
from dsgpt.model.config import GPT2Config
from dsgpt.planner.setup import Setup

TINY = GPT2Config(n_layer=2, n_head=2, n_embd=8, block_size=16, vocab_size=64)


@pytest.fixture
def setup(tmp_path: Path) -> Callable[..., Setup]:
    """From a shipped recipe, what changes in it, and fields of ``Setup``, to one of 2 ranks and 3 micro batches."""

    def make(name: str = "zero1", *, zero: dict | None = None, top: dict | None = None, **fields) -> Setup:
        recipe = json.loads((REPOSITORY / "ds_configs" / f"{name}.json").read_text())
        recipe["zero_optimization"] |= zero or {}
        path, problems = tmp_path / "recipe.json", Problems()
        path.write_text(json.dumps(recipe | (top or {})))
        known = {
            "run_type": "optimized",
            "model": TINY,
            "recipe": read_recipe(path, problems),
            "world_size": 2,
            "precision": "fp32",
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 3,
            "seq_length": 4,
        }
        problems.raise_if_any()
        return Setup(**(known | fields))

    return make

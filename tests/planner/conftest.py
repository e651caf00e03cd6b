"""Setups of a tiny model for tests of formulas, and plans made in this process."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from small_run import REPOSITORY

from dsgpt.charts.memory import draw_plan
from dsgpt.common.command_line import exit_code_of
from dsgpt.common.errors import Problems
from dsgpt.config.recipe import read_recipe
from dsgpt.model.config import GPT2Config
from dsgpt.planner.command import act
from dsgpt.planner.options import read_plan_options
from dsgpt.planner.setup import Setup

# Setups of a tiny model, for tests of formulas.


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


# Plans made in this process, as `src/plan.py` makes them.


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs a command line in an empty folder, which must end with ``code``; returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(line: str, *, code: int = 0) -> str:
        options, problems = read_plan_options(line.split())
        assert act(options, problems, repository=REPOSITORY, draw=draw_plan) == code
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], list[str]]:
    """Runs a command line in an empty folder, which must be refused; returns its error lines."""
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> list[str]:
        def main() -> int:
            return act(*read_plan_options(line.split()), repository=REPOSITORY, draw=draw_plan)

        assert exit_code_of(main) == 2
        assert not list(tmp_path.iterdir()), "a refused request wrote something"
        return [each.removeprefix("error: ") for each in capsys.readouterr().err.splitlines()]

    return run

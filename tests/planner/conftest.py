"""Setups of a tiny model for tests of formulas, and plans made in this process."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from planner_records import RECORD
from small_run import REPOSITORY

from dsgpt.charts.memory import draw_plan
from dsgpt.common.command_line import exit_code_of
from dsgpt.config.recipe import recipe_from
from dsgpt.model.config import GPT2Config
from dsgpt.planner.options import read_plan_options
from dsgpt.planner.search import act
from dsgpt.planner.setup import Setup

TINY = {
    "run_type": "optimized",
    "model": GPT2Config(n_layer=2, n_head=2, n_embd=8, block_size=16, vocab_size=64),
    "world_size": 2,
    "precision": "fp32",
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "seq_length": 4,
}


@pytest.fixture
def setup() -> Callable[..., Setup]:
    """From a shipped recipe, what changes in it, and fields of ``Setup``, to one of 2 ranks and 3 micro batches."""

    def make(name: str = "zero1", *, zero: dict | None = None, top: dict | None = None, **fields) -> Setup:
        recipe = json.loads((REPOSITORY / "ds_configs" / f"{name}.json").read_text())
        recipe["zero_optimization"] |= zero or {}
        return Setup(recipe=recipe_from(recipe | (top or {}), Path("recipe.json")), **(TINY | fields))

    return make


@pytest.fixture
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a calibration of two devices, outside the folder in which plans are made."""
    path = tmp_path_factory.mktemp("machine") / "calibration.json"
    path.write_text(json.dumps(RECORD))
    return path


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs a command line as ``src/plan.py`` does, in an empty folder; it must end with ``code``. Returns its output.

    What is refused, with code 2, may write nothing.
    """
    monkeypatch.chdir(tmp_path)

    def run(line: str, *, code: int = 0) -> str:
        def main() -> int:
            return act(*read_plan_options(line.split()), draw=draw_plan)

        assert exit_code_of(main) == code
        assert code != 2 or not list(tmp_path.iterdir()), "a refused request wrote something"
        out, errors = capsys.readouterr()
        return errors if code == 2 else out

    return run


@pytest.fixture
def refused(plan: Callable[..., str]) -> Callable[[str], list[str]]:
    """Runs a command line that must be refused; returns its error lines."""
    return lambda line: [each.removeprefix("error: ") for each in plan(line, code=2).splitlines()]

"""A run that was finished once, for tests that copy it."""

import shutil
from pathlib import Path

import pytest
from small_run import command_line, write_data, write_recipe
from training_runs import LONG, stop_after_9

from dsgpt.training.command import train as train_here


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a recipe, and a finished run in ``run``; tests only read it."""
    folder = write_data(tmp_path_factory.mktemp("finished"))
    write_recipe(folder / "recipe.json")
    assert train_here(command_line(folder, **LONG)) == 0
    return folder


@pytest.fixture
def copied_run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return shutil.copytree(finished_run / "run", tmp_path / "copy")


@pytest.fixture
def stopped(copied_run: Path) -> Path:
    """A copy of the finished run as a kill after step 9 would have left it."""
    return stop_after_9(copied_run)

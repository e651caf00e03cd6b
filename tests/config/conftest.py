"""A run in ``here`` that must be refused, and the path of a recipe."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_run import command_line

from dsgpt.training.command import train

Refused = Callable[..., list[str]]


@pytest.fixture
def refused(here: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Train with changed flags, which must fail as a user's mistake. Returns the error lines without ``here``."""

    def run(**changes: Any) -> list[str]:
        before = sorted(here.rglob("*"))
        assert train(command_line(here, **changes)) == 2
        assert sorted(here.rglob("*")) == before, "a refused request wrote something"
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        lines = printed.err.splitlines()
        assert all(line.startswith("error: ") for line in lines), lines
        return [line.removeprefix("error: ").replace(f"{here}/", "") for line in lines]

    return run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "recipe.json"

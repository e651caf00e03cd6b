"""Plans made in this process, as ``src/plan.py`` makes them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from small_run import REPOSITORY

from dsgpt.charts.plan import draw_plan
from dsgpt.common.command_line import exit_code_of
from dsgpt.planner.command import act
from dsgpt.planner.options import read_plan_options


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

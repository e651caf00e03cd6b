"""A folder of runs for the pages: a finished pair of the same work, and runs in every other state."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from chart_records import record, step_lines, write_run
from streamlit.testing.v1 import AppTest

from dsgpt.dashboard.reading import contents


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder, to which a test may add, with two finished runs of the same work.

    zero1 takes 60% of the baseline's time on two devices.
    """
    folder = tmp_path / "runs"
    for name, devices, seconds, shift in (("baseline", 1, 100.0, 0.0), ("zero1", 2, 60.0, 1e-6)):
        values = record(training_config__strategy=name, hardware__world_size=devices, summary__train_time_sec=seconds)
        values["training_config"]["total_steps"] = 40
        values["timestamp_utc"] = "2026-11-22T10:00:00+00:00"
        write_run(folder / name, values, lines=step_lines(seconds=seconds / 40, shift=shift))
    return folder


@pytest.fixture
def open_page(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., AppTest]:
    """Opens a page of the dashboard on ``runs`` or another folder, as ``charts/dashboard.py`` would.

    ``state`` is the session's.
    """
    contents.clear()

    def opened(
        page: str, query: dict[str, list[str]] | None = None, *, folder: Path = runs, **state: object
    ) -> AppTest:
        monkeypatch.setattr(sys, "argv", ["dashboard.py", "--runs", str(folder)])
        text = f"from dsgpt.dashboard import {page}\n{page}.show()\n"
        test = AppTest.from_string(text, default_timeout=60)
        for key, value in state.items():
            test.session_state[key] = value
        for key, values in (query or {}).items():
            test.query_params[key] = values
        test.run()
        assert not test.exception, test.exception
        return test

    return opened

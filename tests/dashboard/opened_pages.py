"""Pages as Streamlit's AppTest runs them, without a browser."""

import sys
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest


def _page(name: str) -> None:
    import importlib

    importlib.import_module(f"dsgpt.dashboard.{name}").show()


def open_page(name: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> AppTest:
    """The page ``name`` after its first run, with the runs in ``runs``."""
    monkeypatch.setattr(sys, "argv", ["dashboard.py", "--runs", str(runs)])
    page = AppTest.from_function(_page, args=(name,), default_timeout=60).run()
    assert not page.exception
    return page

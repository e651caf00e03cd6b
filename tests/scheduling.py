"""Which tests run in the same process when several processes share the suite (``make test``), and which start first."""

import re
from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

TESTS = Path(__file__).parent
SHARED = {"benchmarks": "result_of", "strategies": "seen"}
"""Folder of tests to the fixture whose launches its tests share."""
ONE_PROCESS = SHARED | {"dashboard/browser": "visit"}
"""As ``SHARED``, and folders whose tests share a process that is no launcher."""
SLOW_FIRST = [
    *("clusters", "benchmarks", "strategies", "training", "inference", "goldens", "dashboard/browser"),
    *(".", "formats", "data", "charts", "record"),
]
"""Folders whose tests start first, so that no process still runs long after the others."""


def folder_of(path: Path) -> str:
    """The folder of a test file, relative to ``tests/``; empty for a file outside of it."""
    return path.parent.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""


@cache
def group_of(path: Path) -> str:
    """The group of a test file, whose tests run in one process: its folder where they share launches, else the file.

    The scheduler knows the names of tests and nothing else, so this looks for the fixture in the text of the file.
    """
    folder = folder_of(path)
    if folder not in ONE_PROCESS:
        return path.as_posix()
    takes_fixture = rf"def test_\w+\([^)]*\b{ONE_PROCESS[folder]}\b"
    return folder if re.search(takes_fixture, path.read_text(encoding="utf-8")) else path.as_posix()


def place_of(path: Path) -> tuple[int, bool]:
    """Sorts test files: slow folders first, and in a folder the files that share launches."""
    folder = folder_of(path)
    return (SLOW_FIRST.index(folder) if folder in SLOW_FIRST else len(SLOW_FIRST)), group_of(path) != folder


class GroupScheduling(LoadScopeScheduling):
    """Gives a process one group of tests after the other.

    pytest-xdist adds its own groups to the names of tests, where pytest 9.2 hides them.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(TESTS.parent / nodeid.split("::", 1)[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> GroupScheduling:
    """Schedule by group."""
    return GroupScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start slow tests first."""
    items.sort(key=lambda item: place_of(item.path))

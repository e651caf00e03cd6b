"""Tests that share launches run in one of the two processes of ``make test``; else both would start the launches."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from scheduling import SHARED, TESTS, group_of
from small_run import REPOSITORY


def test_a_file_stays_in_one_process():
    options = (REPOSITORY / "Makefile").read_text().split("-m pytest ", 1)[1].splitlines()[0].split()
    files = ["tests/common/test_json_files.py", "tests/config/test_recipe.py", "tests/test_rooms_picture.py"]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options, *files]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    processes = defaultdict(set)
    for process, file in re.findall(r"^\[(gw\d)\].* PASSED (\S+\.py)::", done.stdout, flags=re.MULTILINE):
        processes[file].add(process)
    assert sorted(processes) == sorted(files)
    assert all(len(found) == 1 for found in processes.values()), processes
    assert len(set.union(*processes.values())) == 2


def test_tests_that_share_launches_are_one_group():
    """The scheduler searches the text of the files; it must find those whose tests take the fixture."""
    for folder, fixture in SHARED.items():
        files = sorted((TESTS / folder).glob("test_*.py"))
        sharing = [file.name for file in files if group_of(file) == folder]
        assert sharing == [file.name for file in files if _takes(file, fixture)]
        assert len(sharing) > 1


def _takes(file: Path, fixture: str) -> bool:
    """Whether a test of ``file`` has ``fixture`` among its arguments."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return any(argument.arg == fixture for test in tests for argument in test.args.args)

"""What the tests of all suites' commands share."""

import subprocess
from pathlib import Path
from typing import Any

from forked_ranks import run_script
from messages import without_torch
from small_run import REPOSITORY

REFERENCE = Path("checkpoint/reference/cpu-2-cores")


def benchmark(*arguments: Any, cwd: Path = REPOSITORY) -> "subprocess.CompletedProcess[str]":
    """Run ``src/benchmark.py``."""
    return run_script(REPOSITORY / "src" / "benchmark.py", arguments, cwd=cwd)


def refusal(*arguments: Any, cwd: Path) -> str:
    """The error of a command that must end with exit code 2 and leave nothing in ``cwd``, an empty folder."""
    done = benchmark(*arguments, cwd=cwd)
    assert done.returncode == 2
    assert list(cwd.iterdir()) == []
    return without_torch(done.stderr).strip()

"""What the tests of all suites' commands share."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from messages import without_torch
from small_run import REPOSITORY

REFERENCE = Path("checkpoint/reference/cpu-2-cores")


def benchmark(*arguments: Any, cwd: Path = REPOSITORY) -> "subprocess.CompletedProcess[str]":
    """Run ``src/benchmark.py``."""
    command = [sys.executable, str(REPOSITORY / "src" / "benchmark.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def refusal(*arguments: Any, cwd: Path) -> str:
    """The error of a command that must end with exit code 2 and leave nothing in ``cwd``, an empty folder."""
    done = benchmark(*arguments, cwd=cwd)
    assert done.returncode == 2
    assert list(cwd.iterdir()) == []
    return without_torch(done.stderr).strip()

"""What the tests of all suites' commands share."""

import subprocess
from pathlib import Path
from typing import Any

from forked_ranks import run_script
from small_run import REPOSITORY

REFERENCE = Path("checkpoint/reference/cpu-2-cores")


def benchmark(*arguments: Any, cwd: Path = REPOSITORY) -> "subprocess.CompletedProcess[str]":
    """Run ``src/benchmark.py``."""
    return run_script(REPOSITORY / "src" / "benchmark.py", arguments, cwd=cwd)

"""What the tests of all suites' commands share."""

import subprocess
from pathlib import Path
from typing import Any

from forked_ranks import run_script
from small_run import REPOSITORY


def benchmark(*arguments: Any, cwd: Path = REPOSITORY) -> "subprocess.CompletedProcess[str]":
    """Run ``src/benchmark.py``."""
    return run_script(REPOSITORY / "src" / "benchmark.py", arguments, cwd=cwd)

"""Child processes that run one rank of a cell each: how they start, and how their end is noticed."""

import contextlib
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.harness.launch import CALL_SEPARATOR
from dsgpt.benchmarks.harness.rank_files import rank_file, read_ranks
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.runtime.leaving import leave

CELL_LIMIT_SEC = 600
"""Seconds after which a cell counts as stuck."""
PATIENCE_SEC = 15
"""Seconds that a rank may continue after another one failed. A rank that runs longer only waits for the failed one."""
POLL_SEC = 0.02

Cell = dict[str, Any]
"""The fields of a ``launch.Assignment``."""


class Alive:
    """Ends this process when the suite or the launcher is gone: neither can end its ranks when it is killed.

    Args:
        runner: process id of the suite.
    """

    def __init__(self, *, runner: int) -> None:
        self._runner, self._launcher = runner, os.getppid()

    def check(self) -> None:
        """Exit if the suite's process or the launcher is gone."""
        if os.getppid() != self._launcher:
            sys.exit("the launcher is gone")
        try:
            os.kill(self._runner, 0)
        except ProcessLookupError:
            sys.exit("the suite is gone")

    def wait_for(self, path: Path) -> None:
        """Return when ``path`` exists; exit as ``check`` does."""
        while not path.exists():
            self.check()
            time.sleep(POLL_SEC)


def run_cell(cell: Cell, rank: int) -> None:
    """Run one cell in this process. Write the rank's file after a refusal or error; else the called function does."""
    folder = Path(cell["folder"])
    module, function = cell["call"].split(CALL_SEPARATOR)
    try:
        getattr(importlib.import_module(module), function)(cell["flags"], folder, **cell["arguments"])
    except UserError as error:
        _write_end(folder, rank, status="refused", message="\n".join(error.problems))
    except Exception as error:  # noqa: BLE001 - every failure of a cell is a result of the suite
        traceback.print_exc()
        _write_end(folder, rank, status="error", message=f"{type(error).__name__}: {error}")


def _write_end(folder: Path, rank: int, *, status: str, message: str) -> None:
    end = {"status": status, "message": message, "time": time.time()}
    write_json_atomic(rank_file(folder, rank), end)


def fork(cell: Cell, rank: int, environment: Mapping[str, str]) -> int:
    """Run ``cell`` as ``rank`` in a forked child with exactly this environment; return its process id."""
    child = os.fork()
    if not child:
        _run_forked(cell, rank, environment)
    return child


def _run_forked(cell: Cell, rank: int, environment: Mapping[str, str]) -> None:
    """What the forked child does. It does not return."""
    with _log_file(cell, rank).open("w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    run_cell(cell, rank)
    leave(0)


def spawn(module: list[str], cell: Cell, rank: int, environment: Mapping[str, str]) -> int:
    """Run ``module``, a name and arguments, in a new interpreter with this environment; return its process id."""
    log, new = str(_log_file(cell, rank)), os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", *module],
        environment,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, log, new, 0o644), (os.POSIX_SPAWN_DUP2, 1, 2)],
    )


def _log_file(cell: Cell, rank: int) -> Path:
    return Path(cell["folder"]) / f"rank-{rank}.log"


def watch(children: dict[int, int], cell: Cell, *, ranks: int, alive: Alive) -> None:
    """Wait for all children, kill them if they hang, and write the end of each that could not write one itself.

    Args:
        children: rank to process id; empty afterwards.
        cell: what they run.
        ranks: number of ranks of the cell; other processes may run some of them.
        alive: checked while they run.
    """
    folder = Path(cell["folder"])
    started, alone_since = time.monotonic(), float("inf")
    while children:
        for rank, child in list(children.items()):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                del children[rank]
                _write_missing_end(folder, rank, status)
        alive.check()
        now = time.monotonic()
        if now < alone_since and any(end["status"] != "done" for end in read_ranks(folder, ranks)):
            alone_since = now
        if now - started > CELL_LIMIT_SEC or now - alone_since > PATIENCE_SEC:
            for child in children.values():
                os.kill(child, signal.SIGKILL)
        time.sleep(POLL_SEC)


def _write_missing_end(folder: Path, rank: int, status: int) -> None:
    """If a child wrote no file, write how it ended; ``status`` is from ``waitpid``."""
    if not rank_file(folder, rank).exists():
        code = os.waitstatus_to_exitcode(status)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code} and without a result"
        _write_end(folder, rank, status="error", message=f"rank {rank} {how}")


@contextlib.contextmanager
def killed_on_error(children: Mapping[int, int]) -> Iterator[None]:
    """Kill ``children``, rank to process id, when this process must exit."""
    try:
        yield
    except BaseException:
        for child in children.values():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        raise

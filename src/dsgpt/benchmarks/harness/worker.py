"""A rank of a suite: ``python -m dsgpt.benchmarks.harness.worker JOB``, under ``torchrun``, ``deepspeed`` or alone.

A launch takes seconds, most of them imports, so one launch serves many cells: every rank imports everything once and
then trains each cell in a forked child of its own, which joins a process group of its own. No cell finds anything that
another one left behind. A process that uses a GPU cannot be forked: there every child is a new interpreter.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.harness.measurement import rank_file
from dsgpt.benchmarks.parity.rank import run_cell
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_atomic, write_json_atomic
from dsgpt.main import leave
from dsgpt.runtime.topology import Topology, free_port, read_topology

CELL_LIMIT_SEC = 600
"""After this a cell counts as stuck."""
PATIENCE_SEC = 15
"""How long a rank may go on after another one has failed; then it is waiting for a peer that will not come."""
PORT_FILE = "port"
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""With this variable ranks meet in torchrun's own store, which knows one process group, not many."""
POLL_SEC = 0.02


def main(arguments: list[str]) -> int:
    """Train every cell of the job; how each ended is in its folder, so the exit code is 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("--local_rank", type=int, help="from launchers; the environment says it too")
    parser.add_argument("--cell", type=int, help="train this one alone, in this process, which is a spawned child")
    given = parser.parse_args(arguments)
    job = json.loads(given.job.read_text(encoding="utf-8"))
    topology = read_topology()
    if given.cell is not None:
        _run(job["cells"][given.cell], topology.rank)
        leave(0)
    if job["start"] == "fork":
        for module in job["imports"]:
            importlib.import_module(module)
        gc.collect()
        gc.freeze()  # else every collection of a child touches, and so copies, the memory of all that was imported
    alive = _Alive(runner=job["runner"])
    for index, cell in enumerate(job["cells"]):
        folder = Path(cell["folder"])
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_agree_on_port(folder, topology, alive))}
        if job["start"] == "fork":
            child = _fork(cell, topology.rank, meeting)
        else:
            child = _spawn([job["worker"], str(given.job), "--cell", str(index)], folder, topology.rank, meeting)
        _watch(child, folder, topology, alive)
    return 0


class _Alive:
    """Ends this rank when nobody waits for it any more: a suite or a launcher that is killed takes nobody along."""

    def __init__(self, *, runner: int) -> None:
        self._runner, self._launcher = runner, os.getppid()

    def check(self) -> None:
        """Leave if the suite's process or the launcher is gone."""
        if os.getppid() != self._launcher:
            sys.exit("the launcher is gone")
        try:
            os.kill(self._runner, 0)
        except ProcessLookupError:
            sys.exit("the suite is gone")


def _run(cell: dict[str, Any], rank: int) -> None:
    """Train one cell in this process; its end, whatever it is, goes to the rank's file."""
    folder = Path(cell["folder"])
    try:
        if cell["call"]:
            module, function = cell["call"].split(":")
            getattr(importlib.import_module(module), function)(cell["flags"], folder, **cell["arguments"])
        else:
            run_cell(cell["flags"], folder, bug=cell["bug"], reference=cell["reference"])
    except UserError as error:
        _write_end(folder, rank, status="refused", message="\n".join(error.problems))
    except Exception as error:  # noqa: BLE001 - every failure of a cell is a result of the suite
        traceback.print_exc()
        _write_end(folder, rank, status="error", message=f"{type(error).__name__}: {error}")


def _write_end(folder: Path, rank: int, *, status: str, message: str) -> None:
    end = {"status": status, "message": message, "time": time.time()}
    write_json_atomic(rank_file(folder, rank), end)


def _fork(cell: dict[str, Any], rank: int, meeting: dict[str, str]) -> int:
    """Train ``cell`` in a forked child; its process id."""
    child = os.fork()
    if not child:
        _train_forked(cell, rank, meeting)
    return child


def _train_forked(cell: dict[str, Any], rank: int, meeting: dict[str, str]) -> None:
    """What the forked child does, until it leaves."""
    with _log_file(Path(cell["folder"]), rank).open("w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.pop(AGENT_STORE, None)
    os.environ.update(meeting)
    _run(cell, rank)
    leave(0)


def _spawn(module: list[str], folder: Path, rank: int, meeting: dict[str, str]) -> int:
    """Train a cell in a new interpreter that runs ``module``, a name and arguments; its process id."""
    environment = {key: value for key, value in os.environ.items() if key != AGENT_STORE}
    log, new = str(_log_file(folder, rank)), os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", *module],
        environment | meeting,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, log, new, 0o644), (os.POSIX_SPAWN_DUP2, 1, 2)],
    )


def _log_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _agree_on_port(folder: Path, topology: Topology, alive: _Alive) -> int:
    """A free port that rank 0 finds now and tells the others: one found long before may be taken by then."""
    path = folder / PORT_FILE
    if topology.rank == 0:
        write_atomic(path, str(free_port()).encode())
    while not path.exists():
        alive.check()
        time.sleep(POLL_SEC)
    return int(path.read_text(encoding="utf-8"))


def _watch(child: int, folder: Path, topology: Topology, alive: _Alive) -> None:
    """Wait for ``child``; end it where it hangs, and write down an end that it could not write itself."""
    started, alone_since = time.monotonic(), None
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        with _killed_on_error(child):
            alive.check()
            now = time.monotonic()
            if alone_since is None and _any_failed(folder, topology.world_size):
                alone_since = now
            if now - started > CELL_LIMIT_SEC or (alone_since is not None and now - alone_since > PATIENCE_SEC):
                os.kill(child, signal.SIGKILL)
            time.sleep(POLL_SEC)
    if not rank_file(folder, topology.rank).exists():
        code = os.waitstatus_to_exitcode(status)
        why = f"killed by signal {-code}" if code < 0 else f"left with exit code {code}"
        _write_end(folder, topology.rank, status="error", message=f"rank {topology.rank} was {why}")


def _any_failed(folder: Path, ranks: int) -> bool:
    ends = (rank_file(folder, rank) for rank in range(ranks))
    return any(json.loads(end.read_text(encoding="utf-8"))["status"] != "done" for end in ends if end.exists())


@contextlib.contextmanager
def _killed_on_error(child: int) -> Iterator[None]:
    """A rank that must leave takes its child along."""
    try:
        yield
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise


def _on_sigterm(_number: int, _frame: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _on_sigterm)
    sys.exit(main(sys.argv[1:]))

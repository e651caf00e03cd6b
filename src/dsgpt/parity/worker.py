"""A rank of the suite: ``python -m dsgpt.parity.worker JOB``, under ``torchrun``, ``deepspeed`` or no launcher.

A launch takes seconds, most of them imports, so one launch serves many cells: every rank imports everything once and
then trains each cell in a forked child of its own, which joins a process group of its own. No cell finds anything that
another one left behind. On GPUs, which cannot be forked, a job has one cell, trained in this process.
"""

import argparse
import contextlib
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

from dsgpt.errors import UserError
from dsgpt.files import write_atomic, write_json_atomic
from dsgpt.main import leave
from dsgpt.parity.measurement import rank_file
from dsgpt.parity.rank import run_cell
from dsgpt.topology import Topology, free_port, read_topology

CELL_LIMIT_SEC = 600
"""After this a cell counts as stuck."""
PATIENCE_SEC = 15
"""How long a rank may go on after another one has failed; then it is waiting for a peer that will not come."""
PORT_FILE = "port"
POLL_SEC = 0.02


def main(arguments: list[str]) -> int:
    """Train every cell of the job; how each ended is in its folder, so the exit code is 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("--local_rank", type=int, help="from launchers; the environment says it too")
    job = json.loads(parser.parse_args(arguments).job.read_text(encoding="utf-8"))
    topology = read_topology()
    if job["device"] != "cpu":
        (cell,) = job["cells"]
        _run(cell, topology.rank)
        return 0
    for module in job["imports"]:
        importlib.import_module(module)
    alive = _Alive(runner=job["runner"])
    for cell in job["cells"]:
        _run_in_child(cell, topology, alive)
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


def _run_in_child(cell: dict[str, Any], topology: Topology, alive: _Alive) -> None:
    folder = Path(cell["folder"])
    port = _agree_on_port(folder, topology, alive)
    child = os.fork()
    if child:
        _watch(child, folder, topology, alive)
        return
    with (folder / f"rank-{topology.rank}.log").open("w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # torchrun's own store knows one process group, not many
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    _run(cell, topology.rank)
    leave(0)


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

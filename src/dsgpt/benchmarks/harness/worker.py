"""A rank of a suite: ``python -m dsgpt.benchmarks.harness.worker JOB``, under ``torchrun``, ``deepspeed`` or alone.

A launch takes seconds, most of them for imports, so one launch serves many cells: every rank imports everything once
and then runs each cell in a forked child, which joins a process group of its own. No cell sees state of another one. A
process that uses a GPU cannot be forked: there every child is a new interpreter.

A cell names the function that its ranks call; see ``launch.Assignment``.
"""

import argparse
import contextlib
import functools
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

from dsgpt.benchmarks.harness.launch import CALL_SEPARATOR, PORT_FILE
from dsgpt.benchmarks.harness.rank_files import rank_file, read_ranks
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_atomic, write_json_atomic
from dsgpt.main import leave
from dsgpt.runtime.topology import Topology, free_port, read_topology

CELL_LIMIT_SEC = 600
"""Seconds after which a cell counts as stuck."""
PATIENCE_SEC = 15
"""Seconds that a rank may continue after another one failed; after that it only waits for the failed rank."""
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""With this variable ranks meet in torchrun's own store, which serves one process group, not many."""
POLL_SEC = 0.02


def main(arguments: list[str]) -> int:
    """Run every cell of the job. The exit code is always 0, because each cell's folder says how it ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("--local_rank", type=int, help="from launchers; the environment has it too")
    parser.add_argument("--cell", type=int, help="run this one alone, in this process, which is a spawned child")
    given = parser.parse_args(arguments)
    job = json.loads(given.job.read_text(encoding="utf-8"))
    topology = read_topology()
    if given.cell is not None:
        _run(job["cells"][given.cell], topology.rank)
        leave(0)
    if job["start"] == "fork":
        for module in job["imports"]:
            importlib.import_module(module)
        if "deepspeed" in job["imports"]:
            identify_cpu_once()
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


def identify_cpu_once() -> None:
    """Identify the CPU now, and let forked children reuse the answer.

    DeepSpeed's CPU Adam calls ``get_cpu_info`` whenever it is built, and the function sleeps for a second to measure
    the clock rate.
    """
    cpuinfo: Any = importlib.import_module("cpuinfo")
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()


class _Alive:
    """Ends this rank when the suite or the launcher is gone: neither can end its ranks when it is killed."""

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


def _run(cell: dict[str, Any], rank: int) -> None:
    """Run one cell in this process. Writes the rank's file after a refusal or an error, else the cell's call does."""
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


def _fork(cell: dict[str, Any], rank: int, meeting: dict[str, str]) -> int:
    """Run ``cell`` in a forked child; return its process id."""
    child = os.fork()
    if not child:
        _run_forked(cell, rank, meeting)
    return child


def _run_forked(cell: dict[str, Any], rank: int, meeting: dict[str, str]) -> None:
    """What the forked child does. It does not return."""
    with _log_file(Path(cell["folder"]), rank).open("w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.pop(AGENT_STORE, None)
    os.environ.update(meeting)
    _run(cell, rank)
    leave(0)


def _spawn(module: list[str], folder: Path, rank: int, meeting: dict[str, str]) -> int:
    """Run a cell in a new interpreter that runs ``module``, a name and arguments; return its process id."""
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
    """A port that rank 0 finds free now and writes for the others. A port found earlier may be taken by now."""
    path = folder / PORT_FILE
    if topology.rank == 0:
        write_atomic(path, str(free_port()).encode())
    while not path.exists():
        alive.check()
        time.sleep(POLL_SEC)
    return int(path.read_text(encoding="utf-8"))


def _watch(child: int, folder: Path, topology: Topology, alive: _Alive) -> None:
    """Wait for ``child``, kill it if it hangs, and write its end if it could not write one itself."""
    started, alone_since = time.monotonic(), float("inf")
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        with _killed_on_error(child):
            alive.check()
            now = time.monotonic()
            if now < alone_since and any(end["status"] != "done" for end in read_ranks(folder, topology.world_size)):
                alone_since = now
            if now - started > CELL_LIMIT_SEC or now - alone_since > PATIENCE_SEC:
                os.kill(child, signal.SIGKILL)
            time.sleep(POLL_SEC)
    if not rank_file(folder, topology.rank).exists():
        code = os.waitstatus_to_exitcode(status)
        why = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code} and without a result"
        _write_end(folder, topology.rank, status="error", message=f"rank {topology.rank} {why}")


@contextlib.contextmanager
def _killed_on_error(child: int) -> Iterator[None]:
    """Kill the child when this rank must exit."""
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

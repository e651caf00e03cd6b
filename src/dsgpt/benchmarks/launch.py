"""Starts the ranks of a job, and yields each cell as it ends."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.machine.launcher import exit_rank, launcher_command

# The file that every rank of a cell writes at its end: a status, and what the rank measured.

RankEnd = dict[str, Any]
"""``status`` is ``done``, ``refused`` or ``error``; the last two come with a ``message`` and a ``time``."""


def rank_file(folder: Path, rank: int) -> Path:
    """The file that ``rank`` writes into the cell's folder when it ends, however it ends."""
    return folder / f"rank-{rank}.json"


def read_rank(folder: Path, rank: int) -> RankEnd | None:
    """The rank's file; None until it exists."""
    path = rank_file(folder, rank)
    if not path.exists():
        return None
    end: RankEnd = json.loads(path.read_text(encoding="utf-8"))
    return end


def read_ranks(folder: Path, ranks: int) -> list[RankEnd]:
    """The contents of the files of those ranks of a cell that have ended."""
    ends = [read_rank(folder, rank) for rank in range(ranks)]
    return [end for end in ends if end is not None]


def first_failure(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The end of the rank that failed first; others fail after it because they lost a peer. None if none failed."""
    return min((end for end in ends if end["status"] != "done"), key=lambda end: end["time"], default=None)


# Starts the ranks of a job with the launcher that users use, and yields each cell as it ends.

WORKER = "dsgpt.benchmarks.worker"
LAUNCH_POLL_SEC = 0.05
IMPORTS = {
    "python": ["torch._dynamo"],
    "torchrun": ["torch._dynamo", "torch.distributed.fsdp"],
    "deepspeed": ["torch._dynamo", "deepspeed"],
}
"""Modules that take seconds to import and would otherwise be imported in every cell. The optimizers of torch need its
compiler."""
ELSEWHERE = ("DS_", "OMP_", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")
"""Prefixes of variables that a launcher around the suite (a pod's, ``srun``) sets for its own ranks, or a machine for
its own jobs."""
STUCK_SEC = 900
"""Seconds without the end of a cell after which a launch counts as stuck. A rank ends its own cell sooner."""
LEAVE_SEC = 5
"""Seconds between SIGTERM and SIGKILL for a launcher and its ranks."""
CALL_SEPARATOR = ":"
PORT_FILE = "port"
"""File in a cell's folder with the port at which its ranks meet. It is the first file that rank 0 writes."""


class Start(StrEnum):
    """How the ranks of a cell start."""

    FORK_ALL = "fork all"
    """Rank 0 of the launch imports, then forks all ranks of each cell: much faster where ranks outnumber cores."""
    FORK_OWN = "fork own"
    """Every rank of the launch imports, then forks its own rank of each cell. As in a user's run, each rank has its own
    interpreter state, such as the order of sets."""
    SPAWN = "spawn"
    """Every rank of the launch starts its rank of each cell in a new Python: a process that uses a GPU cannot fork."""


def usual_start(ranks: int, device: str) -> Start:
    """How cells start on that many ranks unless the caller says otherwise."""
    if device != "cpu":
        return Start.SPAWN
    return Start.FORK_OWN if ranks == 2 else Start.FORK_ALL


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One cell as a rank gets it."""

    folder: str
    """An existing folder with nothing in it but the recipe."""
    flags: list[str]
    call: str
    """``module:function``: what every rank calls with flags, folder and ``arguments``."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the call, as JSON can hold them."""

    @property
    def module(self) -> str:
        """The module of ``call``."""
        return self.call.split(CALL_SEPARATOR)[0]


@dataclass(kw_only=True)
class Launch:
    """One start of a launcher, for the record."""

    launcher: str
    ranks: int
    cells: int
    seconds: float = 0.0
    """From the launcher's start to its end."""
    start_seconds: float | None = None
    """From the launcher's start to the first rank ready for work: imports, mostly."""


def launch_command(launcher: str, ranks: int) -> list[str]:
    """The command in front of the job file."""
    return [*launcher_command(launcher, ranks), "--module" if launcher == "deepspeed" else "-m", WORKER]


def environment_for(device: str) -> dict[str, str]:
    """This process's variables without those that would make its ranks part of other jobs.

    On a CPU, a variable keeps DeepSpeed's launcher from looking for GPUs. Every rank has one thread.
    """
    ours = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(ELSEWHERE) and key not in {"RANK", "WORLD_SIZE"}
    }
    return ours | {"OMP_NUM_THREADS": "1"} | ({"DS_ACCELERATOR": "cpu"} if device == "cpu" else {})


def run_job(
    launch: Launch,
    assignments: Sequence[Assignment],
    *,
    job_file: Path,
    device: str,
    start: Start | None = None,
    imports: Sequence[str] | None = None,
) -> Iterator[tuple[int, float]]:
    """Run ``assignments`` one after the other; yield index and seconds of each when all its ranks have ended.

    An assignment that is not yielded was lost with its launch. The launcher's output is in ``job_file`` with the suffix
    ``.log``.

    Args:
        launch: how to start the ranks; its times are filled in.
        assignments: what to run.
        job_file: the file to write for the ranks.
        device: ``cpu`` or ``cuda``.
        start: how the ranks of each cell start; by default ``usual_start``.
        imports: modules to import once for all forked cells, besides those of the calls; by default what the launcher's
            own strategies need.
    """
    modules = [*(IMPORTS[launch.launcher] if imports is None else imports), *(one.module for one in assignments)]
    job = {
        "start": start or usual_start(launch.ranks, device),
        "worker": WORKER,
        "runner": os.getpid(),
        "imports": list(dict.fromkeys(modules)),
        "cells": [asdict(assignment) for assignment in assignments],
    }
    write_json_atomic(job_file, job)
    command = [*launch_command(launch.launcher, launch.ranks), str(job_file)]
    started = time.perf_counter()
    with job_file.with_suffix(".log").open("wb") as log, _process(command, environment_for(device), log) as process:
        yield from _ends(process, launch, assignments, log=log, started=started)
    launch.seconds = time.perf_counter() - started


def _ends(
    process: subprocess.Popen[bytes],
    launch: Launch,
    assignments: Sequence[Assignment],
    *,
    log: BinaryIO,
    started: float,
) -> Iterator[tuple[int, float]]:
    """Watch the ranks' files until all assignments have ended, the launcher has ended, or it is stuck."""
    done, since = 0, started
    while done < len(assignments):
        ended = process.poll() is not None  # asked first: a file may appear just before the end
        folder = Path(assignments[done].folder)
        if launch.start_seconds is None and (folder / PORT_FILE).exists():
            since = time.perf_counter()
            launch.start_seconds = since - started
        if all(rank_file(folder, rank).exists() for rank in range(launch.ranks)):
            now = time.perf_counter()
            yield done, now - since
            done, since = done + 1, now
        elif ended:
            return
        elif time.perf_counter() - since > STUCK_SEC:
            log.write(f"no training ended within {STUCK_SEC} s\n".encode())
            return
        else:
            time.sleep(LAUNCH_POLL_SEC)
    with contextlib.suppress(subprocess.TimeoutExpired):  # ``_process`` stops a launcher that does not exit
        process.wait(timeout=STUCK_SEC)


@contextlib.contextmanager
def _process(command: list[str], environment: dict[str, str], log: BinaryIO) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher in a new session. It is stopped at the end of the context; its workers notice that and exit too."""
    process = subprocess.Popen(
        command, env=environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Terminate a launcher and its ranks, then kill what is left. DeepSpeed's launcher would leave its ranks behind."""
    os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + LEAVE_SEC
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(LAUNCH_POLL_SEC)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# Child processes that run one rank of a cell each: how they start, and how their end is noticed.

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
    exit_rank(0)


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

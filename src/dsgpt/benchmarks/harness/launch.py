"""Starts the ranks of a job with the launcher that users use, and yields each cell as it ends."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from dsgpt.benchmarks.harness.rank_files import rank_file
from dsgpt.common.files import write_json_atomic
from dsgpt.runtime.launcher import launcher_command

WORKER = "dsgpt.benchmarks.harness.worker"
POLL_SEC = 0.05
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
            time.sleep(POLL_SEC)
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
            time.sleep(POLL_SEC)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

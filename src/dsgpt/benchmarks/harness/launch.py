"""Starts the ranks of a job with the launcher that users take, and tells which cells are done as they finish."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.harness.measurement import rank_file
from dsgpt.common.files import write_json_atomic
from dsgpt.runtime.launcher import launcher_command

WORKER = "dsgpt.benchmarks.harness.worker"
POLL_SEC = 0.05
IMPORTS = {
    "python": ["torch._dynamo"],
    "torchrun": ["torch._dynamo", "torch.distributed.fsdp"],
    "deepspeed": ["torch._dynamo", "deepspeed"],
}
"""What takes seconds to import and would otherwise be imported in every cell; torch's optimizers need its compiler."""
ELSEWHERE = ("DS_", "OMP_", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")
"""How the names of variables begin that a launcher around the suite (a pod's, ``srun``) sets for its own ranks, or a
machine for its own jobs."""
STUCK_SEC = 900
"""After so long without the end of a training a launch is stuck; each rank of it ends its own training sooner."""
LEAVE_SEC = 5
"""How long a launcher and its ranks get to leave after they were asked to."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One cell as a rank gets it."""

    folder: str
    """Exists and is empty but for the recipe."""
    flags: list[str]
    bug: str = ""
    reference: dict[str, Any] | None = None
    """The fields of a ``Split``, to train the reference with this split instead of a strategy."""
    call: str = ""
    """``module:function`` to call with flags, folder and ``arguments`` instead of training the cell."""
    arguments: dict[str, str] = field(default_factory=dict)


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

    DeepSpeed's launcher would look for GPUs on its own, and every rank is a process of one thread.
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
    start: str | None = None,
    imports: Sequence[str] | None = None,
) -> Iterator[tuple[int, float]]:
    """Run ``assignments`` one after the other; the index and seconds of each come as soon as all its ranks are done.

    What does not come was lost with its launch; ``job_file`` with the suffix ``.log`` holds what was said.

    Args:
        launch: how to start the ranks; its times are filled in.
        assignments: what to train.
        job_file: to be written, for the ranks.
        device: ``cpu`` or ``cuda``.
        start: how a rank starts each training: ``fork``, which is faster, or ``spawn``, which GPUs need; by default
            what fits the device.
        imports: to be made once for all forked trainings; by default what the launcher's own strategies need.
    """
    job = {
        "start": start or ("fork" if device == "cpu" else "spawn"),
        "worker": WORKER,
        "runner": os.getpid(),
        "imports": list(imports or IMPORTS[launch.launcher]),
        "cells": [asdict(assignment) for assignment in assignments],
    }
    write_json_atomic(job_file, job)
    command = [*launch_command(launch.launcher, launch.ranks), str(job_file)]
    started = time.perf_counter()
    with job_file.with_suffix(".log").open("wb") as log, _process(command, environment_for(device), log) as process:
        done, since = 0, started
        while done < len(assignments):
            ended = process.poll() is not None  # asked first: a file may appear just before the end
            folder = Path(assignments[done].folder)
            if launch.start_seconds is None and (folder / "port").exists():
                since = time.perf_counter()
                launch.start_seconds = since - started
            if all(rank_file(folder, rank).exists() for rank in range(launch.ranks)):
                now = time.perf_counter()
                yield done, now - since
                done, since = done + 1, now
            elif ended:
                break
            elif time.perf_counter() - since > STUCK_SEC:
                log.write(f"no training ended within {STUCK_SEC} s\n".encode())
                break
            else:
                time.sleep(POLL_SEC)
        else:
            _wait(process)
    launch.seconds = time.perf_counter() - started


@contextlib.contextmanager
def _process(command: list[str], environment: dict[str, str], log) -> Iterator[subprocess.Popen]:
    """A launcher in a session of its own, which ends with the context: its workers notice, and end too."""
    process = subprocess.Popen(
        command, env=environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            _end_group(process)


def _wait(process: subprocess.Popen) -> None:
    """Wait for a launcher whose ranks have nothing left to do; one that stays is ended by ``_process``."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=STUCK_SEC)


def _end_group(process: subprocess.Popen) -> None:
    """Ask a launcher and its ranks to leave, then make them. DeepSpeed's launcher would leave its ranks behind."""
    os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + LEAVE_SEC
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(POLL_SEC)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

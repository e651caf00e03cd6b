"""Run a script as ranks that fork from a process with torch and DeepSpeed imported, instead of by a launcher.

A launch of two ranks imports them four times, which takes longer than the training of a test. Tests of launchers, of
signals, and of memory start real processes.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dsgpt.benchmarks.launch import ELSEWHERE, IMPORTS, environment_for, identify_cpu_once
from dsgpt.machine.launcher import exit_rank
from dsgpt.machine.topology import free_port

MODULES = (*IMPORTS["deepspeed"], *IMPORTS["torchrun"], "dsgpt.training.run")
"""Modules that take long to import."""
OF_A_RANK = ("RANK", "WORLD_SIZE")
NO_READER = "a pipe without a reader"
"""As an output of a script: as after ``| true``."""
LIMIT_SEC = 600
"""Seconds after which ranks count as stuck."""
POLL_SEC = 0.01


def run_script(
    script: str | Path,
    words: Sequence[object],
    *,
    ranks: int | None = None,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stdout: str | None = None,
    stderr: str | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run ``script`` with ``words`` to its end.

    Args:
        script: the path of a Python script.
        words: its arguments.
        ranks: how many processes run it, each with the variables of a rank; None for one without them.
        cwd: where they run; by default here.
        environment: their variables, besides those of a rank; by default those of this process, without those that
            make it part of another job.
        stdout: the path of a device, or ``NO_READER``; by default the output is returned.
        stderr: as ``stdout``.

    Returns:
        What they printed together, and the exit code of the rank that failed first. The other ranks of it are
        terminated, as by a launcher.
    """
    if environment is None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith((*ELSEWHERE, *OF_A_RANK))}
    with tempfile.TemporaryDirectory() as folder:
        request = {
            "words": [str(script), *map(str, words)],
            "ranks": ranks,
            "cwd": str(cwd or Path.cwd()),
            "environment": dict(environment),
            "outputs": [stdout or f"{folder}/out", stderr or f"{folder}/err"],
        }
        server = _server()
        assert server.stdin and server.stdout
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "the process that forks ranks has ended"
        out, err = (
            Path(path).read_text(encoding="utf-8", errors="replace") if path.startswith(folder) else ""
            for path in request["outputs"]
        )
        return subprocess.CompletedProcess(request["words"], int(answer), out, err)


@functools.cache
def _server() -> "subprocess.Popen[str]":
    """This test process's server. It exits when its input is closed, at the latest with the test process."""
    server = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment_for("cpu"),
        encoding="utf-8",
    )
    atexit.register(server.communicate)
    return server


def serve() -> None:
    """Answer each request, a line of JSON, with the exit code of its ranks."""
    for module in MODULES:
        importlib.import_module(module)
    identify_cpu_once()
    gc.collect()
    gc.freeze()  # else every collection of a rank copies the memory of all that was imported
    for line in sys.stdin:
        print(_run(json.loads(line)), flush=True)


def _run(request: dict[str, Any]) -> int:
    """Fork the ranks of a request; return the exit code of the first that fails, or 0."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    count = request["ranks"] or 1
    running = set()
    for rank in range(count):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        own = {key: str(value) for key, value in variables.items()} | meeting if request["ranks"] else {}
        child = os.fork()
        if not child:
            outputs = request["outputs"]
            be_script(request["words"], cwd=request["cwd"], environment=request["environment"] | own, outputs=outputs)
        running.add(child)
    return _first_failure(running)


def be_script(
    words: Sequence[str], *, cwd: str | Path, environment: Mapping[str, str], outputs: Sequence[str | Path]
) -> NoReturn:
    """Make this forked child the script ``words[0]``, whose standard output and standard error are ``outputs``."""
    code: Any = 1
    try:
        for descriptor, path in enumerate([os.devnull, *outputs]):
            if path == NO_READER:
                reader, end = os.pipe()
                os.close(reader)
            else:
                end = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(end, descriptor)
        buffering = 0 if environment.get("PYTHONUNBUFFERED") else -1
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(os.fdopen(number, "wb", buffering, closefd=False), write_through=not buffering)
            for number in (1, 2)
        )
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        sys.argv = list(words)
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:  # noqa: BLE001 - as the interpreter reports it
        traceback.print_exc()
    exit_rank(code or 0)


def _first_failure(running: set[int]) -> int:
    deadline, failure = time.monotonic() + LIMIT_SEC, 0
    while running:
        for child in list(running):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                running.remove(child)
                failure = failure or os.waitstatus_to_exitcode(status)
        if failure or time.monotonic() > deadline:
            _end(running, signal.SIGTERM if time.monotonic() <= deadline else signal.SIGKILL)
        time.sleep(POLL_SEC)
    return failure


def _end(running: set[int], number: int) -> None:
    for child in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)


if __name__ == "__main__":
    serve()

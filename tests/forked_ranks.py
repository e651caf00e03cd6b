"""Run a script as ranks that fork from a process with torch and DeepSpeed imported, instead of by a launcher.

A launch of two ranks imports them four times, which takes longer than the training of a test. One server forks the
ranks of all tests, also where several processes share the suite. Tests of launchers, of signals, and of memory start
real processes.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NoReturn

import pytest

from dsgpt.benchmarks import cells, launch
from dsgpt.benchmarks.launch import ELSEWHERE, IMPORTS, WORKER, child_environment, identify_cpu_once
from dsgpt.machine.launcher import exit_rank
from dsgpt.machine.topology import free_port

MODULES = (
    *IMPORTS["deepspeed"],
    *IMPORTS["torchrun"],
    *("deepspeed.module_inject.auto_ep_layer", "deepspeed.ops.op_builder.all_ops", "deepspeed.sequence.layer"),
    *("transformers", "dsgpt.training.run"),
)
"""Modules that take long to import; some are those that DeepSpeed's engines import when they are built or first run."""
OF_A_RANK = ("RANK", "WORLD_SIZE")
NO_READER = "a pipe without a reader"
"""As an output of a script: as after ``| true``."""
LIMIT_SEC = 600
"""Seconds after which ranks count as stuck."""
ECHO_SEC, LEAVE_SEC = 3, 30
"""Seconds after the first SIGTERM from which ranks that should end get it again and again, and then SIGKILL."""
POLL_SEC = 0.01
ADDRESS = "DSGPT_TESTS_FORK_SERVER"
"""The variable with the path of the server's socket, for the processes that share the suite."""


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
        outputs, command = [stdout or f"{folder}/out", stderr or f"{folder}/err"], [str(script), *map(str, words)]
        with _asked(command, ranks, cwd=cwd, environment=environment, outputs=outputs) as connection:
            answer = connection.makefile().readline()
        assert answer, "the process that forks ranks has ended"
        out, err = (
            Path(path).read_text(encoding="utf-8", errors="replace") if path.startswith(folder) else ""
            for path in outputs
        )
        return subprocess.CompletedProcess(command, int(answer), out, err)


@contextlib.contextmanager
def launches_fork() -> Iterator[None]:
    """Inside, the ranks of every launch of ``dsgpt.benchmarks`` fork here, and so do the preparations of texts.

    They share what a launch's ranks import.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "launcher_command", lambda launcher, ranks: [launcher, str(ranks)])
        patch.setattr(launch, "own_group", _forked_launch)
        fork = SimpleNamespace(run=lambda command, **_: run_script(command[1], command[2:]))
        patch.setattr(cells, "subprocess", fork)
        yield


class _ForkedLaunch:
    """What ``launch._ends`` asks a launcher."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def poll(self) -> int | None:
        """Not None if all ranks have ended."""
        return 0 if select.select([self._connection], [], [], 0)[0] else None

    def wait(self, timeout: float) -> None:
        select.select([self._connection], [], [], timeout)


@contextlib.contextmanager
def _forked_launch(command: list[str], log: BinaryIO, *, device: str) -> Iterator[_ForkedLaunch]:
    launcher, ranks, *_, job = command
    count, environment = None if launcher == "python" else int(ranks), child_environment(device)
    with _asked([WORKER, job], count, environment=environment, outputs=[log.name] * 2) as connection:
        yield _ForkedLaunch(connection)


def _asked(
    words: Sequence[str],
    ranks: int | None,
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str],
    outputs: Sequence[str],
) -> socket.socket:
    """A connection on which the server answers when the ranks have ended. It ends them when the connection closes."""
    request = {"words": words, "cwd": str(cwd or Path.cwd()), "environment": dict(environment), "outputs": outputs}
    start_server()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ[ADDRESS])
    connection.sendall(json.dumps(request | {"ranks": ranks}).encode() + b"\n")
    return connection


def start_server() -> None:
    """Start the server of this process and of those that it starts, unless there is one.

    It exits when its input is closed, at the latest with this process.
    """
    if ADDRESS in os.environ:
        return
    folder = tempfile.TemporaryDirectory()
    server = subprocess.Popen(
        [sys.executable, __file__, f"{folder.name}/socket"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment("cpu"),
    )
    assert server.stdout and server.stdout.readline(), "the process that forks ranks did not start"
    os.environ[ADDRESS] = f"{folder.name}/socket"
    atexit.register(folder.cleanup)
    atexit.register(server.communicate)


def serve(address: str) -> None:
    """Answer each request, a line of JSON, with the exit code of its ranks."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        running: dict[socket.socket, Ranks] = {}
        while True:
            waiting = [sys.stdin, listener, *running]
            ready = select.select(waiting, [], [], POLL_SEC if running else None)[0]
            if sys.stdin in ready:
                return
            if listener in ready:
                _import_once()
                connection, _ = listener.accept()
                request = json.loads(connection.makefile().readline())
                running[connection] = Ranks(request, unused=[listener, connection, *running])
            for connection, ranks in list(running.items()):
                if connection in ready:
                    ranks.stop()
                if (code := ranks.poll()) is not None:
                    with contextlib.suppress(BrokenPipeError):
                        connection.sendall(f"{code}\n".encode())
                    connection.close()
                    del running[connection]


def _import_once() -> None:
    if MODULES[-1] not in sys.modules:
        sys.modules["mlflow"] = None  # type: ignore[assignment]  # else DeepSpeed's autotuner imports it, for 2 s
        for module in MODULES:
            importlib.import_module(module)
        for module in [name for name in sys.modules if name.partition(".")[0] in {"mlflow", "huggingface_hub"}]:
            del sys.modules[module]  # the hub's library reads its variables once: each script has its own
        identify_cpu_once()
        numa = importlib.import_module("deepspeed.utils.numa")
        numa.get_numa_cores = functools.cache(numa.get_numa_cores)  # ZeRO-3 starts numactl in every reduction
        gc.collect()
        gc.freeze()  # else every collection of a rank copies the memory of all that was imported


class Ranks:
    """The forked ranks of a request.

    Args:
        request: what they run.
        unused: sockets of this process, which they close.
    """

    def __init__(self, request: dict[str, Any], *, unused: Sequence[socket.socket]) -> None:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        count = request["ranks"] or 1
        self._running: set[int] = set()
        self._failure, self._stopped = 0, float("inf")
        self._deadline = float("inf") if request["words"][0] == WORKER else time.monotonic() + LIMIT_SEC
        for rank in range(count):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            own = {key: str(value) for key, value in variables.items()} | meeting if request["ranks"] else {}
            child = os.fork()
            if not child:
                for one in unused:
                    one.close()
                environment = request["environment"] | own
                be_script(request["words"], cwd=request["cwd"], environment=environment, outputs=request["outputs"])
            self._running.add(child)

    def poll(self) -> int | None:
        """The exit code of the rank that failed first, or 0; None until all have ended."""
        for child in list(self._running):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                self._running.remove(child)
                self._failure = self._failure or os.waitstatus_to_exitcode(status)
        if self._failure:
            self.stop()
        if (now := time.monotonic()) > self._stopped + ECHO_SEC:
            self._signal(signal.SIGTERM)
        if now > min(self._deadline, self._stopped + LEAVE_SEC):
            self._signal(signal.SIGKILL)
        return None if self._running else self._failure

    def stop(self) -> None:
        """Terminate the ranks."""
        if self._stopped == float("inf"):
            self._stopped = time.monotonic()
            self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        for child in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)


def be_script(
    words: Sequence[str], *, cwd: str | Path, environment: Mapping[str, str], outputs: Sequence[str | Path]
) -> NoReturn:
    """Make this forked child the script or module ``words[0]``, with ``outputs`` as standard output and error."""
    code: Any = 1
    try:
        for descriptor, path in enumerate([os.devnull, *outputs]):
            if path == NO_READER:
                reader, end = os.pipe()
                os.close(reader)
            else:
                end = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(end, descriptor)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        sys.argv = list(words)
        sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep) if environment.get("PYTHONPATH") else []
        if words[0].endswith(".py"):
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
        else:
            sys.modules.pop(words[0], None)
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:  # noqa: BLE001 - as the interpreter reports it
        traceback.print_exc()
    exit_rank(code or 0)


if __name__ == "__main__":
    serve(sys.argv[1])

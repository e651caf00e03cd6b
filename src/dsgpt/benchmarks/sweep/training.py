"""Runs one training with the launcher that users use, ends it after a limit, and says how it ended."""

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from dsgpt.benchmarks.harness.launch import environment_for
from dsgpt.common.errors import EXIT_USER_ERROR
from dsgpt.common.json_files import clipped_text
from dsgpt.reports.sweeps import State

LEAVE_SEC = 5.0
"""Seconds between SIGTERM and SIGKILL."""
LONGEST_LINE = 300
_TAIL_BYTES = 1 << 20
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|\bMemoryError\b|can't allocate memory|annot allocate memory"
)
_EXIT_CODE = re.compile(r"^\s*exitcode\s*:\s*(-?\d+)", flags=re.MULTILINE)
"""In the report of ``torchrun``, which itself ends with 1 after every failure."""
_ERROR = re.compile(r"^(?:\[\w+\]:)?error: (.*)$")
_EXCEPTION = re.compile(r"^(?:\[\w+\]:)?(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b")


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a training ended."""

    state: State
    message: str | None
    """The last line of its log that names an error; None if it is done."""
    seconds: float


def train(command: Sequence[str], *, log: Path, limit_sec: float, cwd: Path, device: str) -> Ending:
    """Run ``command`` in a process group of its own, with its output in ``log``.

    Args:
        command: launcher, script and flags.
        log: the file to write.
        limit_sec: seconds after which all its processes are ended.
        cwd: where it runs.
        device: ``cpu`` or ``cuda``; on a CPU, DeepSpeed's launcher is told not to look for GPUs.
    """
    started = time.perf_counter()
    with log.open("wb") as output, _own_group(command, output.fileno(), cwd=cwd, device=device) as process:
        try:
            code: int | None = process.wait(timeout=limit_sec)
        except subprocess.TimeoutExpired:
            code = None
    seconds = time.perf_counter() - started
    text = _tail(log)
    if code is None:
        message = f"did not end within {limit_sec:g} s; its last line: {_last_line(text)}"
        return Ending(state=State.TIMED_OUT, message=message, seconds=seconds)
    state = state_of(code, text)
    return Ending(state=state, message=None if state == State.DONE else error_line(code, text), seconds=seconds)


def state_of(code: int, text: str) -> State:
    """What the exit code of the command and the end of its output say."""
    if code == 0:
        return State.DONE
    if _OUT_OF_MEMORY.search(text):
        return State.OUT_OF_MEMORY
    reported = _EXIT_CODE.findall(text)
    return State.REFUSED if (int(reported[-1]) if reported else code) == EXIT_USER_ERROR else State.FAILED


def error_line(code: int, text: str) -> str:
    """The line of an output that says best why it ended: memory, this program's error, an exception, or the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    memory = [line for line in lines if _OUT_OF_MEMORY.search(line)]
    own = [found[1] for line in lines if (found := _ERROR.match(line))]
    exceptions = [line for line in lines if _EXCEPTION.match(line)]
    if code == -signal.SIGKILL and not (memory or own):
        return "was killed with SIGKILL, as the system does when memory runs out"
    if own and not memory:
        return clipped_text(own[-1], width=LONGEST_LINE)
    best = next((found[-1] for found in (memory, exceptions, lines) if found), "it printed nothing")
    return clipped_text(f"exit code {code}: {best}", width=LONGEST_LINE)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return clipped_text(lines[-1], width=LONGEST_LINE) if lines else "it printed nothing"


def _tail(log: Path) -> str:
    """The end of the log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return file.read().decode("utf-8", errors="replace")


@contextlib.contextmanager
def _own_group(command: Sequence[str], output: int, *, cwd: Path, device: str) -> Iterator["subprocess.Popen[bytes]"]:
    """The running command; at the end of the context none of its processes is left."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment_for(device),
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the launcher and all that it started: ``torchrun`` gives each worker a session of its own."""
    family = [psutil.Process(process.pid)]
    with contextlib.suppress(psutil.NoSuchProcess):
        family += family[0].children(recursive=True)
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.terminate()
    _, alive = psutil.wait_procs(family, timeout=LEAVE_SEC)
    for one in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()

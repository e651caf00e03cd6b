"""A training as a user starts it, observed from outside: its steps, its ranks, the processes left after its end."""

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from dsgpt.benchmarks.harness.launch import environment_for
from dsgpt.checkpointing import store
from dsgpt.telemetry.record import STEPS_FILE, read_steps

POLL_SEC = 0.002
"""Much shorter than a step or a save, so that a kill hits the instant that it is aimed at."""
MARK = "DSGPT_LAUNCH_UNDER_TEST"
"""The variable that all processes of a launch inherit."""
LIMIT_SEC = 300
"""Longer than any training of the campaign takes."""


class Missed(RuntimeError):
    """What the suite waited for did not happen."""


class Training:
    """One launch of ``src/gpt2.py`` in a new session. At the end of the context all its processes are killed.

    Args:
        command: launcher, script and flags.
        run_dir: the run folder.
        log: the file to which its output is appended.
    """

    def __init__(self, command: Sequence[str], *, run_dir: Path, log: Path) -> None:
        self._mark = uuid.uuid4().hex
        self.run_dir, self._log, self._log_start = run_dir, log, log.stat().st_size if log.exists() else 0
        with log.open("ab") as file, default_sighup():
            self.launcher = psutil.Popen(
                list(command),
                env=environment_for("cpu") | {MARK: self._mark},
                cwd=run_dir.parent,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "Training":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.everyone():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.launcher.wait()

    def everyone(self) -> list[psutil.Process]:
        """Every process that this launch started, even if its parent has ended."""
        return [process for process in psutil.process_iter() if _environment(process).get(MARK) == self._mark]

    def ranks(self, count: int) -> list[psutil.Process]:
        """The processes that train, by rank.

        Raises:
            Missed: there are not ``count`` of them.
        """
        if count == 1:
            return [self.launcher]
        named = {process.pid: _environment(process).get("RANK") for process in self.everyone()}
        found = {}
        for process in psutil.process_iter():
            rank = named.get(process.pid)
            if rank is not None and named.get(process.ppid()) is None:  # children of a rank have its environment
                found[int(rank)] = process
        if sorted(found) != list(range(count)):
            raise Missed(f"of {count} ranks, {sorted(found)} were found")
        return [found[rank] for rank in range(count)]

    def steps(self) -> int:
        """The last step that the run has logged."""
        return last_step(self.run_dir)

    def wait_for(self, condition: Callable[[], bool], *, what: str) -> None:
        """Wait until ``condition`` holds.

        Raises:
            Missed: the launcher ended first, or it took ``LIMIT_SEC``.
        """
        deadline = time.monotonic() + LIMIT_SEC
        while not condition():
            if self.launcher.poll() is not None and not condition():
                raise Missed(f"the run ended before {what}: {self.output()[-500:]}")
            if time.monotonic() > deadline:
                raise Missed(f"{what} did not happen within {LIMIT_SEC} s: {self.output()[-500:]}")
            time.sleep(POLL_SEC)

    def wait_for_step(self, step: int) -> None:
        """Wait until ``step`` is done and logged."""
        self.wait_for(lambda: self.steps() >= step, what=f"step {step}")

    def wait_for_save(self, step: int) -> None:
        """Wait until the checkpoint of ``step`` is being written."""
        partial, final = store.partial_folder(self.run_dir, step), self.run_dir / store.folder_name(step)
        self.wait_for(lambda: partial.exists() or final.exists(), what=f"the save of step {step}")

    def wait_until_gone(self) -> tuple[int, float, float]:
        """Wait until all processes have ended.

        Returns:
            The launcher's exit code, the seconds until it ended, and those until the last of its processes had.

        Raises:
            Missed: some are still there after ``LIMIT_SEC``.
        """
        started, ended = time.monotonic(), None
        while True:
            now = time.monotonic() - started
            if ended is None and self.launcher.poll() is not None:
                ended = now
            if ended is not None and not self.everyone():
                return self.launcher.returncode, ended, now
            if now > LIMIT_SEC:
                raise Missed(f"{len(self.everyone())} processes are left after {LIMIT_SEC} s: {self.output()[-500:]}")
            time.sleep(0.05)

    def wait(self) -> int:
        """Wait for the end of the launcher alone, and return its exit code.

        Raises:
            Missed: it is still there after ``LIMIT_SEC``.
        """
        try:
            return self.launcher.wait(LIMIT_SEC)
        except psutil.TimeoutExpired as error:
            raise Missed(f"it did not end within {LIMIT_SEC} s: {self.output()[-500:]}") from error

    def output(self) -> str:
        """What the launcher and its ranks printed."""
        return self._log.read_bytes()[self._log_start :].decode(errors="replace").strip()


@contextlib.contextmanager
def default_sighup() -> Iterator[None]:
    """A context whose child processes do not ignore SIGHUP, even if this process was started with ``nohup``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
        return {}


def last_step(run_dir: Path) -> int:
    """The last step in the run's log; 0 if there is none. A torn line does not count."""
    log = run_dir / STEPS_FILE
    return max((line["step"] for line in read_steps(log) if "loss" in line), default=0) if log.exists() else 0


def send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to each of ``processes`` that still exists, as close together as one process can."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def kill(processes: Sequence[psutil.Process]) -> None:
    """``kill -9`` for each of ``processes``."""
    send(processes, signal.SIGKILL)

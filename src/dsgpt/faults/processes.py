"""A training as a user starts it, watched from outside: where it stands, its ranks, and who is left after its end."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from dsgpt.checkpointing import store
from dsgpt.parity.launch import environment_for
from dsgpt.telemetry.record import STEPS_FILE, read_steps

POLL_SEC = 0.002
"""Short beside a step and a save, which a kill is aimed at."""
LIMIT_SEC = 300
"""No training of the campaign takes so long, from its start to its end."""


class Missed(RuntimeError):
    """A training did not come to what was waited for."""


class Training:
    """One launch of ``src/gpt2.py`` in a session of its own. A context: nothing of it is left at its end.

    Args:
        command: launcher, script and flags; ``run_dir`` is one of its words.
        run_dir: the run folder.
        log: takes what it says; appended to.
    """

    def __init__(self, command: Sequence[str], *, run_dir: Path, log: Path) -> None:
        self.run_dir, self._log, self._said_before = run_dir, log, log.stat().st_size if log.exists() else 0
        with log.open("ab") as file, hanging_up_ends_children():
            self.launcher = psutil.Popen(
                list(command),
                env=environment_for("cpu"),
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
        """Every process that has the run folder in its command: launchers and ranks, whoever their parents are."""
        return [process for process in psutil.process_iter() if str(self.run_dir) in _words(process)]

    def ranks(self) -> list[psutil.Process]:
        """The processes that train, by rank; fewer than there will be while they are being started."""
        found = {}
        for process in self.everyone():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                rank = process.environ().get("RANK")  # launchers give it to ranks, and have none
                if rank is not None:
                    found[int(rank)] = process
        return [found[rank] for rank in sorted(found)] or [self.launcher]

    def steps(self) -> int:
        """The last step that the run has put down."""
        return last_step(self.run_dir)

    def wait_for(self, condition: Callable[[], bool], *, what: str) -> None:
        """Wait until ``condition`` holds.

        Raises:
            Missed: the launcher ended first, or it took ``LIMIT_SEC``.
        """
        deadline = time.monotonic() + LIMIT_SEC
        while not condition():
            if self.launcher.poll() is not None and not condition():
                raise Missed(f"the run ended before {what}: {self.said()[-500:]}")
            if time.monotonic() > deadline:
                raise Missed(f"{what} did not come within {LIMIT_SEC} s: {self.said()[-500:]}")
            time.sleep(POLL_SEC)

    def wait_for_step(self, step: int) -> None:
        """Wait until ``step`` is done and put down."""
        self.wait_for(lambda: self.steps() >= step, what=f"step {step}")

    def wait_for_save(self, step: int) -> None:
        """Wait until the checkpoint of ``step`` is being written."""
        partial, final = store.partial_folder(self.run_dir, step), self.run_dir / store.folder_name(step)
        self.wait_for(lambda: partial.exists() or final.exists(), what=f"the save of step {step}")

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written now, or was left half written."""
        return bool(list(self.run_dir.glob(".partial-step-*")))

    def wait_until_gone(self) -> tuple[int, float, float]:
        """Wait for the end of all.

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
                raise Missed(f"{len(self.everyone())} processes are left after {LIMIT_SEC} s: {self.said()[-500:]}")
            time.sleep(0.05)

    def said(self) -> str:
        """What the launcher and its ranks printed."""
        return self._log.read_bytes()[self._said_before :].decode(errors="replace").strip()


@contextlib.contextmanager
def hanging_up_ends_children() -> Iterator[None]:
    """Let processes that are started inside hear SIGHUP, also where this one was started with ``nohup``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _words(process: psutil.Process) -> list[str]:
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


def last_step(run_dir: Path) -> int:
    """The last step in the run's log, 0 where there is none; a torn line counts for nothing."""
    log = run_dir / STEPS_FILE
    return max((line["step"] for line in read_steps(log) if "loss" in line), default=0) if log.exists() else 0


def kill(processes: Sequence[psutil.Process]) -> None:
    """``kill -9`` for each of them, as close together as one process can."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)

"""The status of a run, and the lock of the process that trains it.

The status follows from the record, and from whether a process still trains. The record of a run that was killed says
``running`` forever. So ``running`` is believed only while a process holds the run's lock, or, for a run on another
machine, while its files still change.
"""

import contextlib
import errno
import logging
import os
import socket
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from dsgpt.common.errors import UserError
from dsgpt.common.files import Lock, NoLocksError, holder_of
from dsgpt.record.schema import RECORD_FILE, STEPS_FILE

logger = logging.getLogger(__name__)

# One process per run folder: it holds a lock, which the system releases when the process ends.

LOCK_FILE = ".lock"
PATIENCE_SEC = 60
"""Seconds that ``--resume`` waits: longer than ranks may continue after their launcher ended."""
_POLL_SEC = 0.5


class RunLock:
    """The lock of ``run_dir``. A context manager: on exit it releases the lock if it was taken.

    Args:
        run_dir: the folder.
        patience_sec: seconds to wait while another process holds it.
    """

    def __init__(self, run_dir: Path, *, patience_sec: float = 0) -> None:
        self._run_dir, self._patience_sec = run_dir, patience_sec
        self._lock: Lock | None = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()

    def take(self) -> None:
        """Lock the folder, which must exist, unless this process has locked it before.

        The lock file is never removed: otherwise two processes could lock two files of the same name.

        Raises:
            UserError: another process holds it, or the lock file cannot be opened.
        """
        if self._lock is not None:
            return
        path = self._run_dir / LOCK_FILE
        try:
            lock = Lock.of_file(path)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UserError(f"{path}: is a link, and lock files are not opened through links: remove it") from error
            raise UserError(f"{path}: cannot be opened ({error.strerror}): name another folder") from error
        end, taken = time.monotonic() + self._patience_sec, self._take(lock)
        if self._patience_sec and not taken:
            waits = f"waiting up to {self._patience_sec:.0f} s for it to end"
            logger.warning(f"another process is still training in {self._run_dir}; {waits}")
        while not taken and time.monotonic() < end:
            time.sleep(_POLL_SEC)
            taken = self._take(lock)
        if not taken:
            waited = f" and did not end within {self._patience_sec:.0f} s" if self._patience_sec else ""
            what = f"another process is training in this folder{waited}"
            raise UserError(f"--checkpoint_path {self._run_dir}: {what}: wait for it, or name another folder")
        self._lock = lock

    def _take(self, lock: Lock) -> bool:
        """Try to take the lock. On a file system without locks the run continues without one, after a warning."""
        try:
            return lock.take()
        except NoLocksError as error:
            then = "nothing prevents a second process from training in this folder; make sure that none does"
            logger.warning(f"warning: the file system of {self._run_dir} has no locks ({error.strerror}): {then}")
            return True


def is_guarded(run_dir: Path) -> bool:
    """Whether a run was ever started in ``run_dir``, so that a process may have locked it."""
    return os.path.lexists(run_dir / LOCK_FILE)


def refuse_if_locked(run_dir: Path) -> None:
    """Check that no other process trains in ``run_dir``; writes nothing.

    Raises:
        UserError: one does.
    """
    if is_guarded(run_dir):
        with RunLock(run_dir) as lock:
            lock.take()


SILENT_SEC = 600
"""Seconds after which a run on another machine counts as abandoned if none of its files has changed."""


class Status(StrEnum):
    """Status of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """Somebody stopped it."""
    FAILED = "failed"
    """An error ended it."""
    ABANDONED = "abandoned"
    """The record says that the run is running, and no process trains: it was killed, or its machine went down."""
    UNKNOWN = "unknown"
    """The record says nothing about it: those of the older generation."""


_RECORDED = {"completed": Status.FINISHED, "interrupted": Status.INTERRUPTED, "failed": Status.FAILED}


@dataclass(frozen=True)
class Signs:
    """Signs of life in a run folder. Look for them before the record is read: a run that ends in between has ended."""

    process: int | None
    """The process on this machine that holds the lock."""
    locks_known: bool
    """Whether this machine lists its locks."""
    silent_sec: float | None
    """Since a file of the run last changed; None if it has none."""


def signs_of_life(run_dir: Path) -> Signs:
    """The signs of life in ``run_dir`` now. The lock itself is not touched."""
    process, listed = None, True
    try:
        process = holder_of(run_dir / LOCK_FILE)
    except FileNotFoundError:
        listed = Path("/proc/locks").exists()
    except OSError:
        listed = False
    changed = []
    for name in (RECORD_FILE, STEPS_FILE, LOCK_FILE):
        with contextlib.suppress(OSError):
            changed.append(os.lstat(run_dir / name).st_mtime)
    return Signs(process, listed, max(0.0, time.time() - max(changed)) if changed else None)


def status_of(recorded: str | None, *, host: str | None, signs: Signs) -> tuple[Status, str]:
    """Status of a run, and why this is believed, in one line.

    Args:
        recorded: the ``status`` of its record; ``running`` for a run that has no record yet.
        host: of its record; None if it has none.
        signs: from before the record was read.
    """
    if recorded in _RECORDED:
        return _RECORDED[recorded], f"its record says {recorded}"
    if recorded != "running":
        return Status.UNKNOWN, "its record does not say what became of it"
    if signs.process is not None:
        return Status.RUNNING, f"process {signs.process} holds its lock"
    if signs.locks_known and host in {None, socket.gethostname()}:
        return Status.ABANDONED, "no process holds its lock: it was killed, or the machine went down"
    where = f"on {host}" if host else "on a machine that it does not name"
    if signs.silent_sec is not None and signs.silent_sec < SILENT_SEC:
        return Status.RUNNING, f"{where}; it wrote {signs.silent_sec:.0f} s ago"
    return Status.ABANDONED, f"{where}; it has written nothing for {SILENT_SEC / 60:.0f} minutes or more"

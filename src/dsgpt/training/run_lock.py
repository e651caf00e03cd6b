"""One process per run folder: it holds a lock, which the system releases when the process ends."""

import errno
import logging
import os
import time
from pathlib import Path
from types import TracebackType

from dsgpt.common.errors import UserError
from dsgpt.common.locks import Lock, NoLocksError

logger = logging.getLogger(__name__)

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        if not (self._take(lock) or self._wait(lock)):
            waited = f" and did not end within {self._patience_sec:.0f} s" if self._patience_sec else ""
            raise UserError(
                f"--checkpoint_path {self._run_dir}: another process is training in this folder{waited}: wait for it, "
                "or name another folder"
            )
        self._lock = lock

    def _wait(self, lock: Lock) -> bool:
        end = time.monotonic() + self._patience_sec
        if self._patience_sec:
            logger.warning(
                f"another process is still training in {self._run_dir}; waiting up to {self._patience_sec:.0f} s for "
                "it to end"
            )
        while time.monotonic() < end:
            time.sleep(_POLL_SEC)
            if self._take(lock):
                return True
        return False

    def _take(self, lock: Lock) -> bool:
        """Try to take the lock. On a file system without locks the run continues without one, after a warning."""
        try:
            return lock.take()
        except NoLocksError as error:
            logger.warning(
                f"warning: the file system of {self._run_dir} has no locks ({error.strerror}): nothing prevents a "
                "second process from training in this folder; make sure that none does"
            )
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

"""One writer per run folder: whoever trains in it holds a lock that the system releases with the process."""

import contextlib
import errno
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from dsgpt.errors import UserError

LOCK_FILE = ".lock"
_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""What a network file system without locks answers; a run on it goes on unguarded."""


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold ``run_dir``, which exists, for this process.

    The file stays: removing it would let two processes hold two files of the same name.

    Raises:
        UserError: another process holds it, or the lock file cannot be made.
    """
    path = run_dir / LOCK_FILE
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be opened ({error.strerror}): name another folder") from error
    with file:
        _take(file, run_dir)
        yield


def refuse_if_locked(run_dir: Path) -> None:
    """Look whether another process trains in ``run_dir``; writes nothing.

    Raises:
        UserError: one does.
    """
    if (run_dir / LOCK_FILE).is_file():
        with run_lock(run_dir):
            pass


def _take(file: TextIO, run_dir: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            f"--checkpoint_path {run_dir}: another process is training in this folder: wait for it, or name another"
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise

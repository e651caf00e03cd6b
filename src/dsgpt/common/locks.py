"""Locks between processes (flock). The system frees a lock when its process ends, however that happens."""

import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""Errors of a network file system without locks."""


_TABLE = Path("/proc/locks")
"""Linux's table of all locks: ``1: FLOCK  ADVISORY  WRITE 4711 08:01:131 0 EOF``."""


class NoLocksError(OSError):
    """The file system has no locks."""


class Lock:
    """The lock of one open file or folder. A context manager: releases the lock at the end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """The lock of a file, which is created if missing.

        Never remove the file: another process could then create and lock a new one.

        Raises:
            OSError: it cannot be opened; ``ELOOP``: it is a link.
        """
        return cls(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666))

    @classmethod
    def of_folder(cls, path: Path, *, follow_link: bool = False) -> Self:
        """The lock of a folder.

        Raises:
            OSError: there is no such folder, or it is a link and ``follow_link`` is false.
        """
        return cls(os.open(path, os.O_RDONLY | os.O_DIRECTORY | (0 if follow_link else os.O_NOFOLLOW)))

    def take(self, *, shared: bool = False, wait: bool = False) -> bool:
        """Try to take the lock; return whether this process has it now.

        Args:
            shared: other processes may share it; otherwise no other process may have it.
            wait: wait until it is free, instead of returning False.

        Raises:
            NoLocksError: the file system has no locks.
            OSError: it refuses for another reason.
        """
        kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        try:
            fcntl.flock(self._descriptor, kind)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _NO_LOCKS:
                raise NoLocksError(error.errno, error.strerror) from error
            raise
        return True

    def release(self) -> None:
        """Let others take the lock; this object cannot take it again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def holder_of(path: Path) -> int | None:
    """The process that has the lock of a file for itself, as Linux lists it; None if no process on this machine has it.

    The lock is not touched: trying to take it could make another process fail that takes it at that moment.

    Raises:
        OSError: there is no such file, or the system has no table of locks.
    """
    found = path.stat()
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:"
    anonymous = os.major(found.st_dev) == 0  # of overlays and others, whose table may name the device below
    for line in _TABLE.read_text(encoding="utf-8").splitlines():
        words = line.split()
        here = words[5].rpartition(":")[2] == str(found.st_ino) and (anonymous or words[5].startswith(place))
        if here and words[1:4] == ["FLOCK", "ADVISORY", "WRITE"]:
            return int(words[4])
    return None

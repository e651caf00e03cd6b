"""Locks between processes (flock). The system frees a lock when its process ends, however that happens."""

import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""Errors of a network file system without locks."""


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

"""Files: atomic writes, hashes, links, names that can be printed, and locks between processes."""

import codecs
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import traceback
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any, Self

# Helpers for files: atomic writes, hashes, links, and names that can be printed.

_BLOCK = 1 << 22

Advance = Callable[[int], None]
"""Gets how many bytes, or other units, were done since its last call."""
PRINTABLE = "dsgpt.printable"
"""Error handler for ``encode``: escapes bytes that are not UTF-8 and characters that the encoding lacks (``\\xe9``)."""


def _spelt_out(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_escape(character) for character in error.object[error.start : error.end]), error.end


def _escape(character: str) -> str:
    byte = ord(character) - 0xDC00  # os.fsdecode maps a byte that it cannot decode to U+DC00 plus the byte
    return f"\\x{byte:02x}" if 0x80 <= byte <= 0xFF else character.encode("ascii", "backslashreplace").decode()


codecs.register_error(PRINTABLE, _spelt_out)


def printable(path: object) -> str:
    """A path, or a text that contains one, as valid Unicode that can be printed and written."""
    return str(path).encode("utf-8", PRINTABLE).decode("utf-8")


def is_utf8(path: object) -> bool:
    """Whether the name of a path is valid UTF-8."""
    return printable(path) == str(path)


def undecodable(path: object) -> str:
    """The message about a path that is not UTF-8 and that a library must open."""
    why = "the libraries that read tokenizers and weights cannot open such a path"
    return f"{printable(path)}: is not valid UTF-8, and {why}: rename it"


def sha256_of(path: Path, progress: Callable[[int], object] = lambda _: None) -> str:
    """The SHA-256 of a file, as lower-case hex; ``progress`` gets the number of bytes read since its last call."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()


def is_regular_file(path: Path) -> bool:
    """Whether ``path`` is a regular file and not a link; False where that cannot be found out."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):  # no such file, no permission, or not a valid name
        return False


def link_between(folder: Path, path: Path) -> Path | None:
    """The first link on the path from ``folder`` (not itself checked) down to ``path``; None if there is none."""
    inside = [path, *path.parents]
    return next((part for part in reversed(inside[: inside.index(folder)]) if part.is_symlink()), None)


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists. If it is a link, only the link is removed, never its target."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def append_to(path: Path) -> FileIO:
    """Open a file for appending, unbuffered; create it if needed.

    Raises:
        OSError: the system refuses, or ``path`` is a link: its target must not be written.
    """
    return FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666), "ab")


def sync_directory(path: Path) -> None:
    """Make the names inside ``path`` durable: only after this does a rename survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the contents of ``path`` by ``data``: a reader sees the old file or the new one, never a part of one.

    The file is durable on return. A failure leaves no partial file behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # "x" never writes through a link of that name
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_json_atomic(path: Path, value: Any) -> None:
    """Write ``value`` as JSON. NaN and infinity raise ``ValueError``: they are not JSON."""
    write_atomic(path, json_text(value).encode())


def json_text(value: Any) -> str:
    """``value`` as files hold it. NaN and infinity raise ``ValueError``: they are not JSON."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def print_traceback() -> None:
    """Print the exception being handled, if standard error is still open, and continue."""
    with contextlib.suppress(OSError):
        traceback.print_exc()


# Locks between processes (flock). The system frees a lock when its process ends, however that happens.

_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""Errors of a network file system without locks."""


_TABLE = Path("/proc/locks")
"""Linux's table of all locks: ``1: FLOCK  ADVISORY  WRITE 4711 08:01:131 0 EOF``."""


class NoLocksError(OSError):
    """The file system has no locks."""


class Lock(contextlib.AbstractContextManager["Lock"]):
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

    def __exit__(self, *_: object) -> None:
        self.release()


def holder_of(path: Path) -> int | None:
    """The process that has the lock of a file for itself, as Linux lists it; None if no process on this machine has it.

    The lock is not touched: trying to take it could make another process fail that takes it at that moment.

    Raises:
        OSError: there is no such file, or the system has no table of locks.
    """
    status = path.stat()
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:"
    anonymous = os.major(status.st_dev) == 0  # of overlays and others, whose table may name the device below
    for line in _TABLE.read_text(encoding="utf-8").splitlines():
        words = line.split()
        here = words[5].rpartition(":")[2] == str(status.st_ino) and (anonymous or words[5].startswith(place))
        if here and words[1:4] == ["FLOCK", "ADVISORY", "WRITE"]:
            return int(words[4])
    return None

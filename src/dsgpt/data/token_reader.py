"""Reads ids of a token file while a run trains, and names what goes wrong: file, byte and reason.

A memory map would end the process with SIGBUS, and without a word, if the file was cut off or its mount vanished.
``preadv`` returns an error or too few bytes. It costs a system call per window, and no page of the file counts as
memory of the process.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsgpt.data.token_file import DTYPES, Stamp, TokenFile, TokenFileError

logger = logging.getLogger(__name__)

PAUSES_SEC = (1.0, 4.0, 15.0)
"""Pauses before a read that failed is tried again; a network file system may be back by then."""
STALL_SEC = 10.0
"""Seconds after which a read that has not returned is named, and named again each time that they doubled."""


class TokenReader:
    """Reads one token file. A process opens it at its first read, also one that was forked before."""

    def __init__(self, file: TokenFile) -> None:
        self._file, self._dtype = file, np.dtype(DTYPES[file.sidecar.dtype])
        self._descriptor: int | None = None

    def read(self, first: int, ids: NDArray[np.unsignedinteger]) -> None:
        """Fill ``ids``, (n,), with the ids from index ``first``; its type may be wider than the file's.

        A read that fails is tried again after each of ``PAUSES_SEC``, with a warning, from a file that is opened anew.

        Raises:
            TokenFileError: it still fails, or the file is no longer the one that the run began with.
        """
        own = ids if ids.dtype == self._dtype else np.empty(len(ids), dtype=self._dtype)
        offset = first * self._dtype.itemsize
        for pause in (*PAUSES_SEC, None):
            try:
                with _watched(self._file.path, offset):
                    self._fill(own.data.cast("B"), offset)
                break
            except OSError as error:
                what = f"{self._file.path}: cannot be read at byte {offset:,} ({error.strerror or error})"
                if pause is None:
                    raise TokenFileError(
                        f"{what}, in {len(PAUSES_SEC) + 1} tries: bring the file or its disk back, and --resume"
                    ) from error
                logger.warning(f"{what}: trying again in {pause:g} s")
                self.close()
                time.sleep(pause)
        if own is not ids:
            ids[:] = own

    def _fill(self, view: memoryview, offset: int) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(self._file.path, os.O_RDONLY | os.O_CLOEXEC)
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if not count:
                break
            done += count
        status = os.fstat(self._descriptor)  # after the read: what was read before a change is not lost
        if (now := Stamp(status.st_size, status.st_mtime_ns)) != self._file.stamp or done < len(view):
            what = f"has {now.size:,} bytes now, not {self._file.size_bytes:,}"
            raise TokenFileError(
                f"{self._file.path}: changed on disk while it is read, at byte {offset + done:,} "
                f"({what if now.size != self._file.size_bytes else 'another time of change'}): bring the file that "
                "the run began with back, and --resume"
            )

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # a mount that vanished
                os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.close()


# A thread that names reads which do not return: no error comes from a mount that waits for its server.


class _Read(NamedTuple):
    path: Path
    offset: int
    started: float


_reads: dict[int, _Read] = {}
"""What each thread of this process reads now."""
_watched_process = 0
"""The process in which the thread runs: a forked one has none."""


@contextlib.contextmanager
def _watched(path: Path, offset: int) -> Iterator[None]:
    """Warn while the read inside does not return."""
    global _watched_process  # noqa: PLW0603 - a process has one such thread
    if _watched_process != os.getpid():
        _watched_process = os.getpid()
        _reads.clear()
        threading.Thread(target=_name_stalled_reads, daemon=True, name="stalled reads").start()
    thread = threading.get_ident()
    _reads[thread] = _Read(path, offset, time.monotonic())
    try:
        yield
    finally:
        del _reads[thread]


def _name_stalled_reads() -> None:
    due: dict[_Read, float] = {}
    while True:
        time.sleep(STALL_SEC / 4)
        due = {read: due.get(read, STALL_SEC) for read in tuple(_reads.values())}
        for read in due:
            seconds = time.monotonic() - read.started
            if seconds >= due[read]:
                logger.warning(f"{read.path}: a read at byte {read.offset:,} has not returned for {seconds:.0f} s")
                due[read] = 2 * seconds

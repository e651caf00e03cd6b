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
import weakref
from functools import cache
from pathlib import Path

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
        self.file, self._dtype = file, np.dtype(DTYPES[file.sidecar.dtype])
        self._descriptor: int | None = None
        self.reading: tuple[int, float] | None = None
        """The byte that is read now, and since when."""

    def read(self, first: int, ids: NDArray[np.unsignedinteger]) -> None:
        """Fill ``ids``, (n,), with the ids from index ``first``; its type may be wider than the file's.

        A read that fails is tried again after each of ``PAUSES_SEC``, with a warning, from a file that is opened anew.

        Raises:
            TokenFileError: it still fails, or the file ends before.
        """
        own = ids if ids.dtype == self._dtype else np.empty(len(ids), dtype=self._dtype)
        offset = first * self._dtype.itemsize
        for pause in (*PAUSES_SEC, None):
            self.reading = offset, time.monotonic()
            try:
                self._fill(own.data.cast("B"), offset)
                break
            except OSError as error:
                what = f"{self.file.path}: cannot be read at byte {offset:,} ({error.strerror or error})"
                if pause is None:
                    raise TokenFileError(
                        f"{what}, in {len(PAUSES_SEC) + 1} tries: bring the file or its disk back, and --resume"
                    ) from error
                logger.warning(f"{what}: trying again in {pause:g} s")
                self.close()
                time.sleep(pause)
            finally:
                self.reading = None
        if own is not ids:
            ids[:] = own

    def _fill(self, view: memoryview, offset: int) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(self.file.path, os.O_RDONLY | os.O_CLOEXEC)
            _watched(os.getpid()).add(self)
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if not count:
                self.check(offset + done)
                raise OSError(f"{len(view) - done} bytes are missing")
            done += count

    def check(self, offset: int | None = None) -> None:
        """Check that the file is still the one that the run began with; call it after reading.

        A file that was cut off and grows again would be read as zeros.

        Args:
            offset: the byte at which it was noticed.

        Raises:
            TokenFileError: its size or its time of change is another, or cannot be read.
        """
        if self._descriptor is None:
            return
        try:
            status = os.fstat(self._descriptor)
        except OSError as error:
            if offset is not None:
                raise  # for another try
            what = f"{self.file.path}: cannot be looked at any more ({error.strerror})"
            raise TokenFileError(f"{what}: bring the file or its disk back, and --resume") from error
        if (now := Stamp(status.st_size, status.st_mtime_ns)) == self.file.stamp:
            return
        other_size = f"has {now.size:,} bytes now, not {self.file.size_bytes:,}"
        what = other_size if now.size != self.file.size_bytes else "another time of change"
        where = "" if offset is None else f", at byte {offset:,}"
        raise TokenFileError(
            f"{self.file.path}: changed on disk while it is read{where} ({what}): bring the file that the run began "
            "with back, and --resume"
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


@cache
def _watched(process: int) -> "weakref.WeakSet[TokenReader]":  # noqa: ARG001 - a forked process has no thread yet
    """The readers of a process; a thread warns while a read of them does not return."""
    readers: weakref.WeakSet[TokenReader] = weakref.WeakSet()
    threading.Thread(target=_name_stalled_reads, args=(readers,), daemon=True, name="stalled reads").start()
    return readers


def _name_stalled_reads(readers: "weakref.WeakSet[TokenReader]") -> None:
    due: dict[tuple[Path, int, float], float] = {}
    while True:
        time.sleep(STALL_SEC / 4)
        reads = {(reader.file.path, *reading) for reader in tuple(readers) if (reading := reader.reading)}
        due = {read: due.get(read, STALL_SEC) for read in reads}
        for path, offset, started in due:
            seconds = time.monotonic() - started
            if seconds >= due[path, offset, started]:
                logger.warning(f"{path}: a read at byte {offset:,} has not returned for {seconds:.0f} s")
                due[path, offset, started] = 2 * seconds

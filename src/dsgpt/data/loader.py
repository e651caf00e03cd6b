"""The data loader: micro batches of one data-parallel rank, windows of the data in the order of the run.

Reading names what goes wrong: file, byte and reason. A memory map would end the process with SIGBUS, and without a
word, if the file was cut off or its mount vanished. ``preadv`` returns an error or too few bytes. It costs a system
call per window, and no page of the file counts as memory of the process.
"""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_convert

from dsgpt.data.data_set import DataSet, Windows
from dsgpt.data.order import RankShare, SampleOrder
from dsgpt.data.token_file import DTYPES, Stamp, TokenFile, TokenFileError
from dsgpt.machine.launcher import ignore_stop_signals

PADDING_WINDOW = -1
"""Index that pads the last validation batch, so that every rank has the same number of micro batches; not a window."""
IGNORED_TARGET = -100
"""A target that counts neither in the loss nor in the tokens: torch's cross-entropy ignores it by default."""

STEPS_AT_ONCE = 64
"""Optimizer steps whose windows are computed in one call."""

WORKER_SEC = 600
"""Seconds without a micro batch after which a data worker counts as stuck, and the rank fails."""


class Batch(NamedTuple):
    """One micro batch of one rank."""

    inputs: Tensor
    """(micro_batch_size, seq_length), int64."""
    targets: Tensor
    """Ids that follow ``inputs``, same shape; -100 where a target does not count."""


class WindowDataset(Dataset[Batch]):
    """The windows of a data set; indexed by a whole micro batch at a time."""

    def __init__(self, data: DataSet, *, seq_length: int, vocab_size: int) -> None:
        self._windows, self._vocab_size = Windows(data, seq_length), vocab_size
        self._readers = {file.path: TokenReader(file) for file in data.files}
        self._dtype = max((DTYPES[file.sidecar.dtype] for file in data.files), key=lambda name: np.dtype(name).itemsize)

    def __getitems__(self, windows: list[int]) -> Batch:
        """The micro batch of these ``windows``.

        Raises:
            TokenFileError: a file cannot be read; or an id is outside the vocabulary, which on a GPU would fail an
                assertion in a kernel.
        """
        rows = np.zeros((len(windows), self._windows.seq_length + 1), dtype=self._dtype)
        for row, window in zip(rows, windows, strict=True):
            if window != PADDING_WINDOW:
                done = 0
                for file, first, tokens in self._windows.spans(window):
                    self._readers[file.path].read(first, row[done : done + tokens])
                    done += tokens
        for reader in self._readers.values():
            reader.check()
        if (largest := int(rows.max())) >= self._vocab_size:
            spans = self._windows.spans(windows[int(rows.max(axis=1).argmax())])
            files = dict.fromkeys(str(file.path) for file, _, _ in spans)
            raise TokenFileError(
                f"{' or '.join(files)}: holds id {largest}, but the model's vocabulary ends at {self._vocab_size - 1}"
            )
        inputs, targets = (torch.from_numpy(part.astype(np.int64)) for part in (rows[:, :-1], rows[:, 1:]))
        if PADDING_WINDOW in windows:
            targets[torch.tensor(windows) == PADDING_WINDOW] = IGNORED_TARGET
        return Batch(inputs=inputs, targets=targets)


def training_windows(order: SampleOrder, share: RankShare, steps: range) -> Iterator[list[int]]:
    """The windows of each micro batch of ``steps`` (from 0). The windows before a resumed run's step are not read."""
    for first in steps[::STEPS_AT_ONCE]:
        for batch in order.batches(first, min(first + STEPS_AT_ONCE, steps.stop)):
            yield from share.of(batch).tolist()


def validation_windows(parts: Sequence[range], share: RankShare, *, global_batch_size: int) -> Iterator[list[int]]:
    """The windows of each micro batch: each part in order, its last global batch padded."""
    for part in parts:
        for first in part[::global_batch_size]:
            batch = np.arange(first, first + global_batch_size)
            batch[batch >= part.stop] = PADDING_WINDOW
            yield from share.of(batch).tolist()


def micro_batches(
    dataset: WindowDataset, windows: Iterator[list[int]], *, workers: int, pin_memory: bool
) -> Iterable[Batch]:
    """The micro batches of ``windows``, in their order; it can be iterated over once.

    With 0 ``workers`` the rank reads them itself, as it must in validation. A worker would be forked in the middle of
    the run, while threads of collectives are running. If one of them holds a lock of Python at that moment, the worker
    waits for the lock forever, and the rank waits for the worker.
    """
    if not workers:
        batches = map(dataset.__getitems__, windows)
        return (Batch(*(part.pin_memory() for part in batch)) for batch in batches) if pin_memory else batches
    # The dataset returns a whole micro batch, so there is nothing to collate. With its own generator, the loader
    # draws no seed from the default generator, whose state belongs to dropout and is restored at a resume.
    return DataLoader(
        dataset,
        batch_sampler=windows,
        collate_fn=default_convert,
        num_workers=workers,
        pin_memory=pin_memory,
        timeout=WORKER_SEC,
        worker_init_fn=ignore_stop_signals,
        generator=torch.Generator(),
    )


class CopiedAhead:
    """Micro batches on a GPU. The next one is read and copied, on a stream of its own, while the GPU computes."""

    def __init__(self, batches: Iterable[Batch], device: torch.device) -> None:
        self._batches, self._device = iter(batches), device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's has no types
        self._ahead: Batch | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self._ahead or self._copied()
        if batch is None:
            raise StopIteration
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._copies)  # before the next copy is in it
        for part in batch:
            part.record_stream(computing)  # else its memory could be given to a copy too early
        self._ahead = self._copied()
        return batch

    def _copied(self) -> Batch | None:
        batch = next(self._batches, None)
        with torch.cuda.stream(self._copies):
            return batch and Batch(*(part.to(self._device, non_blocking=True) for part in batch))


# Reading ids of a token file while a run trains.

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

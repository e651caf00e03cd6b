"""The data loader: micro batches of one data-parallel rank, windows of the data in the order of the run."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_convert

from dsgpt.data.data_set import DataSet, Windows
from dsgpt.data.order import RankShare, SampleOrder
from dsgpt.data.token_file import DTYPES, TokenFileError
from dsgpt.data.token_reader import TokenReader
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
        length = self._windows.seq_length
        rows = np.zeros((len(windows), length + 1), dtype=self._dtype)
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

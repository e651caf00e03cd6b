"""From a token file to micro batches: the windows of one data-parallel rank, in the order of the run."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_convert

from dsgpt.data.token_file import SampleOrder, TokenFile, TokenFileError
from dsgpt.machine.launcher import ignore_stop_signals

PADDING_WINDOW = -1
"""Not a window: pads the last validation batch, so that every rank has the same number of micro batches."""
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
    """Same shape; the ids that follow ``inputs``. -100 where a target does not count."""


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """Which part of every global batch one data-parallel rank reads."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    data_rank: int
    """Rank among the data-parallel ranks; ranks that share a copy of the model have the same one."""
    data_parallel_size: int

    def of(self, global_batch: NDArray[np.int64]) -> NDArray[np.int64]:
        """This rank's windows of a global batch (B,), as (gradient_accumulation_steps, micro_batch_size)."""
        shares = global_batch.reshape(self.data_parallel_size, self.gradient_accumulation_steps, self.micro_batch_size)
        own: NDArray[np.int64] = shares[self.data_rank]
        return own


class WindowDataset(Dataset[Batch]):
    """The windows of a token file; indexed by a whole micro batch at a time."""

    def __init__(self, file: TokenFile, *, seq_length: int, vocab_size: int) -> None:
        self._file = file
        self._ids = file.memmap()
        self._seq_length = seq_length
        self._vocab_size = vocab_size

    def __getitems__(self, windows: list[int]) -> Batch:
        """The micro batch of these ``windows``.

        Raises:
            TokenFileError: an id is outside the vocabulary; on a GPU it would fail an assertion in a kernel.
        """
        length = self._seq_length
        rows = np.zeros((len(windows), length + 1), dtype=np.int64)
        for row, window in zip(rows, windows, strict=True):
            if window != PADDING_WINDOW:
                row[:] = self._ids[window * length : window * length + length + 1]
        if rows.max() >= self._vocab_size:
            raise TokenFileError(
                f"{self._file.path}: holds id {rows.max()}, but the model's vocabulary ends at {self._vocab_size - 1}"
            )
        ids = torch.from_numpy(rows)
        targets = ids[:, 1:].clone()
        targets[torch.tensor(windows) == PADDING_WINDOW] = IGNORED_TARGET
        return Batch(inputs=ids[:, :-1].contiguous(), targets=targets)


class _TrainingBatches:
    """The micro batches of the steps from ``first_step`` up to but not including ``last_step``, as lists of windows."""

    def __init__(self, order: SampleOrder, share: RankShare, *, first_step: int, last_step: int) -> None:
        self._order, self._share = order, share
        self._steps = range(first_step, last_step)

    def __len__(self) -> int:
        return len(self._steps) * self._share.gradient_accumulation_steps

    def __iter__(self) -> Iterator[list[int]]:
        for first in self._steps[::STEPS_AT_ONCE]:
            for batch in self._order.batches(first, min(first + STEPS_AT_ONCE, self._steps.stop)):
                yield from self._share.of(batch).tolist()


class _ValidationBatches:
    """The micro batches of the validation windows in file order, the last global batch padded."""

    def __init__(self, windows: int, share: RankShare, *, global_batch_size: int) -> None:
        self._windows, self._share, self._global_batch_size = windows, share, global_batch_size

    def __len__(self) -> int:
        return -(-self._windows // self._global_batch_size) * self._share.gradient_accumulation_steps

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, self._windows, self._global_batch_size):
            batch = np.arange(first, first + self._global_batch_size)
            batch[batch >= self._windows] = PADDING_WINDOW
            yield from self._share.of(batch).tolist()


def _loader(
    dataset: WindowDataset, batches: _TrainingBatches | _ValidationBatches, *, workers: int, pin_memory: bool
) -> DataLoader[Batch]:
    # The dataset returns a whole micro batch, so there is nothing to collate. With its own generator, the loader
    # draws no seed from the default generator, whose state belongs to dropout and is restored at a resume.
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=default_convert,
        num_workers=workers,
        pin_memory=pin_memory,
        timeout=WORKER_SEC if workers else 0,
        worker_init_fn=ignore_stop_signals,
        generator=torch.Generator(),
    )


def training_loader(
    dataset: WindowDataset,
    order: SampleOrder,
    share: RankShare,
    *,
    first_step: int,
    last_step: int,
    workers: int,
    pin_memory: bool,
) -> DataLoader[Batch]:
    """Micro batches of steps ``first_step`` (from 0) up to but not including ``last_step``.

    A resumed run starts at its step directly: the windows before it are not read.
    """
    batches = _TrainingBatches(order, share, first_step=first_step, last_step=last_step)
    return _loader(dataset, batches, workers=workers, pin_memory=pin_memory)


def validation_loader(
    dataset: WindowDataset, windows: int, share: RankShare, *, global_batch_size: int, pin_memory: bool
) -> DataLoader[Batch]:
    """Micro batches of the first ``windows`` validation windows, ``global_batch_size`` of them per validation step.

    The rank reads them itself. A worker would be forked in the middle of the run, while threads of collectives are
    running. If one of them holds a lock of Python at that moment, the worker waits for the lock forever, and the rank
    waits for the worker.
    """
    batches = _ValidationBatches(windows, share, global_batch_size=global_batch_size)
    return _loader(dataset, batches, workers=0, pin_memory=pin_memory)

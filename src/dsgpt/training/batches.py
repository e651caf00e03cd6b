"""The micro batches of a run, for training and for validation."""

from collections.abc import Iterator
from typing import Self

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from dsgpt.config.run_config import RunConfig
from dsgpt.data.loader import Batch, RankShare, WindowDataset, training_loader, validation_loader
from dsgpt.runtime.interruption import stop_signals_blocked


class Batches:
    """The micro batches of a loader, and its worker processes from the start until ``close``.

    Workers must end before Python exits: they ignore SIGTERM (``ignore_stop_signals``), and Python's exit handler,
    which sends it to every child, would wait forever. After an error they live until ``close``, because the traceback
    refers to them.
    """

    def __init__(self, loader: DataLoader[Batch]) -> None:
        with stop_signals_blocked():
            self._batches: Iterator[Batch] = iter(loader)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        """End the worker processes; no more batches can be read."""
        if isinstance(self._batches, _MultiProcessingDataLoaderIter):
            self._batches._shutdown_workers()
            for worker in self._batches._workers:
                if worker.is_alive():  # it is stuck, and ignores the SIGTERM that it was sent
                    worker.kill()
                    worker.join()


def training_batches(config: RunConfig, *, first_step: int) -> Batches:
    """This rank's micro batches from optimizer step ``first_step`` (the first is 0) to the end of the run."""
    dataset = WindowDataset(config.train, seq_length=config.seq_length, vocab_size=config.model.vocab_size)
    return Batches(
        training_loader(
            dataset,
            config.order,
            _share(config),
            first_step=first_step,
            last_step=config.total_steps,
            workers=config.options.num_workers,
            pin_memory=config.device == "cuda",
        )
    )


def validation_batches(config: RunConfig) -> Batches:
    """This rank's micro batches of one validation."""
    dataset = WindowDataset(config.val, seq_length=config.seq_length, vocab_size=config.model.vocab_size)
    return Batches(
        validation_loader(
            dataset,
            config.val_windows,
            _share(config),
            global_batch_size=config.batch.global_batch_size,
            pin_memory=config.device == "cuda",
        )
    )


def _share(config: RunConfig) -> RankShare:
    return RankShare(
        micro_batch_size=config.batch.micro_batch_size,
        gradient_accumulation_steps=config.batch.gradient_accumulation_steps,
        data_rank=config.topology.data_rank,
        data_parallel_size=config.batch.data_parallel_size,
    )

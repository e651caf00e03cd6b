"""The micro batches of a run, for training and for validation."""

from collections.abc import Iterator

from dsgpt.config.run_config import RunConfig
from dsgpt.data.loader import Batch, RankShare, WindowDataset, training_loader, validation_loader


def training_batches(config: RunConfig, *, first_step: int) -> Iterator[Batch]:
    """This rank's micro batches from optimizer step ``first_step`` (the first is 0) to the end of the run."""
    dataset = WindowDataset(config.train, seq_length=config.seq_length, vocab_size=config.model.vocab_size)
    return iter(
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


def validation_batches(config: RunConfig) -> Iterator[Batch]:
    """This rank's micro batches of one validation."""
    dataset = WindowDataset(config.val, seq_length=config.seq_length, vocab_size=config.model.vocab_size)
    return iter(
        validation_loader(
            dataset,
            config.val_windows,
            _share(config),
            global_batch_size=config.batch.global_batch_size,
            workers=config.options.num_workers,
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

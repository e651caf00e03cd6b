"""The training loop. It asks for a step, meters it, validates, saves; it knows no strategy, device or launcher."""

import time
from collections.abc import Callable, Iterator

import torch

from dsgpt.config import RunConfig
from dsgpt.data.loader import Batch, RankShare, WindowDataset, training_loader, validation_loader
from dsgpt.strategies.base import Strategy
from dsgpt.telemetry.console import Console
from dsgpt.telemetry.cost import CostMeter
from dsgpt.telemetry.meter import TimedBatches
from dsgpt.training.journal import Journal


def fit(
    config: RunConfig, strategy: Strategy, journal: Journal, console: Console, *, done: int, save: Callable[[int], None]
) -> None:
    """Train from step ``done`` to the end.

    Args:
        config: the run.
        strategy: executes steps.
        journal: takes what happened.
        console: shows the progress of validations.
        done: optimizer steps that a resumed run has behind it.
        save: writes a checkpoint of the step it is given.

    Raises:
        NonFiniteError: the loss or gradient norm was NaN or infinite; no state of it was saved.
    """
    options, per_epoch = config.options, config.order.steps_per_epoch
    batches = TimedBatches(training_batches(config, first_step=done))
    costs = CostMeter(
        lambda: strategy.state_tensors()._asdict(), last_step=config.total_steps, report=journal.cost_measured
    )
    for step in range(done + 1, config.total_steps + 1):
        epoch = (step - 1) // per_epoch
        started = journal.meter.start()
        with costs.watch(step):
            result = strategy.train_step(batches, step)
        seconds = batches.take_seconds()
        journal.step_done(started, step=step, epoch=epoch, result=result, dataload_sec=seconds, watched=costs.watched)

        last = step == config.total_steps
        epoch_ends = last or step % per_epoch == 0
        save_now = last or _due(step, options.save_every)
        if epoch_ends or save_now or _due(step, options.eval_every):
            journal.flush()
        if epoch_ends or _due(step, options.eval_every):
            validate(config, strategy, journal, console, step=step)
        if epoch_ends:
            journal.epoch_done(epoch)
        if save_now:
            save(step)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def validate(config: RunConfig, strategy: Strategy, journal: Journal, console: Console, *, step: int) -> None:
    """Measure the mean loss over the validation windows, the same ones in the same order on every strategy."""
    started = time.perf_counter()
    steps = -(-config.val_windows // config.batch.global_batch_size)
    batches = validation_batches(config)
    progress = console.progress(total=steps, what="validating", unit="batch")
    sums = []
    for _ in range(steps):
        sums.append(torch.stack(strategy.eval_step(batches)))
        progress.advance()
    progress.close()
    loss_sum, tokens = torch.stack(sums).sum(dim=0).tolist()
    journal.validated(step=step, val_loss=loss_sum / tokens, tokens=int(tokens), seconds=time.perf_counter() - started)


def _share(config: RunConfig) -> RankShare:
    return RankShare(
        micro_batch_size=config.batch.micro_batch_size,
        gradient_accumulation_steps=config.batch.gradient_accumulation_steps,
        data_rank=config.topology.data_rank,
        data_parallel_size=config.batch.data_parallel_size,
    )


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

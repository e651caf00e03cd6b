"""The training loop. It asks for a step, meters it, validates, saves; it knows no strategy, device or launcher."""

import time
from collections.abc import Iterator

import torch

from dsgpt.config.run_config import RunConfig
from dsgpt.data.loader import Batch, RankShare, WindowDataset, training_loader, validation_loader
from dsgpt.strategies.base import Strategy
from dsgpt.telemetry.console import Console
from dsgpt.telemetry.meter import TimedBatches
from dsgpt.telemetry.step_traffic import CostMeter
from dsgpt.training.journal import Journal
from dsgpt.training.saving import Saver
from dsgpt.training.stopping import Stopping


def fit(
    config: RunConfig,
    strategy: Strategy,
    journal: Journal,
    console: Console,
    stopping: Stopping,
    *,
    done: int,
    saver: Saver,
) -> None:
    """Train from step ``done`` to the end.

    Args:
        config: the run.
        strategy: executes steps.
        journal: takes what happened.
        console: shows the progress of validations.
        stopping: says whether to end early.
        done: optimizer steps that a resumed run has behind it.
        saver: writes checkpoints.

    Raises:
        NonFiniteError: the loss or gradient norm was NaN or infinite; no state of it was saved.
        SaveError: a checkpoint could not be written.
        Interrupted: on every rank together; the state is saved.
    """
    if stopping.agreed():
        raise stopping.stop("before it took a step")
    batches = TimedBatches(training_batches(config, first_step=done))
    costs = CostMeter(
        lambda: strategy.state_tensors()._asdict(), last_step=config.total_steps, report=journal.cost_measured
    )
    if done:
        validated = journal.last_val_step
        if not _look_back(config, strategy, journal, console, stopping, step=done):
            raise stopping.stop(f"after step {done}, which is saved")
        if done == config.total_steps and journal.last_val_step != validated:
            saver.save(done, needed=True)  # the last checkpoint may be the best
    for step in range(done + 1, config.total_steps + 1):
        epoch = (step - 1) // config.order.steps_per_epoch
        started = journal.meter.start()
        with costs.watch(step):
            result = strategy.train_step(batches, step)
        seconds = batches.take_seconds()
        journal.step_done(started, step=step, epoch=epoch, result=result, dataload_sec=seconds, watched=costs.watched)

        stop = stopping.agreed() or not _look_back(config, strategy, journal, console, stopping, step=step)
        last = step == config.total_steps
        if not (stop or last):  # else the save that follows hears of the one before it
            saver.look()
        if stop or last or _due(step, config.options.save_every):
            journal.flush()
            saver.save(step, needed=stop or last)
        if stop:
            raise stopping.stop(f"after step {step}, which is saved")


def _look_back(
    config: RunConfig, strategy: Strategy, journal: Journal, console: Console, stopping: Stopping, *, step: int
) -> bool:
    """Do what ``step``, the last one taken, calls for: a validation, the end of an epoch.

    A run that was stopped before it had done so does it when it is resumed.

    Returns:
        Whether nobody asked to stop meanwhile.
    """
    epoch_ends = step == config.total_steps or step % config.order.steps_per_epoch == 0
    if epoch_ends or _due(step, config.options.eval_every):
        journal.flush()
        if journal.last_val_step != step and not validate(config, strategy, journal, console, stopping, step=step):
            return False
    if epoch_ends and journal.epoch_is_open:
        journal.epoch_done((step - 1) // config.order.steps_per_epoch)
    return True


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def validate(
    config: RunConfig, strategy: Strategy, journal: Journal, console: Console, stopping: Stopping, *, step: int
) -> bool:
    """Measure the mean loss over the validation windows, and note it in the journal.

    Returns:
        Whether it was measured; nothing is noted of a validation that was stopped on its way.
    """
    started = time.perf_counter()
    measured = validation_loss(config, strategy, console, stopping)
    if measured is None:
        return False
    val_loss, tokens = measured
    journal.validated(step=step, val_loss=val_loss, tokens=tokens, seconds=time.perf_counter() - started)
    return True


def validation_loss(
    config: RunConfig, strategy: Strategy, console: Console, stopping: Stopping
) -> tuple[float, int] | None:
    """The mean loss over the validation windows, the same ones in the same order on every strategy; collective.

    Returns:
        Nats per token and the number of targets; None where the validation was stopped on its way.
    """
    steps = -(-config.val_windows // config.batch.global_batch_size)
    batches = validation_batches(config)
    progress = console.progress(total=steps, what="validating", unit="batch")
    sums = []
    for _ in range(steps):
        if stopping.agreed():
            progress.close()
            return None
        sums.append(torch.stack(strategy.eval_step(batches)))
        progress.advance()
    progress.close()
    loss_sum, tokens = torch.stack(sums).sum(dim=0).tolist()
    return loss_sum / tokens, int(tokens)


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

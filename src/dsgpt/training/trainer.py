"""The training loop, and what it needs. It does not depend on the strategy, device or launcher."""

import contextlib
import logging
import time
from collections.abc import Callable

import torch

from dsgpt.common.errors import Interrupted
from dsgpt.common.next_step import next_line
from dsgpt.config.run_config import RunConfig
from dsgpt.runtime.interruption import Interruption
from dsgpt.runtime.launcher import own_command
from dsgpt.runtime.process_group import HostGroup, barrier, gather_objects
from dsgpt.strategies.base import Strategy
from dsgpt.telemetry.console import Progress
from dsgpt.telemetry.meter import TimedBatches
from dsgpt.telemetry.monitor import Monitor
from dsgpt.training.batches import training_batches, validation_batches
from dsgpt.training.completion import mark_complete, measure_inference
from dsgpt.training.events import stalls_reported
from dsgpt.training.journal import Journal
from dsgpt.training.measurements import Measurements
from dsgpt.training.saving import Saver
from dsgpt.training.stopping import Stopping

logger = logging.getLogger(__name__)


class Trainer:
    """Trains a run, from its first step or the step after its checkpoint, until its record is complete; one per rank.

    Args:
        config: the run.
        device: of this rank.
        strategy: executes steps; the state of the checkpoint is already loaded into it.
        journal: receives what happens; it has the figures of earlier processes.
        saver: writes checkpoints.
        monitor: samples GPUs while the run trains.
        interruption: requests to stop this rank.
        ranks: all ranks.
        done: optimizer steps of earlier processes.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        device: torch.device,
        strategy: Strategy,
        journal: Journal,
        saver: Saver,
        monitor: Monitor,
        interruption: Interruption,
        ranks: HostGroup,
        done: int,
    ) -> None:
        self._config, self._device, self._strategy = config, device, strategy
        self._journal, self._saver = journal, saver
        self._monitor, self._interruption = monitor, interruption
        self._stopping = Stopping(interruption, journal.budget, ranks)
        self._done = done

    def run(self) -> None:
        """Train, measure inference and complete the record; collective. After an error the record's ``status`` says so.

        Raises:
            NonFiniteError: a loss, gradient norm or weight was NaN or infinite; that state was not saved.
            SaveError: a checkpoint could not be written.
            Interrupted: on every rank, if the run was asked to stop; every step that it took is saved.
        """
        with self._interruption.patience():
            try:
                self._journal.write()
                with self._monitor, stalls_reported(self._config, self._journal.budget):
                    self.fit()
                self._complete()
            except BaseException as error:
                self._saver.close()
                self._end_early(error)
                raise
            finally:
                self._journal.close()

    def fit(self) -> None:
        """Take the remaining steps; validate and save when they are due."""
        if self._stopping.agreed(steps_left=self._done < self._config.total_steps):
            raise self._stopping.stop("before it took a step", idle=True)
        with contextlib.closing(training_batches(self._config, first_step=self._done)) as batches:
            self._take_steps(TimedBatches(batches))

    def _take_steps(self, batches: TimedBatches) -> None:
        config, journal, stopping = self._config, self._journal, self._stopping
        measured = Measurements(config, device=self._device, strategy=self._strategy, journal=journal, batches=batches)
        if self._done:
            self._catch_up()
        for step in range(self._done + 1, config.total_steps + 1):
            epoch = (step - 1) // config.order.steps_per_epoch
            started = journal.step_begins()
            with measured.watch(step):
                result = self._strategy.train_step(batches, step)
            waited, watched = batches.take_seconds(), measured.watched
            journal.step_done(started, step=step, epoch=epoch, result=result, dataload_sec=waited, watched=watched)
            measured.after(step)

            stop = stopping.agreed() or not self._after_step(step)
            last = step == config.total_steps
            if not (stop or last):  # else ``save`` below waits for the background save
                self._saver.poll()
            if stop or last or _due(step, config.options.save_every):
                journal.flush()
                self._saver.save(step, needed=stop or last)
            if stop:
                raise stopping.stop(f"after step {step}, which is saved")

    def _catch_up(self) -> None:
        """Validate and end the epoch at the checkpoint's step, if the run was stopped before it did."""
        step, validated = self._done, self._journal.last_val_step
        if not self._after_step(step):
            raise self._stopping.stop(f"after step {step}, which is saved", idle=True)
        if step == self._config.total_steps and self._journal.last_val_step != validated:
            self._saver.save(step, needed=True)  # the last checkpoint may be the best

    def _after_step(self, step: int) -> bool:
        """Validate and end the epoch if they are due after ``step``, the last one taken.

        Returns:
            False if a request to stop ended the validation; the resumed run repeats it.
        """
        config, journal = self._config, self._journal
        epoch_ends = step == config.total_steps or step % config.order.steps_per_epoch == 0
        if epoch_ends or _due(step, config.options.eval_every):
            journal.flush()
            if journal.last_val_step != step and not self._validate(step):
                return False
        if epoch_ends and journal.epoch_is_open:
            journal.epoch_done((step - 1) // config.order.steps_per_epoch)
        return True

    def _validate(self, step: int) -> bool:
        """Measure the validation loss and note it; False where a request to stop ended it."""
        started = time.perf_counter()
        measured = validation_loss(self._config, self._strategy, stop=self._stopping.agreed)
        if measured is None:
            return False
        val_loss, tokens = measured
        self._journal.validated(step=step, val_loss=val_loss, tokens=tokens, seconds=time.perf_counter() - started)
        return True

    def _complete(self) -> None:
        config, journal = self._config, self._journal
        journal.gpus_used([figures for own in gather_objects(self._monitor.figures) for figures in own])
        if not config.options.no_inference:
            journal.record.inference = measure_inference(
                config, self._strategy, device=self._device, interruption=self._interruption
            )
        if self._stopping.agreed(steps_left=False):
            raise self._stopping.stop("when all steps were done and saved, before the end of the run")
        journal.write("completed")
        if config.topology.is_main:
            mark_complete(config, journal.record.summary)
        barrier()

    def _end_early(self, error: BaseException) -> None:
        self._journal.end_early("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        if isinstance(error, Interrupted) and error.together:
            logger.info(f"{error}; continue with --resume")
            command = own_command()
            logger.info(next_line([*command, *([] if "--resume" in command else ["--resume"])]))
            barrier()  # the launcher ends all ranks when one exits, but the main rank may still be writing files


def validation_loss(
    config: RunConfig, strategy: Strategy, *, stop: Callable[[], bool] = lambda: False
) -> tuple[float, int] | None:
    """The mean loss over the validation windows, which are the same, in the same order, for every strategy; collective.

    Args:
        config: the run.
        strategy: computes the losses.
        stop: called before each batch; returns the same on every rank.

    Returns:
        Nats per token and the number of targets; None where ``stop`` ended it.
    """
    steps = -(-config.val_windows // config.batch.global_batch_size)
    progress = Progress(total=steps, what="validating", unit="batch")
    sums = []
    with contextlib.closing(progress), contextlib.closing(validation_batches(config)) as batches:
        for _ in range(steps):
            if stop():
                return None
            sums.append(torch.stack(strategy.eval_step(batches)))
            progress.advance()
    loss_sum, tokens = torch.stack(sums).sum(dim=0).tolist()
    return loss_sum / tokens, int(tokens)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0

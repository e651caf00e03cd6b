"""The figures of a run, its speed, its state for a checkpoint, and its record."""

import contextlib
import logging
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dsgpt.checkpoints.manifest import Change, Epoch, RunState
from dsgpt.common.errors import NonFiniteError, UserError
from dsgpt.common.text import busy_words
from dsgpt.config.run_config import RunConfig
from dsgpt.machine.process_group import HostGroup
from dsgpt.planner.rates import CALIBRATION, Calibration, Utilisation, read_calibration, utilisation
from dsgpt.record.schema import RunRecord, read_steps
from dsgpt.strategies.base import StepResult
from dsgpt.telemetry.memory import TrainingPeaks
from dsgpt.telemetry.meter import (
    Figures,
    Mark,
    RankShare,
    RankTimes,
    StepMeter,
    interval_figures,
    require_finite,
    throughput,
    timing_figures,
)
from dsgpt.telemetry.monitor import gpu_use
from dsgpt.training.budget import Budget, TrainingPlan
from dsgpt.training.resume import EarlierRecord, Segments
from dsgpt.training.run_description import CHANGES_KEY, predicted_peak_memory
from dsgpt.training.sinks import Sinks

logger = logging.getLogger(__name__)


# The speed of a run for its lines and its record: throughput, its share of the hardware's peak, ranks that wait.


class Speed:
    """Computes the speed of a run; every rank has one.

    Args:
        config: the run.
        description: of this process, with its hardware; empty on all ranks but the main one.
        ranks: all ranks.
    """

    def __init__(self, config: RunConfig, description: dict[str, Any], *, ranks: HostGroup) -> None:
        self._config, self._ranks = config, ranks
        on_cpu = description.get("hardware", {}).get("device") == "cpu"
        self._calibration = _calibration_of_this_machine() if on_cpu else None
        self._here = self._utilisation_on(description)
        self._times = RankTimes()

    def interval(self, meter: StepMeter) -> dict[str, Any]:
        """The figures of the steps since the last call; collective: the ranks are compared."""
        figures, computing_sec = meter.take_interval()
        own = RankShare(sum(figures.dataload_secs), computing_sec, meter.last_own_loss)
        ranks = [RankShare(*values) for values in self._ranks.gathered(own)]
        interval, times = interval_figures(figures, ranks=ranks)
        self._times.add(times)
        return {**interval, "mfu": self._here.mfu(throughput(figures))}

    def of_run(self, meter: StepMeter, description: dict[str, Any]) -> dict[str, Any]:
        """The keys of the summary; those that compare ranks are of the steps of this process that were shown.

        Args:
            meter: of the run.
            description: what all segments of the run share: without a common hardware its share is unknown.
        """
        use, tokens_per_sec = self._utilisation_on(description), throughput(meter.run)
        return {
            "mean_tokens_per_sec_global": tokens_per_sec,
            "mean_tokens_per_sec_per_device": use.per_device(tokens_per_sec),
            "flops_per_token": use.flops_per_token,
            "mfu": use.mfu(tokens_per_sec),
            **self._times.figures(),
        }

    def _utilisation_on(self, description: dict[str, Any]) -> Utilisation:
        config = self._config
        hardware = description.get("hardware", {})
        return utilisation(
            config.model,
            hardware,
            seq_length=config.seq_length,
            precision=config.precision,
            calibration=self._calibration,
        )


def _calibration_of_this_machine() -> Calibration | None:
    """What ``plan.py --calibrate`` measured, if it did."""
    if not CALIBRATION.exists():
        return None
    try:
        return read_calibration(CALIBRATION)
    except UserError:
        logger.warning(f"MFU is unknown: {CALIBRATION} cannot be used; write it again with src/plan.py --calibrate")
        return None


# The figures of a run, its state for a checkpoint, and its record. Sends every event to the sinks.


class Journal:
    """The figures of a run. Every rank keeps them, and they agree; the main rank alone has sinks.

    Args:
        config: the run.
        device: of this rank.
        description: of the run, for the record; empty on all ranks but the main one.
        sinks: receive what happens.
        ranks: all ranks.
        plan: what was predicted of this run.
        done: optimizer steps of earlier processes.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        device: torch.device,
        description: dict[str, Any],
        sinks: Sinks,
        ranks: HostGroup,
        plan: TrainingPlan | None = None,
        done: int = 0,
    ) -> None:
        self._config = config
        self._sinks = sinks
        self.budget = Budget(config, plan)
        self._peaks = TrainingPeaks(device)
        self._meter = StepMeter(device, tokens_per_step=config.tokens_per_step)
        self._speed = Speed(config, description, ranks=ranks)
        self._segments = Segments(description, done=done)
        self._changes: list[dict[str, Any]] = description.get(CHANGES_KEY, [])
        self._failed_saves = 0
        self._communication_share: float | None = None
        self._gpu_use: dict[str, Any] | None = None
        self._predicted = predicted_peak_memory(config)
        self.record = RunRecord(description=description)
        self.last_val_loss: float | None = None
        self.last_val_step: int | None = None
        self.best_val_loss: float | None = None

    def resume(self, state: RunState, steps_file: Path, *, earlier: EarlierRecord) -> None:
        """Continue the figures of earlier processes of this run.

        Args:
            state: of the checkpoint.
            steps_file: ``metrics.jsonl``, cut back to the steps of ``state``; lines that are missing make sums unknown.
            earlier: the record of the last process.
        """
        self._segments.resume(state)
        self.budget.resume(earlier)
        self.record.epochs = [asdict(epoch) for epoch in state.epochs]
        self.record.saves = [asdict(save) for save in earlier.saves or () if save.step <= state.step]
        self.best_val_loss = state.best_val_loss
        self.last_val_loss, self.last_val_step = state.last_val_loss, state.last_val_step
        self._failed_saves = max(state.failed_saves, earlier.summary.failed_saves or 0)
        lines = list(read_steps(steps_file)) if steps_file.exists() else []
        self._meter.resume(
            lines,
            done=state.step,
            epoch_start=sum(epoch.steps for epoch in state.epochs),
            wall_sec=state.wall_time_sec,
            last_loss=state.last_train_loss,
        )
        if self._meter.run.train_sec is None:
            logger.warning(f"{steps_file} lacks steps before {state.step}: sums over them are unknown in the record")

    def state(self, step: int) -> RunState:
        """The state of the run after ``step``, for a checkpoint."""
        self._note_segment()
        return RunState(
            step=step,
            samples_seen=step * self._config.batch.global_batch_size,
            best_val_loss=self.best_val_loss,
            epochs=[Epoch(**epoch) for epoch in self.record.epochs],
            wall_time_sec=self._meter.wall_seconds(),
            last_train_loss=self._meter.last_loss,
            last_val_loss=self.last_val_loss,
            last_val_step=self.last_val_step,
            failed_saves=self._failed_saves,
            changes=[Change(**change) for change in self._changes],
            segments=self._segments.all,
        )

    @property
    def epoch_is_open(self) -> bool:
        """Whether steps were taken since the last record of an epoch."""
        return self._meter.epoch.steps > 0

    def step_begins(self) -> Mark:
        """Mark the start of a step, for ``step_done``."""
        return self._meter.start()

    def step_done(
        self, started: Mark, *, step: int, epoch: int, result: StepResult, dataload_sec: float, watched: bool
    ) -> None:
        """Note a finished step without waiting for the device; print as often as ``--steps_per_print`` says."""
        self._meter.stop(started, step=step, epoch=epoch, result=result, dataload_sec=dataload_sec, watched=watched)
        self._sinks.send(lambda sink: sink.step_taken())
        if step % self._config.steps_per_print == 0 or step in {1, self._config.total_steps}:
            self.flush(due=True)

    def flush(self, *, due: bool = False) -> None:
        """Send the steps since the last call to the sinks; ``due`` where the last of them is to be printed: collective.

        Raises:
            NonFiniteError: one of them has a loss or gradient norm that is NaN or infinite.
        """
        lines = self._meter.flush()
        if due and lines:
            lines[-1]["interval"] = self._speed.interval(self._meter)
        self._sinks.try_to_send("lines", lambda sink: sink.steps(lines, due=due))
        require_finite(lines)
        if self.budget.measured(lines):
            self.write()

    def traffic_measured(self, measured: dict[str, Any]) -> None:
        """Note the model state and the traffic of a step."""
        self.record.cost = {"segment": len(self._segments.all) - 1, **measured}
        self._sinks.send(lambda sink: sink.traffic(measured))

    def communication_profiled(self, measured: dict[str, Any]) -> None:
        """Note what the collectives of some steps cost."""
        self._communication_share = measured["exposed_share"]
        self._sinks.try_to_send("communication", lambda sink: sink.communication(measured))

    def gpus_used(self, devices: list[dict[str, Any]]) -> None:
        """Note the figures of the GPUs that were sampled while this process trained."""
        tokens = self._meter.process.steps * self._config.tokens_per_step
        self._gpu_use = gpu_use(devices, expected=self._config.topology.world_size, tokens=tokens)

    def validated(self, *, step: int, val_loss: float, tokens: int, seconds: float) -> None:
        """Note a validation loss.

        Raises:
            NonFiniteError: it is NaN or infinite.
        """
        self.last_val_loss, self.last_val_step = val_loss, step
        line = {
            "step": step,
            "val_loss": val_loss,
            "val_tokens": tokens,
            "train_time_sec": self._meter.run.train_sec,
            "wall_time_sec": self._meter.wall_seconds(),
        }
        self._sinks.try_to_send("lines", lambda sink: sink.validation(line, seconds=seconds))
        if not math.isfinite(val_loss):
            raise NonFiniteError(
                f"step {step}: the validation loss is {val_loss:g}: training stopped, and this state is not saved"
            )
        self.best_val_loss = min(val_loss, self.best_val_loss) if self.best_val_loss is not None else val_loss
        self.write()

    def epoch_done(self, epoch: int) -> None:
        """Close the record of an epoch, or of the part of it that the run trained."""
        figures = self._meter.epoch
        self._note_segment()
        earlier = sum(finished["epoch_wall_time_sec"] for finished in self.record.epochs)
        peaks = self._segments.peaks(since_step=self._meter.run.steps - figures.steps + 1)
        finished = Epoch(
            epoch_idx=epoch,
            epoch_wall_time_sec=max(0.0, self._meter.wall_seconds() - earlier),
            train_time_sec=figures.train_sec,
            steps=figures.steps,
            micro_steps=figures.steps * self._config.batch.gradient_accumulation_steps,
            optimizer_steps=figures.steps,
            tokens_processed_global=figures.steps * self._config.tokens_per_step,
            train_loss_avg_global=figures.loss_mean(),
            val_loss_avg_global=self.last_val_loss,
            **peaks,
            **timing_figures(figures),
        )
        self.record.epochs.append(asdict(finished))
        self._meter.epoch = Figures()
        self.write()

    def saved(self, *, step: int, mode: str, stall_sec: float, total_sec: float, size: int) -> None:
        """Note a checkpoint.

        Args:
            step: its step.
            mode: ``sync`` or ``async``.
            stall_sec: seconds that training waited for it.
            total_sec: seconds from its beginning until it was published.
            size: bytes of its files.
        """
        self.budget.save_secs.append(total_sec)
        seconds = {"save_stall_sec": stall_sec, "save_total_sec": total_sec}
        self.record.saves.append({"step": step, "mode": mode, **seconds, "bytes": size})

    def save_failed(self) -> None:
        """Count a checkpoint that could not be written."""
        self._failed_saves += 1

    def before_save(self) -> None:
        """Make durable what a resume needs besides the checkpoint, and the record in case the save is killed.

        Raises:
            OSError: the file system refuses.
        """
        self._update_record()
        self._sinks.send(lambda sink: sink.record(self.record))
        self._sinks.send(lambda sink: sink.sync())

    def after_save(self) -> None:
        """Exclude what a save allocated from the figures of training."""
        self._peaks.reset()

    def write(self, status: str = "running") -> None:
        """Send the record to the sinks.

        Args:
            status: of the run. While it is ``running``, a write error is handled as ``--on_save_failure`` says;
                afterwards it is raised.

        Raises:
            OSError: the file system refuses.
        """
        running = status == "running"
        self._update_record(status, peaks=running)
        if running:
            self._sinks.try_to_send("record", lambda sink: sink.record(self.record))
        else:
            self._sinks.send(lambda sink: sink.record(self.record))
            if self.record.segments and (words := busy_words(self.record.segments[-1])):
                logger.warning(words)

    def write_saves(self) -> None:
        """Write the record after a save, so that after a kill it lists every save."""
        self._update_record(peaks=False)
        self._sinks.try_to_send("record", lambda sink: sink.record(self.record))

    def _update_record(self, status: str = "running", *, peaks: bool = True) -> None:
        """Compute the figures of the record.

        Its memory figures are of training: after a save or the end (``peaks`` false) they stay as they were.
        """
        run = self._meter.run
        self._note_segment(peaks=peaks)
        self.record.status = status
        self.record.description = self._segments.common_description()
        self.record.plan = self.budget.block()
        self.record.segments = [asdict(segment) for segment in self._segments.all]
        self.record.summary = {
            "total_wall_time_sec": self._meter.wall_seconds(),
            "train_time_sec": run.train_sec,
            "optimizer_steps": run.steps,
            "tokens_processed_global": run.steps * self._config.tokens_per_step,
            "final_train_loss": self._meter.last_loss,
            "final_val_loss": self.last_val_loss,
            "best_val_loss": self.best_val_loss,
            "failed_saves": self._failed_saves,
            **self._speed.of_run(self._meter, self.record.description),
            "communication_share": self._communication_share,
            "gpu_use": self._gpu_use,
            **self._segments.peaks(),
            "predicted_peak_memory": self._predicted,
        }

    def _note_segment(self, *, peaks: bool = True) -> None:
        """Update the segment of this process; without ``peaks``, its memory figures stay as they were."""
        if peaks:
            self._peaks.note()
        self._segments.note(self._meter, self._peaks.figures())

    def end_early(self, status: str) -> None:
        """Send what is known when an error ends the run; a further error must not hide the first."""
        lines: list[dict[str, Any]] = []
        with contextlib.suppress(RuntimeError):  # of a broken device
            lines = self._meter.flush(wait=False)
        self._sinks.send_if_possible(lambda sink: sink.steps(lines, due=False))
        self._update_record(status, peaks=False)
        self._sinks.send_if_possible(lambda sink: sink.record(self.record))

    def close(self) -> None:
        """Close the sinks."""
        self._meter.close()
        self._sinks.send(lambda sink: sink.close())

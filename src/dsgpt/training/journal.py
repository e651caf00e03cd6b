"""What the loop tells the world: console lines, ``metrics.jsonl``, the epochs and the summary of the record."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dsgpt.checkpointing.run_state import Change, Epoch, RunState
from dsgpt.checkpointing.writing import reason_of
from dsgpt.common.errors import NonFiniteError
from dsgpt.config.run_config import RunConfig
from dsgpt.strategies.base import StepResult
from dsgpt.telemetry.console import Console, Progress
from dsgpt.telemetry.memory import TrainingPeaks
from dsgpt.telemetry.meter import Figures, StepMeter, require_finite, throughput, timing_figures
from dsgpt.telemetry.record import RECORD_FILE, STEPS_FILE, RunRecord, StepLog, read_steps
from dsgpt.telemetry.step_traffic import cost_line
from dsgpt.training.earlier_record import EarlierRecord
from dsgpt.training.run_description import CHANGES_KEY
from dsgpt.training.segments import Segments


class Journal:
    """Every rank keeps the figures, which are the same on all of them; only the main rank writes files and speaks."""

    def __init__(
        self, config: RunConfig, device: torch.device, console: Console, facts: dict[str, Any], *, first_step: int
    ) -> None:
        self._config = config
        self._console = console
        self._writes = config.topology.is_main
        self._peaks = TrainingPeaks(device)
        self._meter = StepMeter(device, tokens_per_step=config.tokens_per_step)
        self.record = RunRecord(config.run_dir / RECORD_FILE, facts, epochs=[])
        self._log = StepLog(config.run_dir / STEPS_FILE) if self._writes else None
        self._progress: Progress = console.progress(
            total=config.total_steps, done=first_step, what="training", unit="step"
        )
        self.last_val_loss: float | None = None
        self.last_val_step: int | None = None
        self.best_val_loss: float | None = None
        self._failed_saves = 0
        self._refused: set[str] = set()
        self._changes: list[dict[str, Any]] = facts.get(CHANGES_KEY, [])
        self._segments = Segments(facts, done=first_step)

    def take_up(self, state: RunState, steps_file: Path, *, earlier: EarlierRecord) -> None:
        """Go on where an earlier process of this run stopped.

        ``steps_file`` was cut to the steps of ``state``. What is missing in it makes sums unknown. ``earlier`` is the
        record that the process left.
        """
        self._segments.take_up(state)
        self.record.epochs = [asdict(epoch) for epoch in state.epochs]
        self.record.saves = [asdict(save) for save in earlier.saves or () if save.step <= state.step]
        self.best_val_loss = state.best_val_loss
        self._failed_saves = max(state.failed_saves, earlier.summary.failed_saves or 0)
        lines = list(read_steps(steps_file)) if steps_file.exists() else []
        self._meter.take_up(
            lines,
            done=state.step,
            epoch_start=sum(epoch.steps for epoch in state.epochs),
            wall_sec=state.wall_time_sec,
            last_loss=state.last_train_loss,
        )
        self.last_val_loss, self.last_val_step = state.last_val_loss, state.last_val_step
        if self._meter.run.train_sec is None:
            self._console.say(f"{steps_file} lacks steps before {state.step}: sums over them are unknown in the record")

    def state(self, step: int) -> RunState:
        """Where the run stands after ``step``, for a checkpoint."""
        self._note()
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

    def _note(self, *, peaks: bool = True) -> None:
        """Take what this process did so far; without ``peaks``, those of the last time stand."""
        if peaks:
            self._peaks.note()
        self._segments.note(self._meter, self._peaks.figures())

    def saved(self, *, step: int, mode: str, stall_sec: float, total_sec: float, size: int) -> None:
        """Note what a checkpoint cost.

        Args:
            step: that it is of.
            mode: ``sync`` or ``async``.
            stall_sec: how long training waited for it.
            total_sec: from its beginning until it was published.
            size: bytes of its files.
        """
        seconds = {"save_stall_sec": stall_sec, "save_total_sec": total_sec}
        self.record.saves.append({"step": step, "mode": mode, **seconds, "bytes": size})

    def save_failed(self) -> None:
        """Count a checkpoint that could not be written."""
        self._failed_saves += 1

    def before_save(self) -> None:
        """Make durable what a checkpoint counts on, and the record of a run that may be killed while it saves."""
        self._write()
        if self._log:
            self._log.sync()

    def after_save(self) -> None:
        """Keep what a save allocated out of the figures of training."""
        self._peaks.forget()

    @property
    def epoch_is_open(self) -> bool:
        """Whether steps were taken since the last record of an epoch."""
        return self._meter.epoch.steps > 0

    @property
    def meter(self) -> StepMeter:
        """Times the steps."""
        return self._meter

    def step_done(
        self, started: Any, *, step: int, epoch: int, result: StepResult, dataload_sec: float, watched: bool
    ) -> None:
        """Note a finished step without waiting for the device; print at the rhythm that was asked for."""
        self._meter.stop(started, step=step, epoch=epoch, result=result, dataload_sec=dataload_sec, watched=watched)
        self._progress.advance()
        if step % self._config.steps_per_print == 0 or step in {1, self._config.total_steps}:
            self.flush(print_last=True)

    def cost_measured(self, cost: dict[str, Any]) -> None:
        """Note what a step costs a rank, which the next record tells."""
        self.record.cost = {"segment": len(self._segments.all) - 1, **cost}
        self._console.say(f"step {cost['measured_step']:>6}/{self._config.total_steps}  {cost_line(cost)}")

    def flush(self, *, print_last: bool = False) -> None:
        """Write the steps since the last call.

        Raises:
            NonFiniteError: one of them has a loss or gradient norm that is NaN or infinite.
        """
        lines = self._meter.flush()
        self._put(lines)
        if lines and print_last:
            self._say_step(lines[-1])
        require_finite(lines)

    def _put(self, lines: list[dict[str, Any]]) -> None:
        """Add lines to ``metrics.jsonl``; what a full disk does not take comes later, if the run may go on with it."""
        if self._log:
            with self._tolerant(STEPS_FILE):
                self._log.write(lines)

    @contextlib.contextmanager
    def _tolerant(self, file: str) -> Iterator[None]:
        """Go on after a refusal of the file system, told once for each ``file``, as ``--on_save_failure`` says.

        Raises:
            OSError: it does not.
        """
        try:
            yield
        except OSError as error:
            if self._config.options.on_save_failure == "stop":
                raise
            if file not in self._refused:
                self._console.say(f"{reason_of(error)}; going on (--on_save_failure continue), and trying again")
            self._refused.add(file)
        else:
            self._refused.discard(file)

    def end_early(self, status: str) -> None:
        """Write what is known when an error ends the run, which is told by the caller: no other may hide it."""
        with contextlib.suppress(RuntimeError, OSError):  # of a broken device, of a full disk
            lines = self._meter.flush(wait=False)
            if self._log:
                self._log.write(lines)
        with contextlib.suppress(OSError):
            self.write(status)

    def _say_step(self, line: dict[str, Any]) -> None:
        norm = line["grad_norm"]
        skipped = "  (skipped: fp16 overflow)" if line["skipped"] else ""
        self._console.say(
            f"step {line['step']:>6}/{self._config.total_steps}  loss {line['loss']:.4f}  lr {line['lr']:.2e}  "
            f"grad norm {norm:.3f}  {line['tokens_per_sec']:>9,.0f} tokens/s  {line['step_time_sec'] * 1000:.0f} ms  "
            f"left {self._progress.time_left()}{skipped}"
        )

    def validated(self, *, step: int, val_loss: float, tokens: int, seconds: float) -> None:
        """Note a validation loss.

        Raises:
            NonFiniteError: it is NaN or infinite.
        """
        self.last_val_loss, self.last_val_step = val_loss, step
        entry = {
            "step": step,
            "val_loss": val_loss,
            "val_tokens": tokens,
            "train_time_sec": self._meter.run.train_sec,
            "wall_time_sec": self._meter.wall_seconds(),
        }
        self._put([entry])
        self._console.say(
            f"step {step:>6}/{self._config.total_steps}  validation loss {val_loss:.4f} on {tokens:,} tokens "
            f"in {seconds:.1f} s"
        )
        if not math.isfinite(val_loss):
            raise NonFiniteError(
                f"step {step}: the validation loss is {val_loss:g}: training stopped, and this state is not saved"
            )
        self.best_val_loss = min(val_loss, self.best_val_loss) if self.best_val_loss is not None else val_loss
        self.write()

    def epoch_done(self, epoch: int) -> None:
        """Close the record of an epoch, or of what the run saw of it."""
        figures = self._meter.epoch
        self._note()
        accumulation = self._config.batch.gradient_accumulation_steps
        earlier = sum(finished["epoch_wall_time_sec"] for finished in self.record.epochs)
        finished = Epoch(
            epoch_idx=epoch,
            epoch_wall_time_sec=max(0.0, self._meter.wall_seconds() - earlier),
            train_time_sec=figures.train_sec,
            steps=figures.steps,
            micro_steps=figures.steps * accumulation,
            optimizer_steps=figures.steps,
            tokens_processed_global=figures.steps * self._config.tokens_per_step,
            train_loss_avg_global=figures.loss_mean(),
            val_loss_avg_global=self.last_val_loss,
            **self._segments.peaks(since_step=self._meter.run.steps - figures.steps + 1),
            **timing_figures(figures),
        )
        self.record.epochs.append(asdict(finished))
        self._meter.epoch = Figures()
        self.write()

    def write(self, status: str = "running") -> None:
        """Write the record as it stands, or later where the run goes on without; as ``_tolerant`` says.

        Args:
            status: of the run; of one that has ended, the record is written or the error raised.
        """
        with self._tolerant(RECORD_FILE) if status == "running" else contextlib.nullcontext():
            self._write(status, peaks=status == "running")

    def write_saves(self) -> None:
        """Write the record after a save: a run that is killed now must not look as if nothing had been saved."""
        with self._tolerant(RECORD_FILE):
            self._write("running", peaks=False)

    def _write(self, status: str = "running", *, peaks: bool = True) -> None:
        """Its memory figures are of training: without ``peaks``, after a save or the end, the last ones stand."""
        run = self._meter.run
        self._note(peaks=peaks)
        self.record.status = status
        self.record.facts = self._segments.common_facts()
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
            "mean_tokens_per_sec_global": throughput(run),
            **self._segments.peaks(),
        }
        if self._writes:
            self.record.write()

    def close(self) -> None:
        """Close the files."""
        self._progress.close()
        if self._log:
            self._log.close()

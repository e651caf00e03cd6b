"""The journal of a run: its figures, its speed, its segments, its record, and the sinks of all of it."""

import contextlib
import logging
import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsgpt.checkpoints.manifest import Change, Epoch, Goodput, RunState, Segment, highest_peaks
from dsgpt.checkpoints.training_state import reason_of
from dsgpt.common.errors import NonFiniteError, UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.common.text import busy_words
from dsgpt.config.run_config import RunConfig
from dsgpt.data.order import MixtureOrder
from dsgpt.machine.console import Field, Progress, fitted
from dsgpt.machine.device import HostGroup, gather_objects
from dsgpt.planner.options import CALIBRATION
from dsgpt.planner.rates import Calibration, Utilisation, read_calibration, utilisation
from dsgpt.record.schema import RECORD_FILE, STEPS_FILE, RunRecord, StepLog, finite, mean, percentile, read_steps
from dsgpt.telemetry.cost import TrainingPeaks, peak_bytes, traffic_line
from dsgpt.telemetry.meter import Figures, RankShare, RankTimes, StepMeter, StepResult, interval_figures, require_finite
from dsgpt.telemetry.monitor import LoadOfOthers
from dsgpt.telemetry.profiles import COMMUNICATION_FILE, communication_table
from dsgpt.training.budget import Budget, TrainingPlan
from dsgpt.training.run_description import CHANGES_KEY, predicted_peak_memory
from dsgpt.training.run_folder import EarlierRecord, Save

logger = logging.getLogger(__name__)

# Sinks, to which the journal sends what happens. Those of experiment trackers are in ``trackers.py``.

Line = dict[str, Any]
"""A line of ``metrics.jsonl``, of a step or of a validation, by its keys."""


class Sink:
    """Receives what happens in a run, on the main rank alone. A subclass overrides the methods that concern it.

    ``steps``, ``validation``, ``communication`` and ``record`` may raise an ``OSError``: the run stops or continues, as
    ``--on_save_failure`` says. An ``OSError`` of ``sync`` makes the save fail.
    """

    def step_taken(self) -> None:
        """An optimizer step was taken; its figures are still on the device."""

    def steps(self, lines: list[Line], *, due: bool) -> None:
        """The figures of steps, oldest first.

        Args:
            lines: may be empty; lines of an earlier call that failed are not repeated.
            due: whether the last of them is to be shown to the user, as ``--steps_per_print`` says.
        """

    def validation(self, line: Line, *, seconds: float) -> None:
        """The loss of a validation, and how long it took."""

    def traffic(self, measured: dict[str, Any]) -> None:
        """The ``cost`` block of the record: model state and traffic of one step."""

    def communication(self, measured: dict[str, Any]) -> None:
        """The contents of ``communication.json``."""

    def record(self, record: RunRecord) -> None:
        """The record as it is now; its ``status`` is ``running`` until the run ends."""

    def sync(self) -> None:
        """Make durable what was received, because a checkpoint follows."""

    def close(self) -> None:
        """Called after the last event."""


class FileSink(StepLog, Sink):
    """Writes ``metrics.jsonl``, ``training_metrics.json`` and ``communication.json``.

    Lines that the file system refuses are written with the next ones. The record is replaced as a whole: a reader sees
    the old one or the new one.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir / STEPS_FILE)
        self._run_dir = run_dir

    def steps(self, lines: list[Line], *, due: bool) -> None:  # noqa: ARG002 - every line is written
        """Write a line for each step."""
        self.write(lines)

    def validation(self, line: Line, *, seconds: float) -> None:  # noqa: ARG002 - not in the file
        """Write its line."""
        self.write([line])

    def communication(self, measured: dict[str, Any]) -> None:
        """Write ``communication.json``."""
        write_json_atomic(self._run_dir / COMMUNICATION_FILE, finite(measured))

    def record(self, record: RunRecord) -> None:
        """Write the record as it is now."""
        write_json_atomic(self._run_dir / RECORD_FILE, record.as_dict())


class ConsoleSink(Sink):
    """Logs a line for people; on a terminal, one line that changes replaces the lines of steps.

    Args:
        config: the run.
        done: optimizer steps of earlier processes.
    """

    def __init__(self, config: RunConfig, *, done: int) -> None:
        self._total_steps, self._devices, self._device = config.total_steps, config.topology.world_size, config.device
        self._figures: list[Field] = []
        self._shown_step = 0
        total, text = config.total_steps, self._live_line
        self._progress = Progress(total=total, done=done, what="training", unit="step", text=text)

    def step_taken(self) -> None:
        """Advance the bar."""
        self._progress.advance()

    def _live_line(self, progress: Progress, width: int) -> str:
        """The text of the live line in ``width`` columns."""
        figures = list(self._figures)
        if figures and self._shown_step != progress.done:
            figures[0] = figures[0]._replace(text=f"{figures[0].text} at step {self._shown_step}")
        first = Field(f"step {progress.done}/{self._total_steps}", 0)
        return fitted([first, *figures, Field(f"left {progress.time_left()}", 2)], width)

    def steps(self, lines: list[Line], *, due: bool) -> None:
        """Log the last step if it is ``due``."""
        if not (due and lines):
            return
        line = lines[-1]
        self._shown_step = line["step"]
        skipped = "  (skipped: fp16 overflow)" if line["skipped"] else ""
        mfu, memory = line["interval"]["mfu"], peak_bytes(self._device)
        used = "" if mfu is None else f"MFU {mfu:.1%}  "
        speed = line["interval"]["tokens_per_sec"] or line["tokens_per_sec"]
        loss, lr, norm = f"loss {line['loss']:.4f}", f"lr {line['lr']:.2e}", f"grad norm {line['grad_norm']:.3f}"
        self._figures = [Field(loss, 1), Field(lr, 5), Field(norm, 4), Field(f"{speed:,.0f} tokens/s", 3)]
        self._figures += [Field(f"{speed / self._devices:,.0f} a device", 8)] if self._devices > 1 else []
        self._figures += [Field(used.strip(), 6)] if used else []
        self._figures += [Field(f"memory {memory / 1e9:.2f} GB", 7)] if memory is not None else []
        took = f"{line['tokens_per_sec']:>9,.0f} tokens/s  {line['step_time_sec'] * 1000:.0f} ms"
        words = [place(self._shown_step, self._total_steps), loss, lr, norm, took]
        left = f"{used}left {self._progress.time_left()}{skipped}"
        logger.info("  ".join([*words, left]), extra=self._progress.log_only)

    def validation(self, line: Line, *, seconds: float) -> None:
        """Log the loss."""
        where = place(line["step"], self._total_steps)
        tokens = f"{line['val_tokens']:,} tokens in {seconds:.1f} s"
        logger.info(f"{where}  validation loss {line['val_loss']:.4f} on {tokens}")
        for name, loss in line.get("val_loss_by_source", {}).items():
            logger.info(f"{where}    {loss:.4f} on {name}")

    def traffic(self, measured: dict[str, Any]) -> None:
        """Log what was measured."""
        logger.info(f"{place(measured['measured_step'], self._total_steps)}  {traffic_line(measured)}")

    def communication(self, measured: dict[str, Any]) -> None:
        """Log a table."""
        for line in communication_table(measured):
            logger.info(line)

    def close(self) -> None:
        """Remove the bar."""
        self._progress.close()


class Sinks:
    """Sends each event to several sinks, in their order.

    Args:
        sinks: those of the main rank; none on the other ranks.
        stops: whether a write error stops the run (``--on_save_failure stop``).
    """

    def __init__(self, sinks: Sequence[Sink] = (), *, stops: bool = True) -> None:
        self._sinks, self._stops = sinks, stops
        self._refusing: set[tuple[str, Sink]] = set()

    def send(self, event: Callable[[Sink], None]) -> None:
        """Send an event.

        Raises:
            OSError: a sink could not write; the sinks after it do not receive the event.
        """
        for sink in self._sinks:
            event(sink)

    def try_to_send(self, what: str, event: Callable[[Sink], None]) -> None:
        """Send an event; after a write error, continue if ``--on_save_failure`` allows it.

        The error is reported once, until the sink can write ``what`` (``lines`` or ``record``) again.

        Raises:
            OSError: the option does not allow it.
        """
        for sink in self._sinks:
            try:
                event(sink)
            except OSError as error:
                if self._stops:
                    raise
                if (what, sink) not in self._refusing:
                    then = "the run continues and tries again (--on_save_failure continue)"
                    logger.warning(f"{reason_of(error)}; {then}")
                self._refusing.add((what, sink))
            else:
                self._refusing.discard((what, sink))

    def send_if_possible(self, event: Callable[[Sink], None]) -> None:
        """Send an event and ignore write errors: the run is already ending with another error."""
        for sink in self._sinks:
            with contextlib.suppress(OSError):
                event(sink)


def open_sinks(config: RunConfig, *, done: int, trackers: Sequence[Sink] = ()) -> Sinks:
    """The sinks of this rank of a run; the main rank opens ``metrics.jsonl``.

    Args:
        config: the run.
        done: optimizer steps of earlier processes.
        trackers: receive each event after the files of the run.
    """
    if not config.topology.is_main:
        return Sinks()
    file = FileSink(config.run_dir)  # first, so that a line is in the file before it is shown
    return Sinks([file, ConsoleSink(config, done=done), *trackers], stops=config.options.on_save_failure == "stop")


def place(step: int, total_steps: int) -> str:
    """``step      6/12``, the start of console lines about a step."""
    return f"step {step:>6}/{total_steps}"


# The segments of a run, one for each process that trained a part of it, and the description that all of them share.


class Segments:
    """The earlier segments, up to the checkpoint that this process resumed from, and the segment of this process.

    Args:
        description: of the run; empty on all ranks but the main one, because the others keep no segments.
        done: optimizer steps of earlier processes.
    """

    def __init__(self, description: dict[str, Any], *, done: int) -> None:
        self._description, self._done = description, done
        self._load = LoadOfOthers(ranks=description["hardware"]["local_world_size"] > 1) if description else None
        self._earlier: list[Segment] = []
        self.all: list[Segment] = []
        """All segments, as of the last ``note``."""

    def resume(self, state: RunState) -> None:
        """Continue the segments of a checkpoint."""
        self._earlier = list(state.segments)

    def note(self, meter: StepMeter, peaks: dict[str, int | None]) -> None:
        """Update the segment of this process."""
        if self._load is None:
            return
        measured = {
            "first_step": self._done + 1,
            "last_step": max(meter.run.steps, self._done),
            "train_time_sec": meter.process.train_sec,
            "wall_time_sec": meter.process_wall_seconds(),
            "mean_tokens_per_sec_global": meter.process.tokens_per_sec(),
            **peaks,
            **self._load.figures(),
        }
        facts = {**self._description["training_config"], **self._description, **measured}
        self.all = [*self._earlier, Segment(**{field.name: facts[field.name] for field in fields(Segment)})]

    def peaks(self, *, since_step: int = 1) -> dict[str, Any]:
        """The memory keys of the summary, or of an epoch that began with ``since_step``."""
        return highest_peaks(self.all, first_step=since_step, last_step=self.all[-1].last_step if self.all else 0)

    def common_description(self) -> dict[str, Any]:
        """The description of the run, with None where the segments differ."""
        if not self.all:
            return self._description
        common = {block: dict(self._description[block]) for block in ("env", "hardware", "training_config")}
        common["top"] = {name: self._description[name] for name in ("git_commit", "host")}
        for segment in map(asdict, self.all):
            for block, values in common.items():
                other = segment.get(block, values | segment)
                common[block] = {name: value if other.get(name) == value else None for name, value in values.items()}
        return self._description | common.pop("top") | common


# The figures of a run, its state for a checkpoint, and its record. Sends every event to the sinks.


class Validation(NamedTuple):
    """The result of a validation."""

    loss: float
    """Nats per token, the mean over all targets."""
    tokens: int
    """Targets."""
    by_source: dict[str, float]
    """The loss of each source by itself."""


class Journal:
    """The figures of a run. Every rank keeps them, and they agree; the main rank alone has sinks.

    Args:
        config: the run.
        device: of this rank.
        description: of the run, for the record; empty on all ranks but the main one.
        sinks: receive what happens.
        ranks: all ranks.
        plan: what was predicted of this run.
        goodput: of earlier processes.
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
        goodput: Goodput | None = None,
        done: int = 0,
    ) -> None:
        self._config, self._sinks = config, sinks
        self.budget = Budget(config, plan)
        self.peaks = TrainingPeaks(device)
        self.meter = StepMeter(device, tokens_per_step=config.tokens_per_step)
        self._ranks, self._times = ranks, RankTimes()
        self._calibration: Calibration | None = None
        if description.get("hardware", {}).get("device") == "cpu" and CALIBRATION.exists():
            try:
                self._calibration = read_calibration(CALIBRATION)
            except UserError:
                cure = "write it again with src/plan.py --calibrate"
                logger.warning(f"MFU is unknown: {CALIBRATION} cannot be used; {cure}")
        self._here = self._utilisation_on(description)
        self._segments = Segments(description, done=done)
        self._changes: list[dict[str, Any]] = description.get(CHANGES_KEY, [])
        self.on_flush: Callable[[], None] = lambda: None
        """Called when the steps were read from the device, before the sinks receive them."""
        self.failed_saves = 0
        """Checkpoints that could not be written."""
        self._communication_share: float | None = None
        self.gpu_use: dict[str, Any] | None = None
        """Figures of the GPUs that were sampled while this process trained."""
        self._goodput = (goodput or Goodput()).begin(self.budget.process_sec)
        self._lost_sec = {"start": self.budget.process_sec, "validation": 0.0, "saves": 0.0}
        self._predicted = predicted_peak_memory(config)
        self.record = RunRecord(description=description)
        self.last_val_loss: float | None = None
        self.last_val_step: int | None = None
        self.best_val_loss: float | None = None
        self._last_validation: Validation | None = None

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
        self.failed_saves = max(state.failed_saves, earlier.summary.failed_saves or 0)
        lines = list(read_steps(steps_file)) if steps_file.exists() else []
        starts, ended = {segment.first_step for segment in state.segments}, sum(epoch.steps for epoch in state.epochs)
        self.meter.resume(lines, done=state.step, first_steps=starts, epoch_start=ended)
        self.meter.earlier_wall_sec, self.meter.last_loss = state.wall_time_sec or 0.0, state.last_train_loss
        if self.meter.run.train_sec is None:
            logger.warning(f"{steps_file} lacks steps before {state.step}: sums over them are unknown in the record")

    def state(self, step: int) -> RunState:
        """The state of the run after ``step``, for a checkpoint."""
        self._note_segment()
        return RunState(
            step=step,
            samples_seen=step * self._config.batch.global_batch_size,
            best_val_loss=self.best_val_loss,
            epochs=[Epoch(**epoch) for epoch in self.record.epochs],
            wall_time_sec=self.meter.wall_seconds(),
            last_train_loss=self.meter.last_loss,
            last_val_loss=self.last_val_loss,
            last_val_step=self.last_val_step,
            failed_saves=self.failed_saves,
            changes=[Change(**change) for change in self._changes],
            segments=self._segments.all,
        )

    def step_done(self, *, step: int, epoch: int, result: StepResult, dataload_sec: float, watched: bool) -> None:
        """Note a finished step without waiting for the device; print as often as ``--steps_per_print`` says."""
        self.meter.stop(step=step, epoch=epoch, result=result, dataload_sec=dataload_sec, watched=watched)
        self._sinks.send(lambda sink: sink.step_taken())
        if step % self._config.steps_per_print == 0 or step in {1, self._config.total_steps}:
            self.flush(due=True)

    def flush(self, *, due: bool = False) -> None:
        """Send the steps since the last call to the sinks; ``due`` where the last of them is to be printed: collective.

        Raises:
            NonFiniteError: one of them has a loss or gradient norm that is NaN or infinite.
        """
        lines = self.meter.flush()
        self.on_flush()
        if due and lines:
            figures, self.meter.interval = self.meter.interval, Figures()
            own = RankShare(sum(figures.dataload_secs), figures.computing_sec, self.meter.last_own_loss)
            ranks = [RankShare(*values) for values in self._ranks.gathered(own)]
            self._times.add(figures, ranks)
            mfu = self._here.mfu(figures.tokens_per_sec())
            lines[-1]["interval"] = {**interval_figures(figures, ranks=ranks), "mfu": mfu}
        self._sinks.try_to_send("lines", lambda sink: sink.steps(lines, due=due))
        try:
            require_finite(lines)
        except NonFiniteError as error:
            raise NonFiniteError(f"{error}{self._first_non_finite(lines)}") from error
        if self.budget.measured(lines):
            self.write()

    def _first_non_finite(self, lines: list[dict[str, Any]]) -> str:
        """The rank whose own figures were the first that are not finite; collective: all have the same lines."""
        own = ((line, *result.own_non_finite()) for line, result in enumerate(self.meter.results))
        fault = next((fault for fault in own if fault[2]), (len(lines), math.inf, ""))
        topology = self._config.topology
        own_part = socket.gethostname(), (topology.stage, topology.tensor_rank, topology.sequence_rank)
        ranks: list[tuple[str, tuple[int, ...], tuple[int, float, str]]] = gather_objects((*own_part, fault))
        line, exchange, what = min(fault for _, _, fault in ranks)
        at_fault = {rank for rank, (_, _, fault) in enumerate(ranks) if fault[:2] == (line, exchange)}
        parts = {ranks[rank][1] for rank in at_fault}
        replicas = {rank for rank, (_, part, _) in enumerate(ranks) if part in parts}
        alone = topology.data_parallel_size == 1
        if not what or len(at_fault) == len(ranks) or (at_fault == replicas and not alone):
            return ""  # what all of them share was the first: the weights
        names = ", ".join(f"rank {rank} on {ranks[rank][0]}" for rank in sorted(at_fault))
        or_else = "; if the training diverges, it looks the same" if alone else ""
        return f"; {names} was the first to compute {what} that is not finite, in step {lines[line]['step']}{or_else}"

    def traffic_measured(self, measured: dict[str, Any]) -> None:
        """Note the model state and the traffic of a step."""
        self.record.cost = {"segment": len(self._segments.all) - 1, **measured}
        self._sinks.send(lambda sink: sink.traffic(measured))

    def communication_profiled(self, measured: dict[str, Any]) -> None:
        """Note what the collectives of some steps cost."""
        self._communication_share = measured["exposed_share"]
        self._sinks.try_to_send("communication", lambda sink: sink.communication(measured))

    def validated(self, *, step: int, validation: Validation, seconds: float) -> None:
        """Note a validation loss.

        Raises:
            NonFiniteError: it is NaN or infinite.
        """
        val_loss = validation.loss
        self.last_val_loss, self.last_val_step, self._last_validation = val_loss, step, validation
        self._lost_sec["validation"] += seconds
        line: Line = {"step": step, "val_loss": val_loss, "val_tokens": validation.tokens}
        if len(validation.by_source) > 1:
            line["val_loss_by_source"] = validation.by_source
        line |= {"train_time_sec": self.meter.run.train_sec, "wall_time_sec": self.meter.wall_seconds()}
        self._sinks.try_to_send("lines", lambda sink: sink.validation(line, seconds=seconds))
        if not math.isfinite(val_loss):
            then = "training stopped, and this state is not saved"
            raise NonFiniteError(f"step {step}: the validation loss is {val_loss:g}: {then}")
        self.best_val_loss = min(val_loss, self.best_val_loss) if self.best_val_loss is not None else val_loss
        self.write()

    def epoch_done(self, epoch: int) -> None:
        """Close the record of an epoch, or of the part of it that the run trained."""
        figures = self.meter.epoch
        self._note_segment()
        earlier = sum(finished["epoch_wall_time_sec"] for finished in self.record.epochs)
        finished = Epoch(
            epoch_idx=epoch,
            epoch_wall_time_sec=max(0.0, self.meter.wall_seconds() - earlier),
            train_time_sec=figures.train_sec,
            steps=figures.steps,
            micro_steps=figures.steps * self._config.batch.gradient_accumulation_steps,
            optimizer_steps=figures.steps,
            tokens_processed_global=figures.steps * self._config.tokens_per_step,
            train_loss_avg_global=figures.loss_mean(),
            val_loss_avg_global=self.last_val_loss,
            **self._segments.peaks(since_step=self.meter.run.steps - figures.steps + 1),
            tokens_per_sec_global=figures.tokens_per_sec(),
            step_time_mean_sec=mean(figures.step_secs),
            step_time_p50_sec=percentile(figures.step_secs, 0.50),
            step_time_p95_sec=percentile(figures.step_secs, 0.95),
            dataload_time_mean_sec=mean(figures.dataload_secs),
        )
        self.record.epochs.append(asdict(finished))
        self.meter.epoch = Figures()
        self.write()

    def saved(self, save: Save) -> None:
        """Note a checkpoint."""
        self.budget.save_secs.append(save.save_total_sec)
        self._lost_sec["saves"] += save.save_stall_sec
        self.record.saves.append(asdict(save))

    def before_save(self) -> None:
        """Make durable what a resume needs besides the checkpoint, and the record in case the save is killed.

        Raises:
            OSError: the file system refuses.
        """
        self._update_record()
        self._sinks.send(lambda sink: sink.record(self.record))
        self._sinks.send(lambda sink: sink.sync())

    def write(self, status: str = "running", *, peaks: bool = True) -> None:
        """Send the record to the sinks.

        Args:
            status: of the run. While it is ``running``, a write error is handled as ``--on_save_failure`` says;
                afterwards it is raised.
            peaks: whether memory counts; not after a save, whose memory is not that of training, nor at the end.

        Raises:
            OSError: the file system refuses.
        """
        running = status == "running"
        self._update_record(status, peaks=running and peaks)
        if running:
            self._sinks.try_to_send("record", lambda sink: sink.record(self.record))
        else:
            self._sinks.send(lambda sink: sink.record(self.record))
            if self.record.segments and (words := busy_words(self.record.segments[-1])):
                logger.warning(words)

    def _update_record(self, status: str = "running", *, peaks: bool = True) -> None:
        """Compute the figures of the record.

        Its memory figures are of training: after a save or the end (``peaks`` false) they stay as they were.
        """
        run, config, by_source = self.meter.run, self._config, dict[str, Any]()
        if isinstance(config.order, MixtureOrder):  # null if other data came in at a resume
            counts = config.order.consumed(run.steps * config.batch.global_batch_size)
            names = [source.name for source in config.train.sources]
            changed = any(change["name"] == "train data" for change in self._changes)
            by_source["samples_by_source"] = None if changed else dict(zip(names, counts, strict=True))
        if len(config.val.sources) > 1:  # null if there was no validation since
            by_source["final_val_loss_by_source"] = self._last_validation and self._last_validation.by_source
        self._note_segment(peaks=peaks)
        self.record.status = status
        self.record.description = self._segments.common_description()
        self.record.plan = self.budget.block()
        compilation, waited = self.meter.compilation_sec, run.data_sec
        kept = None if run.train_sec is None else max(0.0, run.train_sec - compilation - waited)
        lost = {**self._lost_sec, "compilation": compilation, "data": waited}
        goodput = self._goodput.now(process_sec=self.budget.process_sec, kept_sec=kept, lost_sec=lost)
        self.record.goodput = {"share": goodput.share, **asdict(goodput)}
        self.record.segments = [asdict(segment) for segment in self._segments.all]
        # The share of a hardware that not all segments have is unknown. Ranks are compared in steps of this process.
        use, tokens_per_sec = self._utilisation_on(self.record.description), run.tokens_per_sec()
        self.record.summary = {
            "total_wall_time_sec": self.meter.wall_seconds(),
            "train_time_sec": run.train_sec,
            "optimizer_steps": run.steps,
            "tokens_processed_global": run.steps * config.tokens_per_step,
            "final_train_loss": self.meter.last_loss,
            "final_val_loss": self.last_val_loss,
            "best_val_loss": self.best_val_loss,
            **by_source,
            "failed_saves": self.failed_saves,
            "mean_tokens_per_sec_global": tokens_per_sec,
            "mean_tokens_per_sec_per_device": use.per_device(tokens_per_sec),
            "flops_per_token": use.flops_per_token,
            "mfu": use.mfu(tokens_per_sec),
            **self._times.figures(),
            "communication_share": self._communication_share,
            "gpu_use": self.gpu_use,
            **self._segments.peaks(),
            "predicted_peak_memory": self._predicted,
        }

    def _utilisation_on(self, description: dict[str, Any]) -> Utilisation:
        config, known, hardware = self._config, self._calibration, description.get("hardware", {})
        length, precision = config.attended_length or config.seq_length, config.precision
        return utilisation(config.model, hardware, seq_length=length, precision=precision, calibration=known)

    def _note_segment(self, *, peaks: bool = True) -> None:
        """Update the segment of this process; without ``peaks``, its memory figures stay as they were."""
        if peaks:
            self.peaks.note()
        self._segments.note(self.meter, self.peaks.figures)

    def end_early(self, status: str) -> None:
        """Send what is known when an error ends the run; a further error must not hide the first."""
        lines: list[dict[str, Any]] = []
        with contextlib.suppress(RuntimeError):  # of a broken device
            lines = self.meter.flush(wait=False)
        self._sinks.send_if_possible(lambda sink: sink.steps(lines, due=False))
        self._update_record(status, peaks=False)
        self._sinks.send_if_possible(lambda sink: sink.record(self.record))

    def close(self) -> None:
        """Close the sinks."""
        self.meter.close()
        self._sinks.send(lambda sink: sink.close())

"""Where the journal of a run sends what happens: the console, ``metrics.jsonl``, ``training_metrics.json``.

The sinks of experiment trackers are in the folder ``trackers``.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dsgpt.checkpoints.training_state import reason_of
from dsgpt.common.files import write_json_atomic
from dsgpt.config.run_config import RunConfig
from dsgpt.machine.console import Field, Progress, fitted
from dsgpt.record.schema import RECORD_FILE, STEPS_FILE, RunRecord, StepLog, finite
from dsgpt.telemetry.communication_profile import COMMUNICATION_FILE, communication_table
from dsgpt.telemetry.memory import peak_bytes, traffic_line

logger = logging.getLogger(__name__)

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


class LineSink(Sink):
    """Appends to ``metrics.jsonl``; lines that the file system refuses are written with the next ones."""

    def __init__(self, path: Path) -> None:
        self._log = StepLog(path)

    def steps(self, lines: list[Line], *, due: bool) -> None:  # noqa: ARG002 - every line is written
        """Write a line for each step."""
        self._log.write(lines)

    def validation(self, line: Line, *, seconds: float) -> None:  # noqa: ARG002 - not in the file
        """Write its line."""
        self._log.write([line])

    def sync(self) -> None:
        """Make the lines durable: a resume from the checkpoint needs them."""
        self._log.sync()

    def close(self) -> None:
        """Close the file."""
        self._log.close()


class ConsoleSink(Sink):
    """Logs a line for people; on a terminal, one line that changes replaces the lines of steps.

    Args:
        total_steps: of the run.
        done: of them, by earlier processes.
        devices: that train.
        memory: returns the peak of memory of this rank in bytes, None where it is unknown.
    """

    def __init__(self, *, total_steps: int, done: int, devices: int, memory: Callable[[], int | None]) -> None:
        self._total_steps, self._devices, self._memory = total_steps, devices, memory
        self._figures: list[Field] = []
        self._shown_step = 0
        self._progress = Progress(total=total_steps, done=done, what="training", unit="step", text=self._live_line)

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
        self._figures = live_fields(line, devices=self._devices, memory=self._memory())
        skipped = "  (skipped: fp16 overflow)" if line["skipped"] else ""
        mfu = line["interval"]["mfu"]
        used = "" if mfu is None else f"MFU {mfu:.1%}  "
        logger.info(
            f"{self._place(line)}  loss {line['loss']:.4f}  lr {line['lr']:.2e}  "
            f"grad norm {line['grad_norm']:.3f}  {line['tokens_per_sec']:>9,.0f} tokens/s  "
            f"{line['step_time_sec'] * 1000:.0f} ms  {used}left {self._progress.time_left()}{skipped}",
            extra=self._progress.log_only,
        )

    def validation(self, line: Line, *, seconds: float) -> None:
        """Log the loss."""
        logger.info(
            f"{self._place(line)}  validation loss {line['val_loss']:.4f} on {line['val_tokens']:,} tokens "
            f"in {seconds:.1f} s"
        )

    def traffic(self, measured: dict[str, Any]) -> None:
        """Log what was measured."""
        logger.info(f"{self._place({'step': measured['measured_step']})}  {traffic_line(measured)}")

    def communication(self, measured: dict[str, Any]) -> None:
        """Log a table."""
        for line in communication_table(measured):
            logger.info(line)

    def _place(self, line: Line) -> str:
        return place(line["step"], self._total_steps)

    def close(self) -> None:
        """Remove the bar."""
        self._progress.close()


def live_fields(line: Line, *, devices: int, memory: int | None) -> list[Field]:
    """The figures of a step for the live line, in the order in which they are shown."""
    interval = line["interval"]
    speed = interval["tokens_per_sec"] or line["tokens_per_sec"]
    fields = [
        Field(f"loss {line['loss']:.4f}", 1),
        Field(f"lr {line['lr']:.2e}", 5),
        Field(f"grad norm {line['grad_norm']:.3f}", 4),
        Field(f"{speed:,.0f} tokens/s", 3),
    ]
    if devices > 1:
        fields.append(Field(f"{speed / devices:,.0f} a device", 8))
    if interval["mfu"] is not None:
        fields.append(Field(f"MFU {interval['mfu']:.1%}", 6))
    if memory is not None:
        fields.append(Field(f"memory {memory / 1e9:.2f} GB", 7))
    return fields


class RecordSink(Sink):
    """Replaces ``training_metrics.json`` as a whole: a reader sees the old record or the new one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def record(self, record: RunRecord) -> None:
        """Write the record as it is now."""
        write_json_atomic(self._path, record.as_dict())

    def communication(self, measured: dict[str, Any]) -> None:
        """Write ``communication.json`` beside the record."""
        write_json_atomic(self._path.with_name(COMMUNICATION_FILE), finite(measured))


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
                    logger.warning(
                        f"{reason_of(error)}; the run continues and tries again (--on_save_failure continue)"
                    )
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
    sinks = (
        LineSink(config.run_dir / STEPS_FILE),  # first, so that a line is in the file before it is shown
        ConsoleSink(
            total_steps=config.total_steps,
            done=done,
            devices=config.topology.world_size,
            memory=lambda: peak_bytes(config.device),
        ),
        RecordSink(config.run_dir / RECORD_FILE),
        *trackers,
    )
    return Sinks(sinks, stops=config.options.on_save_failure == "stop")


def place(step: int, total_steps: int) -> str:
    """``step      6/12``, the start of console lines about a step."""
    return f"step {step:>6}/{total_steps}"

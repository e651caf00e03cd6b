"""What an experiment tracker is told about a run, and the sink that keeps its errors away from the run."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dsgpt.common.json_files import clipped_text
from dsgpt.common.problems import is_number
from dsgpt.telemetry.record import RunRecord
from dsgpt.training.sinks import Line, Sink

logger = logging.getLogger(__name__)

PROJECT = "dsgpt"
"""The project or experiment that holds the runs, in trackers that have such a level."""


class Row(NamedTuple):
    """The metrics of a step or of a validation."""

    step: int
    """Optimizer steps completed; the first is 1."""
    metrics: dict[str, float]
    """By the keys of ``metrics.jsonl``, without those that are unknown; true is 1 and false is 0."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run, as a tracker is told when it is opened."""

    run_dir: Path
    folder: Path
    """For what the tracker stores on this machine; absolute, because libraries keep it in variables."""
    run_id: str
    """That of the record."""
    settings: dict[str, Any]
    """The settings of the record, nested."""
    done: int
    """Step of the checkpoint that the run was resumed from; 0 for a fresh start."""

    @property
    def name(self) -> str:
        """The name of the run folder."""
        return self.run_dir.resolve().name


class Tracker(Protocol):
    """One tracker with one run open. Each method may raise anything."""

    def log(self, rows: list[Row]) -> None:
        """Store metrics, oldest first."""

    def flush(self) -> None:
        """Write what is buffered: a checkpoint follows, and a run resumed from it does not send these steps again."""

    def end(self, status: str, summary: dict[str, float]) -> None:
        """Store how the run ended: the ``status`` of the record, and the numbers of its summary."""

    def close(self) -> None:
        """Called after the last event."""


class TrackerSink(Sink):
    """Tells a tracker what happens.

    The first error of the tracker is reported in one line; it is not called again, and the run continues.

    Args:
        name: of the tracker, as in ``--track``.
        opens: opens the tracker; may raise anything.
    """

    def __init__(self, name: str, opens: Callable[[], Tracker]) -> None:
        self._name = name
        self._tracker: Tracker | None = None
        try:
            self._tracker = opens()
        except Exception as error:  # noqa: BLE001 - no error of a tracker may stop the training
            self._give_up(error)

    def _tell(self, event: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            event(self._tracker)
        except Exception as error:  # noqa: BLE001 - no error of a tracker may stop the training
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._tracker = None
        reason = clipped_text(f"{type(error).__name__}: {error}", width=200)
        logger.warning(f"--track {self._name}: failed ({reason}); it receives nothing more, and the run continues")

    def steps(self, lines: list[Line], *, due: bool) -> None:  # noqa: ARG002 - every step is tracked
        """Send the metrics of every step."""
        if lines:
            self._tell(lambda tracker: tracker.log([row_of(line) for line in lines]))

    def validation(self, line: Line, *, seconds: float) -> None:  # noqa: ARG002 - not a metric of ``metrics.jsonl``
        """Send the loss."""
        self._tell(lambda tracker: tracker.log([row_of(line)]))

    def record(self, record: RunRecord) -> None:
        """Send status and summary when the run ends."""
        if record.status != "running":
            summary = {name: value for name, value in record.summary.items() if is_number(value)}
            self._tell(lambda tracker: tracker.end(record.status, summary))

    def sync(self) -> None:
        """Flush the tracker."""
        self._tell(lambda tracker: tracker.flush())

    def close(self) -> None:
        """Close the tracker."""
        self._tell(lambda tracker: tracker.close())
        self._tracker = None


def row_of(line: Line) -> Row:
    """The metrics of a line of ``metrics.jsonl``; those of its interval are named ``interval/...``."""
    of_interval = {f"interval/{name}": value for name, value in line.get("interval", {}).items()}
    every = {**{name: value for name, value in line.items() if name not in {"step", "interval"}}, **of_interval}
    values = {name: value for name, value in every.items() if value is not None}
    return Row(line["step"], {name: int(value) if isinstance(value, bool) else value for name, value in values.items()})

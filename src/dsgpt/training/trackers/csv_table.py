"""``metrics.csv``: the lines of ``metrics.jsonl`` as a table."""

import csv
import io
import os

from dsgpt.common.files import append_to, write_atomic
from dsgpt.telemetry.interval import IntervalFigures
from dsgpt.telemetry.record import STEPS_FILE, read_steps
from dsgpt.training.trackers.base import Row, TrackedRun, row_of

CSV_FILE = "metrics.csv"
COLUMNS = (
    *("step", "epoch", "loss", "val_loss", "lr", "grad_norm", "skipped", "tokens", "tokens_per_sec", "step_time_sec"),
    *("dataload_time_sec", "warm_up", "val_tokens", "train_time_sec", "wall_time_sec"),
    *(f"interval/{name}" for name in (*IntervalFigures.__annotations__, "mfu")),
)
"""Every metric of a line of ``metrics.jsonl``."""


class CsvTracker:
    """Appends rows; a resumed run first writes those of ``metrics.jsonl``, already cut back to its checkpoint."""

    def __init__(self, run: TrackedRun) -> None:
        path, steps = run.folder / CSV_FILE, run.run_dir / STEPS_FILE
        earlier = [row_of(line) for line in read_steps(steps)] if steps.exists() else []
        write_atomic(path, (",".join(COLUMNS) + "\n").encode() + _text(earlier))
        self._file = append_to(path)

    def log(self, rows: list[Row]) -> None:
        """Append the rows, and hand them to the operating system."""
        waiting = _text(rows)
        while waiting:
            waiting = waiting[self._file.write(waiting) :]

    def flush(self) -> None:
        """Make the rows durable."""
        os.fsync(self._file.fileno())

    def end(self, status: str, summary: dict[str, float]) -> None:
        """Store nothing: the table has only rows of steps; the record has the summary."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _text(rows: list[Row]) -> bytes:
    """The rows, with an empty cell for what a row lacks.

    Raises:
        ValueError: a row has a metric without a column.
    """
    buffer = io.StringIO()
    table = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    table.writerows({"step": row.step, **row.metrics} for row in rows)
    return buffer.getvalue().encode()

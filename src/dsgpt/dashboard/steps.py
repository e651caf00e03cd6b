"""The lines of a ``metrics.jsonl`` as columns, which are continued while a run writes. Imports no Streamlit."""

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsgpt.common.problems import is_number
from dsgpt.telemetry.record import step_entry

Values = NDArray[np.float64]
TRAIN = (
    *("step", "loss", "lr", "grad_norm", "tokens", "tokens_per_sec"),
    *("step_time_sec", "train_time_sec", "wall_time_sec", "warm_up"),
)
"""Keys of the line of a step that become columns; ``docs/records.md`` says what they are. Of flags, true is 1."""
VALIDATION = ("step", "val_loss", "tokens", "train_time_sec")
"""Keys of the line of a validation. It has no ``tokens``: they are those of the step before it."""
INTERVALS = ("step", "mfu", "data_wait_share", "slowest_rank_lag_sec")
"""Keys of ``interval``, of the steps that have it."""
_TAIL_BYTES = 1 << 16
_LONGEST_LINE = 1 << 16
_SEAM_BYTES = 256
"""A step's line has its wall time, so these differ between two runs."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What was read so far. A value that a line lacks is NaN; later lines do not change these columns."""

    train: dict[str, Values]
    """By ``TRAIN``, ascending steps."""
    validation: dict[str, Values]
    intervals: dict[str, Values]
    damaged: int
    """Lines that are left out."""

    @property
    def last_step(self) -> int:
        """0 before the first."""
        return int(self.train["step"][-1]) if len(self.train["step"]) else 0


class _Columns:
    """Growing columns. Views of them stay as they were when more rows are added."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names, self._rows = names, 0
        self._values = np.empty((len(names), 256))

    def add(self, row: list[float]) -> None:
        if self._rows == self._values.shape[1]:
            self._values = np.concatenate([self._values, np.empty_like(self._values)], axis=1)
        self._values[:, self._rows] = row
        self._rows += 1

    def view(self) -> dict[str, Values]:
        """The columns with ascending steps; of a step that was written twice, the last row."""
        found = self._values[:, : self._rows]
        steps = found[0]
        if self._rows > 1 and not (np.diff(steps) > 0).all():
            _, backwards = np.unique(steps[::-1], return_index=True)
            found = found[:, self._rows - 1 - backwards]
        return dict(zip(self._names, found, strict=True))


class StepReader:
    """Reads a ``metrics.jsonl`` once, and later only what was appended. Threads may share it.

    A file that was replaced or cut is read anew: the bytes before the place where the last read ended are compared.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._offset, self._rest, self._seam, self._damaged, self._tokens = 0, b"", b"", 0, np.nan
        self._train, self._validation, self._intervals = _Columns(TRAIN), _Columns(VALIDATION), _Columns(INTERVALS)
        self._now: Steps | None = None

    def read(self) -> Steps:
        """Everything up to the last whole line.

        Raises:
            OSError: the file cannot be read.
        """
        with self._lock, self._path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if self._now is not None and size == self._offset:
                return self._now
            file.seek(max(0, self._offset - len(self._seam)))
            if size < self._offset or file.read(len(self._seam)) != self._seam:
                self._begin()
                file.seek(0)
            while part := file.read(1 << 20):
                self._seam = (self._seam + part)[-_SEAM_BYTES:]
                self._take(part)
            self._offset = file.tell()
            self._now = Steps(
                train=self._train.view(),
                validation=self._validation.view(),
                intervals=self._intervals.view(),
                damaged=self._damaged,
            )
            return self._now

    def _take(self, part: bytes) -> None:
        *lines, rest = (self._rest + part).split(b"\n")
        self._rest = rest[:_LONGEST_LINE]
        for line in lines:
            if not line.strip():
                continue
            entry = step_entry(line) if len(line) < _LONGEST_LINE else None
            if entry is None:
                self._damaged += 1
            else:
                self._add(entry)

    def _add(self, entry: dict[str, Any]) -> None:
        if "loss" in entry:
            row = _row(entry, TRAIN)
            self._tokens = row[TRAIN.index("tokens")]
            self._train.add(row)
            interval = entry.get("interval")
            if isinstance(interval, dict):
                known = {name: value for name, value in interval.items() if is_number(value)}
                self._intervals.add(_row({**known, "step": entry["step"]}, INTERVALS))
        if "val_loss" in entry:
            self._validation.add(_row({"tokens": self._tokens, **entry}, VALIDATION))


def _row(entry: dict[str, Any], names: tuple[str, ...]) -> list[float]:
    """The values of a line, whose numbers ``step_entry`` has checked."""
    found = (entry.get(name) for name in names)
    return [np.nan if value is None else float(value) for value in found]


def last_entries(path: Path) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The last line of a step and the last line of a validation near the end of a ``metrics.jsonl``; None without one.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]
    step = validation = None
    for line in reversed(lines):
        entry = step_entry(line)
        if entry is not None:
            step = step or (entry if "loss" in entry else None)
            validation = validation or (entry if "val_loss" in entry else None)
        if step and validation:
            break
    return step, validation

"""The lines of a ``metrics.jsonl`` as columns."""

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute as pc
from pyarrow import json as arrow_json

from dsgpt.common.errors import is_number
from dsgpt.record.schema import LARGEST, is_figure, step_entry

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
_COUNTED = ("loss", "val_loss", "tokens", "skipped", "warm_up", "interval")
"""Keys that mean something else when they are missing than when they are null."""
_SCHEMA = pa.schema(
    {name: pa.float64() for name in (*TRAIN, *VALIDATION, "val_tokens", "dataload_time_sec")}
    | {"step": pa.int64(), "skipped": pa.bool_(), "warm_up": pa.bool_()}
    | {"interval": pa.struct(dict.fromkeys(INTERVALS[1:], pa.float64()))}
)
_PART_BYTES, _LEAST_BYTES = 1 << 23, 1 << 16
"""Read at once; and from which on lines are parsed together."""
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

    def add(self, rows: Values) -> None:
        """Add rows, shape (names, rows)."""
        end = self._rows + rows.shape[1]
        if end > self._values.shape[1]:
            room = np.empty((len(self._names), max(end, 2 * self._rows) - self._rows))
            self._values = np.concatenate([self._values[:, : self._rows], room], axis=1)
        self._values[:, self._rows : end] = rows
        self._rows = end

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
            while part := file.read(_PART_BYTES):
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
        whole, newline, rest = (self._rest + part).rpartition(b"\n")
        self._rest = rest[:_LONGEST_LINE]
        if len(whole) >= _LEAST_BYTES and (table := _parsed(whole + newline)) is not None:
            self._add_table(table)
            return
        for line in whole.split(b"\n"):
            if not line.strip():
                continue
            entry = _entry(line) if len(line) < _LONGEST_LINE else None
            if entry is None:
                self._damaged += 1
            else:
                self._add(entry)

    def _add_table(self, table: pa.Table) -> None:
        """What ``_add`` adds of each line, at once."""
        columns = {name: table[name].cast(pa.float64(), safe=False).to_numpy() for name in {*TRAIN, *VALIDATION}}
        trains = np.flatnonzero(~np.isnan(columns["loss"]))
        validations = np.flatnonzero(~np.isnan(columns["val_loss"]))
        own, tokens = columns["tokens"], np.append(columns["tokens"][trains], self._tokens)
        before = tokens[np.searchsorted(trains, validations, side="right") - 1]
        self._train.add(np.stack([columns[name][trains] for name in TRAIN]))
        columns["tokens"] = np.full_like(own, np.nan)
        columns["tokens"][validations] = np.where(np.isnan(own[validations]), before, own[validations])
        self._validation.add(np.stack([columns[name][validations] for name in VALIDATION]))
        self._tokens = tokens[len(trains) - 1]
        interval = table["interval"].combine_chunks()
        known = np.flatnonzero(interval.is_valid().to_numpy(zero_copy_only=False) & ~np.isnan(columns["loss"]))
        columns |= {name: interval.field(name).to_numpy(zero_copy_only=False) for name in INTERVALS[1:]}
        self._intervals.add(np.stack([columns[name][known] for name in INTERVALS]))

    def _add(self, entry: dict[str, Any]) -> None:
        if "loss" in entry:
            row = _row(entry, TRAIN)
            self._tokens = float(row[TRAIN.index("tokens"), 0])
            self._train.add(row)
            interval = entry.get("interval")
            if isinstance(interval, dict):
                known = {name: value for name, value in interval.items() if is_number(value) and is_figure(value)}
                self._intervals.add(_row({**known, "step": entry["step"]}, INTERVALS))
        if "val_loss" in entry:
            self._validation.add(_row({"tokens": self._tokens, **entry}, VALIDATION))


def _entry(line: bytes) -> dict[str, Any] | None:
    """The values of a line; None if it is damaged, or if a number in it is no figure of a run."""
    entry = step_entry(line)
    whole = entry is not None and all(is_figure(value) for value in entry.values() if is_number(value))
    return entry if whole else None


def _row(entry: dict[str, Any], names: tuple[str, ...]) -> Values:
    """The values of a line, whose numbers ``step_entry`` has checked, shape (names, 1)."""
    found = (entry.get(name) for name in names)
    return np.array([[np.nan if value is None else float(value)] for value in found])


def _parsed(lines: bytes) -> pa.Table | None:
    """Lines as a table, twenty times as fast as one by one; None if ``_entry`` might take one of them otherwise.

    Arrow checks neither text nor line breaks, takes null for a missing key, and bounds nothing. It refuses a key that
    stands twice, and a value of another type than its column's.
    """
    letters = np.frombuffer(lines, np.uint8)
    ends = np.flatnonzero(letters == ord("\n"))
    begins = np.append(0, ends[:-1] + 1)
    objects = (letters[begins] == ord("{")).all() and (letters[ends - 1] == ord("}")).all()
    short = (ends - begins).max() < _LONGEST_LINE
    if not (objects and short and lines.isascii()) or b"\\u" in lines or b"NaN" in lines:
        return None
    try:
        table = arrow_json.read_json(pa.BufferReader(lines), parse_options=arrow_json.ParseOptions(_SCHEMA))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    steps = table["step"]
    if table.num_rows != len(ends) or steps.null_count or pc.min(steps).as_py() < 0:
        return None
    if any(lines.count(b'"%s":' % name.encode()) != len(ends) - table[name].null_count for name in _COUNTED):
        return None
    flat = table.flatten()
    fits = all(_are_figures(column) for column in flat.columns if pa.types.is_floating(column.type))
    return table if fits and not any(pa.types.is_nested(each.type) for each in flat.schema) else None


def _are_figures(column: pa.ChunkedArray) -> bool:
    size = np.abs(column.to_numpy())
    return not ((size > LARGEST) | ((size > 0) & (size < 1 / LARGEST))).any()


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
        entry = _entry(line)
        if entry is not None:
            step = step or (entry if "loss" in entry else None)
            validation = validation or (entry if "val_loss" in entry else None)
        if step and validation:
            break
    return step, validation

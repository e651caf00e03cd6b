"""``training_metrics.json``, the record of one run, and ``metrics.jsonl``, its steps. Imports no torch.

Unknown values are null, never 0. Numbers that are not finite are not JSON and are written as null.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsgpt.common.errors import is_number
from dsgpt.common.files import append_to, write_atomic
from dsgpt.common.json_files import JsonError, clipped_text, parse_json

SCHEMA_VERSION = "2.1"
RECORD_FILE = "training_metrics.json"
STEPS_FILE = "metrics.jsonl"
COMPLETE_FILE = "RUN_COMPLETE.txt"
LOG_FILE = "train.log"
PEAKS = ("max_cuda_mem_allocated_bytes_rank0", "max_cuda_mem_reserved_bytes_rank0", "peak_rss_bytes_rank0")
"""Keys of a segment, of an epoch and of the summary: bytes."""
GENERATED_TOKENS = 100
"""``inference_latency`` is the time to generate this many tokens; null where the context is shorter."""

_LONGEST_LINE = 1 << 16
"""Bytes; the lines of this program have about 400."""
_FLAGS = {"skipped", "warm_up"}
_NUMBERS = {
    *("loss", "lr", "grad_norm", "val_loss", "val_tokens", "tokens", "tokens_per_sec", "step_time_sec"),
    *("dataload_time_sec", "train_time_sec", "wall_time_sec"),
}
"""Keys whose values are numbers or null; the values of ``_FLAGS`` are true or false."""


def later_schema(version: object, known: str = SCHEMA_VERSION) -> str:
    """What is wrong with a record of schema ``version``; empty for ``known``, an earlier one and None."""
    numbers = re.fullmatch(r"(\d{1,4})\.(\d{1,4})", str(version))
    if version is None or (numbers and [int(part) for part in numbers.groups()] <= [*map(int, known.split("."))]):
        return ""
    return (
        f"has schema {clipped_text(str(version))}, and this program knows {known}: its figures may mean something else"
    )


def read_steps(path: Path, *, damaged: list[int] | None = None) -> Iterator[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``, without a last line that a kill cut off.

    Args:
        path: the file.
        damaged: receives the numbers of the other lines that are left out, which a crash or an editor damaged.
    """
    with path.open("rb") as file:
        number, whole = 0, True
        while line := file.readline(_LONGEST_LINE):
            begins, whole = whole, line.endswith(b"\n")
            number += begins
            if not whole and len(line) < _LONGEST_LINE:
                return  # cut off by a kill
            entry = step_entry(line) if begins and whole else None
            if entry is not None:
                yield entry
            elif damaged is not None and begins:
                damaged.append(number)


def step_entry(line: bytes) -> dict[str, Any] | None:
    """The values of a line of ``metrics.jsonl``; None where it is damaged."""
    try:
        entry = parse_json(line)
    except JsonError:
        return None
    if not isinstance(entry, dict) or not _is_whole(entry.get("step")):
        return None
    fits = all(value is None or is_number(value) for key, value in entry.items() if key in _NUMBERS)
    flags = all(isinstance(value, bool) for key, value in entry.items() if key in _FLAGS)
    return entry if fits and flags else None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def drop_steps_after(path: Path, step: int) -> list[int]:
    """Remove the lines of ``metrics.jsonl`` after ``step``, which a resumed run will write again.

    Returns:
        The numbers of damaged lines, which are removed too.
    """
    damaged: list[int] = []
    kept = [line for line in read_steps(path, damaged=damaged) if line["step"] <= step] if path.exists() else []
    write_atomic(path, "".join(_line(entry) for entry in kept).encode())
    return damaged


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(finite(entry), allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """``value`` with every NaN and infinity in it replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of the known values; None if there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def percentile(values: list[float], fraction: float) -> float | None:
    """The smallest value that at least ``fraction`` of ``values`` do not exceed (nearest rank).

    None for an empty list.
    """
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(fraction * len(values)) - 1)]


class StepLog:
    """Appends to ``metrics.jsonl``; the main rank only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = append_to(path)
        self._waiting = b""

    def write(self, entries: list[dict[str, Any]]) -> None:
        """Append ``entries``, a line each, and hand them to the operating system.

        Raises:
            OSError: the system refuses. The lines are kept for the next call, and the file ends with a whole line.
        """
        self._waiting += "".join(_line(entry) for entry in entries).encode()
        end = self._file.seek(0, os.SEEK_END)
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError:
            self._waiting = self._take_back(end) + self._waiting
            raise

    def _take_back(self, end: int) -> bytes:
        """Cut the file back to ``end``; returns what was after it."""
        with self._path.open("rb") as file:
            file.seek(end)
            written = file.read()
        self._file.truncate(end)
        return written

    def sync(self) -> None:
        """Make all lines durable: a resume from a checkpoint needs the lines up to its step.

        Raises:
            OSError: the file system refuses some of them.
        """
        self.write([])
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(kw_only=True)
class RunRecord:
    """The contents of ``training_metrics.json``, which grow with the run."""

    description: dict[str, Any]
    """The settings of the run, which do not change while a process trains; see ``training.run_description``."""
    status: str = "running"
    segments: list[dict[str, Any]] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    saves: list[dict[str, Any]] = field(default_factory=list)
    inference: dict[str, Any] | None = None
    cost: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The record as it is now, ready for JSON: numbers that are not finite are None."""
        record = {
            "schema_version": SCHEMA_VERSION,
            **self.description,
            "status": self.status,
            "segments": self.segments,
            "epochs": self.epochs,
            "summary": self.summary,
            "saves": self.saves,
            "inference": self.inference,
            "cost": self.cost,
            "plan": self.plan,
            **self.flat_keys(),
        }
        cleaned: dict[str, Any] = finite(record)
        return cleaned

    def flat_keys(self) -> dict[str, Any]:
        """The keys of the first generation of records, which older tools read."""
        latency = None
        if self.inference is not None and self.inference["new_tokens"] == GENERATED_TOKENS:
            latency = self.inference["latency_sec"]
        return {
            "train_time_per_epoch": [epoch["train_time_sec"] for epoch in self.epochs],
            "train_loss_per_epoch": [epoch["train_loss_avg_global"] for epoch in self.epochs],
            "val_loss_per_epoch": [epoch["val_loss_avg_global"] for epoch in self.epochs],
            "train_throughput": self.summary.get("mean_tokens_per_sec_global"),
            "inference_latency": latency,
            "inference_throughput": GENERATED_TOKENS / latency if latency else None,
        }


FLAT_KEYS = tuple(RunRecord(description={}).flat_keys())
"""Those of the first generation."""

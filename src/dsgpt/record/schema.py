"""The record of one run, ``training_metrics.json``, and its steps, ``metrics.jsonl``. Imports no torch.

Unknown values are null, never 0. Numbers that are not finite are not JSON and are written as null. What this program
must find again is read strictly; what any program may have written is read leniently, by ``Fields``.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dsgpt.common.errors import UserError, is_number
from dsgpt.common.files import append_to, write_atomic
from dsgpt.common.json_files import JsonError, check_depth, clipped_text, parse_json

SCHEMA_VERSION = "2.1"
RECORD_FILE = "training_metrics.json"
STEPS_FILE = "metrics.jsonl"
COMPLETE_FILE = "RUN_COMPLETE.txt"
LOG_FILE = "train.log"
HARDWARE_FILE = re.compile(r"hardware(-\d+)?\.jsonl")
"""``telemetry.monitor.hardware_file``."""
MACHINE_FILE = re.compile(rf"{HARDWARE_FILE.pattern}|train-\d+\.log")
"""The files of which each machine has one: ``log_file``, and those about hardware."""
PEAKS = ("max_cuda_mem_allocated_bytes_rank0", "max_cuda_mem_reserved_bytes_rank0", "peak_rss_bytes_rank0")
"""Keys of a segment, of an epoch and of the summary: bytes."""
CAUSES = ("start", "compilation", "data", "validation", "saves", "repeated", "gaps", "other")
"""Causes of the seconds that no kept step took, keys of ``goodput``; ``docs/records.md`` explains each."""
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


def log_file(machine: int) -> str:
    """The name of a machine's log; ``machine`` 0 is that of rank 0."""
    return LOG_FILE if machine == 0 else f"train-{machine}.log"


def later_schema(version: object, ours: str = SCHEMA_VERSION) -> str:
    """Warning about a record of schema ``version``; empty for ``ours``, an earlier one and None."""
    numbers = re.fullmatch(r"(\d{1,4})\.(\d{1,4})", str(version))
    if version is None or (numbers and [int(part) for part in numbers.groups()] <= [*map(int, ours.split("."))]):
        return ""
    has = f"has schema {clipped_text(str(version))}"
    return f"{has}, and this program knows {ours}: its figures may mean something else"


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
    if not isinstance(entry, dict) or type(step := entry.get("step")) is not int or not 0 <= step < 1 << 63:
        return None
    fits = all(value is None or is_number(value) for key, value in entry.items() if key in _NUMBERS)
    return entry if fits and all(isinstance(value, bool) for key, value in entry.items() if key in _FLAGS) else None


def drop_steps_after(path: Path, step: int, *, val_loss: float | str | None = "any") -> list[int]:
    """Remove the lines of ``metrics.jsonl`` after ``step``, which a resumed run will write again.

    Args:
        path: the file.
        step: of the checkpoint.
        val_loss: the loss of the checkpoint's validation, or None without one: later validations of ``step``, which the
            run had not saved, are removed too. With ``any`` they stay.

    Returns:
        The numbers of damaged lines, which are removed too.
    """
    damaged: list[int] = []
    lines = [line for line in read_steps(path, damaged=damaged) if line["step"] <= step] if path.exists() else []
    while val_loss != "any" and lines and lines[-1]["step"] == step and lines[-1].get("val_loss", val_loss) != val_loss:
        lines.pop()
    write_atomic(path, "".join(_line(entry) for entry in lines).encode())
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
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


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
            with self._path.open("rb") as file:
                file.seek(end)
                written = file.read()
            self._file.truncate(end)
            self._waiting = written + self._waiting  # not before: what stays in the file must not be written again
            raise

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
    weights_sha256: str | None = None
    """Of all weights at the end of a run with ``--exact``."""
    cost: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None
    second_copy: dict[str, Any] | None = None
    """Figures of ``--save_to``; see ``checkpoints.second_copy``."""
    goodput: dict[str, Any] | None = None
    """See ``checkpoints.manifest.Goodput``."""

    def as_dict(self) -> dict[str, Any]:
        """The record as it is now, ready for JSON: numbers that are not finite are None."""
        grown = {name: value for name, value in vars(self).items() if name != "description"}
        return dict(finite({"schema_version": SCHEMA_VERSION} | self.description | grown | self.flat_keys()))

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
"""Keys of the first generation of records."""


# Values of a record that any program may have written: missing, wrong or infinite ones are None.

LARGEST = 1e60
"""No figure of a run is above it, or below its inverse: products and ratios of a few such figures are finite."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def is_figure(value: float) -> bool:
    """Whether a number may be a figure of a run: 0, or of a size with which others can be computed."""
    return value == 0 or 1 / LARGEST <= abs(value) <= LARGEST


def parse_lenient(text: str, notes: list[str]) -> Any:
    """Parse JSON. NaN, infinities and overflows become None, and one line in ``notes``.

    Half of a surrogate pair, which an escape can write and UTF-8 cannot, becomes a question mark.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply.
    """
    refused: list[str] = []

    def number(kind: type[int] | type[float], token: str) -> float | None:
        """The number of a token; None for one that is not finite."""
        if math.isfinite(float(token)):
            return kind(token)
        refused.append(token)
        return None

    check_depth(text.encode("utf-8", errors="replace"))
    read_float, read_int = partial(number, float), partial(number, int)
    value = json.loads(text, parse_constant=refused.append, parse_float=read_float, parse_int=read_int)
    if _SURROGATE.search(text):
        value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    if refused:
        notes.append(f"{len(refused)} value(s) not finite ({refused[0][:12]}): treated as unknown")
    return value


def read_fields(path: Path, *, wanted: str, notes: list[str]) -> "Fields":
    """The JSON object in a file.

    Args:
        path: the file.
        wanted: the record that should have been given, for the message about a file that is not text.
        notes: receives remarks on its values.

    Raises:
        UserError: the file cannot be read, or holds anything else; one line.
    """
    try:
        value = parse_lenient(path.read_text(encoding="utf-8"), notes)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file; give {wanted}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); is the file complete?") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a JSON {type(value).__name__}, not an object; give a training_metrics.json")
    return Fields(value, notes=notes)


class Fields:
    """The fields of a JSON object; each may be absent, null or of the wrong type."""

    def __init__(self, values: Any, *, notes: list[str], path: str = "") -> None:
        self._values: Mapping[str, Any] = values if isinstance(values, dict) else {}
        self._notes = notes
        self._path = path
        if values is not None and not isinstance(values, dict):
            notes.append(f"{path.rstrip('.')} is not an object: treated as unknown")

    def section(self, key: str) -> "Fields":
        """The object under ``key``; empty if there is none."""
        return Fields(self._values.get(key), notes=self._notes, path=f"{self._path}{key}.")

    def sections(self, key: str) -> list["Fields"]:
        """The list of objects under ``key``; empty if there is none."""
        items = self._values.get(key)
        if not isinstance(items, list):
            return []
        return [Fields(item, notes=self._notes, path=f"{self._path}{key}[{i}].") for i, item in enumerate(items)]

    def raw(self, key: str) -> Any:
        """The unchecked value of ``key``, or None."""
        return self._values.get(key)

    def has(self, key: str) -> bool:
        """Whether ``key`` is there; its value may be null."""
        return key in self._values

    def names(self) -> list[str]:
        """The keys of the object."""
        return list(self._values)

    def text(self, key: str) -> str | None:
        """A non-empty string, or None."""
        value = self._values.get(key)
        return value if isinstance(value, str) and value else None

    def number(self, key: str) -> float | None:
        """A number of at least 0, or None; anything else is noted."""
        return self._number(key, self._values.get(key))

    def whole(self, key: str) -> int | None:
        """A whole number of at least 0, exactly, or None; anything else is noted."""
        value = self._values.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63):
            return value
        self._note(key, value, "a whole number from 0 up")
        return None

    def series(self, key: str) -> list[float | None]:
        """The numbers under ``key``, one per epoch; a single number is a list of one."""
        if (value := self._values.get(key)) is None:
            return []
        return [self._number(key, item) for item in (value if isinstance(value, list) else [value])]

    def _number(self, key: str, value: Any) -> float | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or not is_figure(value):
            self._note(key, value, "a number from 0 up")
            return None
        return float(value)

    def _note(self, key: str, value: Any, wanted: str) -> None:
        self._notes.append(f"{self._path}{key} holds {str(value)[:40]!r}, not {wanted}: treated as unknown")

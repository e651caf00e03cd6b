"""Typed values of a record that any program may have written."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from dsgpt.common.errors import UserError
from dsgpt.common.files import printable
from dsgpt.common.json_files import check_depth

# Typed values of a record that any program may have written: missing, wrong or infinite values are None.

LARGEST = 1e60
"""No figure of a run is above it, or below its inverse: products and ratios of a few such figures are finite."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def is_figure(value: float) -> bool:
    """Whether a number may be a figure of a run: 0, or of a size with which others can be computed."""
    return value == 0 or 1 / LARGEST <= abs(value) <= LARGEST


def parse_json(text: str, notes: list[str]) -> Any:
    """Parse JSON. NaN, infinities and overflows become None, and one line in ``notes``.

    Half of a surrogate pair, which an escape can write and UTF-8 cannot, is spelt out.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply.
    """
    refused: list[str] = []

    def parse_number(token: str) -> float | None:
        value = float(token)
        if math.isfinite(value):
            return value
        refused.append(token)
        return None

    def parse_integer(token: str) -> int | None:
        if len(token) <= 300:
            return int(token)
        refused.append(token)
        return None

    check_depth(text.encode("utf-8", errors="replace"))
    value = json.loads(text, parse_constant=refused.append, parse_float=parse_number, parse_int=parse_integer)
    if _SURROGATE.search(text):
        value = _as_unicode(value)
    if refused:
        notes.append(f"{len(refused)} value(s) not finite ({refused[0][:12]}): treated as unknown")
    return value


def _as_unicode(value: Any) -> Any:
    if isinstance(value, dict):
        return {printable(key): _as_unicode(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_as_unicode(inner) for inner in value]
    return printable(value) if isinstance(value, str) else value


def read_object(text: str, *, source: str, notes: list[str]) -> Mapping[str, Any]:
    """Parse ``text`` as a JSON object.

    Raises:
        UserError: it is anything else; the message names ``source``.
    """
    try:
        value = parse_json(text, notes)
    except ValueError as error:
        raise UserError(f"{source}: not JSON ({error}); is the file complete?") from error
    if not isinstance(value, dict):
        raise UserError(f"{source}: holds a JSON {type(value).__name__}, not an object; give a training_metrics.json")
    return value


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
        value = self._values.get(key)
        if value is None:
            return []
        items = value if isinstance(value, list) else [value]
        return [self._number(key, item) for item in items]

    def is_list(self, key: str) -> bool:
        """Whether the value of ``key`` is a list, not a single number."""
        return isinstance(self._values.get(key), list)

    def _number(self, key: str, value: Any) -> float | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or not is_figure(value):
            self._note(key, value, "a number from 0 up")
            return None
        return float(value)

    def _note(self, key: str, value: Any, wanted: str) -> None:
        self._notes.append(f"{self._path}{key} holds {str(value)[:40]!r}, not {wanted}: treated as unknown")


# The figures of a record's epochs, of which some may be unknown.

FLAT_KEYS = (
    "train_time_per_epoch",
    "train_loss_per_epoch",
    "val_loss_per_epoch",
    "train_throughput",
    "inference_latency",
    "inference_throughput",
)
"""Of the older generation of records."""


class Epochs:
    """Values per epoch, from ``epochs`` if it has any, otherwise from the flat keys."""

    def __init__(self, record: Fields, *, notes: list[str]) -> None:
        epochs = record.sections("epochs")
        self.steps = [epoch.number("optimizer_steps") for epoch in epochs]
        self.tokens = [epoch.number("tokens_processed_global") for epoch in epochs]
        self.train_losses = [epoch.number("train_loss_avg_global") for epoch in epochs] or record.series(FLAT_KEYS[1])
        self.val_losses = [epoch.number("val_loss_avg_global") for epoch in epochs] or record.series(FLAT_KEYS[2])
        self.times = record.series("train_time_per_epoch")
        self.count = max(len(self.train_losses), len(self.val_losses))
        if not record.is_list("train_time_per_epoch") and self.times and self.count > 1:
            notes.append(f"train_time_per_epoch is one number for {self.count} epochs: the training time is unknown")
            self.times = []
        self.train_time = total(self.times)
        self.throughput = mean_rate(record.series("train_throughput"), times=self.times)
        if self.throughput is not None and record.raw("schema_version") is None:
            notes.append("train_throughput of the older generation names no unit: taken as tokens per second")


def first(*values: float | None) -> float | None:
    """The first known value."""
    return next((value for value in values if value is not None), None)


def last(values: list[float | None]) -> float | None:
    """The value of the last epoch, even if unknown: the loss of an earlier epoch is not the final one."""
    return values[-1] if values else None


def total(values: list[float | None]) -> float | None:
    """The sum; None if any value is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def mean(values: list[float | None]) -> float | None:
    """Of the known values; None if there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def mean_rate(rates: list[float | None], *, times: list[float | None]) -> float | None:
    """Mean rate over the epochs, weighted by their seconds if both are known for each epoch."""
    if len(rates) == len(times) and (all_seconds := total(times)):
        pairs = zip(rates, times, strict=True)
        amounts = [rate * seconds for rate, seconds in pairs if rate is not None and seconds is not None]
        if len(amounts) == len(rates):
            return sum(amounts) / all_seconds
    return mean(rates)


def lowest(values: list[float | None]) -> float | None:
    """The smallest of the known values; None if there is none."""
    return min((value for value in values if value is not None), default=None)

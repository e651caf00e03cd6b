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

    def _number(self, key: str, value: Any) -> float | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or not is_figure(value):
            self._note(key, value, "a number from 0 up")
            return None
        return float(value)

    def _note(self, key: str, value: Any, wanted: str) -> None:
        self._notes.append(f"{self._path}{key} holds {str(value)[:40]!r}, not {wanted}: treated as unknown")

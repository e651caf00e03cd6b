"""Collects every mistake before any of them is reported."""

import difflib
import math
from collections.abc import Iterable
from typing import Any

from dsgpt.errors import UserError


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean X?)`` for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


class Problems:
    """A list of one-line mistakes, each with its cure."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, *lines: str) -> None:
        """Note mistakes; a line said before is not repeated."""
        self._lines.extend(line for line in lines if line not in self._lines)

    def raise_if_any(self) -> None:
        """Raise one ``UserError`` with all of them."""
        if self._lines:
            raise UserError(*self._lines)


class Section:
    """One object of a JSON file, read key by key; what is wrong with a value goes to ``problems`` with its place."""

    def __init__(self, values: Any, *, place: str, problems: Problems) -> None:
        self.place = place
        self._problems = problems
        self.values: dict[str, Any] = values if isinstance(values, dict) else {}
        if not isinstance(values, dict):
            self.complain("", f"must be an object in braces, not {values!r}")

    def complain(self, key: str, what: str) -> None:
        """Note that the value of ``key`` is wrong."""
        where = f"{self.place}: {key}" if key else self.place
        self._problems.add(f"{where} {what}")

    def check_keys(self, known: Iterable[str], *, refused: dict[str, str] | None = None) -> None:
        """Complain about keys that are not ``known``, with the nearest one, and about ``refused`` ones, with why."""
        for key in self.values:
            if refused and key in refused:
                self.complain(key, f"is not supported: {refused[key]}")
            elif key not in known:
                self.complain(key, f"is no known key{did_you_mean(key, known)}")

    def number(self, key: str, default: float | None, *, low: float, high: float = math.inf) -> float | None:
        """A finite number from ``low`` to ``high``."""
        value = self.values.get(key, default)
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            allowed = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            self.complain(key, f"must be a number {allowed}, not {value!r}")
            return default
        return float(value)

    def whole(self, key: str, default: int | None, *, low: int, high: int | None = None) -> int | None:
        """A whole number of at least ``low``."""
        value = self.values.get(key, default)
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
            self.complain(key, f"must be a whole number {allowed}, not {value!r}")
            return default
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.complain(key, f"must be true or false, not {value!r}")
            return default
        return value

    def choice(self, key: str, default: str | None, allowed: Iterable[str]) -> str | None:
        """One of ``allowed``."""
        value = self.values.get(key, default)
        if value is default:
            return default
        if value not in allowed:
            self.complain(key, f"must be one of {', '.join(allowed)}, not {value!r}{did_you_mean(str(value), allowed)}")
            return default
        return value

    def section(self, key: str) -> "Section | None":
        """The object under ``key``, or None where there is none."""
        if key not in self.values:
            return None
        return Section(self.values[key], place=f"{self.place}: {key}", problems=self._problems)

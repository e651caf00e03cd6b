"""Collects every mistake before any of them is reported."""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard, TypeVar

from dsgpt.common.errors import DifferentRunError, UserError
from dsgpt.common.json_files import clipped, clipped_text

MOST_KEYS = 20
"""How many unknown keys of one object are named: finding the nearest known key takes a millisecond for each."""
D = TypeVar("D")
"""Type of a default: ``section.whole(key, None, low=1)`` is ``int | None``, ``section.whole(key, 1, low=1)`` an int."""
LONGEST_WORD = 80
"""How many characters of a word are compared with known words: words in a file may be longer."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean X?)`` with the nearest known word; empty if none is near."""
    near = difflib.get_close_matches(word[:LONGEST_WORD], sorted(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


def is_number(value: object) -> TypeGuard[float]:
    """Whether a JSON value is a finite number; true and false are not, though they are ``int`` in Python."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number outside the range of floats
        return False


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "boolean": ("true or false", lambda value: isinstance(value, bool)),
    "count": ("a whole number of at least 0", lambda value: is_number(value) and value >= 0 and value == int(value)),
    "positive": ("a whole number of at least 1", lambda value: is_number(value) and value >= 1 and value == int(value)),
    "number": ("a number", is_number),
    "text": ("a text", lambda value: isinstance(value, str)),
    "object": ("an object in braces", lambda value: isinstance(value, dict)),
}
"""Kinds of values by their names in ``Section.check_kinds``. A count may be written 5e8, as DeepSpeed allows."""


class Problems:
    """A list of mistakes, one line each, with what to do."""

    def __init__(self) -> None:
        self._only_differs = True
        self._lines: dict[str, None] = {}  # an ordered set: a bad file may have thousands

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, *lines: str, differs: bool = False) -> None:
        """Note mistakes; a line that was noted before is not repeated.

        ``differs``: they only say that the run in the folder has other settings or data.
        """
        self._only_differs &= differs or not lines
        self._lines |= dict.fromkeys(lines)

    def mention(self, word: str) -> bool:
        """Whether a mistake about ``word``, or about a misspelling of it, was already noted."""
        return any(line.startswith(f"{word} ") or f"did you mean {word}?" in line for line in self._lines)

    def raise_if_any(self) -> None:
        """Raise one ``UserError`` with all mistakes; a ``DifferentRunError`` if all were noted with ``differs``."""
        if self._lines:
            raise (DifferentRunError if self._only_differs else UserError)(*self._lines)


class Section:
    """One object of a JSON file, read key by key. A wrong value is noted in ``problems`` with its place."""

    def __init__(self, values: dict[str, Any], *, place: str, problems: Problems) -> None:
        self.place = place
        self._problems = problems
        self.values = values

    def complain(self, key: str, what: str) -> None:
        """Note that the value of ``key`` is wrong; with an empty ``key``, that the object is."""
        where = f"{self.place}: {key}" if key else self.place
        self._problems.add(f"{where} {what}")

    def check_keys(self, known: Iterable[str], *, refused: dict[str, str] | None = None) -> None:
        """Complain about keys that are not ``known``, with the nearest one, and about ``refused`` ones, with why."""
        unknown = [key for key in self.values if key not in known or (refused and key in refused)]
        for key in unknown[:MOST_KEYS]:
            if refused and key in refused:
                self.complain(key, f"is not supported: {refused[key]}")
            else:
                self.complain(clipped_text(key), f"is no known key{did_you_mean(key, known)}")
        if len(unknown) > MOST_KEYS:
            self.complain("", f"has {len(unknown) - MOST_KEYS:,} more keys that are not known")

    def check_kinds(self, kinds: Mapping[str, str]) -> None:
        """Complain about values that are not of their kind, for keys that DeepSpeed will read."""
        for key, kind in kinds.items():
            if kind and key in self.values:
                words, fits = _KINDS[kind]
                if not fits(self.values[key]):
                    self.complain(key, f"must be {words}, not {clipped(self.values[key])}")

    def number(self, key: str, default: D, *, low: float, high: float = math.inf) -> float | D:
        """A finite number from ``low`` to ``high``."""
        value = self.values.get(key, default)
        if value is default:
            return default
        if not is_number(value) or not low <= value <= high:
            allowed = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            self.complain(key, f"must be a number {allowed}, not {clipped(value)}")
            return default
        return float(value)

    def whole(self, key: str, default: D, *, low: int, high: int | None = None) -> int | D:
        """A whole number of at least ``low``."""
        value = self.values.get(key, default)
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
            self.complain(key, f"must be a whole number {allowed}, not {clipped(value)}")
            return default
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.complain(key, f"must be true or false, not {clipped(value)}")
            return default
        return value

    def choice(self, key: str, default: D, allowed: Iterable[str]) -> str | D:
        """One of ``allowed``."""
        value = self.values.get(key, default)
        if value is default:
            return default
        if not isinstance(value, str) or value not in allowed:
            self.complain(
                key, f"must be one of {', '.join(allowed)}, not {clipped(value)}{did_you_mean(str(value), allowed)}"
            )
            return default
        return value

    def section(self, key: str) -> "Section | None":
        """The object under ``key``; None if there is none. Anything else than an object is complained about."""
        if key not in self.values:
            return None
        if not isinstance(self.values[key], dict):
            self.complain(key, f"must be an object in braces, not {clipped(self.values[key])}")
            return None
        return Section(self.values[key], place=f"{self.place}: {key}", problems=self._problems)

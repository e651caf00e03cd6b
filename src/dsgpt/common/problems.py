"""Collects all mistakes, so that they are reported together."""

import difflib
import math
from collections.abc import Iterable
from typing import TypeGuard

from dsgpt.common.errors import DifferentRunError, UserError

MOST_KEYS = 20
"""How many unknown keys of one object are named: finding the nearest known key takes a millisecond for each."""
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

    def copy(self) -> "Problems":
        """The mistakes noted so far; later ones are not added to it."""
        noted = Problems()
        noted._only_differs, noted._lines = self._only_differs, dict(self._lines)
        return noted

    def raise_if_any(self) -> None:
        """Raise one ``UserError`` with all mistakes; a ``DifferentRunError`` if all were noted with ``differs``."""
        if self._lines:
            raise (DifferentRunError if self._only_differs else UserError)(*self._lines)

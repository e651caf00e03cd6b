"""Reads words of a command line without stopping at the first mistake. Imports no torch."""

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn

from dsgpt.errors import UserError
from dsgpt.problems import Problems, did_you_mean


class Parser(argparse.ArgumentParser):
    """Raises ``UserError`` instead of printing usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


class Reader:
    """Turns words into values; a word that is no value is noted, and the flag counts as not given."""

    def __init__(self) -> None:
        self.problems = Problems()

    def whole(self, flag: str, *, low: int) -> Callable[[str], int | None]:
        """A reader of whole numbers of at least ``low``; thousands may be grouped by ``_`` or ``,``."""

        def read(word: str) -> int | None:
            try:
                value = int(word.replace("_", "").replace(",", ""))
            except ValueError:
                value = low - 1
            if value < low:
                self.problems.add(f"{flag} must be a whole number of at least {low}, not {word}")
                return None
            return value

        return read

    def fraction(self, flag: str) -> Callable[[str], float | None]:
        """A reader of numbers of at least 0 and below 1."""

        def read(word: str) -> float | None:
            try:
                value = float(word)
            except ValueError:
                value = -1.0
            if not 0 <= value < 1:
                self.problems.add(f"{flag} must be a number of at least 0 and below 1, not {word}")
                return None
            return value

        return read

    def choice(self, flag: str, allowed: Sequence[str], default: str | None) -> Callable[[str], str | None]:
        """A reader of the ``allowed`` words; ``default`` stands in for any other."""

        def read(word: str) -> str | None:
            if word not in allowed:
                self.problems.add(
                    f"{flag} must be one of {', '.join(allowed)}, not {word}{did_you_mean(word, allowed)}"
                )
                return default
            return word

        return read

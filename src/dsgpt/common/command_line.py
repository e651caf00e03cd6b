"""Reads words of a command line without stopping at the first mistake. Imports no torch."""

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from dsgpt.common.errors import UserError
from dsgpt.common.files import is_utf8, undecodable
from dsgpt.common.problems import Problems, did_you_mean


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
            """The number, or None with a note of the mistake."""
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
            """The number, or None with a note of the mistake."""
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
            """The word, or ``default`` with a note of the mistake."""
            if word not in allowed:
                self.problems.add(
                    f"{flag} must be one of {', '.join(allowed)}, not {word}{did_you_mean(word, allowed)}"
                )
                return default
            return word

        return read

    def choices(self, flag: str, allowed: Sequence[str]) -> Callable[[str], tuple[str, ...] | None]:
        """A reader of one or several of the ``allowed`` words, with commas between them."""

        def read(text: str) -> tuple[str, ...] | None:
            """The words, or None with a note of the mistake."""
            words = tuple(text.split(","))
            for word in words:
                if word not in allowed:
                    self.problems.add(
                        f"{flag} must be {' or '.join(allowed)}, or several with commas between them, not {word}"
                        f"{did_you_mean(word, allowed)}"
                    )
                    return None
            return words

        return read


def read_words(
    parser: argparse.ArgumentParser, reader: Reader, words: Sequence[str], *, elsewhere: Mapping[str, str]
) -> argparse.Namespace:
    """Read a command line to its end; what is wrong goes to ``reader``.

    Args:
        parser: knows the flags.
        reader: the one that its types note mistakes in.
        words: the command line.
        elsewhere: flags that ``parser`` does not know, and where to say the same.

    Raises:
        UserError: argparse cannot read the line at all, for example a value for a flag that takes none.
    """
    namespace, unknown = parser.parse_known_args(_with_values(words, parser, reader))
    reader.problems.add(*path_problems(parser, namespace))
    known = [flag for action in parser._actions for flag in action.option_strings]
    previous_unknown = False
    for word in unknown:
        name = word.split("=")[0]
        if word.startswith("--"):
            hint = f": {elsewhere[name]}" if name in elsewhere else did_you_mean(name, known)
            reader.problems.add(f"{name} is no known flag{hint}")
        elif not previous_unknown:
            reader.problems.add(f"{word!r} belongs to no flag")
        previous_unknown = word.startswith("--")
    return namespace


def path_problems(parser: argparse.ArgumentParser, namespace: argparse.Namespace) -> list[str]:
    """A line for each path that tokenizers and safetensors cannot open, because its name is not valid UTF-8."""
    return [
        f"{action.option_strings[0] if action.option_strings else action.metavar} {undecodable(value)}"
        for action in parser._actions
        if isinstance(value := getattr(namespace, action.dest, None), Path) and not is_utf8(value)
    ]


def _with_values(words: Sequence[str], parser: argparse.ArgumentParser, reader: Reader) -> list[str]:
    """``words`` less the flags whose value is missing, which are noted: argparse would stop at the first."""
    takers = {flag for action in parser._actions if action.nargs is None for flag in action.option_strings}
    kept = []
    for word, following in itertools.zip_longest(words, words[1:], fillvalue="--"):
        if word in takers and following.startswith("--"):
            reader.problems.add(f"{word} needs a value")
        else:
            kept.append(word)
    return kept

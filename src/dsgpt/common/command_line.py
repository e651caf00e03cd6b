"""The command line of every script: reads all of it and reports all of its mistakes together. Imports no torch."""

import argparse
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from dsgpt.common.errors import UserError
from dsgpt.common.files import is_utf8, undecodable
from dsgpt.common.problems import Problems, did_you_mean

D = TypeVar("D")
"""Type of a default."""
V = TypeVar("V")
"""Type of a value."""


class Parser(argparse.ArgumentParser):
    """Raises ``UserError`` instead of printing the usage and exiting; ``--help`` keeps the line breaks of its texts."""

    def __init__(
        self,
        *,
        description: str,
        epilog: str = "",
        prog: str | None = None,
        formatter_class: type[argparse.HelpFormatter] = argparse.RawDescriptionHelpFormatter,
        allow_abbrev: bool = False,
    ) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=formatter_class,
            allow_abbrev=allow_abbrev,
        )

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a ``UserError``."""
        raise UserError(f"{message}; see --help")


class Reader:
    """Converts words to values. If it cannot, it adds a line to ``problems``, and the flag has no value."""

    def __init__(self) -> None:
        self.problems = Problems()

    def value(
        self, flag: str, parse: Callable[[str], V], *, accepts: Callable[[V], bool], must_be: str
    ) -> Callable[[str], V | None]:
        """A reader of the values that ``parse`` makes of a word and that ``accepts`` allows.

        Args:
            flag: for the message.
            parse: raises ``ValueError`` if the word is none.
            accepts: whether the value may be used.
            must_be: what is allowed, for the message.
        """

        def read(word: str) -> V | None:
            """The value, or None after noting the mistake."""
            try:
                value = parse(word)
            except ValueError:
                value = None
            if value is None or not accepts(value):
                self.problems.add(f"{flag} must be {must_be}, not {word}")
                return None
            return value

        return read

    def whole(self, flag: str, *, low: int) -> Callable[[str], int | None]:
        """A reader of whole numbers of at least ``low``; ``_`` and ``,`` may group the digits."""
        must_be = f"a whole number of at least {low}"
        return self.value(flag, lambda word: int(ungrouped(word)), accepts=lambda value: value >= low, must_be=must_be)

    def number(self, flag: str) -> Callable[[str], float | None]:
        """A reader of finite numbers of at least 0."""
        return self.value(
            flag, float, accepts=lambda value: 0 <= value < float("inf"), must_be="a number of at least 0"
        )

    def interval(self, flag: str, *, low: float) -> Callable[[str], float | None]:
        """A reader of 0, or of finite numbers of at least ``low``."""
        return self.value(
            flag,
            float,
            accepts=lambda value: value == 0 or low <= value < float("inf"),
            must_be=f"0, or a number of at least {low}",
        )

    def fraction(self, flag: str) -> Callable[[str], float | None]:
        """A reader of numbers of at least 0 and below 1."""
        return self.value(
            flag, float, accepts=lambda value: 0 <= value < 1, must_be="a number of at least 0 and below 1"
        )

    def share(self, flag: str) -> Callable[[str], float | None]:
        """A reader of numbers above 0 and below 1."""
        return self.value(
            flag, float, accepts=lambda value: 0 < value < 1, must_be="a number above 0 and below 1, such as 0.05"
        )

    def choice(self, flag: str, allowed: Sequence[str], default: D) -> Callable[[str], str | D]:
        """A reader of the ``allowed`` words; any other word becomes ``default``."""

        def read(word: str) -> str | D:
            """The word, or ``default`` after noting the mistake."""
            if word not in allowed:
                self.problems.add(
                    f"{flag} must be one of {', '.join(allowed)}, not {word}{did_you_mean(word, allowed)}"
                )
                return default
            return word

        return read

    def choices(self, flag: str, allowed: Sequence[str]) -> Callable[[str], tuple[str, ...] | None]:
        """A reader of one or more of the ``allowed`` words, separated by commas."""

        def read(text: str) -> tuple[str, ...] | None:
            """The words, or None after noting the mistake."""
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


def ungrouped(word: str) -> str:
    """``word`` without the ``_`` and ``,`` that group the digits of a number."""
    return word.replace("_", "").replace(",", "")


def read_words(
    parser: argparse.ArgumentParser,
    reader: Reader,
    words: Sequence[str] | None = None,
    *,
    elsewhere: Mapping[str, str] | None = None,
) -> argparse.Namespace:
    """Read a whole command line; ``reader.problems`` then holds all of its mistakes.

    Args:
        parser: defines the flags.
        reader: its methods convert the values of ``parser``'s flags.
        words: the command line; by default that of this process.
        elsewhere: for flags of other programs, how to set the same value here.

    Raises:
        UserError: argparse cannot read the line at all, for example a value for a flag that takes none.
    """
    given = sys.argv[1:] if words is None else words
    namespace, unknown = parser.parse_known_args(_with_values(given, parser, reader))
    reader.problems.add(*path_problems(parser, namespace))
    known = [flag for action in parser._actions for flag in action.option_strings]
    previous_unknown = False
    for word in unknown:
        name = word.partition("=")[0]
        if _is_flag(word, parser):
            hint = f": {elsewhere[name]}" if elsewhere and name in elsewhere else did_you_mean(name, known)
            reader.problems.add(f"{name} is not a known flag{hint or '; see --help'}")
        elif not previous_unknown:  # otherwise it is the value of the unknown flag
            reader.problems.add(f"{word!r} is neither a flag nor the value of one")
        previous_unknown = _is_flag(word, parser)
    return namespace


def path_problems(parser: argparse.ArgumentParser, namespace: argparse.Namespace) -> list[str]:
    """A line for each path whose name is not valid UTF-8: tokenizers and safetensors cannot open it."""
    return [
        f"{action.option_strings[0] if action.option_strings else action.metavar} {undecodable(value)}"
        for action in parser._actions
        if isinstance(value := getattr(namespace, action.dest, None), Path) and not is_utf8(value)
    ]


def _with_values(words: Sequence[str], parser: argparse.ArgumentParser, reader: Reader) -> list[str]:
    """``words`` without the flags that lack a value. Each is noted as a mistake; argparse would stop at the first."""
    takers = {flag for action in parser._actions if action.nargs in (None, "+") for flag in action.option_strings}
    kept = []
    for word, following in itertools.zip_longest(words, words[1:], fillvalue="--"):
        if word in takers and _is_flag(following, parser):
            reader.problems.add(f"{word} needs a value")
        else:
            kept.append(word)
    return kept


def _is_flag(word: str, parser: argparse.ArgumentParser) -> bool:
    """Whether argparse reads ``word`` as a flag; it reads ``-``, negative numbers and words with spaces as values."""
    if word.startswith("--"):
        return " " not in word.partition("=")[0]
    return word.startswith("-") and word != "-" and " " not in word and not parser._negative_number_matcher.match(word)

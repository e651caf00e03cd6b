"""What every script here shares towards the user: flags that report all mistakes at once, progress."""

import argparse
import contextlib
import difflib
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from tqdm import tqdm

from dsgpt.common.errors import UserError

KEPT = "nothing was published; the same command starts again"
"""After an interruption, or on a full disk."""


class FlagParser(argparse.ArgumentParser):
    """An argument parser that raises its mistakes instead of exiting at the first one."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found as a ``UserError``."""
        raise UserError(f"{message}; see --help")

    def parse_flags(self, argv: Sequence[str] | None, problems: list[str]) -> argparse.Namespace:
        """Parse ``argv`` and append one line to ``problems`` for every flag or word that is not known."""
        flags, unknown = self.parse_known_args(argv)
        known = [option for action in self._actions for option in action.option_strings]
        before = ""
        for word in unknown:
            name = word.partition("=")[0]
            close = difflib.get_close_matches(name, known, n=1)
            if word.startswith("-"):
                problems.append(
                    f"{name}: is not a known flag; " + (f"did you mean {close[0]}?" if close else "see --help")
                )
            elif not before.startswith("-"):  # otherwise it is the value of the unknown flag
                problems.append(f"{word}: is not expected here; see --help")
            before = word
        return flags


def make_parser(description: str, examples: str) -> FlagParser:
    """A parser whose ``--help`` keeps the line breaks of its description and ends with ``examples``."""
    return FlagParser(
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def whole_number(text: str, *, flag: str, minimum: int, problems: list[str]) -> int:
    """``text`` as a whole number; what is wrong with it goes to ``problems`` and ``minimum`` is returned instead."""
    try:
        value = int(text.replace("_", "").replace(",", ""))
    except ValueError:
        problems.append(f"{flag} {text}: is not a whole number; give {minimum:,} or more")
        return minimum
    if value < minimum:
        problems.append(f"{flag} {text}: is too small; give {minimum:,} or more")
        return minimum
    return value


def unknown_name(value: str, *, flag: str, names: Sequence[str]) -> str:
    """One line that says that ``value`` is none of ``names``, with the closest of them."""
    close = difflib.get_close_matches(value, names, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{flag} {value}: is not a known name; {hint}known are {', '.join(names)}"


def counted(number: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    """Whole seconds, in words where there are none."""
    return "less than 1 s" if seconds < 1 else f"{seconds:.0f} s"


@contextlib.contextmanager
def progress(*, total: int | None, description: str, unit: str) -> Iterator[tqdm]:
    """A progress bar with an estimate of the time left; none where stderr is no terminal.

    Work that ends early without a mistake (a limit was reached, documents were empty) ends at 100 % of what was done.

    Args:
        total: bytes (``unit`` "B") or other units of the whole work; None where that cannot be known.
        description: what is being done, in a word or two.
        unit: what ``total`` counts.
    """
    with tqdm(
        total=total, desc=description, unit=unit, unit_scale=True, mininterval=0.2, maxinterval=0.4,
        dynamic_ncols=True, disable=not sys.stderr.isatty(),
    ) as bar:  # fmt: skip
        try:
            yield bar
        except GeneratorExit:  # the rows' reader has enough
            bar.total = bar.n
            raise
        bar.total = bar.n

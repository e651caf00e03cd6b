"""What the preparation scripts print: counts, durations and progress bars."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, TypeAlias

from tqdm import tqdm

Bar: TypeAlias = "tqdm[NoReturn]"
"""A progress bar that the caller updates; it does not wrap an iterable."""
KEPT = "nothing was published; the same command starts again"
"""Ends the error line after an interruption, or if the disk is full."""


def folder_if_named(word: str) -> Path | None:
    """The value of a flag that names a folder; None for an empty word, such as an unset variable of the shell."""
    return Path(word) if word else None


def counted(number: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    """Whole seconds, or ``less than 1 s``."""
    return "less than 1 s" if seconds < 1 else f"{seconds:.0f} s"


@contextlib.contextmanager
def progress(*, total: int | None, description: str, unit: str) -> Iterator[Bar]:
    """A progress bar with an estimate of the time left; nothing is shown if standard error is not a terminal.

    If the work ends early without an error (a limit was reached, documents were empty), the bar ends at 100 %.

    Args:
        total: amount of work, in bytes (``unit`` "B") or other units; None if unknown.
        description: what is being done, in a word or two.
        unit: the unit of ``total``.
    """
    with tqdm(
        total=total, desc=description, unit=unit, unit_scale=True, mininterval=0.2, maxinterval=0.4,
        dynamic_ncols=True, disable=not sys.stderr.isatty(),
    ) as bar:  # fmt: skip
        try:
            yield bar
        except GeneratorExit:  # the reader of the rows stopped early
            bar.total = bar.n
            raise
        bar.total = bar.n

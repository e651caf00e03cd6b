"""What the preparation scripts print: numbers in words, and progress bars."""

import contextlib
import sys
from collections.abc import Iterator
from typing import NoReturn, TypeAlias

from tqdm import tqdm

Bar: TypeAlias = "tqdm[NoReturn]"
"""A progress bar that is moved by hand, not by an iterable."""
KEPT = "nothing was published; the same command starts again"
"""What is said after an interruption, or on a full disk."""


def counted(number: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    """Whole seconds, in words where there are none."""
    return "less than 1 s" if seconds < 1 else f"{seconds:.0f} s"


@contextlib.contextmanager
def progress(*, total: int | None, description: str, unit: str) -> Iterator[Bar]:
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
        except GeneratorExit:  # whoever reads the rows stopped early
            bar.total = bar.n
            raise
        bar.total = bar.n

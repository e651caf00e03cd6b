"""Errors that scripts turn into an exit code, and mistakes that are collected and reported together."""

import difflib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeGuard

# Errors that scripts turn into an exit code, and the exit codes (the table is in docs/exit-codes.md).

EXIT_DONE = 0
EXIT_DOES_NOT_FIT = 1
"""``src/plan.py``: the setup that was asked for needs more memory than there is."""
EXIT_USER_ERROR = 2
EXIT_NON_FINITE = 3
EXIT_NOT_SAVED = 4
EXIT_OUT_OF_MEMORY = 5
EXIT_LOST_RANK = 6
EXIT_WRONG = 7
EXIT_STOPPED = 75
"""The run was asked to stop, and saved a checkpoint first: ``--resume`` continues it and loses no step. The number is
``EX_TEMPFAIL`` of sysexits.h: a scheduler may repeat the command."""
EXIT_INTERRUPTED = 130
"""The process ended at once: the steps since the last checkpoint are lost."""
EXIT_READER_GONE = 141
"""The reader of the output closed it. The number is what a shell reports for a program that SIGPIPE ended."""


class UserError(ValueError):
    """A mistake that the user can correct; printed without a traceback, exit code 2.

    ``problems`` holds one line for each mistake: the file, value or flag at fault, what is allowed, and what to do.
    """

    exit_code = EXIT_USER_ERROR

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class DifferentRunError(UserError):
    """The run in the folder is sound, but was made with other settings or data. Nothing else is wrong."""


class NonFiniteError(ArithmeticError):
    """The loss or the gradient norm became NaN or infinite; that step was not saved, exit code 3."""

    exit_code = EXIT_NON_FINITE


class SaveError(RuntimeError):
    """A checkpoint could not be written, and every rank knows it; exit code 4."""

    exit_code = EXIT_NOT_SAVED


class OutOfMemory(RuntimeError):
    """The memory of a device ran out; the message says what fits. Exit code 5."""

    exit_code = EXIT_OUT_OF_MEMORY


class LostRank(RuntimeError):
    """Another rank died, failed or hangs, and this one cannot go on; the message names it. Exit code 6.

    ``refused``: it refused to start, for a reason that the user can correct; exit code 2.
    """

    speaks = True
    """Whether this rank prints it."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.exit_code = EXIT_USER_ERROR if refused else EXIT_LOST_RANK


class InvariantError(RuntimeError):
    """A check of ``--check_invariants`` failed: what was trained is wrong, on every rank; exit code 7."""

    exit_code = EXIT_WRONG


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, by a signal or because its launcher ended; exit code 75.

    It is a ``KeyboardInterrupt`` because libraries do not catch those. ``together``: all ranks agreed to stop.
    ``limit``: because of ``--max_hours`` or ``--max_cost``. ``asked_sec``: seconds since the request.
    """

    exit_code = EXIT_STOPPED

    def __init__(self, message: str, *, together: bool = False, limit: bool = False, asked_sec: float = 0.0) -> None:
        super().__init__(message)
        self.together, self.limit, self.asked_sec = together, limit, asked_sec


# Collects all mistakes, so that they are reported together.

MOST_KEYS = 20
"""Most unknown keys of one object that are named: the search for the nearest key takes a millisecond for each."""
LONGEST_WORD = 80
"""Characters of a word that are compared with known words: words in a file may be longer."""


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`` (did you mean X?)`` with the nearest known word; empty if none is near."""
    near = difflib.get_close_matches(word[:LONGEST_WORD], sorted(candidates), n=1, cutoff=0.6)
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

    @contextmanager
    def collect(self) -> Iterator[None]:
        """A context whose ``UserError`` is noted, and ends it without an exception."""
        try:
            yield
        except UserError as error:
            self.add(*error.problems)

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

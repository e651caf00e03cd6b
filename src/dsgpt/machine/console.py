"""Output of a run: standard output, ``train.log``, and one live line on a terminal.

Every module logs to ``logging.getLogger(__name__)``, below the logger ``dsgpt``. Rank 0 adds handlers to it; the other
ranks disable it. Lines have no prefix; their level only serves filters. Progress bars are shown only on a terminal.
"""

import contextlib
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from tqdm import tqdm

from dsgpt.common.files import PRINTABLE, append_to
from dsgpt.common.text import duration

# One line of a terminal that shows how a run is doing, fitted to the terminal's width.

_ERASE = "\x1b[K"
"""Erases to the end of the terminal's row, with what was typed there."""


class Field(NamedTuple):
    """A part of the line."""

    text: str
    rank: int
    """Importance: in a narrow terminal the fields with the highest ranks are left out first."""


def fitted(fields: Sequence[Field], width: int) -> str:
    """The most important fields that fit into ``width`` columns, in their order; the first one is cut if it does not.

    A field is left out with all that are less important.
    """
    shown = list(fields)
    while len(shown) > 1 and len(_line(shown)) > width:
        shown.remove(max(shown, key=lambda field: field.rank))
    return _line(shown)[: max(0, width)]


def _line(fields: Sequence[Field]) -> str:
    return "  ".join(field.text for field in fields)


class LiveBar(tqdm):  # type: ignore[type-arg]  # it iterates over nothing
    """A tqdm bar that shows a text instead of a bar, and gives way to other bars.

    Args:
        text: returns the text for a number of columns.
        named: the arguments of ``tqdm``.
    """

    def __init__(self, *, text: Callable[[int], str], **named: Any) -> None:
        self._text = text
        super().__init__(**named, position=0, leave=False, dynamic_ncols=True, file=sys.stderr)

    def __str__(self) -> str:
        columns: int | None = self.format_dict["ncols"]
        return self._text((columns or 80) - 1)  # a full last column may begin a new line

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Draw the line, unless another bar is in its place."""
        if msg is None and any(other is not self and not other.disable for other in _open_bars()):
            return
        super().display(msg, pos)
        self.fp.write(_ERASE if msg is None else f"\r{_ERASE}")
        self.fp.flush()

    def clear(self, nolock: bool = False) -> None:
        """Clear the line."""
        super().clear(nolock)
        if not self.disable:
            self.fp.write(_ERASE)
            self.fp.flush()


def _open_bars() -> "list[tqdm[Any]]":
    return list(tqdm._instances)  # type: ignore[attr-defined]  # its types leave it out


def make_room() -> int | None:
    """Clear the live line; return its place for another bar, or None if there is no live line."""
    for bar in _open_bars():
        if isinstance(bar, LiveBar) and not bar.disable:
            bar.clear()
            return 0
    return None


_PACKAGE = logging.getLogger("dsgpt")
_PACKAGE.addHandler(logging.NullHandler())
LINE_SEC = 30.0
"""Seconds between two lines about progress where there is no terminal."""
_LIVE = "live"
"""The attribute of log records that the console does not print."""


def print_line(line: str = "") -> None:
    """Print one line to standard output, above a progress bar if one is shown.

    If the terminal is closed, the reader has ended or the disk is full, the line is lost and the run continues.
    """
    with contextlib.suppress(OSError):
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()


class _ConsoleHandler(logging.Handler):
    """Prints every record as a line, except those that a live line shows instead."""

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, _LIVE, False):
            print_line(self.format(record))


@contextlib.contextmanager
def logging_to_console(*, speaks: bool) -> Iterator[None]:
    """Print what this package logs at level INFO or above, inside the context.

    Args:
        speaks: whether this rank prints; the other ranks only log warnings, for the log of their machine.
    """
    handler = _ConsoleHandler() if speaks else logging.NullHandler()
    level, propagate = _PACKAGE.level, _PACKAGE.propagate
    _PACKAGE.setLevel(logging.INFO if speaks else logging.WARNING)
    _PACKAGE.propagate = False  # handlers that a library gave the root logger would print every line again
    _PACKAGE.addHandler(handler)
    try:
        yield
    finally:
        _PACKAGE.removeHandler(handler)
        _PACKAGE.setLevel(level)
        _PACKAGE.propagate = propagate


class LogFile(logging.Handler):
    """Copies log lines to a file that is opened later. A context: it receives what is logged inside, and an error."""

    def __init__(self) -> None:
        super().__init__()
        self._file: FileIO | None = None
        self._early: list[str] = []

    def open(self, path: Path) -> None:
        """Append the lines so far, and all that follow, to ``path``.

        Raises:
            OSError: the file system refuses.
        """
        self._file = append_to(path)  # unbuffered: a line that a full disk refused must not be written later
        self._file.write("".join(f"{line}\n" for line in self._early).encode(errors=PRINTABLE))
        self._early.clear()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line; a line that the file system refuses is lost."""
        line = self.format(record)
        if self._file is None:
            self._early.append(line)
            return
        with contextlib.suppress(OSError):
            self._file.write(f"{line}\n".encode(errors=PRINTABLE))

    def __enter__(self) -> Self:
        _PACKAGE.addHandler(self)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt):  # rank 0 has logged those
            self.add_error(error)
        _PACKAGE.removeHandler(self)
        self.close()

    def add_error(self, error: BaseException) -> None:
        """Write an error, one that is not this program's own with its traceback."""
        own = hasattr(error, "exit_code")
        self.add(f"error: {error}" if own else "".join(traceback.format_exception(error)).rstrip("\n"))

    def add(self, line: str) -> None:
        """Write a line that is not on the console."""
        self.emit(logging.makeLogRecord({"msg": line}))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
        super().close()


class Progress:
    """A tqdm bar, and the time left in words for lines that are logged.

    Args:
        total: units of work.
        done: units done before.
        what: the name of the work.
        unit: the name of a unit.
        shown: whether there is a bar; by default where this rank logs and standard error is a terminal.
        text: if given, there is a live line instead of a bar: returns its text for a number of columns, from this.
        lines: print a line on standard error every ``LINE_SEC`` seconds.
    """

    heard: ClassVar[Callable[[], object]] = staticmethod(lambda: None)
    """Called whenever any of them advances: the ranks that wait for this process are told."""

    def __init__(
        self,
        *,
        total: int,
        what: str,
        unit: str,
        done: int = 0,
        shown: bool | None = None,
        text: Callable[["Progress", int], str] | None = None,
        lines: bool = False,
    ) -> None:
        if shown is None:
            shown = _PACKAGE.isEnabledFor(logging.INFO) and sys.stderr.isatty()
        self.done = done
        """Number of units that are done."""
        self._total, self._first = total, done
        self._started = self._said = time.perf_counter()
        self._line = what if lines else ""
        named: dict[str, Any] = {"total": total, "initial": done, "disable": not shown}
        if text is None:
            position = make_room() if shown else None
            named |= {"desc": what, "unit": unit, "dynamic_ncols": True, "leave": False, "position": position}
        self._bar = tqdm(**named) if text is None else LiveBar(text=partial(text, self), **named)
        self.log_only = {_LIVE: text is not None and shown and sys.stdout.isatty()}
        """Values for a logger's ``extra``: the line is only in the log file, because a live line on a terminal replaces
        it."""

    def advance(self, count: int = 1) -> None:
        """Note that ``count`` more are done."""
        Progress.heard()
        self.done += count
        self._bar.update(count)
        if self._line and time.perf_counter() - self._said >= LINE_SEC:
            self._said = time.perf_counter()
            print(f"{self._line}: {self.done / self._total:.0%}, {self.time_left()} left", file=sys.stderr, flush=True)

    def time_left(self) -> str:
        """The time to completion at the speed so far, validation and saving included."""
        done = self.done - self._first
        if done == 0:
            return "unknown"
        return duration((self._total - self.done) * (time.perf_counter() - self._started) / done)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


class Console:
    """Prints lines and progress bars for commands that have no log: suites and conversions.

    Args:
        speaks: whether it prints at all.
    """

    def __init__(self, *, speaks: bool) -> None:
        self._speaks = speaks

    def say(self, line: str = "") -> None:
        """Print one line as ``print_line`` does."""
        if self._speaks:
            print_line(line)

    def progress(self, *, total: int, what: str, unit: str, lines: bool = False) -> Progress:
        """A progress bar on a terminal; elsewhere nothing, or with ``lines`` a line now and then."""
        terminal = sys.stderr.isatty()
        shown = self._speaks and terminal
        return Progress(total=total, what=what, unit=unit, shown=shown, lines=lines and self._speaks and not terminal)

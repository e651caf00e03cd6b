r"""How every script starts and ends: its exit code, its error lines, and its output streams. Imports no torch.

Bytes of a path that are not UTF-8, and characters that the output's encoding lacks, are printed as ``\xe9``.
"""

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

from dsgpt.common.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_READER_GONE, EXIT_USER_ERROR, UserError
from dsgpt.common.files import PRINTABLE, printable, undecodable

_REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
"""Errors of the file system that the user can correct."""
_INTERRUPTED = ("interrupted", EXIT_INTERRUPTED)


class OutputError(OSError):
    """Standard output or standard error refused what was written."""


class Terminated(SystemExit):
    """A signal asked this process to end; the exit code is 128 plus its number, as a shell reports it."""

    def __init__(self, number: int) -> None:
        self.name = signal.Signals(number).name
        self.status = 128 + number
        super().__init__(self.status)


def raise_on_signals() -> None:
    """Let SIGTERM and SIGHUP raise ``Terminated``, so that partial files and folders are removed and children ended.

    After the first of them, further ones do not disturb the unwinding. ``nohup`` keeps its effect.
    """
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]

    def end(number: int, _frame: FrameType | None) -> None:
        for handled in numbers:
            signal.signal(handled, lambda *_: None)  # SIG_IGN would be inherited by a program started from now on
        raise Terminated(number)

    for number in numbers:
        signal.signal(number, end)


def run_script(main: Callable[[], int | None], *, kept: str = "") -> NoReturn:
    """Run ``main`` and end this process with its exit code (the table is in docs/exit-codes.md).

    If the reader of its output closed it (``| head -1``), the exit code is 141 and nothing is printed, as if SIGPIPE
    had ended the process. SIGTERM and SIGHUP end it as ``raise_on_signals`` says.

    Args:
        main: does the work; returns its exit code, or None for 0.
        kept: what is left if the script is interrupted or the disk is full; ends the error line.
    """
    prepare_output(lose=False)
    raise_on_signals()
    code: int | str | None
    try:
        code = exit_code_of(main, kept=kept)
    except SystemExit as end:  # raised by argparse after --help
        code = end.code
    try:
        sys.stdout.flush()
    except OutputError as error:
        code = code or _output_lost(error)
    sys.exit(code)


def exit_code_of(main: Callable[[], int | None], *, kept: str = "") -> int:
    """Run ``main`` and return the exit code. Prints the user's mistakes, one line each; raises any other error."""
    try:
        return main() or EXIT_DONE
    except UserError as error:
        return complain(error.problems, EXIT_USER_ERROR)
    except OutputError as error:
        return _output_lost(error)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return complain([_with(kept, f"{error.filename or 'the output'}: {error.strerror}")], EXIT_USER_ERROR)
    except UnicodeEncodeError as error:
        if error.reason != "surrogates not allowed":  # not a path that a library refused
            raise
        return complain([undecodable(error.object)], EXIT_USER_ERROR)
    except (KeyboardInterrupt, Terminated) as end:
        how, code = (f"ended by {end.name}", end.status) if isinstance(end, Terminated) else _INTERRUPTED
        return complain([_with(kept, how)], code)


def complain(lines: Sequence[str], code: int) -> int:
    """Print each line as an error, and return ``code``."""
    for line in "\n".join(lines).splitlines():
        with contextlib.suppress(OSError):  # the terminal is gone; the exit code remains
            print(f"error: {printable(line)}", file=sys.stderr, flush=True)
    return code


def prepare_output(*, lose: bool) -> None:
    """Let standard output and standard error accept any text; a closed stream becomes /dev/null.

    Args:
        lose: discard output that the system refuses, and continue; otherwise the first refusal by standard output
            raises ``OutputError``. A refusal by standard error never ends a program.
    """
    sys.stdout = _stream(1, sys.stdout, lose=lose)
    sys.stderr = _stream(2, sys.stderr, lose=True)


def _stream(number: int, old: Any, *, lose: bool) -> io.TextIOWrapper:
    """A stream to the descriptor ``number``, buffered like ``old``, which is None if the descriptor is closed."""
    if old is None:  # after `>&-`, the next opened file would get this number, and receive the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        return io.TextIOWrapper(io.BufferedWriter(_Output(number, lose=True)), encoding="utf-8", errors=PRINTABLE)
    raw = _Output(number, lose=lose)
    return io.TextIOWrapper(
        raw if old.write_through else io.BufferedWriter(raw),  # as Python builds it under PYTHONUNBUFFERED
        encoding=old.encoding,
        errors=PRINTABLE,
        line_buffering=old.line_buffering,
        write_through=old.write_through,
    )


class _Output(io.FileIO):
    """Standard output or standard error. After the first failure, everything written is discarded."""

    def __init__(self, number: int, *, lose: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self._lose = lose
        self._failed = False

    def write(self, data: Any) -> int:
        """Write all of ``data``, or discard it."""
        size = memoryview(data).nbytes
        if self._failed:
            return size
        try:
            done = 0
            while done < size:
                done += super().write(memoryview(data).cast("B")[done:]) or 0
        except OSError as error:
            self._failed = True
            if not self._lose:
                raise OutputError(error.errno, error.strerror) from error
        return size


def _output_lost(error: OutputError) -> int:
    if error.errno == errno.EPIPE:
        return EXIT_READER_GONE
    return complain([f"standard output: {error.strerror}: the output is incomplete"], EXIT_USER_ERROR)


def _with(kept: str, line: str) -> str:
    return f"{line}; {kept}" if kept else line

r"""The command line of every script: how it is read, and how a script starts and ends.

How every script starts and ends: its exit code, its error lines, and its output streams. Bytes of a path that are not
UTF-8, and characters that the output's encoding lacks, are printed as ``\xe9``.
"""

import argparse
import contextlib
import errno
import importlib
import io
import itertools
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NoReturn, TypeVar

from dsgpt.common.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_READER_GONE,
    EXIT_USER_ERROR,
    Problems,
    UserError,
    did_you_mean,
)
from dsgpt.common.files import PRINTABLE, is_utf8, printable, undecodable

# The command line of every script: reads all of it and reports all of its mistakes together.

COMPLETING = "_ARGCOMPLETE"
"""The shell sets this variable when it asks for completions; its value is the place of the first word plus 1."""
D = TypeVar("D")
"""Type of a default."""
V = TypeVar("V")
"""Type of a value."""


class Parser(argparse.ArgumentParser):
    """Raises ``UserError`` instead of printing the usage and exiting; ``--help`` keeps the line breaks of its texts."""

    command: ClassVar[str | None] = None
    """The command of ``dsgpt`` that runs the script, for the usage."""

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
            prog=self.command or prog,
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

    def wholes(self, flag: str, *, low: int) -> Callable[[str], tuple[int, ...] | None]:
        """A reader of one or more whole numbers of at least ``low``, separated by commas; each counts once."""
        return self.value(
            flag,
            lambda text: tuple(dict.fromkeys(map(int, text.split(",")))),
            accepts=lambda values: min(values) >= low,
            must_be=f"a whole number of at least {low}, or several with commas between them",
        )

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
    if COMPLETING in os.environ:
        importlib.import_module("argcomplete").autocomplete(parser)  # prints what fits the cursor, and exits
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

r"""The command line of every script: how it is read, and how a script starts and ends.

Each flag is a field of a dataclass of options, declared once by ``flag`` or ``switch``. The parser, the help, the
checks, the default and the page docs/flags.md are derived from it. All mistakes of a line are reported together.

How every script starts and ends: its exit code, its error lines, and its output streams. Bytes of a path that are not
UTF-8, and characters that the output's encoding lacks, are printed as ``\xe9``.
"""

import argparse
import ast
import contextlib
import dataclasses
import errno
import importlib
import inspect
import io
import itertools
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NoReturn, TypeVar

from dsgpt.common import errors
from dsgpt.common.files import PRINTABLE, is_utf8, printable, undecodable

# The words that a flag accepts. A reader turns a word into a value, or raises ``Unfit``.

COMPLETING = "_ARGCOMPLETE"
"""The shell sets this variable when it asks for completions; its value is the place of the first word plus 1."""
Words = Sequence[str] | None
"""A command line; None stands for that of this process."""
Elsewhere = Mapping[str, str] | None
"""For flags of other programs, how to set the same value here."""
V = TypeVar("V")
"""Type of a value."""
O = TypeVar("O")  # noqa: E741
"""Type of the options of a command."""


class Unfit(Exception):
    """A word that a flag does not accept. The message, such as ``must be a port, not x``, follows the flag's name."""


def value(parse: Callable[[str], V], *, accepts: Callable[[V], bool], must_be: str) -> Callable[[str], V]:
    """A reader of the values that ``parse`` makes of a word and that ``accepts`` allows.

    Args:
        parse: raises ``ValueError`` if the word is none.
        accepts: whether the value may be used.
        must_be: what is allowed, for the message.
    """

    def read(word: str) -> V:
        with contextlib.suppress(ValueError):
            if accepts(parsed := parse(word)):
                return parsed
        raise Unfit(f"must be {must_be}, not {word}")

    return read


def ungrouped(word: str) -> str:
    """``word`` without the ``_`` and ``,`` that group the digits of a number."""
    return word.replace("_", "").replace(",", "")


def whole(*, low: int) -> Callable[[str], int]:
    """A reader of whole numbers of at least ``low``; ``_`` and ``,`` may group the digits."""
    must_be = f"a whole number of at least {low}"
    return value(lambda word: int(ungrouped(word)), accepts=lambda number: number >= low, must_be=must_be)


COUNT = whole(low=0)
POSITIVE = whole(low=1)
NUMBER = value(float, accepts=lambda number: 0 <= number < float("inf"), must_be="a number of at least 0")


def choice(allowed: Sequence[str]) -> Callable[[str], str]:
    """A reader of the ``allowed`` words."""
    return lambda word: _known(word, allowed, must_be=f"one of {', '.join(allowed)}")


def choices(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """A reader of one or more of the ``allowed`` words, separated by commas."""
    some = f"{' or '.join(allowed)}, or several with commas between them"
    return lambda text: tuple(_known(word, allowed, must_be=some) for word in text.split(","))


def _known(word: str, allowed: Sequence[str], *, must_be: str) -> str:
    if word not in allowed:
        raise Unfit(f"must be {must_be}, not {word}{errors.did_you_mean(word, allowed)}")
    return word


# Options: dataclasses whose fields are flags.


def flag(
    read: Callable[[str], Any] | None,
    metavar: str | None,
    text: str = "",
    *,
    default: Any = None,
    name: str | None = None,
    group: str | None = None,
    needs: str | None = None,
    work: object = None,
    **more: Any,
) -> Any:
    """The field of a flag that takes a value; its name is that of the flag.

    Args:
        read: ``str``, ``Path`` or a reader of the words that the flag accepts; None without a value.
        metavar: what the help calls the value.
        text: of the help; ``%(default)s`` stands for the default. Without it, it is the docstring below the field.
        default: of the field, if the flag is not given.
        name: of the flag, if it is another than that of the field; without ``--`` it is a positional argument.
        group: the title in the help above this flag and the next ones.
        needs: what to give, for the message of ``require_flags`` if the flag is missing.
        work: for ``src/gpt2.py``, what the flag means for equal work (``dsgpt.config.options``).
        more: for ``argparse``: ``nargs``, ``action``, ``required``.
    """
    given_as = {"help": text or None, **({"type": read, "metavar": metavar} if read else {}), **more}
    if not isinstance(default, tuple):  # argparse cannot append to a tuple
        given_as["default"] = default
    declared = {"name": name, "group": group, "needs": needs, "work": work, "argparse": given_as}
    return dataclasses.field(default=dataclasses.MISSING if more.get("required") else default, metadata=declared)


def switch(text: str = "", *, group: str | None = None, work: object = None) -> Any:
    """The field of a flag without a value, which is false if it is not given; the arguments are those of ``flag``."""
    return flag(None, None, text, default=False, group=group, work=work, action="store_true")


def part(options: type) -> Any:
    """The field of a group of options that have a dataclass of their own; their flags are added in its place."""
    return dataclasses.field(default_factory=options, metadata={"part": options})


def _name_of(field: "dataclasses.Field[Any]") -> str:
    """Name of a flag, or of a positional argument, from its field."""
    return field.metadata["name"] or f"--{field.name}"


HELP_WIDTH = 120
"""Columns of the texts of a help."""


def help_of(command: type) -> dict[str, Any]:
    """The texts of a command's help, for ``Parser``: the docstring of ``command`` without its first line.

    Paragraphs are filled anew, except those with an indented line. The epilog begins with the examples.
    """
    text, _, examples = (inspect.getdoc(command) or "").partition("\n\nExamples:\n")
    filled = [
        part if "\n " in f"\n{part}" else textwrap.fill(part, HELP_WIDTH, break_on_hyphens=False)
        for part in text.split("\n\n")[1:]
    ]
    return {"description": "\n\n".join(filled), "epilog": f"examples:\n{examples}" if examples else ""}


def docstrings_of_fields(options: type) -> dict[str, str]:
    """The docstring below each field of a dataclass and its bases, on one line. Reads their source."""
    texts: dict[str, str] = {}
    for kind in filter(dataclasses.is_dataclass, reversed(options.__mro__)):
        (own,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        for field, below in itertools.pairwise(own.body if isinstance(own, ast.ClassDef) else ()):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
                texts[field.target.id] = " ".join(ast.literal_eval(below.value).split())
    return texts


class Parser(argparse.ArgumentParser):
    """Collects mistakes in ``problems`` instead of exiting; ``--help`` keeps the line breaks of its texts."""

    command: ClassVar[str | None] = None
    """The command of ``dsgpt`` that runs the script, for the usage."""

    def __init__(self, *, prog: str | None = None, allow_abbrev: bool = False, **texts: Any) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=self.command or prog, allow_abbrev=allow_abbrev, formatter_class=form, **texts)
        self.problems = errors.Problems()
        self._declared: list[type] = []

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a ``UserError``."""
        raise errors.UserError(f"{message}; see --help")

    def add_flags(self, options: type, *, names: Iterable[str] | None = None) -> None:
        """Add the flags that the fields of the dataclass ``options`` declare: all, or those of some fields."""
        group: argparse._ActionsContainer = self
        self._declared.append(options)
        fields = {field.name: field for field in dataclasses.fields(options)}
        for field in fields.values() if names is None else map(fields.__getitem__, names):
            if "part" in field.metadata:
                self.add_flags(field.metadata["part"])
            elif field.metadata:
                if title := field.metadata["group"]:
                    group = self.add_argument_group(title)
                dest: dict[str, Any] = {"dest": field.name} if _name_of(field).startswith("-") else {}
                group.add_argument(_name_of(field), **dest, **field.metadata["argparse"])

    def format_help(self) -> str:
        """The help. That of a flag may be the docstring below its field."""
        texts = {name: text for options in self._declared for name, text in docstrings_of_fields(options).items()}
        for action in self._actions:
            action.help = action.help or texts.get(action.dest)
        return super().format_help()

    def print_help(self, file: Any = None) -> None:
        """Print the help. argparse drops the error of an output that refuses a help longer than its buffer."""
        print(self.format_help(), end="", file=file)

    def read(self, options: type[O], words: Words = None, *, elsewhere: Elsewhere = None) -> O:
        """Read a whole command line; ``problems`` then holds all of its mistakes.

        Args:
            options: a dataclass whose flags were added. A flag that is wrong or not given has its default.
            words: the command line.
            elsewhere: for unknown flags.

        Raises:
            UserError: argparse cannot read the line at all, for example a value for a flag that takes none.
        """
        if COMPLETING in os.environ:
            importlib.import_module("argcomplete").autocomplete(self)  # prints what fits the cursor, and exits
        namespace, unknown = self.parse_known_args(self._with_values(sys.argv[1:] if words is None else words))
        values = {name: each for name, each in vars(namespace).items() if each is not None}
        for action in self._actions:
            if isinstance(path := values.get(action.dest), Path) and not is_utf8(path):
                # tokenizers and safetensors cannot open it
                self.problems.add(f"{_shown(action)} {undecodable(path)}")
        flags = [each for action in self._actions for each in action.option_strings]
        previous_unknown = False
        for word in unknown:
            name = word.partition("=")[0]
            if self._is_flag(word):
                hint = f": {elsewhere[name]}" if elsewhere and name in elsewhere else errors.did_you_mean(name, flags)
                self.problems.add(f"{name} is not a known flag{hint or '; see --help'}")
            elif not previous_unknown:  # otherwise it is the value of the unknown flag
                self.problems.add(f"{word!r} is neither a flag nor the value of one")
            previous_unknown = self._is_flag(word)
        return _filled(options, values)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """The value of a word; None after noting the mistake. argparse calls this for each word."""
        try:
            return super()._get_value(action, arg_string)
        except Unfit as error:
            self.problems.add(f"{_shown(action)} {error}")
            return None

    def _with_values(self, words: Sequence[str]) -> list[str]:
        """``words`` without the flags that lack a value. Each is noted as a mistake; argparse would stop at one."""
        takers = {each for action in self._actions if action.nargs in (None, "+") for each in action.option_strings}
        complete = []
        for word, following in itertools.zip_longest(words, words[1:], fillvalue="--"):
            if word in takers and self._is_flag(following):
                self.problems.add(f"{word} needs a value")
            else:
                complete.append(word)
        return complete

    def _is_flag(self, word: str) -> bool:
        """Whether argparse reads ``word`` as a flag; ``-``, negative numbers and words with spaces are values."""
        if word.startswith("--"):
            return " " not in word.partition("=")[0]
        number = self._negative_number_matcher.match(word)
        return word.startswith("-") and word != "-" and " " not in word and not number


def _shown(action: argparse.Action) -> str:
    """The flag as the user writes it, or the name of a positional argument in the help."""
    return action.option_strings[0] if action.option_strings else str(action.metavar)


def _filled(options: type[O], values: Mapping[str, Any]) -> O:
    given: dict[str, Any] = {}
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        if "part" in field.metadata:
            given[field.name] = _filled(field.metadata["part"], values)
        elif field.name in values:
            each = values[field.name]
            given[field.name] = tuple(each) if isinstance(each, list) else each
    return options(**given)


def require_flags(options: Any, problems: errors.Problems) -> None:
    """Note each flag of ``options`` that a command needs and that is missing, unless a mistake in it was noted."""
    for field in dataclasses.fields(options):
        if (what := field.metadata.get("needs")) and getattr(options, field.name) is None:
            name = _name_of(field) if _name_of(field).startswith("-") else field.metadata["argparse"]["metavar"]
            if not problems.mention(name):
                problems.add(f"{name} is missing: give {what}")


def read_options(
    options: type[O], words: Words = None, *, elsewhere: Elsewhere = None, complete: bool = True, **parser: Any
) -> tuple[O, errors.Problems]:
    """Read the command line of a script with one set of flags; return the options, and the mistakes found.

    Args:
        options: a dataclass whose fields declare the flags.
        words: the command line.
        elsewhere: for unknown flags.
        complete: note what ``require_flags`` misses, too.
        parser: the arguments of ``Parser``; by default the texts that ``help_of`` finds.

    Raises:
        UserError: as ``Parser.read``.
    """
    reading = Parser(**help_of(options) | parser)
    reading.add_flags(options)
    given = reading.read(options, words, elsewhere=elsewhere)
    if complete:
        require_flags(given, reading.problems)
    return given, reading.problems


# How every script starts and ends.

_REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
"""Errors of the file system that the user can correct."""
_INTERRUPTED = ("interrupted", errors.EXIT_INTERRUPTED)


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
        return main() or errors.EXIT_DONE
    except errors.UserError as error:
        return complain(error.problems, errors.EXIT_USER_ERROR)
    except OutputError as error:
        return _output_lost(error)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return complain([_with(kept, f"{error.filename or 'the output'}: {error.strerror}")], errors.EXIT_USER_ERROR)
    except UnicodeEncodeError as error:
        if error.reason != "surrogates not allowed":  # not a path that a library refused
            raise
        return complain([undecodable(error.object)], errors.EXIT_USER_ERROR)
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
    how = {name: getattr(old, name) for name in ("encoding", "line_buffering", "write_through")}
    raw: Any = _Output(number, lose=lose)  # below, as Python builds it under PYTHONUNBUFFERED
    return io.TextIOWrapper(raw if old.write_through else io.BufferedWriter(raw), errors=PRINTABLE, **how)


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
        return errors.EXIT_READER_GONE
    return complain([f"standard output: {error.strerror}: the output is incomplete"], errors.EXIT_USER_ERROR)


def _with(kept: str, line: str) -> str:
    return f"{line}; {kept}" if kept else line

"""What all suites share: their flags, their command, their records and pages."""

import contextlib
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from dsgpt.common.command_line import choice, flag
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_atomic, write_json_atomic
from dsgpt.common.json_files import JsonError, clipped_text, read_object
from dsgpt.common.text import BUSY, NO_DIFFERENCE, busy_words, next_line, no_difference
from dsgpt.machine.console import Console
from dsgpt.machine.probe import LoadOfOthers
from dsgpt.record.provenance import SourceChanges, changes_since, git_commit, marked, training_sources
from dsgpt.record.schema import finite

# Which source files can change the record of a suite, of a sweep or of the demo.

SUITES = ("parity", "resume", "faults", "saving", "plan", "speed", "recipes", "decoding", "inference", "serving")
DEMO, SWEEP = "demo", "sweep"
_ROOMS = {"serving": ("inference/server",)}
"""What some suites measure besides training."""
_FILES = {"inference": "src/dsgpt/benchmarks/trace.json", "serving": "src/serve.py"}
_ONLY_READ_RECORDS = ("*_page.py", "records.py")
"""Modules of the suites that make pages and tables from an existing record, or that start the commands of records."""


def record_sources(name: str) -> list[str]:
    """Pathspecs of the files whose change can change the record ``name``, one of ``SUITES``, ``DEMO`` or ``SWEEP``."""
    if name == DEMO:
        return [*training_sources(), "src/demo.py"]
    others = [suite for suite in (*SUITES, SWEEP) if suite != name]
    left_out = [
        f":(exclude)src/dsgpt/benchmarks/{path}"
        for path in (*(f"{suite}*.py" for suite in others), *_ONLY_READ_RECORDS)
    ]
    own = [_FILES[name]] if name in _FILES else []
    return [*training_sources(measured=("benchmarks", *_ROOMS.get(name, ()))), "src/benchmark.py", *own, *left_out]


def record_changes(record: Mapping[str, Any], name: str, *, repository: Path) -> SourceChanges:
    """What happened to the sources of ``record``, the content of the record ``name``, since it was made."""
    return changes_since(record.get("git_commit"), record_sources(name), repository=repository)


# Reads records and writes their pages.

Record = dict[str, Any]
_MAX_BYTES = 256 << 20


class PageText(Protocol):
    """Makes the text of a page."""

    def __call__(self, record: Record, *, source: str) -> str:
        """The page of ``record``, which the reader finds at the path ``source``."""
        ...


@dataclass(frozen=True, kw_only=True)
class SuitePage:
    """How a suite's record becomes a page."""

    name: str
    """The suite's name in the commands of ``src/benchmark.py``."""
    of: str
    """What it is a record of, for messages."""
    text: PageText
    summary: Callable[[Record], list[str]]
    """Lines for the console at the end of a run."""


def make_page(suite: SuitePage, record_file: Path, page: Path, *, repository: Path) -> None:
    """Write ``page`` from a record that ``--table-from`` names.

    Raises:
        UserError: the file is not a record of the suite.
    """
    record = read_record(record_file, of=suite.of)
    with wrong_records_refused(record_file, of=suite.of):
        text = suite.text(record, source=record_file.as_posix())
        write_page(page, text, record=record, name=suite.name, repository=repository)


def read_record(file: Path, *, of: str) -> Record:
    """The record that ``--table-from`` names.

    Args:
        file: holds it.
        of: what it is a record of, for the message.

    Raises:
        UserError: it cannot be read as one.
    """
    try:
        return read_object(file, max_bytes=_MAX_BYTES)
    except JsonError as error:
        raise UserError(f"--table-from {file}: cannot be read as a record of {of}: {error}") from error


@contextlib.contextmanager
def wrong_records_refused(file: Path, *, of: str) -> Iterator[None]:
    """A context for making a page from a record that the user named: a wrong file is the user's mistake.

    Args:
        file: the record.
        of: what it should be a record of, for the message.

    Raises:
        UserError: a value of the record is missing or of another type.
    """
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = clipped_text(f"{type(error).__name__}: {error}")
        raise UserError(f"--table-from {file}: is not a record of {of} ({what})") from error


def write_page(page: Path, text: str, *, record: Record, name: str, repository: Path) -> None:
    """Write ``text`` to ``page``; before its first ``##`` heading whether the machine was busy, and the sources.

    Args:
        page: the file.
        text: the page of ``record``.
        record: names the commit that it was made at.
        name: that of the suite.
        repository: holds the sources.
    """
    sources = record_changes(record, name, repository=repository).paragraph()
    head, heading, rest = text.rstrip("\n").partition("\n\n## ")
    busy = f"\n\n{BUSY}{words}.**" if (words := busy_words(record)) else ""
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, f"{head}{busy}\n\n{sources}{heading}{rest}\n".encode())


def judged(ratio: Mapping[str, Any] | None) -> str:
    """``, no difference`` if the ratios of several pairs say so, as a record has them."""
    return f", {NO_DIFFERENCE}" if ratio and no_difference(ratio["smallest"], ratio["largest"]) else ""


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """``header`` and ``rows`` in Markdown; None is an empty field."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join('' if value is None else str(value) for value in line)} |" for line in lines)


# What every suite's command does: run it, show its progress, write its record and the page made from it.

EXIT_FAILED = 1
"""A result failed; the page says which."""
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """The flags of every suite, after its own."""

    output: Path = flag(Path, "RECORD", "the record to write (default: %(default)s)")
    page: Path = flag(Path, "MD", "the page to write (default: beside the record)")
    table_from: Path | None = flag(
        Path, "RECORD", "run nothing; make the page from an earlier record", name="--table-from"
    )
    keep: Path | None = flag(Path, "DIR", "leave recipes, logs and measurements of every training there")


class SuiteCommand(ABC, Generic[R]):
    """One run of a suite, as its command needs it; ``R`` is the type of a result."""

    page: ClassVar[SuitePage]
    unit: ClassVar[str]
    """What one result is, in the progress bar."""
    count_width: ClassVar[int] = 3
    """Width, in columns, of the number of results so far."""

    @abstractmethod
    def plan(self, console: Console) -> int:
        """Choose what to run; return the number of results. Nothing is written yet.

        Raises:
            UserError: there is nothing to run.
        """

    def work_folder(self, options: SuiteOptions, held: ExitStack) -> Path:
        """Where to work: as ``options.keep`` says.

        Raises:
            UserError: the folder to keep exists.
        """
        return work_folder(options.keep, held, prefix=f"dsgpt-{self.page.name}-")

    @abstractmethod
    def begin(self, folder: Path, console: Console) -> None:
        """Prepare the work in ``folder``, which exists.

        Raises:
            UserError: the text could not be prepared.
        """

    @abstractmethod
    def results(self) -> Iterator[R]:
        """The results, as they come."""

    @abstractmethod
    def line(self, result: R, *, count: str, left: str) -> str:
        """One result for the console; ``count`` is ``[ 7/40]`` and ``left`` ``; 3 min left``, empty after the last."""

    @abstractmethod
    def record(self, results: Sequence[R], *, seconds: float) -> Record:
        """The record of the whole run, which took ``seconds``."""

    @abstractmethod
    def failures(self, results: Sequence[R], record: Record) -> list[str]:
        """What failed; the exit code is 0 only if this is empty."""

    def closing_lines(self, failures: Sequence[str]) -> list[str]:  # noqa: ARG002 - some suites name them
        """The last lines on the console."""
        return []


def run_suite(suite: SuiteCommand[R], options: SuiteOptions, *, repository: Path) -> int:
    """Run the suite, write its record and its page; return 0 if nothing failed, else ``EXIT_FAILED``.

    Raises:
        UserError: from ``plan``, ``begin`` or ``results``; or the folder to keep exists.
    """
    console, name = Console(speaks=True), suite.page.name
    sources = record_sources(name)
    commit = marked(git_commit(repository, mark=""), sources, repository=repository)
    total, started = suite.plan(console), time.perf_counter()
    load = LoadOfOthers()
    with ExitStack() as held:
        suite.begin(suite.work_folder(options, held), console)
        results = _shown(suite, console, total=total, held=held)
        record: Record = finite(suite.record(results, seconds=time.perf_counter() - started) | load.figures())
    record["git_commit"] = marked(commit, sources, repository=repository)  # marked if one has changed meanwhile
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(options.output, record)
    failures = suite.failures(results, record)
    text = suite.page.text(record, source=options.output.as_posix())
    write_page(options.page, text, record=record, name=name, repository=repository)
    last, shown = f"record {options.output}, page {options.page}", next_line(["less", options.page])
    for line in ["", *suite.page.summary(record), busy_words(record), last, *suite.closing_lines(failures), shown]:
        console.say(line)
    return EXIT_FAILED if failures else 0


def _shown(suite: SuiteCommand[R], console: Console, *, total: int, held: ExitStack) -> list[R]:
    """All results; prints a line for each when it comes."""
    progress = console.progress(total=total, what=suite.page.name, unit=suite.unit)
    held.callback(progress.close)
    results: list[R] = []
    for result in suite.results():
        results.append(result)
        progress.advance()
        left = f"; {progress.time_left()} left" if len(results) < total else ""
        count = f"[{len(results):>{suite.count_width}}/{total}]"
        console.say(suite.line(result, count=count, left=left))
    return results


def work_folder(keep: Path | None, held: ExitStack, *, prefix: str) -> Path:
    """The new folder ``keep``; without it, a temporary one with that prefix that ``held`` removes.

    Raises:
        UserError: ``keep`` exists.
    """
    if keep is None:
        return Path(held.enter_context(tempfile.TemporaryDirectory(prefix=prefix)))
    try:
        keep.mkdir(parents=True)
    except FileExistsError as error:
        raise UserError(f"--keep {keep}: exists already: give a new folder") from error
    return keep.resolve()


def record_head(schema_version: str, *, device: str) -> Record:
    """The fields that every record begins with: when, from which code, on which machine."""
    from dsgpt.machine.device import describe_hardware, software_versions  # noqa: PLC0415 - torch takes seconds

    return {
        "schema_version": schema_version,
        "timestamp_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "env": software_versions(),
        "hardware": describe_hardware(device),
    }


def work_facts(device: str) -> Record:
    """The fields of ``work`` that suites on the small model share."""
    from dsgpt.benchmarks.cells import GLOBAL_BATCH, SEQUENCE, shape  # noqa: PLC0415

    return {"global_batch_size": GLOBAL_BATCH, "seq_len": SEQUENCE, "model": shape(device)}


# The flags that several suites have.


def only_flag(metavar: str, what: str) -> Any:
    """``--only``, which selects a part of the suite: empty for all."""
    return flag(str, metavar, f"only these {what} (default: all)", default=(), nargs="+")


def peers_flag(text: str) -> Any:
    """``--peer``, the checkouts of other trainers: ``NAME=FOLDER``."""
    return flag(
        str,
        "NAME=FOLDER",
        f"{text}: nanogpt=FOLDER, whose model.py is executed (default: Hugging Face only)",
        default=(),
        nargs="+",
    )


def device_flag(text: str) -> Any:
    """``--device``."""
    return flag(choice(("cpu", "cuda")), "KIND", f"{text} (default: cpu)", default="cpu")


# What a suite is to the command line: its help, its flags, and what they start.


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A measurement that ``src/benchmark.py`` offers."""

    description: str
    """What it does, what it costs and what its exit codes mean."""
    examples: str
    """The end of its help."""
    options: type[SuiteOptions]
    """The fields are the flags."""
    run: Callable[..., int]
    """Runs it as its options say, with the scripts and recipes of ``repository``; returns the exit code."""
    page: SuitePage

"""What every suite's command does: run it, show its progress, write its record and the page made from it."""

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from dsgpt.benchmarks.harness.pages import Record, SuitePage, write_page
from dsgpt.benchmarks.harness.sources import source_hashes, sources_paragraph
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.common.measured import busy_words
from dsgpt.common.next_step import next_line
from dsgpt.runtime.load import LoadOfOthers
from dsgpt.telemetry.console import Console
from dsgpt.telemetry.record import finite
from dsgpt.telemetry.sources import note_sources, require_sources_file, unchanged

EXIT_FAILED = 1
"""A result failed; the page says which."""
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """The options of every suite's command line; each suite adds its own."""

    output: Path
    """The record to write."""
    page: Path
    """The page to write."""
    keep: Path | None
    """Where to leave the suite's work; None to remove it."""

    @property
    def whole(self) -> bool:
        """Whether the options select the whole suite."""
        return True


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
        UserError: from ``plan``, ``begin`` or ``results``; the folder to keep exists; or the ``SOURCES.json`` next to
            the record cannot be read.
    """
    console, name = Console(speaks=True), suite.page.name
    require_sources_file(options.output.parent)
    before, total, started = source_hashes(repository, name), suite.plan(console), time.perf_counter()
    load = LoadOfOthers()
    with ExitStack() as held:
        suite.begin(suite.work_folder(options, held), console)
        results = _shown(suite, console, total=total, held=held)
        record: Record = finite(suite.record(results, seconds=time.perf_counter() - started) | load.figures())
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(options.output, record)
    failures = suite.failures(results, record)
    note_sources(
        options.output.parent,
        options.output,
        git_commit=record["git_commit"],
        sources=unchanged(before, source_hashes(repository, name)),
        complete=options.whole and not failures,
    )
    text = suite.page.text(record, source=options.output.as_posix())
    sources = sources_paragraph(options.output, name=name, repository=repository)
    write_page(options.page, text, record=record, sources=sources)
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
    from dsgpt.runtime.device import describe_hardware  # noqa: PLC0415 - torch takes seconds
    from dsgpt.telemetry.environment import git_commit, software_versions  # noqa: PLC0415

    return {
        "schema_version": schema_version,
        "timestamp_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "env": software_versions(),
        "hardware": describe_hardware(device),
    }


def work_facts(device: str) -> Record:
    """The fields of ``work`` that suites on the small model share."""
    from dsgpt.benchmarks.harness.work import GLOBAL_BATCH, SEQUENCE, shape  # noqa: PLC0415

    return {"global_batch_size": GLOBAL_BATCH, "seq_len": SEQUENCE, "model": shape(device)}

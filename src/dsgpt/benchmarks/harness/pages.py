"""Reads records and writes their pages."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dsgpt.benchmarks.harness.sources import sources_paragraph
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_atomic
from dsgpt.common.json_files import JsonError, clipped_text, read_object
from dsgpt.common.measured import BUSY, NO_DIFFERENCE, busy_words, no_difference

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
    sources = sources_paragraph(record_file, name=suite.name, repository=repository)
    with wrong_records_refused(record_file, of=suite.of):
        write_page(page, suite.text(record, source=record_file.as_posix()), record=record, sources=sources)


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


def write_page(page: Path, text: str, *, record: Record, sources: str) -> None:
    """Write ``text`` to ``page``; before its first ``##`` heading ``sources``, and whether the machine was busy."""
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

"""From which source files a record was made, and which of them have changed since. Imports no torch.

``SOURCES.json`` beside the records names for each of them the commit and the sha256 of every source file. The records
themselves stay as they are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

from dsgpt.common.errors import UserError
from dsgpt.common.files import sha256_of, write_json_atomic
from dsgpt.common.json_files import JsonError, read_as
from dsgpt.common.measured import BUSY

SOURCES_FILE = "SOURCES.json"
CHANGED_MEANWHILE = "changed while the record was made"
"""Replaces the hash of such a file. It equals no hash, because the record belongs to no single version of the file."""

PARAGRAPH = "Sources: "
"""The beginning of a page's paragraph about the sources of its records."""

Hashes = dict[str, str]
"""Paths below the repository, with ``/``, to sha256 as lower-case hex."""


@dataclass(frozen=True, kw_only=True)
class MadeFrom:
    """What one record was made from."""

    git_commit: str | None
    record_sha256: str
    """Of the record itself: the entry says nothing about another record at the same path."""
    sources: Hashes
    complete: bool = True
    """Whether the whole suite was run, and nothing failed."""


@dataclass(frozen=True, kw_only=True)
class SourcesFile:
    """The contents of ``SOURCES.json``."""

    records: dict[str, MadeFrom] = field(default_factory=dict)
    """By the record's path below the folder of ``SOURCES.json``, with ``/``."""


def hash_files(repository: Path, files: Iterable[Path]) -> Hashes:
    """The sha256 of each of ``files`` by its path below ``repository``, sorted."""
    return {path.relative_to(repository).as_posix(): sha256_of(path) for path in sorted(files)}


def unchanged(before: Hashes, after: Hashes) -> Hashes:
    """``before``, with ``CHANGED_MEANWHILE`` for every file that differs in ``after``, is missing or is new there."""
    return {
        name: before[name] if name in before and before[name] == after.get(name) else CHANGED_MEANWHILE
        for name in sorted(before.keys() | after.keys())
    }


def changed_files(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Files that differ, that are gone or that are new, sorted."""
    return sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))


def require_sources_file(folder: Path) -> None:
    """Refuse a ``SOURCES.json`` in ``folder`` that ``note_sources`` could not extend. It need not exist.

    Raises:
        UserError: it cannot be read.
    """
    _read(folder)


def note_sources(folder: Path, record: Path, *, git_commit: str | None, sources: Hashes, complete: bool = True) -> None:
    """Enter ``record``, a file below ``folder``, into the ``SOURCES.json`` of ``folder``.

    Raises:
        UserError: there is a ``SOURCES.json`` that cannot be read.
    """
    entry = MadeFrom(git_commit=git_commit, record_sha256=sha256_of(record), sources=sources, complete=complete)
    records = _read(folder).records | {record.relative_to(folder).as_posix(): entry}
    write_json_atomic(folder / SOURCES_FILE, asdict(SourcesFile(records=dict(sorted(records.items())))))


def made_from(record: Path) -> MadeFrom | None:
    """The entry of ``record`` in the ``SOURCES.json`` of its folder, or of the folder above (for the record of a run).

    None if there is no entry, or only that of an earlier record at the same path.

    Raises:
        UserError: a ``SOURCES.json`` cannot be read.
    """
    if not record.is_file():
        return None
    path = record.absolute()
    for folder in path.parents[:2]:
        entry = _read(folder).records.get(path.relative_to(folder).as_posix())
        if entry is not None and entry.record_sha256 == sha256_of(record):
            return entry
    return None


def by_folder(names: Sequence[str]) -> str:
    """``src/dsgpt/data: loader.py, order.py; src: gpt2.py``."""
    groups = groupby(names, key=lambda name: name.rpartition("/")[0])
    return "; ".join(f"{folder}: {', '.join(name.rpartition('/')[2] for name in found)}" for folder, found in groups)


def without_sources(page: str) -> str:
    """``page`` without what is written beside its text: the paragraphs about sources and about a busy machine."""
    return "\n\n".join(part for part in page.split("\n\n") if not part.startswith((PARAGRAPH, BUSY)))


def _read(folder: Path) -> SourcesFile:
    file = folder / SOURCES_FILE
    if not file.exists():
        return SourcesFile()
    try:
        return read_as(file, SourcesFile)
    except JsonError as error:
        raise UserError(f"{file}: cannot be read as the sources of records: {error}; restore or remove it") from error

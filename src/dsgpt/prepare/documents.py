"""Documents and the files they come from. A source can be read repeatedly, and never holds all documents in memory."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dsgpt.common.errors import UserError
from dsgpt.common.files import PRINTABLE

_HASHED_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text. Its token ids end with the end-of-text id."""

    key: str
    """Its name inside the source (relative path, or file and row). It decides the split, so it is the same on every
    machine."""
    text: str
    source_bytes: int
    """Bytes of the source file that this document accounts for, for progress in bytes."""


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file that contains one or more documents."""

    path: Path
    key: str
    """Its name inside the source, with forward slashes."""
    split: str | None
    """``train`` or ``val`` if the set has its own split; None if documents are divided by hash."""
    read: Callable[["SourceFile"], Iterator[Document]]
    """Yields the file's documents in order."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """All input of one preparation."""

    description: str
    """Origin of the text, for the token file's sidecar."""
    files: tuple[SourceFile, ...]
    skipped_binary: int = 0
    """Number of files in the given folders that are not text."""
    skipped_links: tuple[str, ...] = ()
    """Links in the given folders, by the keys that files would have there."""
    same_by_documents: bool = False
    """True if the same documents may come from other files: then the fingerprint is that of the documents."""

    @property
    def has_own_split(self) -> bool:
        """Whether the set is already divided into train and validation."""
        return any(file.split is not None for file in self.files)

    def total_bytes(self) -> int:
        """Bytes of all files, the total for a progress bar."""
        return sum(file.path.stat().st_size for file in self.files)

    def fingerprint(self) -> str:
        """A hash that changes when the input changes.

        It covers the names of all files and their contents. If the files are larger than 256 MiB in total, it covers
        their sizes and times of change instead: reading the contents would take as long as the preparation. With
        ``same_by_documents`` it covers the keys and texts of the documents.
        """
        if self.same_by_documents:
            return self._documents_fingerprint()
        digest = hashlib.sha256()
        small = self.total_bytes() <= _HASHED_BYTES
        for file in self.files:
            status = file.path.stat()
            digest.update(f"{file.key}\0{status.st_size}\0".encode(errors=PRINTABLE))
            digest.update(file.path.read_bytes() if small else str(status.st_mtime_ns).encode())
        return digest.hexdigest()

    def _documents_fingerprint(self) -> str:
        digest = hashlib.sha256()
        for _, document in self.documents():
            if document.text.strip():  # empty ones are neither downloaded nor encoded
                text = document.text.encode()
                digest.update(f"{document.key}\0{len(text)}\0".encode(errors=PRINTABLE) + text)
        return digest.hexdigest()

    def documents(self) -> Iterator[tuple[str | None, Document]]:
        """Every document with its own split or None, in a fixed order; empty ones (nothing but space) included."""
        for file in self.files:
            for document in file.read(file):
                yield file.split, document


def read_text_file(file: SourceFile) -> Iterator[Document]:
    """The whole file as one document, its bytes unchanged (no newline is translated).

    Raises:
        UserError: the file is not UTF-8.
    """
    data = file.path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file.path}: is not UTF-8 text (byte {error.start:,} is 0x{data[error.start]:02x}); convert it, for "
            "example with `iconv -f latin1 -t utf-8`, or leave it out"
        ) from error
    yield Document(key=file.key, text=text, source_bytes=len(data))


def json_lines_reader(*, text_key: str, key_field: str | None = None) -> Callable[[SourceFile], Iterator[Document]]:
    """A reader of JSON lines: one object per line, with its text under ``text_key``; a null text is empty.

    A document's key is the value of ``key_field`` if the row has it, otherwise file name and line number.
    """

    def read(file: SourceFile) -> Iterator[Document]:
        """Yield a document for each line that is not blank."""
        with file.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{file.path}:{number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{where}: is not valid JSON ({error}); one object per line is expected") from error
                text = _row_text(row, text_key=text_key, where=where)
                key = str(row.get(key_field, f"{file.key}:{number}"))
                yield Document(key=key, text=text, source_bytes=len(line))

    return read


def _row_text(row: object, *, text_key: str, where: str) -> str:
    if not isinstance(row, dict):
        raise UserError(f'{where}: is a JSON {type(row).__name__}, not an object like {{"{text_key}": "..."}}')
    if text_key not in row:
        names = ", ".join(map(repr, row)) or "no keys at all"
        raise UserError(f"{where}: has no key {text_key!r}, it has {names}; name the right one with --text_key")
    return checked_text(row[text_key], where)


def parquet_reader(*, text_key: str) -> Callable[[SourceFile], Iterator[Document]]:
    """A reader of the column ``text_key`` of a Parquet file, a batch of rows at a time; a null text is empty."""

    def read(file: SourceFile) -> Iterator[Document]:
        """Yield a document for each row."""
        import pyarrow  # noqa: PLC0415 - a tenth of a second that only Parquet needs
        from pyarrow import parquet  # noqa: PLC0415

        try:
            table = parquet.ParquetFile(file.path)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise UserError(f"{file.path}: is not a readable Parquet file ({str(error).splitlines()[0]})") from error
        with table:
            columns = table.schema_arrow.names
            if text_key not in columns:
                raise UserError(
                    f"{file.path}: has no column {text_key!r}, it has {', '.join(map(repr, columns))}; name the right "
                    "one with --text_key"
                )
            size = file.path.stat().st_size // max(table.metadata.num_rows, 1)
            number = 0
            for batch in table.iter_batches(batch_size=256, columns=[text_key]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    text = checked_text(value, f"{file.path}: row {number}")
                    yield Document(key=f"{file.key}:{number}", text=text, source_bytes=size)

    return read


def checked_text(value: object, where: str) -> str:
    """``value`` as text that UTF-8 can encode; None is the empty text.

    Raises:
        UserError: it is not a string, or has half of a surrogate pair (which an escape in JSON can write).
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(
            f"{where}: the text is a {type(value).__name__}, not a string; name another key with --text_key"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: the text is not valid Unicode ({error.reason} at {error.start:,})") from error
    return value

"""Documents, the files they come from, and how a file of each format is read: text, JSON lines, Parquet and Arrow.

A reader takes the file and yields its documents. Text that is not valid Unicode is mended, and the document says so.
"""

import contextlib
import gzip
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from dsgpt.common.errors import UserError
from dsgpt.data.token_file import Stamp

STDIN = Path("-")
"""Standard input, among paths."""


class Document(NamedTuple):
    """One text. Its token ids end with the end-of-text id."""

    key: str
    """Name of the document inside the source (relative path, or file and row). It decides the split, so it is the same
    on every machine."""
    text: str
    data: bytes
    """The text in UTF-8."""
    source_bytes: int
    """Bytes of the source file that this document accounts for, for progress in bytes."""
    place: int = 0
    """Where it begins in the file: the byte of its text or line, or its row."""
    bad: str = ""
    """Why some of its source is not valid UTF-8 or Unicode, so that U+FFFD stands in its place; empty if all is."""

    @property
    def blank(self) -> bool:
        """Whether it is empty, or nothing but space."""
        return not self.text or self.text.isspace()


class SourceFile(NamedTuple):
    """A file that contains one or more documents. There may be a million: so it is a tuple, and has no ``Path``."""

    name: str
    """Its path."""
    key: str
    """Name of the file inside the source, with forward slashes."""
    stamp: Stamp | None
    """Its size and time of change before it is read; None of standard input."""
    read: Callable[["SourceFile"], Iterator[Document]]
    """Yields the file's documents in order. Another process can call it: it is a function of a module, or partial."""
    split: str | None = None
    """``train`` or ``val`` if the set has its own split; None if documents are divided by hash."""
    cut: Callable[["SourceFile"], Iterator["Range"]] | None = None
    """Yields the parts of a large file, if they can be read one by one."""
    unit: Literal["byte", "row"] = "byte"
    """What the ``place`` of a document counts."""
    data: bytes | None = None
    """The contents, if they have been read."""

    @property
    def path(self) -> Path:
        """Its path."""
        return Path(self.name)

    @property
    def size(self) -> int:
        """Bytes of the file; 0 of standard input."""
        return self.stamp.size if self.stamp else 0

    @property
    def plain(self) -> bool:
        """Whether the whole file is one text."""
        return self.read is read_text_file


class Range(NamedTuple):
    """A part of a file with whole documents."""

    size: int
    """Bytes of the file that it accounts for."""
    read: Callable[[SourceFile], Iterator[Document]]
    """As that of ``SourceFile``, for this part."""


# Text, perhaps compressed.

_STREAM_BYTES = 1 << 20
COMPRESSED = (".gz", ".zst")
"""Endings of the names of compressed files."""


def decoded(data: bytes, where: str) -> tuple[str, str]:
    """``data`` as text, and why U+FFFD stands for some of it: that is not UTF-8. Empty if all of it is."""
    try:
        return data.decode(), ""
    except UnicodeDecodeError as error:
        return data.decode(errors="replace"), not_utf8(where, f"byte {error.start:,} is 0x{data[error.start]:02x}")


def not_utf8(where: str, place: str) -> str:
    """The message about a text that is not UTF-8 at ``place``."""
    return (
        f"{where}: is not UTF-8 text ({place}); convert it, for example with `iconv -f latin1 -t utf-8`, leave it out, "
        "or see --on_bad_text"
    )


def read_text_file(file: SourceFile) -> Iterator[Document]:
    """The whole file as one document, its bytes unchanged (no newline is translated)."""
    data = file.data
    if data is None and (file.stamp is None or file.path.suffix in COMPRESSED):
        with _opened(file.path) as opened:
            data = opened.read()
    elif data is None:
        with io.FileIO(file.name) as opened:
            data = opened.readall()
    text, bad = decoded(data, file.name)
    yield Document(file.key, text, text.encode() if bad else data, len(data), bad=bad)


def stdin() -> io.BufferedReader:
    """The bytes of standard input."""
    assert isinstance(sys.stdin.buffer, io.BufferedReader)
    return sys.stdin.buffer


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed if its name ends in ``.gz`` or ``.zst``; or of standard input.

    Raises:
        UserError: it is not compressed as its name says, or is cut off.
    """
    try:
        with _decompressed(path) as opened:
            yield opened
    except (EOFError, OSError, zlib.error) as error:
        if path.suffix not in COMPRESSED or getattr(error, "errno", None):  # those are of the disk
            raise
        raise UserError(
            f"{path}: is not a readable {path.suffix} file ({error}); it may be cut off: compress or fetch it again"
        ) from error


def _decompressed(path: Path) -> AbstractContextManager[IO[bytes]]:
    if path == STDIN:
        return contextlib.nullcontext(stdin())
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.open(path, "rb"), _STREAM_BYTES)
    if path.suffix == ".zst":
        import pyarrow  # noqa: PLC0415 - a tenth of a second that few files need

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), _STREAM_BYTES)
    return path.open("rb")


# Rows: a key or column has the text.

RANGE_BYTES = 1 << 24
"""Least size of a range of rows."""


def checked(value: object, where: str) -> tuple[str, bytes, str]:
    """``value`` as text that UTF-8 can encode, None as the empty text; in UTF-8; and why some of it was replaced.

    Half of a surrogate pair, which an escape in JSON can write, is replaced by U+FFFD.

    Raises:
        UserError: it is not a string.
    """
    text = "" if value is None else value
    if not isinstance(text, str):
        raise UserError(
            f"{where}: the text is a {type(value).__name__}, not a string; name another key with --text_key"
        )
    try:
        return text, text.encode(), ""
    except UnicodeEncodeError as error:
        mended = re.sub("[\ud800-\udfff]", "\ufffd", text)
        what = f"{error.reason} at {error.start:,}"
        return mended, mended.encode(), f"{where}: the text is not valid Unicode ({what}); see --on_bad_text"


def read_json_lines(
    file: SourceFile, *, text_key: str, key_field: str | None = None, start: int = 0, stop: int = 0, first: int = 1
) -> Iterator[Document]:
    """A document for each line that is not blank: an object with its text under ``text_key``; a null text is empty.

    A document's key is the value of ``key_field`` if the row has it, otherwise file name and line number.

    Args:
        file: the file.
        text_key: the key of the text.
        key_field: the key of the document's key.
        start: the byte at which a line begins, and reading.
        stop: the byte at which it ends; 0: at the end of the file.
        first: the number of the first line.

    Raises:
        UserError: a line is not such an object.
    """
    with _opened(file.path) as lines:
        if start:
            lines.seek(start)
        for number, line in enumerate(lines, start=first):
            if stop and start >= stop:
                return
            place, start = start, start + len(line)
            if not line.strip():
                continue
            where = f"{file.path}:{number}"
            whole, bad = decoded(line, where)
            try:
                row = json.loads(whole if bad else line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: is not valid JSON ({error}); one object per line is expected") from error
            if not isinstance(row, dict):
                raise UserError(f'{where}: is a JSON {type(row).__name__}, not an object like {{"{text_key}": "..."}}')
            if text_key not in row:
                names = ", ".join(map(repr, row)) or "no keys at all"
                raise UserError(f"{where}: has no key {text_key!r}, it has {names}; name the right one with --text_key")
            text, data, mended = checked(row[text_key], where)
            yield Document(str(row.get(key_field, f"{file.key}:{number}")), text, data, len(line), place, bad or mended)


def cut_json_lines(file: SourceFile, **reading: Any) -> Iterator[Range]:
    """The ranges of a file of JSON lines; ``reading`` goes to ``read_json_lines``."""
    start, first = 0, 1
    with file.path.open("rb") as lines:
        while block := lines.read(RANGE_BYTES):
            newlines, size = block.count(b"\n"), len(block)
            if not block.endswith(b"\n"):
                rest = lines.readline()
                newlines, size = newlines + rest.endswith(b"\n"), size + len(rest)
            read = partial(read_json_lines, start=start, stop=start + size, first=first, **reading)
            yield Range(size=size, read=read)
            start, first = start + size, first + newlines


def read_parquet(file: SourceFile, *, text_key: str, group: int | None = None, first: int = 0) -> Iterator[Document]:
    """A document for each row of a Parquet file, from the column ``text_key``; a null text is empty.

    Args:
        file: the file.
        text_key: the name of the column.
        group: the only row group to read; None: all.
        first: the number of its first row, from 0.

    Raises:
        UserError: the file cannot be read, or has no such column.
    """
    with opened_table(file.path) as table:
        size = file.size // max(table.metadata.num_rows, 1)
        groups = None if group is None else [group]
        batches = table.iter_batches(batch_size=256, columns=[text_key], row_groups=groups)
        yield from _documents(file, table.schema_arrow.names, text_key, batches, first=first, size=size)


def cut_parquet(file: SourceFile, *, text_key: str) -> Iterator[Range]:
    """The row groups of a Parquet file."""
    with opened_table(file.path) as table:
        counts = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
    first = 0
    for group, count in enumerate(counts):
        read = partial(read_parquet, text_key=text_key, group=group, first=first)
        yield Range(size=file.size * count // max(sum(counts), 1), read=read)
        first += count


def read_arrow(file: SourceFile, *, text_key: str) -> Iterator[Document]:
    """A document for each row of an Arrow file, as ``datasets`` saves them, from the column ``text_key``.

    Raises:
        UserError: the file cannot be read, or has no such column.
    """
    with opened_table(file.path) as table:
        yield from _documents(file, table.schema.names, text_key, table)


def _documents(
    file: SourceFile, columns: list[str], text_key: str, batches: Iterable[Any], *, first: int = 0, size: int = 0
) -> Iterator[Document]:
    """A document for each row of ``batches`` of Arrow; each accounts for ``size`` bytes, or the length of its text."""
    if text_key not in columns:
        raise UserError(
            f"{file.path}: has no column {text_key!r}, it has {', '.join(map(repr, columns))}; name the right one with "
            "--text_key"
        )
    values = (value for batch in batches for value in batch.column(text_key).to_pylist())
    for row, value in enumerate(values, start=first):
        text, data, bad = checked(value, f"{file.path}: row {row + 1}")
        yield Document(f"{file.key}:{row + 1}", text, data, size or len(text), row, bad)


_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


@contextlib.contextmanager
def opened_table(path: Path) -> Iterator[Any]:
    """The open Parquet file, or Arrow file: a stream of record batches.

    Raises:
        UserError: it cannot be read, now or while it is open; or, of Arrow, does not say where it ends, as after a full
            disk.
    """
    import pyarrow  # noqa: PLC0415 - a tenth of a second that only these need
    from pyarrow import parquet  # noqa: PLC0415

    kind = "Parquet file" if path.suffix == ".parquet" else "Arrow stream"
    try:
        if path.suffix == ".parquet":
            with parquet.ParquetFile(path) as table:
                yield table
            return
        with pyarrow.ipc.open_stream(pyarrow.OSFile(str(path))) as table:
            with path.open("rb") as file:
                file.seek(-len(_END_OF_STREAM), os.SEEK_END)
                if file.read() != _END_OF_STREAM:
                    raise pyarrow.ArrowInvalid("it is cut off: its end is missing")
            yield table
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: is not a readable {kind} ({str(error).splitlines()[0]})") from error


def found_key(path: Path) -> str:
    """The key or column of the text in a file of rows: ``text`` if it has that, else its only one of strings.

    ``text`` too if that is not clear, or the first row cannot be read: the reader then says what is wrong.
    """
    strings: list[str] = []
    with contextlib.suppress(UserError, ValueError):
        if path.suffix in (".parquet", ".arrow"):
            with opened_table(path) as table:
                schema = table.schema_arrow if path.suffix == ".parquet" else table.schema
            strings = [column.name for column in schema if str(column.type) in ("string", "large_string")]
        else:
            with _opened(path) as lines:
                row = json.loads(next((line for line in lines if line.strip()), b"{}"))
            strings = [key for key, value in row.items() if isinstance(value, str)] if isinstance(row, dict) else []
    return strings[0] if len(strings) == 1 else "text"

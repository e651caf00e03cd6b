"""Sources of text: files, downloaded sets, sets of the hub, and two corpora that need no download.

``python-transformers`` is the same text on every machine: 8 MB of sources of the package transformers, in the release
that ``requirements.txt`` pins. ``python-stdlib`` is the text that ships with this Python, so it depends on its version:
about 12 MB with CPython from python.org, pyenv or conda. It is somewhat less where a distribution splits the library:
Debian has tkinter, idlelib and others in separate packages.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import platform
import re
import sys
import sysconfig
import tokenize
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Literal

from dsgpt.common.errors import UserError
from dsgpt.common.files import PRINTABLE, printable
from dsgpt.common.json_files import Count, Positive, read_or_refuse

# Documents and the files they come from. A source can be read repeatedly, and never holds all documents in memory.

_HASHED_BYTES = 1 << 28
STDIN = Path("-")
"""Standard input, among paths."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text. Its token ids end with the end-of-text id."""

    key: str
    """Name of the document inside the source (relative path, or file and row). It decides the split, so it is the same
    on every machine."""
    text: str
    source_bytes: int
    """Bytes of the source file that this document accounts for, for progress in bytes."""
    place: int = 0
    """Where it begins in the file: the byte of its text or line, or its row."""
    utf8: bytes | None = None
    """The text in UTF-8, if the source has it."""
    bad: bool = False
    """Whether some of its source was not valid UTF-8 or Unicode, and U+FFFD stands in its place."""


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file that contains one or more documents."""

    path: Path
    key: str
    """Name of the file inside the source, with forward slashes."""
    split: str | None
    """``train`` or ``val`` if the set has its own split; None if documents are divided by hash."""
    read: Callable[["SourceFile"], Iterator[Document]]
    """Yields the file's documents in order. Another process can call it: it is a function of a module, or partial."""
    cut: Callable[["SourceFile"], Iterator["Range"]] | None = None
    """Yields the parts of a large file, if they can be read one by one."""
    unit: Literal["byte", "row"] = "byte"
    """What the ``place`` of a document counts."""

    def size(self) -> int:
        """Bytes of the file; 0 of standard input."""
        return 0 if self.path == STDIN else self.path.stat().st_size


@dataclass(frozen=True, kw_only=True)
class Range:
    """A part of a file with whole documents."""

    size: int
    """Bytes of the file that it accounts for."""
    read: Callable[[SourceFile], Iterator[Document]]
    """As that of ``SourceFile``, for this part."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The whole input of one preparation."""

    description: str
    """Origin of the text, for the token file's sidecar."""
    files: tuple[SourceFile, ...]
    skipped_binary: int = 0
    """Number of files in the given folders that are not text."""
    skipped_links: tuple[str, ...] = ()
    """Links in the given folders, by the keys that files would have there."""
    same_by_documents: bool = False
    """True if the same documents may come from other files: then the fingerprint is that of the documents."""

    def total_bytes(self) -> int:
        """Bytes of all files, the total for a progress bar."""
        return sum(file.size() for file in self.files)

    def fingerprint(self) -> str:
        """A hash that changes when the input changes.

        It covers the names of all files and their contents. If the files are larger than 256 MiB in total, it covers
        their sizes and times of change instead: reading the contents would take as long as the preparation. With
        ``same_by_documents`` it covers the keys and texts of the documents.
        """
        digest = hashlib.sha256()
        if self.same_by_documents:
            for _, document in self.documents():
                if document.text.strip():  # empty ones are neither downloaded nor encoded
                    text = document.text.encode()
                    digest.update(f"{document.key}\0{len(text)}\0".encode(errors=PRINTABLE) + text)
            return digest.hexdigest()
        small = self.total_bytes() <= _HASHED_BYTES
        for file in self.files:
            if file.path == STDIN:
                return os.urandom(32).hex()  # nothing is known of it
            status = file.path.stat()
            digest.update(f"{file.key}\0{status.st_size}\0".encode(errors=PRINTABLE))
            digest.update(file.path.read_bytes() if small else str(status.st_mtime_ns).encode())
        return digest.hexdigest()

    def documents(self) -> Iterator[tuple[str | None, Document]]:
        """Every document with its own split or None, in a fixed order; empty ones (nothing but space) included."""
        for file in self.files:
            for document in file.read(file):
                yield file.split, document


_STREAM_BYTES = 1 << 20
COMPRESSED = (".gz", ".zst")
"""Endings of the names of compressed files."""
RANGE_BYTES = 1 << 24
"""Least size of a range of rows."""


def decoded(data: bytes, where: str, *, strict: bool) -> tuple[str, bool]:
    """``data`` as text, and whether U+FFFD stands for bytes that are not UTF-8.

    Raises:
        UserError: it is not UTF-8, and ``strict``.
    """
    try:
        return data.decode("utf-8"), False
    except UnicodeDecodeError as error:
        if strict:
            raise UserError(
                f"{where}: is not UTF-8 text (byte {error.start:,} is 0x{data[error.start]:02x}); convert it, for "
                "example with `iconv -f latin1 -t utf-8`, leave it out, or see --on_bad_text"
            ) from error
        return data.decode("utf-8", "replace"), True


def read_text_file(file: SourceFile, *, strict: bool = True) -> Iterator[Document]:
    """The whole file as one document, its bytes unchanged (no newline is translated).

    Raises:
        UserError: the file is not UTF-8, and ``strict``.
    """
    with _opened(file.path) as opened:
        data = opened.read()
    text, bad = decoded(data, str(file.path), strict=strict)
    yield Document(key=file.key, text=text, source_bytes=len(data), utf8=None if bad else data, bad=bad)


def read_json_lines(
    file: SourceFile,
    *,
    text_key: str,
    key_field: str | None = None,
    strict: bool = True,
    start: int = 0,
    stop: int | None = None,
    first: int = 1,
) -> Iterator[Document]:
    """A document for each line that is not blank: an object with its text under ``text_key``; a null text is empty.

    A document's key is the value of ``key_field`` if the row has it, otherwise file name and line number.

    Args:
        file: the file.
        text_key: the key of the text.
        key_field: the key of the document's key.
        strict: text that is not valid is an error.
        start: the byte at which a line begins, and reading.
        stop: the byte at which it ends; None: at the end of the file.
        first: the number of the first line.

    Raises:
        UserError: a line is not such an object.
    """
    with _opened(file.path) as lines:
        if start:
            lines.seek(start)
        for number, line in enumerate(lines, start=first):
            if stop is not None and start >= stop:
                return
            place, start = start, start + len(line)
            if line.strip():
                yield json_document(file, line, number, place, text_key=text_key, key_field=key_field, strict=strict)


def _stdin() -> io.BufferedReader:
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
        return contextlib.nullcontext(_stdin())
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.open(path, "rb"), _STREAM_BYTES)
    if path.suffix == ".zst":
        import pyarrow  # noqa: PLC0415 - a tenth of a second that few files need

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), _STREAM_BYTES)
    return path.open("rb")


def json_document(
    file: SourceFile, line: bytes, number: int, place: int, *, text_key: str, key_field: str | None, strict: bool
) -> Document:
    """The document of one ``line``, as ``read_json_lines`` describes."""
    where = f"{file.path}:{number}"
    text, bad = ("", False) if strict else decoded(line, where, strict=False)
    try:
        row = json.loads(text if bad else line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is not valid JSON ({error}); one object per line is expected") from error
    if not isinstance(row, dict):
        raise UserError(f'{where}: is a JSON {type(row).__name__}, not an object like {{"{text_key}": "..."}}')
    if text_key not in row:
        names = ", ".join(map(repr, row)) or "no keys at all"
        raise UserError(f"{where}: has no key {text_key!r}, it has {names}; name the right one with --text_key")
    key = str(row.get(key_field, f"{file.key}:{number}"))
    value, mended = checked_text(row[text_key], where, strict=strict)
    return Document(key=key, text=value, source_bytes=len(line), place=place, bad=bad or mended)


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


def read_parquet(
    file: SourceFile, *, text_key: str, strict: bool = True, group: int | None = None, first: int = 0
) -> Iterator[Document]:
    """A document for each row of a Parquet file, from the column ``text_key``; a null text is empty.

    Args:
        file: the file.
        text_key: the name of the column.
        strict: text that is not valid is an error.
        group: the only row group to read; None: all.
        first: the number of its first row, from 0.

    Raises:
        UserError: the file cannot be read, or has no such column.
    """
    with _parquet(file.path) as table:
        _require_column(file.path, table.schema_arrow.names, text_key)
        size = file.path.stat().st_size // max(table.metadata.num_rows, 1)
        groups = None if group is None else [group]
        batches = table.iter_batches(batch_size=256, columns=[text_key], row_groups=groups)
        for row, value in enumerate((value for batch in batches for value in batch.column(0).to_pylist()), start=first):
            text, bad = checked_text(value, f"{file.path}: row {row + 1}", strict=strict)
            yield Document(key=f"{file.key}:{row + 1}", text=text, source_bytes=size, place=row, bad=bad)


def cut_parquet(file: SourceFile, *, text_key: str, strict: bool) -> Iterator[Range]:
    """The row groups of a Parquet file."""
    with _parquet(file.path) as table:
        counts = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
    size, first = file.path.stat().st_size, 0
    for group, count in enumerate(counts):
        read = partial(read_parquet, text_key=text_key, strict=strict, group=group, first=first)
        yield Range(size=size * count // max(sum(counts), 1), read=read)
        first += count


@contextlib.contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """The open Parquet file.

    Raises:
        UserError: it cannot be read, now or while it is open.
    """
    import pyarrow  # noqa: PLC0415 - a tenth of a second that only Parquet needs
    from pyarrow import parquet  # noqa: PLC0415

    try:
        with parquet.ParquetFile(path) as table:
            yield table
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: is not a readable Parquet file ({str(error).splitlines()[0]})") from error


def _require_column(path: Path, columns: Sequence[str], text_key: str) -> None:
    if text_key not in columns:
        raise UserError(
            f"{path}: has no column {text_key!r}, it has {', '.join(map(repr, columns))}; name the right one with "
            "--text_key"
        )


def read_arrow(file: SourceFile, *, text_key: str, strict: bool = True) -> Iterator[Document]:
    """A document for each row of an Arrow file, as ``datasets`` saves them, from the column ``text_key``.

    Raises:
        UserError: the file cannot be read, or has no such column.
    """
    with _arrow(file.path) as table:
        _require_column(file.path, table.schema.names, text_key)
        values = (value for batch in table for value in batch.column(text_key).to_pylist())
        for row, value in enumerate(values):
            text, bad = checked_text(value, f"{file.path}: row {row + 1}", strict=strict)
            yield Document(key=f"{file.key}:{row + 1}", text=text, source_bytes=len(text), place=row, bad=bad)


_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


@contextlib.contextmanager
def _arrow(path: Path) -> Iterator[Any]:
    """The open Arrow file, a stream of record batches.

    Raises:
        UserError: it cannot be read, now or while it is open; or does not say where it ends, as after a full disk.
    """
    import pyarrow  # noqa: PLC0415 - as for Parquet

    try:
        with pyarrow.ipc.open_stream(pyarrow.OSFile(str(path))) as table:
            with path.open("rb") as file:
                file.seek(-len(_END_OF_STREAM), os.SEEK_END)
                if file.read() != _END_OF_STREAM:
                    raise pyarrow.ArrowInvalid("it is cut off: its end is missing")
            yield table
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: is not a readable Arrow stream ({str(error).splitlines()[0]})") from error


def found_key(path: Path) -> str:
    """The key or column of the text in a file of rows: ``text`` if it has that, else its only one of strings.

    ``text`` too if that is not clear, or the first row cannot be read: the reader then says what is wrong.
    """
    strings: list[str] = []
    with contextlib.suppress(UserError, ValueError):
        if path.suffix in (".parquet", ".arrow"):
            if path.suffix == ".arrow":
                with _arrow(path) as table:
                    schema = table.schema
            else:
                with _parquet(path) as table:
                    schema = table.schema_arrow
            strings = [column.name for column in schema if str(column.type) in ("string", "large_string")]
        else:
            with _opened(path) as lines:
                row = json.loads(next((line for line in lines if line.strip()), b"{}"))
            strings = [key for key, value in row.items() if isinstance(value, str)] if isinstance(row, dict) else []
    return strings[0] if len(strings) == 1 else "text"


def checked_text(value: object, where: str, *, strict: bool = True) -> tuple[str, bool]:
    """``value`` as text that UTF-8 can encode, None as the empty text; and whether U+FFFD stands for some of it.

    Raises:
        UserError: it is not a string; or it has half of a surrogate pair (an escape in JSON can write one), and
            ``strict``.
    """
    if value is None:
        return "", False
    if not isinstance(value, str):
        raise UserError(
            f"{where}: the text is a {type(value).__name__}, not a string; name another key with --text_key"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        if strict:
            what = f"{error.reason} at {error.start:,}"
            raise UserError(f"{where}: the text is not valid Unicode ({what}); see --on_bad_text") from error
        return re.sub("[\ud800-\udfff]", "\ufffd", value), True
    return value, False


# The corpora that every machine has without a download.

TRANSFORMERS_NAME = "python-transformers"
_TRANSFORMERS = "5.23.0"
"""The release that ``requirements.txt`` pins. Its wheel is the same for every Python."""
_TRANSFORMERS_SHA256 = "5ef08dabd78ea409da44a686a4d41c3a600a769f3ed97195309d773ae9e69227"
"""The fingerprint of its documents."""
_MODELS = "transformers/models/"
"""Left out: 45 MB in which files are copies of others, so validation would read what training has read."""


def transformers_source() -> Source:
    """The sources of the package transformers without its models, one document per file, in the order of paths.

    Files are those that the installer has noted: others in the same folder do not count. If the text is not that of the
    pinned release, a warning names the sums of both.

    Raises:
        UserError: the package is not installed, or was installed without a list of its files.
    """
    try:
        installed = metadata.distribution("transformers")
    except metadata.PackageNotFoundError as error:
        raise UserError(f"{TRANSFORMERS_NAME}: transformers is not installed; install it, or use --input") from error
    noted = [
        file for file in installed.files or () if file.suffix == ".py" and file.as_posix().startswith("transformers/")
    ]
    keyed = sorted(
        (key, Path(str(file.locate()))) for file in noted if not (key := file.as_posix()).startswith(_MODELS)
    )
    files = [SourceFile(path=path, key=key, split=None, read=read_text_file) for key, path in keyed if path.is_file()]
    if not files:
        raise UserError(
            f"{TRANSFORMERS_NAME}: transformers {installed.version} is installed without a list of its files; install "
            f"it with `pip install transformers=={_TRANSFORMERS}`, or use --input"
        )
    source = Source(
        description=f"sources of the Python package transformers {installed.version}, without its models",
        files=tuple(files),
        same_by_documents=True,
    )
    if (found := source.fingerprint()) != _TRANSFORMERS_SHA256:
        print(
            f"warning: {TRANSFORMERS_NAME} has the sha256 {found} here, from transformers {installed.version}; that of "
            f"{_TRANSFORMERS} is {_TRANSFORMERS_SHA256}: losses differ from those of machines that have this release",
            file=sys.stderr,
        )
    return source


STDLIB_NAME = "python-stdlib"
_EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"}
_EXCLUDED_PREFIXES = (
    "config-",  # how this interpreter was built, with paths of that machine
    "_sysconfigdata",
    "sitecustomize",  # written by the machine's administrator, not part of Python
    "usercustomize",
)
_TOPICS = "pydoc_data/topics.py"


def stdlib_source() -> Source:
    """The standard library's text, one document per file, in the order of paths, without tests.

    It is in the folder of the base interpreter, not of the virtual environment.

    Raises:
        UserError: the folder has no sources (some distributions ship them compiled or zipped).
    """
    root = Path(sysconfig.get_path("stdlib"))
    keyed = sorted((path.relative_to(root).as_posix(), path) for path in _walk(root))
    if not keyed:
        raise UserError(f"{root}: this Python comes without the sources of its library; use another Python, or --input")
    return Source(
        description=f"sources and documentation of the Python {platform.python_version()} standard library",
        files=tuple(SourceFile(path=path, key=key, split=None, read=_read_library_file) for key, path in keyed),
        same_by_documents=True,
    )


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name in _EXCLUDED_FOLDERS or path.name.startswith((*_EXCLUDED_PREFIXES, ".")):
            continue
        if path.is_dir():
            yield from _walk(path)
        elif path.suffix in (".py", ".rst", ".txt"):
            yield path


def _read_library_file(file: SourceFile) -> Iterator[Document]:
    """One document, in the encoding that the file declares (PEP 263; UTF-8 by default).

    The language reference that ``help()`` shows is a dict in a file: one document for each of its topics.
    """
    if file.key == _TOPICS:
        from pydoc_data.topics import topics  # noqa: PLC0415 - 700 kB that only this needs

        size = file.path.stat().st_size // len(topics)
        for number, name in enumerate(sorted(topics)):
            key = f"{_TOPICS.removesuffix('.py')}/{name}.txt"
            yield Document(key=key, text=topics[name], source_bytes=size, place=number)
        return
    with file.path.open("rb") as lines:
        encoding = tokenize.detect_encoding(lines.readline)[0] if file.path.suffix == ".py" else "utf-8"
    data = file.path.read_bytes()
    yield Document(key=file.key, text=data.decode(encoding), source_bytes=len(data))


EMBEDDED: dict[str, Callable[[], Source]] = {TRANSFORMERS_NAME: transformers_source, STDLIB_NAME: stdlib_source}
"""The corpora that need no download, the default first."""

# The documents that download_data.py writes: JSON lines in NAME/raw/, with a record that is written last.

RAW_FOLDER = "raw"
RECORD_NAME = "download.json"
_SPLIT_OF_FILE = {"documents": None, "train": "train", "validation": "val"}


@dataclass(frozen=True, kw_only=True)
class RawFile:
    """Contents of one file."""

    documents: Count
    bytes: Count


@dataclass(frozen=True, kw_only=True)
class RawRecord:
    """The contents of ``download.json``."""

    name: str
    source: str
    """Origin of the text."""
    files: dict[Literal["documents.jsonl", "train.jsonl", "validation.jsonl"], RawFile]
    max_documents: Positive | None = None


def raw_record(folder: Path) -> RawRecord | None:
    """The record of the finished download in ``folder`` (a ``raw`` folder); None if there is none.

    Raises:
        UserError: the record is damaged, or a file is missing.
    """
    path = folder / RECORD_NAME
    if not path.exists():
        return None
    cure = "; fetch again with --overwrite"
    record = read_or_refuse(path, RawRecord, "the record of a download", cure=cure, unknown_keys=True)
    missing = [file for file in record.files if not (folder / file).is_file()]
    if missing:
        raise UserError(f"{folder / missing[0]}: is missing, but {path.name} names it; fetch it again with --overwrite")
    return record


def downloaded_source(name: str, *, output_dir: Path) -> Source | None:
    """The downloaded set ``name``, from ``output_dir/raw`` or else ``data/NAME/raw``; None if it is in neither."""
    for folder in (output_dir / RAW_FOLDER, Path("data") / name / RAW_FOLDER):
        record = raw_record(folder)
        if record and record.name == name:
            reading: dict[str, Any] = {"text_key": "text", "key_field": "key"}
            read, cut = partial(read_json_lines, **reading), partial(cut_json_lines, **reading)
            return Source(
                description=record.source,
                files=tuple(
                    SourceFile(path=folder / file, key=file, split=_SPLIT_OF_FILE[Path(file).stem], read=read, cut=cut)
                    for file in record.files
                ),
                same_by_documents=name in EMBEDDED,  # whose documents come from the installed files, too
            )
    return None


# The sets that come from the Hugging Face hub, and how their rows become documents.


@dataclass(frozen=True, kw_only=True)
class HubSet:
    """Address and contents of a set on the hub."""

    path: str
    """Name on the hub (or ``parquet``, which reads ``data_files``)."""
    about: str
    """One line for the help."""
    config: str | None = None
    data_files: dict[str, str] | None = None
    splits: dict[str, int] = field(default_factory=dict)
    """Rows of each split that is taken (0: not known), for the progress bar if the hub does not give them."""
    text_key: str = "text"
    """The column of the text."""
    articles: bool = False
    """True if a row is a line, and a heading line begins a document (WikiText)."""

    @property
    def source(self) -> str:
        """The address in words."""
        name = self.data_files["train"].removeprefix("hf://datasets/") if self.data_files else self.path
        return f"{name} ({self.config})" if self.config else name


_OPENWEBTEXT = HubSet(
    path="parquet",  # the hub's main branch may have a loading script, which `datasets` refuses to run
    data_files={"train": "hf://datasets/Skylion007/openwebtext/plain_text/train-*.parquet"},
    about="8 million web pages linked from Reddit, 40 GB: the open replication of GPT-2's training text",
    splits={"train": 8_013_769},
)

HUB_SETS = {
    "tinystories": HubSet(
        path="roneneldan/TinyStories",
        about="2.1 million short stories in a small child's words, 2 GB; has a validation split",
        splits={"train": 2_119_719, "validation": 21_990},
    ),
    "wikitext-103": HubSet(
        path="Salesforce/wikitext",
        config="wikitext-103-raw-v1",
        about="28,475 good and featured Wikipedia articles, 0.5 GB; has a validation split",
        splits={"train": 1_801_350, "validation": 3_760},
        articles=True,
    ),
    "openwebtext": _OPENWEBTEXT,
    "webtext": replace(
        _OPENWEBTEXT,
        about="OpenAI never published GPT-2's WebText; this name gives OpenWebText, the same as openwebtext",
    ),
    "fineweb-edu": HubSet(
        path="HuggingFaceFW/fineweb-edu",
        config="sample-10BT",
        about="9.7 million educational web pages (the sample of 10 billion tokens), 45 GB",
        splits={"train": 9_672_101},
    ),
}


_TITLE = re.compile(r" = (?!= ).* = \n?", re.DOTALL)
"""`` = Title = ``, and not `` = = Section = = ``."""


def join_articles(lines: Iterable[str]) -> Iterator[str]:
    """WikiText's lines, joined into articles; a title between empty lines begins an article.

    The text does not change: the joined articles equal the joined lines.
    """
    article: list[str] = []
    previous_empty = True
    title = ""  # if an empty line follows it
    for line in lines:
        if title and not line.strip() and "".join(article).strip():
            yield "".join(article)
            article = []
        article.append(title)
        title = line if previous_empty and _TITLE.fullmatch(line) else ""
        article.append("" if title else line)
        previous_empty = not line.strip()
    if text := "".join([*article, title]):
        yield text


# The user's own files and folders as a source.

_SNIFFED_BYTES = 8192


def own_source(inputs: Sequence[Path], *, text_key: str | None, output_dir: Path, strict: bool = True) -> Source:
    """The files among ``inputs``, and every visible file in the folders among them, sorted within each folder.

    ``.jsonl`` (also ``.jsonl.gz`` and ``.jsonl.zst``), ``.parquet`` and ``.arrow`` files contain one document per row;
    any other file is one document of text. Of a folder of ``datasets`` only the Arrow files are read; its splits are
    kept, and ``test`` is left out. Inside folders three things are left out. Files with a zero byte near their start
    are binary (git's rule). ``output_dir`` contains the output of earlier runs. Links may lead to private files.

    Args:
        inputs: files and folders, or ``STDIN`` alone: rows if it begins with a brace, otherwise a text.
        text_key: the key or column of the text; None: ``found_key``.
        output_dir: is not read.
        strict: text that is not valid Unicode is an error.
    """
    below = [pair for root in inputs for pair in _files_of(root, output_dir)]
    links = [key for path, key in below if path.is_symlink() and path not in inputs]
    files = [(path, key) for path, key in below if not path.is_symlink() or path in inputs]
    text = [(path, key) for path, key in files if path in inputs or path.name in _SAVED or not _is_binary(path)]
    saved = [
        path.parent for path, _ in text if path.name in _SAVED
    ]  # by `datasets`: text is in their Arrow files alone
    kept = [(path, key) for path, key in text if path.suffix == ".arrow" or path.parent not in saved]
    splits = {path: _split_of(path) for path, _ in kept}
    own = set(splits.values()) >= {"train", "val"} and None not in splits.values()
    return Source(
        description=", ".join(printable(path.name or path) for path in (root.resolve() for root in inputs)),
        files=tuple(
            SourceFile(
                path=path, key=key, split=splits[path] if own else None, **_reading(path, text_key, strict=strict)
            )
            for path, key in kept
            if splits[path] != "test"
        ),
        skipped_binary=len(files) - len(text),
        skipped_links=tuple(links),
    )


_SAVED = ("dataset_info.json", "state.json", "dataset_dict.json")
"""Files that ``datasets`` saves beside its Arrow files."""


def _split_of(path: Path) -> str | None:
    """The split of a file of a set that ``datasets`` saved with its splits; None for any other file."""
    if path.suffix != ".arrow" or not (path.parent.parent / "dataset_dict.json").exists():
        return None
    return {"train": "train", "validation": "val"}.get(path.parent.name, "test")


def _reading(path: Path, text_key: str | None, *, strict: bool) -> dict[str, Any]:
    """How a file is read, by its name: the fields of a ``SourceFile``."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    stdin_rows = path == STDIN and _stdin().peek(1)[:1] == b"{"
    if not (stdin_rows or name.endswith((".jsonl", ".parquet", ".arrow"))):
        return {"read": partial(read_text_file, strict=strict)}
    rows: dict[str, Any] = {"text_key": text_key or ("text" if path == STDIN else found_key(path)), "strict": strict}
    if name.endswith(".parquet"):
        return {"read": partial(read_parquet, **rows), "cut": partial(cut_parquet, **rows), "unit": "row"}
    if name.endswith(".arrow"):
        return {"read": partial(read_arrow, **rows), "unit": "row"}
    cut = partial(cut_json_lines, **rows) if name == path.name and path != STDIN else None
    return {"read": partial(read_json_lines, **rows), "cut": cut}


def _files_of(root: Path, output_dir: Path) -> Iterator[tuple[Path, str]]:
    """Every visible file or link, with its name inside the source."""
    if root.is_file() or root == STDIN:
        yield root, root.name
        return
    kept_out = output_dir.resolve()
    below = []
    for folder, names, files in os.walk(root):
        here = Path(folder)
        names[:] = [name for name in names if not name.startswith(".") and (here / name).resolve() != kept_out]
        links = [name for name in names if (here / name).is_symlink()]  # to folders; the walk does not follow them
        below += [here / name for name in (*files, *links) if not name.startswith(".")]
    keyed = [(path, path.relative_to(root).as_posix()) for path in below]
    yield from sorted(keyed, key=lambda pair: pair[1])


def _is_binary(path: Path) -> bool:
    if not path.is_file():
        return True  # a pipe or a socket
    if path.name.endswith((".parquet", ".arrow", ".jsonl.gz", ".jsonl.zst")):
        return False
    with path.open("rb") as file:
        return b"\0" in file.read(_SNIFFED_BYTES)

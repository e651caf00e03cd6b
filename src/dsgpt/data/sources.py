"""Sources of text: files, downloaded sets, sets of the hub, and two corpora that need no download.

``python-transformers`` is the same text on every machine: 8 MB of sources of the package transformers, in the release
that ``requirements.txt`` pins. ``python-stdlib`` is the text that ships with this Python, so it depends on its version:
about 12 MB with CPython from python.org, pyenv or conda. It is somewhat less where a distribution splits the library:
Debian has tkinter, idlelib and others in separate packages.
"""

import hashlib
import json
import os
import platform
import re
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

from dsgpt.common.errors import UserError
from dsgpt.common.files import PRINTABLE, printable
from dsgpt.common.json_files import Count, Positive, read_or_refuse

# Documents and the files they come from. A source can be read repeatedly, and never holds all documents in memory.

_HASHED_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text. Its token ids end with the end-of-text id."""

    key: str
    """Name of the document inside the source (relative path, or file and row). It decides the split, so it is the same
    on every machine."""
    text: str
    source_bytes: int
    """Bytes of the source file that this document accounts for, for progress in bytes."""


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file that contains one or more documents."""

    path: Path
    key: str
    """Name of the file inside the source, with forward slashes."""
    split: str | None
    """``train`` or ``val`` if the set has its own split; None if documents are divided by hash."""
    read: Callable[["SourceFile"], Iterator[Document]]
    """Yields the file's documents in order."""


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
        return sum(file.path.stat().st_size for file in self.files)

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
            status = file.path.stat()
            digest.update(f"{file.key}\0{status.st_size}\0".encode(errors=PRINTABLE))
            digest.update(file.path.read_bytes() if small else str(status.st_mtime_ns).encode())
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


def read_json_lines(file: SourceFile, *, text_key: str, key_field: str | None = None) -> Iterator[Document]:
    """A document for each line that is not blank: an object with its text under ``text_key``; a null text is empty.

    A document's key is the value of ``key_field`` if the row has it, otherwise file name and line number.

    Raises:
        UserError: a line is not such an object.
    """
    with file.path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file.path}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: is not valid JSON ({error}); one object per line is expected") from error
            if not isinstance(row, dict):
                raise UserError(f'{where}: is a JSON {type(row).__name__}, not an object like {{"{text_key}": "..."}}')
            if text_key not in row:
                names = ", ".join(map(repr, row)) or "no keys at all"
                raise UserError(f"{where}: has no key {text_key!r}, it has {names}; name the right one with --text_key")
            key = str(row.get(key_field, f"{file.key}:{number}"))
            yield Document(key=key, text=checked_text(row[text_key], where), source_bytes=len(line))


def read_parquet(file: SourceFile, *, text_key: str) -> Iterator[Document]:
    """A document for each row of a Parquet file, from the column ``text_key``; a null text is empty.

    Raises:
        UserError: the file cannot be read, or has no such column.
    """
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
        batches = table.iter_batches(batch_size=256, columns=[text_key])
        for number, value in enumerate((value for batch in batches for value in batch.column(0).to_pylist()), start=1):
            text = checked_text(value, f"{file.path}: row {number}")
            yield Document(key=f"{file.key}:{number}", text=text, source_bytes=size)


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
        for name in sorted(topics):
            yield Document(key=f"{_TOPICS.removesuffix('.py')}/{name}.txt", text=topics[name], source_bytes=size)
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
            read = partial(read_json_lines, text_key="text", key_field="key")
            return Source(
                description=record.source,
                files=tuple(
                    SourceFile(path=folder / file, key=file, split=_SPLIT_OF_FILE[Path(file).stem], read=read)
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


def own_source(inputs: Sequence[Path], *, text_key: str, output_dir: Path) -> Source:
    """The files among ``inputs``, and every visible file in the folders among them, sorted within each folder.

    ``.jsonl`` and ``.parquet`` files contain one document per row; any other file is one document of text. Inside
    folders three things are left out. Files with a zero byte near their start are binary (git's rule). ``output_dir``
    contains the output of earlier runs. Links may lead to private files.
    """
    below = [pair for root in inputs for pair in _files_of(root, output_dir)]
    links = [key for path, key in below if path.is_symlink() and path not in inputs]
    files = [(path, key) for path, key in below if not path.is_symlink() or path in inputs]
    text = [(path, key) for path, key in files if not _is_binary(path) or path in inputs]
    readers = {
        ".jsonl": partial(read_json_lines, text_key=text_key),
        ".parquet": partial(read_parquet, text_key=text_key),
    }
    return Source(
        description=", ".join(printable(path.name or path) for path in (root.resolve() for root in inputs)),
        files=tuple(
            SourceFile(path=path, key=key, split=None, read=readers.get(path.suffix, read_text_file))
            for path, key in text
        ),
        skipped_binary=len(files) - len(text),
        skipped_links=tuple(links),
    )


def _files_of(root: Path, output_dir: Path) -> Iterator[tuple[Path, str]]:
    """Every visible file or link, with its name inside the source."""
    if root.is_file():
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
    if path.suffix == ".parquet":
        return False
    with path.open("rb") as file:
        return b"\0" in file.read(_SNIFFED_BYTES)

"""Sources of text: the user's own files and folders, and two corpora that need no download.

``python-transformers`` is the same text on every machine: 8 MB of sources of the package transformers, in the release
that ``requirements.txt`` pins. ``python-stdlib`` is the text that ships with this Python, so it depends on its version:
about 12 MB with CPython from python.org, pyenv or conda. It is somewhat less where a distribution splits the library:
Debian has tkinter, idlelib and others in separate packages.
"""

import hashlib
import io
import os
import platform
import stat
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dsgpt.common.errors import UserError
from dsgpt.common.files import PRINTABLE, printable
from dsgpt.data import readers
from dsgpt.data.readers import STDIN, Document, SourceFile, read_text_file
from dsgpt.data.token_file import Stamp

SMALL_BYTES = 1 << 28
"""A source up to this size is hashed, and held in memory."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The whole input of one preparation. It can be read repeatedly."""

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
        return sum(file.size for file in self.files)

    def fingerprint(self) -> str:
        """A hash that changes when the input changes.

        It covers the names of all files and their contents. If the files are larger than 256 MiB in total, it covers
        their sizes and times of change instead: reading the contents would take as long as the preparation. With
        ``same_by_documents`` it covers the keys and texts of the documents.
        """
        digest = hashlib.sha256()
        if self.same_by_documents:
            for _, document in self.documents():
                if not document.blank:  # empty ones are neither downloaded nor encoded
                    data = document.data
                    digest.update(f"{document.key}\0{len(data)}\0".encode(errors=PRINTABLE) + data)
            return digest.hexdigest()
        small = self.total_bytes() <= SMALL_BYTES
        for file in self.files:
            if file.stamp is None:
                return os.urandom(32).hex()  # nothing is known of it
            digest.update(f"{file.key}\0{file.stamp.size}\0".encode(errors=PRINTABLE))
            if small:
                digest.update(file.path.read_bytes() if file.data is None else file.data)
            else:
                digest.update(str(file.stamp.mtime_ns).encode())
        return digest.hexdigest()

    def documents(self) -> Iterator[tuple[SourceFile, Document]]:
        """Every document with its file, in a fixed order; empty ones (nothing but space) included.

        Raises:
            UserError: a text is not valid Unicode.
        """
        for file in self.files:
            for document in file.read(file):
                if document.bad:
                    raise UserError(document.bad)
                yield file, document


# The user's own files and folders as a source.

_SNIFFED_BYTES = 8192
_SAVED = ("dataset_info.json", "state.json", "dataset_dict.json")
"""Files that ``datasets`` saves beside its Arrow files."""
_PACKED = (".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow")
_ROWS = (".jsonl", *_PACKED)
"""Endings of the names of files of rows."""


def own_source(inputs: Sequence[Path], *, text_key: str | None, output_dir: Path) -> Source:
    """The files among ``inputs``, and every visible file in the folders among them, sorted within each folder.

    ``.jsonl`` (also ``.jsonl.gz`` and ``.jsonl.zst``), ``.parquet`` and ``.arrow`` files contain one document per row;
    any other file is one document of text. Of a folder of ``datasets`` only the Arrow files are read; its splits are
    kept, and ``test`` is left out. Inside folders three things are left out. Files with a zero byte near their start
    are binary (git's rule). ``output_dir`` contains the output of earlier runs. Links may lead to private files.

    Args:
        inputs: files and folders, or ``STDIN`` alone: rows if it begins with a brace, otherwise a text.
        text_key: the key or column of the text; None: ``found_key``.
        output_dir: is not read.
    """
    found: list[tuple[str, str, os.stat_result | None, bool]] = []
    links: list[str] = []
    for root in inputs:
        named, piped = root.is_file(), root == STDIN
        for path, key in [(str(root), root.name)] if named or piped else _files_below(root, output_dir):
            status = None if piped else root.stat() if named else os.lstat(path)
            if status and stat.S_ISLNK(status.st_mode):
                links.append(key)
            else:
                found.append((path, key, status, named))
    keep = sum(status.st_size for _, _, status, _ in found if status) <= SMALL_BYTES
    # Text is in their Arrow files alone.
    saved = {path.rpartition("/")[0] for path, key, *_ in found if key.rpartition("/")[2] in _SAVED}
    files, binary = [], 0
    for path, key, status, named in found:
        data = None
        if status and not named and not stat.S_ISREG(status.st_mode):  # a pipe or a socket
            binary += 1
            continue
        if status and not key.endswith(_PACKED) and key.rpartition("/")[2] not in _SAVED:
            with io.FileIO(path) as opened:
                data = opened.read(_SNIFFED_BYTES)
                if b"\0" in data and not named:
                    binary += 1
                    continue
                if not keep or key.endswith((".jsonl", *readers.COMPRESSED)):
                    data = None
                elif len(data) != status.st_size:
                    data += opened.readall()
        if not saved or key.endswith(".arrow") or path.rpartition("/")[0] not in saved:
            stamp = Stamp(status.st_size, status.st_mtime_ns) if status else None
            rows = key.endswith(_ROWS) or not status
            reading = _reading(Path(path), text_key) if rows else {"read": read_text_file, "data": data}
            files.append(SourceFile(path, key, stamp, **reading))
    own = {file.split for file in files} >= {"train", "val"} and all(file.split for file in files)
    return Source(
        description=", ".join(printable(path.name or path) for path in (root.resolve() for root in inputs)),
        files=tuple(
            file if own or file.split is None else file._replace(split=None) for file in files if file.split != "test"
        ),
        skipped_binary=binary,
        skipped_links=tuple(links),
    )


def _reading(path: Path, text_key: str | None) -> dict[str, Any]:
    """How a file of rows, or standard input, is read: the fields of a ``SourceFile``."""
    if path == STDIN and readers.stdin().peek(1)[:1] != b"{":
        return {"read": read_text_file}
    key: dict[str, Any] = {"text_key": text_key or ("text" if path == STDIN else readers.found_key(path))}
    if path.suffix == ".parquet":
        return {"read": partial(readers.read_parquet, **key), "cut": partial(readers.cut_parquet, **key), "unit": "row"}
    if path.suffix == ".arrow":
        divided = (path.parent.parent / "dataset_dict.json").exists()  # ``datasets`` saved the set with its splits
        split = {"train": "train", "validation": "val"}.get(path.parent.name, "test") if divided else None
        return {"read": partial(readers.read_arrow, **key), "split": split, "unit": "row"}
    return {
        "read": partial(readers.read_json_lines, **key),
        "cut": partial(readers.cut_json_lines, **key) if path.suffix == ".jsonl" else None,
    }


def _files_below(root: Path, output_dir: Path) -> Iterator[tuple[str, str]]:
    """The path of every visible file or link in a folder, with its name inside the source."""
    kept_out = output_dir.resolve()
    below = []
    for folder, names, files in os.walk(root):
        here = Path(folder)
        names[:] = [name for name in names if not name.startswith(".") and (here / name).resolve() != kept_out]
        links = [name for name in names if (here / name).is_symlink()]  # to folders; the walk does not follow them
        key = "" if here == root else f"{here.relative_to(root).as_posix()}/"
        inside = "" if here == Path() else f"{here}/"
        below += [(key + name, inside + name) for name in (*files, *links) if not name.startswith(".")]
    yield from ((path, key) for key, path in sorted(below))


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
    from importlib import metadata  # noqa: PLC0415 - it imports much, and only this corpus needs it

    try:
        installed = metadata.distribution("transformers")
    except metadata.PackageNotFoundError as error:
        raise UserError(f"{TRANSFORMERS_NAME}: transformers is not installed; install it, or use --input") from error
    noted = {file.as_posix(): Path(str(file.locate())) for file in installed.files or () if file.suffix == ".py"}
    keys = [key for key in sorted(noted) if key.startswith("transformers/") and not key.startswith(_MODELS)]
    files = _stamped(((key, noted[key]) for key in keys if noted[key].is_file()), read_text_file)
    if not files:
        raise UserError(
            f"{TRANSFORMERS_NAME}: transformers {installed.version} is installed without a list of its files; install "
            f"it with `pip install transformers=={_TRANSFORMERS}`, or use --input"
        )
    source = Source(
        description=f"sources of the Python package transformers {installed.version}, without its models",
        files=files,
        same_by_documents=True,
    )
    if (found := source.fingerprint()) != _TRANSFORMERS_SHA256:
        print(
            f"warning: {TRANSFORMERS_NAME} has the sha256 {found} here, from transformers {installed.version}; that of "
            f"{_TRANSFORMERS} is {_TRANSFORMERS_SHA256}: losses differ from those of machines that have this release",
            file=sys.stderr,
        )
    return source


def _stamped(
    keyed: Iterable[tuple[str, Path]], read: Callable[[SourceFile], Iterator[Document]]
) -> tuple[SourceFile, ...]:
    return tuple(SourceFile(str(path), key, Stamp.of(path), read) for key, path in keyed)


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
    if not (keyed := sorted((path.relative_to(root).as_posix(), path) for path in _walk(root))):
        raise UserError(f"{root}: this Python comes without the sources of its library; use another Python, or --input")
    return Source(
        description=f"sources and documentation of the Python {platform.python_version()} standard library",
        files=_stamped(keyed, _read_library_file),
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

        size = file.size // len(topics)
        for number, name in enumerate(sorted(topics)):
            key = f"{_TOPICS.removesuffix('.py')}/{name}.txt"
            yield Document(key, topics[name], topics[name].encode(), size, number)
        return
    with file.path.open("rb") as lines:
        encoding = tokenize.detect_encoding(lines.readline)[0] if file.path.suffix == ".py" else "utf-8"
    data = file.path.read_bytes()
    text = data.decode(encoding)
    yield Document(file.key, text, text.encode(), len(data))


EMBEDDED: dict[str, Callable[[], Source]] = {TRANSFORMERS_NAME: transformers_source, STDLIB_NAME: stdlib_source}
"""The corpora that need no download, the default first."""

"""The corpus ``python-stdlib``: the sources and language documentation that ship with this Python.

Every machine has this text without a download: about 12 MB with CPython from python.org, pyenv or conda, and somewhat
less where a distribution splits the library (Debian has tkinter, idlelib and others in separate packages). It depends
on the Python version: two machines have the same text if the hashes are equal.
"""

import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from dsgpt.common.errors import UserError
from dsgpt.prepare.documents import Document, Source, SourceFile

STDLIB_NAME = "python-stdlib"
_EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"}
_EXCLUDED_PREFIXES = (
    "config-",  # how this interpreter was built, with paths of that machine
    "_sysconfigdata",
    "sitecustomize",  # written by the machine's administrator, not part of Python
    "usercustomize",
)
_TOPICS = "pydoc_data/topics.py"


def stdlib_source(*, root: Path | None = None) -> Source:
    """The standard library's text, one document per file, in the order of paths, without tests.

    Args:
        root: the library's folder; by default that of the base interpreter, not of the virtual environment.

    Raises:
        UserError: the folder has no sources (some distributions ship them compiled or zipped).
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    keyed = sorted((path.relative_to(root).as_posix(), path) for path in _walk(root))
    if not keyed:
        raise UserError(f"{root}: this Python comes without the sources of its library; use another Python, or --input")
    return Source(
        description=f"sources and documentation of the Python {platform.python_version()} standard library",
        files=tuple(
            SourceFile(path=path, key=key, split=None, read=_read_topics if key == _TOPICS else _read_library_file)
            for key, path in keyed
        ),
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
    """One document in the encoding that the file declares (PEP 263; UTF-8 by default)."""
    with file.path.open("rb") as lines:
        encoding = tokenize.detect_encoding(lines.readline)[0] if file.path.suffix == ".py" else "utf-8"
    data = file.path.read_bytes()
    yield Document(key=file.key, text=data.decode(encoding), source_bytes=len(data))


def _read_topics(file: SourceFile) -> Iterator[Document]:
    """The language reference that ``help()`` shows, one document per topic; the file is a dict of topics."""
    from pydoc_data.topics import topics  # noqa: PLC0415 - 700 kB that only this reader needs

    size = file.path.stat().st_size // len(topics)
    for name in sorted(topics):
        yield Document(key=f"{_TOPICS.removesuffix('.py')}/{name}.txt", text=topics[name], source_bytes=size)

"""The user's own files and folders as a source."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from dsgpt.common.files import printable
from dsgpt.prepare.documents import Source, SourceFile, json_lines_reader, parquet_reader, read_text_file

_SNIFFED_BYTES = 8192


def own_source(inputs: Sequence[Path], *, text_key: str, output_dir: Path) -> Source:
    """The files among ``inputs``, and every visible file in the folders among them, sorted within each folder.

    ``.jsonl`` and ``.parquet`` files contain one document per row; any other file is one document of text. Inside
    folders three things are left out: files with a zero byte near their start, which are binary (git's rule);
    ``output_dir``, which contains the output of earlier runs; and links, which may lead to private files.
    """
    below = [pair for root in inputs for pair in _files_of(root, output_dir)]
    links = [key for path, key in below if path.is_symlink() and path not in inputs]
    found = [(path, key) for path, key in below if not path.is_symlink() or path in inputs]
    text = [(path, key) for path, key in found if not _is_binary(path) or path in inputs]
    files = tuple(_source_file(path, key, text_key) for path, key in text)
    return Source(
        description=", ".join(printable(path.name or path) for path in (root.resolve() for root in inputs)),
        files=files,
        skipped_binary=len(found) - len(text),
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


def _source_file(path: Path, key: str, text_key: str) -> SourceFile:
    if path.suffix == ".jsonl":
        read = json_lines_reader(text_key=text_key)
    elif path.suffix == ".parquet":
        read = parquet_reader(text_key=text_key)
    else:
        read = read_text_file
    return SourceFile(path=path, key=key, split=None, read=read)

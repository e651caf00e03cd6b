"""NAME.index beside NAME.bin: where each document of a token file comes from; and NAME.sources.json, the source files.

The index holds one record of 24 bytes a document, in the order of the file, little-endian and without a header. Token
ranges are not stored: the sums of ``tokens`` give them. ``docs/data.md`` specifies both files. Imports no torch.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote, unquote_to_bytes

import numpy as np
from numpy.typing import NDArray

from dsgpt.common.files import is_utf8, write_atomic
from dsgpt.common.json_files import Count, read_or_refuse
from dsgpt.data.token_file import TokenFile, TokenFileError

ENTRY = np.dtype([("hash", "<u8"), ("place", "<u8"), ("file", "<u4"), ("tokens", "<u4")])
"""A document: the first 8 bytes of the SHA-256 of its UTF-8 text, as a little-endian number; its byte offset or row in
the source file; the number of that file. ``tokens`` counts its ids, with the end-of-text id."""
MAX_SOURCES_BYTES = 1 << 30
"""The largest list that is read: ten million files with names of a hundred letters."""
_ENCODED = "file:"
Entries: TypeAlias = NDArray[np.void]
"""Of shape (documents,), dtype ``ENTRY``."""


def document_hash(data: bytes) -> int:
    """The ``hash`` of a document whose UTF-8 text is ``data``."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def index_path(path: Path) -> Path:
    """NAME.index for NAME.bin."""
    return path.with_suffix(".index")


def sources_path(path: Path) -> Path:
    """NAME.sources.json for NAME.bin."""
    return path.with_suffix(".sources.json")


@dataclass(frozen=True, kw_only=True)
class SourceEntry:
    """A source file, as it was when its text was encoded."""

    path: str
    """Relative to the folder of the list, with forward slashes; ``-`` for standard input, or an address. In the file a
    name that is not UTF-8 is ``file:`` and its bytes, percent-encoded."""
    size: Count | None
    """Bytes; None if it is no file."""
    mtime_ns: int | None
    """Time of its last change, in nanoseconds since 1970; None if it is no file."""
    unit: str
    """What ``place`` counts: ``byte`` (of the text, decompressed) or ``row``, both from 0."""


@dataclass(frozen=True, kw_only=True)
class SourceList:
    """The contents of NAME.sources.json."""

    files: list[SourceEntry]
    """``file`` of an index entry counts them from 0."""


def relative(path: Path | str, folder: Path) -> str:
    """``path`` as the list in ``folder`` names it."""
    inside, name = os.path.split(os.path.realpath(path) if os.path.islink(path) else path)  # noqa: PTH114 - quick
    between = _between(inside, folder, os.getcwd())  # noqa: PTH109 - as above
    return name if between == "." else f"{between}/{name}"


@lru_cache(maxsize=1024)
def _between(inside: str, folder: Path, _: str) -> str:
    """The path from ``folder`` to another, both without links: once, not for each of its many files.

    Args:
        inside: the other.
        folder: where it begins.
        _: the working folder, on which the answer depends.
    """
    return Path(os.path.relpath(Path(inside).resolve(), folder.resolve())).as_posix()


def write_sources(path: Path, files: Iterable[SourceEntry]) -> None:
    """Write the list of sources of the token file ``path``, durably."""
    # With an indent, json is ten times slower, and there may be a million files.
    dumps = json.JSONEncoder(separators=(",\n      ", ": ")).encode
    entries = []
    for each in files:
        named = each if is_utf8(each.path) else replace(each, path=_ENCODED + quote(os.fsencode(each.path)))
        entries.append(f"    {{\n      {dumps(vars(named))[1:-1]}\n    }}")
    write_atomic(sources_path(path), ('{\n  "files": [\n' + ",\n".join(entries) + "\n  ]\n}\n").encode())


def read_sources(path: Path) -> list[SourceEntry]:
    """The source files of the token file ``path``.

    Raises:
        TokenFileError: there is no list, or it is none.
    """
    beside = sources_path(path)
    if not beside.exists():
        raise TokenFileError(f"{beside}: is missing; an older preparation wrote none: prepare again with --overwrite")
    cure = "; prepare again with --overwrite"
    what, most = "a list of source files", MAX_SOURCES_BYTES
    return [
        replace(each, path=os.fsdecode(unquote_to_bytes(each.path.removeprefix(_ENCODED))))
        if each.path.startswith(_ENCODED)
        else each
        for each in read_or_refuse(beside, SourceList, what, cure=cure, refusal=TokenFileError, max_bytes=most).files
    ]


def open_index(file: TokenFile) -> Entries:
    """The index of ``file``, shape (documents,), read-only and not loaded into memory.

    Raises:
        TokenFileError: there is no index, or it is not that of the file: its documents or tokens are others.
    """
    beside = index_path(file.path)
    cure = "prepare again with --overwrite"
    try:
        size = beside.stat().st_size
    except FileNotFoundError as error:
        raise TokenFileError(f"{beside}: is missing; an older preparation wrote none: {cure}") from error
    if size == 0 or size % ENTRY.itemsize:
        raise TokenFileError(f"{beside}: {size:,} bytes is not a whole number of entries of {ENTRY.itemsize}; {cure}")
    entries: Entries = np.memmap(beside, dtype=ENTRY, mode="r")
    tokens = int(entries["tokens"].sum(dtype=np.uint64))
    if tokens != file.tokens or len(entries) != file.sidecar.documents:
        raise TokenFileError(
            f"{beside}: has {len(entries):,} documents with {tokens:,} tokens, {file.path.name} has "
            f"{file.sidecar.documents:,} with {file.tokens:,}; {cure}"
        )
    return entries

"""NAME.index beside NAME.bin: where each document of a token file comes from; and NAME.sources.json, the source files.

The index holds one record of 24 bytes a document, in the order of the file, little-endian and without a header. Token
ranges are not stored: the sums of ``tokens`` give them. ``docs/data.md`` specifies both files. ``Addresses`` finds in
them where tokens come from: their document, its source file, its place in it, and its text. Imports no torch.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote, unquote_to_bytes

import numpy as np
from numpy.typing import NDArray

from dsgpt.common.errors import UserError
from dsgpt.common.files import is_utf8, printable, sha256_of, write_atomic
from dsgpt.common.json_files import Count, read_or_refuse
from dsgpt.data.token_file import TokenFile, TokenFileError
from dsgpt.data.vocabulary import Vocabulary, open_vocabulary
from dsgpt.formats.tokenizer_files import TOKENIZER, TOKENIZER_FOLDER

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


def relative(path: Path, folder: Path) -> str:
    """``path`` as the list in ``folder`` names it."""
    inside, name = os.path.split(path.resolve() if path.is_symlink() else path.absolute())
    between = _between(inside, folder.absolute())
    return name if between == "." else f"{between}/{name}"


@lru_cache(maxsize=1024)
def _between(inside: str, folder: Path) -> str:
    """The path from ``folder`` to another, both without links: once, not for each of its many files."""
    return Path(os.path.relpath(Path(inside).resolve(), folder.resolve())).as_posix()


def write_sources(path: Path, files: Iterable[SourceEntry]) -> None:
    """Write the list of sources of the token file ``path``, durably."""
    dumps = json.JSONEncoder().encode  # with an indent, json is ten times slower, and there may be a million files
    entries = []
    for each in files:
        named = each if is_utf8(each.path) else replace(each, path=_ENCODED + quote(os.fsencode(each.path)))
        values = ",\n".join(f'      "{key}": {dumps(value)}' for key, value in vars(named).items())
        entries.append(f"    {{\n{values}\n    }}")
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
    read = read_or_refuse(beside, SourceList, what, cure=cure, refusal=TokenFileError, max_bytes=most)
    return [
        replace(each, path=os.fsdecode(unquote_to_bytes(each.path.removeprefix(_ENCODED))))
        if each.path.startswith(_ENCODED)
        else each
        for each in read.files
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


# The documents of a token file, by their number and by their tokens.

_BLOCK = 1 << 16
"""Documents whose ends are summed at once: the ends of all would take 8 bytes a document of memory."""
LONGEST = 1 << 24
"""Tokens of the longest document that is decoded whole."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """A document of a token file."""

    number: int
    """In the order of the file, from 0."""
    start: int
    """Its first token in the file."""
    stop: int
    """The token after its end-of-text id."""
    source: SourceEntry
    place: int
    """Byte or row in the source, from 0; ``source.unit`` says which."""
    hash: int
    """As in the index."""

    @property
    def origin(self) -> str:
        """``notes/a.txt, byte 0``."""
        return f"{printable(self.source.path)}, {self.source.unit} {self.place:,}"

    @property
    def hex(self) -> str:
        """The hash as the first 16 digits of a SHA-256."""
        return self.hash.to_bytes(8, "little").hex()


def vocabulary_of(file: TokenFile) -> Vocabulary:
    """The tokenizer that made the ids of ``file``, from the folder beside it.

    Raises:
        TokenFileError: there is none, or another one.
    """
    folder, facts = file.path.parent / TOKENIZER_FOLDER, file.sidecar.tokenizer
    if facts is None:
        raise TokenFileError(f"{file.path}: its sidecar names no tokenizer, so its text is unknown")
    if not (folder / TOKENIZER).is_file() or sha256_of(folder / TOKENIZER) != facts.sha256:
        raise TokenFileError(f"{folder}: is not the tokenizer that made {file.path.name}")
    return open_vocabulary(folder)


def decoded(vocabulary: Vocabulary, ids: NDArray[np.unsignedinteger]) -> str:
    """The text of ``ids``, shape (n,), with its special tokens."""
    return str(vocabulary.tokenizer.decode(ids.tolist(), skip_special_tokens=False))


class Addresses:
    """The documents of a token file, by their number and by their tokens.

    Args:
        file: the token file.

    Raises:
        TokenFileError: it has no index, another one's, or no list of sources; or it was written after its sidecar.
    """

    def __init__(self, file: TokenFile) -> None:
        if doubt := file.doubt():
            raise TokenFileError(f"{file.path}: {doubt}: check it first, with `dsgpt data verify {file.path}`")
        self.file, self._ids = file, file.memmap()
        self._sources, self._entries = read_sources(file.path), open_index(file)
        self._blocks = [self._entries["tokens"][at : at + _BLOCK] for at in range(0, len(self._entries), _BLOCK)]
        self._starts = np.cumsum([0, *(block.sum(dtype=np.int64) for block in self._blocks)])
        """The first token of every block of documents, and the end."""
        self._ends = lru_cache(maxsize=16)(self._ends_in)

    def __len__(self) -> int:
        return len(self._entries)

    def _ends_in(self, block: int) -> NDArray[np.int64]:
        return np.asarray(self._starts[block] + np.cumsum(self._blocks[block], dtype=np.int64))

    def number_at(self, token: int) -> int:
        """The number of the document that a token belongs to.

        Raises:
            UserError: the file has no such token.
        """
        if not 0 <= token < self.file.tokens:
            raise UserError(f"{self.file.path}: has no token {token:,}: they are 0 to {self.file.tokens - 1:,}")
        block = int(np.searchsorted(self._starts, token, side="right")) - 1
        return block * _BLOCK + int(np.searchsorted(self._ends(block), token, side="right"))

    def __getitem__(self, number: int) -> Address:
        """The document ``number``.

        Raises:
            UserError: there is none.
        """
        if not 0 <= number < len(self):
            raise UserError(f"{self.file.path}: has no document {number:,}: they are 0 to {len(self) - 1:,}")
        digest, place, source, tokens = self._entries[number].tolist()
        if source >= len(self._sources):
            raise TokenFileError(
                f"{sources_path(self.file.path)}: has no file {source}; prepare again with --overwrite"
            )
        stop = int(self._ends(number // _BLOCK)[number % _BLOCK])
        start, entry = stop - tokens, self._sources[source]
        return Address(number=number, start=start, stop=stop, source=entry, place=place, hash=digest)

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """The tokenizer beside the file; None if the sidecar names none, or another one is there."""
        try:
            return vocabulary_of(self.file)
        except TokenFileError:
            return None

    def text(self, start: int, stop: int) -> str:
        """The text of a range of tokens; without a tokenizer their ids."""
        ids = self._ids[start:stop]
        return decoded(self.vocabulary, ids) if self.vocabulary else f"ids {' '.join(map(str, ids.tolist()))}"

    def agreement(self, address: Address) -> str:
        """Whether a document's tokens, and its source as it is now, have the text that was prepared; in words."""
        path, size, tokens = self.file.path.parent / address.source.path, 0, "the tokens were not compared"
        if self.vocabulary is not None and address.stop - address.start <= LONGEST:
            text = self.text(address.start, address.stop - 1).encode()
            same, size = document_hash(text) == address.hash, len(text)
            tokens = f"the tokens {'decode to this text' if same else 'do not decode to exactly this text'}"
        if change := change_of(address.source, path):
            return f"the source {change}; {tokens}"
        found = [document_hash(text) == address.hash for text in _texts_at(path, address, size)]
        there = "with this text there" if any(found) else "but this text is not there"
        return f"the source is unchanged, {there if found else 'its text was not compared'}; {tokens}"


def _texts_at(path: Path, address: Address, size: int) -> Iterator[bytes]:
    """The texts that may be the document at this address of a source, as UTF-8: all to its end, or ``size`` bytes.

    Of a row, or a line of JSON, each of its strings. None of a source that is compressed.
    """
    if path.suffix in {".gz", ".zst"}:
        return
    with contextlib.suppress(OSError, ValueError, IndexError):  # it was changed, and its time of change set back
        if path.suffix == ".parquet":
            from pyarrow import dataset  # noqa: PLC0415 - a third of a second that few need

            values = dataset.dataset(path, format="parquet").take([address.place]).to_pylist()[0].values()
        elif path.suffix == ".arrow":
            import pyarrow  # noqa: PLC0415 - as above

            table = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()
            values = table.slice(address.place, 1).to_pylist()[0].values()
        else:
            with path.open("rb") as file:
                file.seek(address.place)
                data = file.readline() if path.suffix == ".jsonl" else file.read()
            text = data.decode()
            values = (
                json.loads(text).values() if path.suffix == ".jsonl" else (text, data[:size].decode("utf-8", "ignore"))
            )
        yield from (value.encode() for value in values if isinstance(value, str))


def change_of(source: SourceEntry, path: Path) -> str:
    """How the file of a ``source`` differs from what it was when it was prepared; empty if it does not."""
    if source.size is None:
        return "is no file that could be looked at again"
    try:
        now = path.stat()
    except OSError as error:
        return f"cannot be read any more ({error.strerror})"
    if now.st_size != source.size:
        return f"has changed: it has {now.st_size:,} bytes and had {source.size:,}"
    return "" if now.st_mtime_ns == source.mtime_ns else "was written again since, with as many bytes"


CHANGED_SHOWN = 3
"""Most changed sources that are named in one line."""


def changed_sources(file: TokenFile) -> str:
    """A line that names the sources of ``file`` which changed since it was prepared; empty if none did.

    Also empty if there is no list of sources, or if not one of them is here: the file was prepared elsewhere.
    """
    try:
        sources = [(source, file.path.parent / source.path) for source in read_sources(file.path)]
    except TokenFileError:
        return ""
    changes = [
        f"{path} {change}"
        for source, path in sources
        if source.size is not None and (change := change_of(source, path))
    ]
    if not changes or not any(path.exists() for _, path in sources):
        return ""
    more = f", and {len(changes) - CHANGED_SHOWN:,} more" if len(changes) > CHANGED_SHOWN else ""
    named = printable(", ".join(changes[:CHANGED_SHOWN]))
    return f"{file.path}: {len(changes):,} of its {len(sources):,} sources changed since it was prepared: {named}{more}"

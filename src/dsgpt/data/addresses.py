"""Where the tokens of a token file come from: their document, its source file, its place in it, and its text.

All of it is looked up in the index beside the file (``index.py``). Imports no torch.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsgpt.common.errors import UserError
from dsgpt.common.files import printable, sha256_of
from dsgpt.data import readers
from dsgpt.data.index import SourceEntry, document_hash, open_index, read_sources, sources_path
from dsgpt.data.token_file import TokenFile, TokenFileError
from dsgpt.data.vocabulary import Vocabulary, open_vocabulary
from dsgpt.formats.tokenizer_files import TOKENIZER, TOKENIZER_FOLDER

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
    """The documents of a token file, by their number and by their tokens. Takes 8 bytes of memory a document.

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
        self._ends = np.cumsum(self._entries["tokens"], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._entries)

    def number_at(self, token: int) -> int:
        """The number of the document that a token belongs to.

        Raises:
            UserError: the file has no such token.
        """
        if not 0 <= token < self.file.tokens:
            raise UserError(f"{self.file.path}: has no token {token:,}: they are 0 to {self.file.tokens - 1:,}")
        return int(np.searchsorted(self._ends, token, side="right"))

    def __getitem__(self, number: int) -> Address:
        """The document ``number``.

        Raises:
            UserError: there is none.
        """
        if not 0 <= number < len(self):
            raise UserError(f"{self.file.path}: has no document {number:,}: they are 0 to {len(self) - 1:,}")
        digest, place, source, tokens = self._entries[number].tolist()
        if source >= len(self._sources):
            beside = sources_path(self.file.path)
            raise TokenFileError(f"{beside}: has no file {source}; prepare again with --overwrite")
        stop, entry = int(self._ends[number]), self._sources[source]
        return Address(number=number, start=stop - tokens, stop=stop, source=entry, place=place, hash=digest)

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
            text, bad = readers.decoded(data, "")
            if path.suffix == ".jsonl":
                values = json.loads(text if bad else data).values()
            else:
                values = (text, data[:size].decode("utf-8", "ignore"))
        yield from (readers.checked(value, "")[1] for value in values if isinstance(value, str))


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
    files = [(source, path) for source, path in sources if source.size is not None]
    changes = [f"{path} {change}" for source, path in files if (change := change_of(source, path))]
    if not changes or not any(path.exists() for _, path in sources):
        return ""
    more = f", and {len(changes) - CHANGED_SHOWN:,} more" if len(changes) > CHANGED_SHOWN else ""
    named = printable(", ".join(changes[:CHANGED_SHOWN]))
    return f"{file.path}: {len(changes):,} of its {len(sources):,} sources changed since it was prepared: {named}{more}"

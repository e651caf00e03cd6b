"""Cuts a source into blocks, which are encoded one by one; also a text that is too large to be read as a whole.

Which blocks there are depends on the source alone. So the same command finds again what an earlier one encoded.
"""

import codecs
import hashlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from dsgpt.common.errors import UserError
from dsgpt.data.index import document_hash
from dsgpt.data.readers import COMPRESSED, Document, SourceFile, decoded, not_utf8
from dsgpt.data.sources import Source

BLOCK_BYTES = 1 << 24
"""About how many bytes of text a block has."""
_MOST_FILES = 2048
"""Most files of a block."""
_READ = 1 << 22
_TRAIN, _VAL = 2**64 - 1, 0
"""Positions that put the halves of a lone text into their splits."""


@dataclass(frozen=True, kw_only=True)
class Large:
    """A part of a document that is encoded in parts: first its facts, then its text in order."""

    role: Literal["facts", "middle", "end"]
    hash: int = 0
    """Of the whole document."""
    characters: int = 0
    """Of the whole document; 0 if nothing but space."""
    position: int | None = None
    """Decides its split instead of a hash of its name."""


class Reading(NamedTuple):
    """Documents of one file, for a worker to read."""

    number: int
    """Of the file in the source."""
    file: SourceFile
    start: int = 0
    end: int = -1
    """Bytes of a part of a large text; -1: the file is read as a whole, or by ``cut``."""
    large: Large | None = None
    val_fraction: float | None = None
    """If given, the file's only document is cut in two, and this share of it is for validation."""

    def items(self) -> Iterator[tuple[Document, Large | None]]:
        """Each document, and what part of it this is; None: all of it."""
        file = self.file
        if self.val_fraction is not None:
            if document := next((one for one in file.read(file) if not one.blank), None):
                halves = cut_in_two(document, val_fraction=self.val_fraction)
                for half, position in zip(halves, (_TRAIN, _VAL), strict=True):
                    digest, characters = document_hash(half.data), len(half.text)
                    facts = Large(role="end", hash=digest, characters=characters, position=position)
                    yield half if file.plain else half._replace(place=document.place), facts
        elif self.large is None:
            for document in file.read(file):
                yield document, None
        elif self.large.role == "facts":
            bad = ""
            try:
                facts = self._facts("strict")
            except UserError as error:
                facts, (bad,) = self._facts("replace"), error.problems
            yield Document(file.key, "", b"", 0, self.start, bad), facts
        else:
            with file.path.open("rb") as opened:
                opened.seek(self.start)
                data = opened.read(self.end - self.start)
            text, bad = decoded(data, f"{file.path}: after byte {self.start:,}")
            yield Document(file.key, text, text.encode() if bad else data, len(data), bad=bad), self.large

    def _facts(self, errors: "Errors") -> Large:
        """The hash and the length of a large text."""
        assert self.large is not None
        digest, characters, blank = hashlib.sha256(), 0, True
        for text, _ in _decoded_blocks(self.file.path, self.start, self.end, errors=errors):
            digest.update(text.encode())
            characters += len(text)
            blank = blank and (not text or text.isspace())
        number = int.from_bytes(digest.digest()[:8], "little")
        return replace(self.large, hash=number, characters=0 if blank else characters)


def cut_in_two(document: Document, *, val_fraction: float) -> tuple[Document, Document]:
    """Cut about ``val_fraction`` off the end of the text for validation, at the start of a line or else of a word.

    Raises:
        UserError: the text is too short.
    """
    text = document.text
    cut = min(max(int(len(text) * (1 - val_fraction)), 1), len(text) - 1)
    last = next((text.rfind(mark, 0, cut) for mark in ("\n", " ") if text.rfind(mark, 0, cut) > 0), cut - 1)
    train, val = text[: last + 1], text[last + 1 :]
    if not train.strip() or not val.strip():
        raise UserError(f"{document.key}: is the only document and too short to be divided; give more text")
    size, data = document.source_bytes * len(train) // len(text), train.encode()
    first = document._replace(text=train, data=data, source_bytes=size)
    rest = document.source_bytes - size
    return first, document._replace(text=val, data=val.encode(), source_bytes=rest, place=document.place + len(data))


@dataclass(frozen=True, kw_only=True)
class Block:
    """What a worker encodes at once."""

    number: int
    first_byte: int
    """Bytes of the source before it."""
    size: int
    """Bytes of the source that it accounts for."""
    readings: tuple[Reading, ...]


def blocks_of(source: Source, *, cuts: bool, val_fraction: float, whitespace_only: bool) -> Iterator[Block]:
    """The blocks of ``source``, in its order.

    Args:
        source: the text.
        cuts: whether a large text may be encoded in pieces.
        val_fraction: share of a lone large text that is cut off its end for validation.
        whitespace_only: a large text may only be cut before a space or newline.
    """
    group: list[Reading] = []
    number = before = total = 0
    for reading, size in _sized(source, cuts=cuts, val_fraction=val_fraction, whitespace_only=whitespace_only):
        if group and (total + size > BLOCK_BYTES or len(group) == _MOST_FILES):
            yield Block(number=number, first_byte=before, size=total, readings=tuple(group))
            number, before, group, total = number + 1, before + total, [], 0
        group.append(reading)
        total += size
    if group:
        yield Block(number=number, first_byte=before, size=total, readings=tuple(group))


def _sized(source: Source, *, cuts: bool, val_fraction: float, whitespace_only: bool) -> Iterator[tuple[Reading, int]]:
    for number, file in enumerate(source.files):
        size, lone = file.size, len(source.files) == 1 and file.plain
        whole = size <= 2 * BLOCK_BYTES or file.path.suffix in COMPRESSED
        if whole or not (file.cut or (file.plain and cuts)):
            yield Reading(number=number, file=file, val_fraction=val_fraction if whole and lone else None), size
        elif file.cut:
            for part in file.cut(file):
                yield Reading(number=number, file=file._replace(read=part.read)), part.size
        else:
            file = file._replace(data=None)  # noqa: PLW2901 - its parts are read from the disk, and sent to workers
            middle = _place_of_cut(file, val_fraction=val_fraction) if lone else size
            for start, end, position in ((0, middle, _TRAIN), (middle, size, _VAL)) if lone else ((0, size, None),):
                facts = Large(role="facts", position=position)
                yield Reading(number=number, file=file, start=start, end=end, large=facts), 0
                offsets = [start, *_cuts(file.path, start, end, whitespace_only=whitespace_only), end]
                for one, two in itertools.pairwise(offsets):
                    piece = Large(role="end" if two == end else "middle")
                    yield Reading(number=number, file=file, start=one, end=two, large=piece), two - one


_SPACE_AFTER_WORD = re.compile(rb"(?<=[!-~\xb0-\xbf])[ \n]")
_NO_LETTER_AFTER_LETTER = re.compile(rb"(?<=[A-Za-z])[\x00-@\[-`{-\x7f]")
"""Where a text of UTF-8 may be cut so that its pieces have its ids. GPT-2's pattern joins no character with a space or
newline after it (0xB0 to 0xBF end no space of Unicode), and no letter with what is none."""


def pieces_of(text: bytes, *, least: int = 1 << 18) -> list[bytes]:
    """``text`` in pieces of at least ``least`` bytes, cut before a space or newline that follows a word."""
    pieces, start = [], 0
    while len(text) - start > least and (found := _SPACE_AFTER_WORD.search(text, start + least)):
        pieces.append(text[start : found.start()])
        start = found.start()
    return [*pieces, text[start:] if start else text]


def _cuts(path: Path, start: int, end: int, *, whitespace_only: bool) -> Iterator[int]:
    """The bytes before which the text from ``start`` to ``end`` is cut, about ``BLOCK_BYTES`` apart."""
    with path.open("rb") as file:
        place = start + BLOCK_BYTES
        while place < end - BLOCK_BYTES // 2:
            file.seek(place - 1)  # the byte before, which the patterns look back at
            window = file.read(min(_READ, end - place + 1))
            if not (found := _SPACE_AFTER_WORD.search(window)) and not whitespace_only:
                found = _NO_LETTER_AFTER_LETTER.search(window)
            place += found.start() - 1 if found else _READ - 1
            if found:
                yield place
                place += BLOCK_BYTES


Errors: TypeAlias = Literal["strict", "replace", "surrogateescape"]


def _decoded_blocks(path: Path, start: int, end: int, *, errors: Errors) -> Iterator[tuple[str, int]]:
    """The text between two bytes of a file, a few megabytes at a time.

    Yields:
        A text, and from how many bytes it was decoded.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    with path.open("rb") as file:
        file.seek(start)
        while start < end:
            data = file.read(min(_READ, end - start))
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(data, final=start + len(data) >= end)
            except UnicodeDecodeError as error:
                raise UserError(not_utf8(str(path), f"byte {start - pending + error.start:,}")) from error
            start += len(data)
            yield text, pending + len(data) - len(decoder.getstate()[0])


def _place_of_cut(file: SourceFile, *, val_fraction: float) -> int:
    """The byte at which a lone text is divided: after the last newline, or else space, before the share of characters.

    What is no UTF-8 counts a character a byte.
    """
    path, place = file.path, 0
    errors: Errors = "surrogateescape"
    wanted = int(sum(len(text) for text, _ in _decoded_blocks(path, 0, file.size, errors=errors)) * (1 - val_fraction))
    for text, used in _decoded_blocks(path, 0, file.size, errors=errors):
        if wanted <= len(text):
            place += len(text[:wanted].encode(errors=errors))
            break
        wanted, place = wanted - len(text), place + used
    with path.open("rb") as data:
        for mark in (b"\n", b" "):
            end = place
            while end > 0:
                begin = max(0, end - _READ)
                data.seek(begin)
                if (found := data.read(end - begin).rfind(mark)) >= 0 and begin + found > 0:
                    return begin + found + 1
                end = begin
    return place

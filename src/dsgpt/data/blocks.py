"""Cuts a source into blocks, which are encoded one by one; also a text that is too large to be read as a whole.

Which blocks there are depends on the source alone. So the same command finds again what an earlier one encoded.
"""

import codecs
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from dsgpt.common.errors import UserError
from dsgpt.data.index import document_hash
from dsgpt.data.sources import COMPRESSED, Document, Source, SourceFile, decoded, read_text_file
from dsgpt.data.vocabulary import cut_in_two

BLOCK_BYTES = 1 << 24
"""About how many bytes of text a block has."""
_MOST_FILES = 2048
"""Most files of a block."""
_READ = 1 << 22


def is_plain(file: SourceFile) -> bool:
    """Whether the whole file is one text."""
    return isinstance(file.read, partial) and file.read.func is read_text_file


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


Item: TypeAlias = tuple[Document, Large | None]
"""A document, and what part of it this is; None: all of it."""


@dataclass(frozen=True, kw_only=True)
class Reading:
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

    def items(self, *, strict: bool) -> Iterator[Item]:
        """The documents, or the part of one."""
        if self.val_fraction is not None:
            document = next((one for one in self.file.read(self.file) if one.text.strip()), None)
            if document is None:
                return
            first = None
            for split, half in cut_in_two(document, val_fraction=self.val_fraction):
                data = half.text.encode()
                place = 0 if first is None or not is_plain(self.file) else first
                first = len(data)
                position = 0 if split == "val" else 2**64 - 1
                facts = Large(role="end", hash=document_hash(data), characters=len(half.text), position=position)
                yield replace(half, place=document.place + place, utf8=data), facts
        elif self.large is None:
            for document in self.file.read(self.file):
                yield document, None
        elif self.large.role == "facts":
            yield self._facts(strict=strict)
        else:
            with self.file.path.open("rb") as file:
                file.seek(self.start)
                data = file.read(self.end - self.start)
            text, bad = decoded(data, f"{self.file.path}: after byte {self.start:,}", strict=strict)
            utf8 = None if bad else data
            yield Document(key=self.file.key, text=text, source_bytes=len(data), utf8=utf8, bad=bad), self.large

    def _facts(self, *, strict: bool) -> tuple[Document, Large]:
        """The document without its text, and the hash of its text."""
        assert self.large is not None
        try:
            digest, characters, blank = self._summed(strict=True)
            bad = False
        except UserError:
            if strict:
                raise
            digest, characters, blank = self._summed(strict=False)
            bad = True
        document = Document(key=self.file.key, text="", source_bytes=0, place=self.start, bad=bad)
        return document, replace(self.large, hash=digest, characters=0 if blank else characters)

    def _summed(self, *, strict: bool) -> tuple[int, int, bool]:
        digest, characters, blank = hashlib.sha256(), 0, True
        errors: Errors = "strict" if strict else "replace"
        for text, _, data in _decoded_blocks(self.file.path, self.start, self.end, errors=errors):
            digest.update(data if strict else text.encode())
            characters += len(text)
            blank = blank and (not text or text.isspace())
        return int.from_bytes(digest.digest()[:8], "little"), characters, blank


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
    number = before = 0
    sized = _sized(source, cuts=cuts, val_fraction=val_fraction, whitespace_only=whitespace_only)
    for readings, size in _grouped(sized):
        yield Block(number=number, first_byte=before, size=size, readings=readings)
        number, before = number + 1, before + size


def _grouped(sized: Iterable[tuple[Reading, int]]) -> Iterator[tuple[tuple[Reading, ...], int]]:
    group: list[Reading] = []
    total = 0
    for reading, size in sized:
        if group and (total + size > BLOCK_BYTES or len(group) == _MOST_FILES):
            yield tuple(group), total
            group, total = [], 0
        group.append(reading)
        total += size
    if group:
        yield tuple(group), total


def _sized(source: Source, *, cuts: bool, val_fraction: float, whitespace_only: bool) -> Iterator[tuple[Reading, int]]:
    for number, file in enumerate(source.files):
        size, lone = file.size(), len(source.files) == 1 and is_plain(file)
        whole = size <= 2 * BLOCK_BYTES or file.path.suffix in COMPRESSED
        if lone and whole:
            yield Reading(number=number, file=file, val_fraction=val_fraction), size
            continue
        if whole or not (file.cut or (is_plain(file) and cuts)):
            yield Reading(number=number, file=file), size
        elif file.cut:
            for part in file.cut(file):
                yield Reading(number=number, file=replace(file, read=part.read)), part.size
        else:
            middle = _place_of_cut(file, val_fraction=val_fraction) if lone else size
            for start, end, position in ((0, middle, 2**64 - 1), (middle, size, 0)) if lone else ((0, size, None),):
                facts = Large(role="facts", position=position)
                yield Reading(number=number, file=file, start=start, end=end, large=facts), 0
                offsets = [start, *_cuts(file.path, start, end, whitespace_only=whitespace_only), end]
                for one, two in itertools.pairwise(offsets):
                    piece = Large(role="end" if two == end else "middle")
                    yield Reading(number=number, file=file, start=one, end=two, large=piece), two - one


SPACE_AFTER_WORD = re.compile(rb"(?<=[!-~\xb0-\xbf])[ \n]")
_NO_LETTER_AFTER_LETTER = re.compile(rb"(?<=[A-Za-z])[\x00-@\[-`{-\x7f]")
"""Where a text of UTF-8 may be cut so that its pieces have its ids. GPT-2's pattern joins no character with a space or
newline after it (0xB0 to 0xBF end no space of Unicode), and no letter with what is none."""


def _cuts(path: Path, start: int, end: int, *, whitespace_only: bool) -> Iterator[int]:
    """The bytes before which the text from ``start`` to ``end`` is cut, about ``BLOCK_BYTES`` apart."""
    with path.open("rb") as file:
        place = start + BLOCK_BYTES
        while place < end - BLOCK_BYTES // 2:
            file.seek(place - 1)  # the byte before, which the patterns look back at
            window = file.read(min(_READ, end - place + 1))
            found = SPACE_AFTER_WORD.search(window)
            if not found and not whitespace_only:
                found = _NO_LETTER_AFTER_LETTER.search(window)
            place += found.start() - 1 if found else _READ - 1
            if found:
                yield place
                place += BLOCK_BYTES


Errors: TypeAlias = Literal["strict", "replace", "surrogateescape"]


def _decoded_blocks(path: Path, start: int, end: int, *, errors: Errors) -> Iterator[tuple[str, int, bytes]]:
    """The text between two bytes of a file, a few megabytes at a time.

    Yields:
        A text; from how many bytes it was decoded; and the bytes that were read. A character that these begin and do
        not end is in the next text.
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
                byte = start - pending + error.start
                raise UserError(
                    f"{path}: is not UTF-8 text (byte {byte:,}); convert it, for example with "
                    "`iconv -f latin1 -t utf-8`, leave it out, or see --on_bad_text"
                ) from error
            start += len(data)
            yield text, pending + len(data) - len(decoder.getstate()[0]), data


def _place_of_cut(file: SourceFile, *, val_fraction: float) -> int:
    """The byte at which a lone text is divided: after the last newline, or else space, before the share of characters.

    Raises:
        UserError: the text is not UTF-8, and is read strictly.
    """
    assert isinstance(file.read, partial)
    path = file.path
    errors: Errors = "strict" if file.read.keywords["strict"] else "surrogateescape"
    size = path.stat().st_size
    counts = [len(text) for text, _, _ in _decoded_blocks(path, 0, size, errors=errors)]
    wanted = int(sum(counts) * (1 - val_fraction))
    place = 0
    for text, used, _ in _decoded_blocks(path, 0, size, errors=errors):
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

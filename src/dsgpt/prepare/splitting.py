"""Which documents are for training and which for validation: a hash of the name decides, not the order."""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from dsgpt.common.errors import UserError
from dsgpt.common.files import PRINTABLE
from dsgpt.prepare.documents import Document

SPLITS = ("train", "val")
_SMALL_DOCUMENTS = 256
_SMALL_CHARACTERS = 1 << 26

Divided = Iterator[tuple[str, Document]]
"""Documents with the split they belong to, in the source's order."""


def position(key: str, *, seed: int) -> float:
    """The position of a document in [0, 1): uniform over keys, a function of seed and key alone."""
    digest = hashlib.sha256(f"{seed}\0{key}".encode(errors=PRINTABLE)).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def divide(documents: Iterable[tuple[str | None, Document]], *, val_fraction: float, seed: int) -> Divided:
    """Assign each non-empty document to a split.

    A set's own split is kept. Otherwise a document is for validation if its ``position`` is below ``val_fraction``, so
    documents that are added or removed later do not move others. In a small collection (up to 256 documents and
    64 Mi characters), where chance could leave a split empty, each split gets at least one document. A single document
    is cut at the start of a line or word.

    Raises:
        UserError: all documents are empty, or a single document is too short to cut.
    """
    filled = ((own, document) for own, document in documents if document.text.strip())
    first = next(filled, None)
    if first is None:
        raise UserError("the input holds no text: every document is empty")
    rest = itertools.chain([first], filled)
    if first[0] is not None:
        return ((own or "train", document) for own, document in rest)
    return _divide_by_position((document for _, document in rest), val_fraction=val_fraction, seed=seed)


def _divide_by_position(documents: Iterator[Document], *, val_fraction: float, seed: int) -> Divided:
    head = _take_small(documents)
    following = next(documents, None)
    if following is None and len(head) == 1:
        yield from _cut_in_two(head[0], val_fraction=val_fraction)
        return
    places = [position(document.key, seed=seed) for document in head]
    # In a small collection the lowest position is always validation and the highest always training.
    low, high = (min(places), max(places)) if following is None else (-1.0, 2.0)
    for place, document in zip(places, head, strict=True):
        yield ("val" if place == low or (place < val_fraction and place != high) else "train"), document
    if following is not None:
        for document in itertools.chain([following], documents):
            yield ("val" if position(document.key, seed=seed) < val_fraction else "train"), document


def _take_small(documents: Iterator[Document]) -> list[Document]:
    head: list[Document] = []
    characters = 0
    for document in documents:
        head.append(document)
        characters += len(document.text)
        if len(head) == _SMALL_DOCUMENTS or characters >= _SMALL_CHARACTERS:
            break
    return head


def _cut_in_two(document: Document, *, val_fraction: float) -> Divided:
    """Cut about ``val_fraction`` off the end of the text for validation, at the start of a line or else of a word."""
    text = document.text
    cut = min(max(int(len(text) * (1 - val_fraction)), 1), len(text) - 1)
    found = next((text.rfind(mark, 0, cut) for mark in ("\n", " ") if text.rfind(mark, 0, cut) > 0), cut - 1)
    train, val = text[: found + 1], text[found + 1 :]
    if not train.strip() or not val.strip():
        raise UserError(f"{document.key}: is the only document and too short to be divided; give more text")
    size = document.source_bytes * len(train) // len(text)
    yield "train", replace(document, text=train, source_bytes=size)
    yield "val", replace(document, text=val, source_bytes=document.source_bytes - size)


def first_documents(divided: Divided, *, count: int, val_fraction: float) -> Divided:
    """The first ``count`` documents: ``val_fraction`` of them (at least one) for validation, the others for training.

    Each split is the beginning of the same split of the whole set: no document is in validation here and in training
    there.
    """
    wanted = {"val": min(max(round(count * val_fraction), 1), count - 1)}
    wanted["train"] = count - wanted["val"]
    for split, document in divided:
        if wanted[split]:
            wanted[split] -= 1
            yield split, document
        if not any(wanted.values()):
            return


_BOUNDARY = re.compile(r"(?<=\S)[ \n]")


def pieces(text: str, *, characters: int) -> Iterator[str]:
    """Cut a long text into pieces of at least ``characters``; the last may be shorter.

    Each piece but the first begins with a space or newline that follows a word.

    GPT-2's pre-tokenizer never joins a word with the space after it, so the pieces have the tokens of the whole text.
    """
    start = 0
    while boundary := _BOUNDARY.search(text, start + characters):
        yield text[start : boundary.start()]
        start = boundary.start()
    yield text[start:]

"""Joins parts into token files with their indexes: which documents, in which split, in which order.

Nothing here depends on the cuts between blocks, so the files are the same for any number of workers or shards.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dsgpt.common.errors import UserError
from dsgpt.data.order import shuffled
from dsgpt.data.parts import Part, Rows
from dsgpt.data.preparation_options import PrepareOptions
from dsgpt.data.sources import Source

SPLITS = ("train", "val")
SMALL_DOCUMENTS = 256
_SMALL_CHARACTERS = 1 << 26
_COPIED_BYTES = 1 << 24
_MOST_OPEN = 256
Numbers: TypeAlias = dict[str, NDArray[np.int64]]
"""The numbers of the documents of each split, by its name."""


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents of consecutive parts, in the order of the source; those left out are not among them."""

    rows: Rows
    """Shape (documents,); of a document in several parts its ``tokens`` are of all of it."""
    starts: NDArray[np.int64]
    """The position of each document's first id in all parts, one after the other."""
    counts: dict[str, int]
    """How many documents were left out or changed, by the reason."""


def gather(parts: Sequence[Part]) -> Documents:
    """The documents of ``parts``.

    Raises:
        UserError: a document has 2^32 ids or more, which an index cannot say.
    """
    rows: Rows = np.concatenate([part.rows for part in parts])
    tokens = rows["tokens"].astype(np.int64)
    firsts = np.flatnonzero(np.append(0, rows["more"])[:-1] == 0)
    totals = np.add.reduceat(tokens, firsts)
    if (totals >= 1 << 32).any():
        raise UserError("a document has 2^32 tokens or more; divide its file")
    whole = rows[firsts].copy()
    whole["tokens"] = totals
    bad, left_out = whole["bad"] > 0, whole["characters"] == 0
    counts = {
        "empty": sum(part.empty for part in parts) + int((left_out & ~bad).sum()),
        "bad text skipped": int((left_out & bad).sum()),
        "bad text replaced": int((~left_out & bad).sum()),
    }
    starts = (np.cumsum(tokens) - tokens)[firsts]
    return Documents(rows=whole[~left_out], starts=starts[~left_out], counts=counts)


def without_duplicates(documents: Documents) -> Documents:
    """The first of all documents with the same hash, and how many were left out.

    Two texts that differ have the same hash of 64 bits with a chance of 3 in a million among 10 million documents.
    """
    _, first = np.unique(documents.rows["hash"], return_index=True)
    first.sort()
    counts = documents.counts | {"duplicates": len(documents.rows) - len(first)}
    return Documents(rows=documents.rows[first], starts=documents.starts[first], counts=counts)


def divided(rows: Rows, *, own: Sequence[str | None], val_fraction: float, count: int | None = None) -> Numbers:
    """The numbers of the documents of each split, in order.

    A set's own split is kept. Otherwise a document is for validation if its position is below ``val_fraction`` of 2^64:
    a hash of its name decides, so documents that are added or removed later do not move others. In a small collection
    (up to 256 documents and 64 Mi characters), chance could leave a split empty. There the lowest position is always
    for validation, and the highest always for training.

    Args:
        rows: of all documents, or of more than ``SMALL_DOCUMENTS`` at their beginning.
        own: the split of each source file, if the set has its own.
        val_fraction: share for validation of a set without.
        count: how many to take of both splits, the first of each; ``val_fraction`` of them, at least one, for
            validation. None: all.
    """
    draws, characters = rows["position"], rows["characters"]
    if own[0] is not None:
        validation = np.array([split == "val" for split in own])[rows["file"]]
    else:
        validation = draws.astype(np.float64) / 2.0**64 < val_fraction
        if 0 < len(rows) <= SMALL_DOCUMENTS and int(characters[:-1].sum()) < _SMALL_CHARACTERS:
            validation = (draws == draws.min()) | (validation & (draws != draws.max()))
    numbers = {"train": np.flatnonzero(~validation), "val": np.flatnonzero(validation)}
    if count is not None:
        held = min(max(round(count * val_fraction), 1), count - 1)
        numbers = {"train": numbers["train"][: count - held], "val": numbers["val"][:held]}
    return numbers


def chosen(options: PrepareOptions, source: Source, parts: Sequence[Part]) -> tuple[Documents, Numbers]:
    """The documents of ``parts``; and the numbers of those of each split, in the order in which they are written.

    With ``--shuffle``, that depends on the seed and the count of a split alone.
    """
    documents = gather(parts)
    if options.deduplicate:
        documents = without_duplicates(documents)
    own = [file.split for file in source.files]
    numbers = divided(documents.rows, own=own, val_fraction=options.share, count=options.num_documents)
    if options.shuffle:
        key = f"dsgpt documents {options.seed}"
        for split, each in numbers.items():
            numbers[split] = each[shuffled(np.arange(len(each)), size=len(each), key=key)]
    return documents, numbers


def ids_of(parts: Sequence[Part], documents: Documents, numbers: NDArray[np.int64], *, width: int) -> Iterator[bytes]:
    """The ids of documents as a token file has them, a few megabytes at a time.

    Args:
        parts: all of them, in order.
        documents: theirs.
        numbers: of the documents that are wanted, in the order of the token file; at least one.
        width: bytes of an id.
    """
    bounds = np.cumsum([0, *(part.rows["tokens"].sum(dtype=np.int64) for part in parts)])
    starts = documents.starts[numbers]
    ends = starts + documents.rows["tokens"][numbers].astype(np.int64)
    breaks = starts[1:] != ends[:-1]  # neighbours are copied together
    first, last = starts[np.append(True, breaks)], ends[np.append(breaks, True)]
    files: dict[int, int] = {}
    with contextlib.ExitStack() as opened:
        for place, end in zip(first.tolist(), last.tolist(), strict=True):
            start = place
            while start < end:
                number = int(np.searchsorted(bounds, start, side="right")) - 1
                stop = min(end, int(bounds[number + 1]), start + _COPIED_BYTES // width)
                if number not in files:
                    if len(files) == _MOST_OPEN:
                        opened.close()
                        files.clear()
                    files[number] = os.open(parts[number].path, os.O_RDONLY)
                    opened.callback(os.close, files[number])
                yield os.pread(files[number], (stop - start) * width, (start - int(bounds[number])) * width)
                start = stop

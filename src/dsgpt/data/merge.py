"""Joins parts into token files with their indexes: which documents, in which split, in which order.

Nothing here depends on the cuts between blocks, so the files are the same for any number of workers or shards.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsgpt.common.errors import UserError
from dsgpt.data.index import ENTRY, Entries
from dsgpt.data.order import shuffled
from dsgpt.data.parts import Part, Rows
from dsgpt.data.token_file import TokenFileWriter

SPLITS = ("train", "val")
SMALL_DOCUMENTS = 256
_SMALL_CHARACTERS = 1 << 26
_COPIED_BYTES = 1 << 24
_MOST_OPEN = 256


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
    firsts = np.flatnonzero(np.append(0, rows["more"][:-1]) == 0) if len(rows) else np.zeros(0, dtype=np.int64)
    totals = np.add.reduceat(tokens, firsts) if len(rows) else tokens
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


def divided(
    rows: Rows, *, own: Sequence[str | None], val_fraction: float, count: int | None = None
) -> dict[str, NDArray[np.int64]]:
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


def shuffle(numbers: dict[str, NDArray[np.int64]], *, seed: int) -> dict[str, NDArray[np.int64]]:
    """``numbers`` in an order that depends on the seed and their count alone."""
    orders = {name: np.arange(len(each)) for name, each in numbers.items()}
    orders = {name: shuffled(each, size=len(each), key=f"dsgpt documents {seed}") for name, each in orders.items()}
    return {name: numbers[name][orders[name]] for name in SPLITS}


def entries_of(documents: Documents, numbers: NDArray[np.int64]) -> Entries:
    """The index of ``numbers``."""
    return documents.rows[numbers][list(ENTRY.names or ())].astype(ENTRY)


class PartReader:
    """Reads ids of parts, by their position in all of them one after the other."""

    def __init__(self, paths: Sequence[Path], parts: Sequence[Part], *, width: int) -> None:
        self._paths, self._width = paths, width
        sizes = [int(part.rows["tokens"].sum(dtype=np.int64)) for part in parts]
        self._bounds = np.append(0, np.cumsum(sizes))
        self._files: dict[int, int] = {}

    def copy(
        self,
        documents: Documents,
        numbers: NDArray[np.int64],
        writer: TokenFileWriter,
        progress: Callable[[int], object],
    ) -> None:
        """Append the documents ``numbers`` to a token file, in that order; ``progress`` gets the bytes as they come."""
        if not len(numbers):
            return
        starts = documents.starts[numbers]
        ends = starts + documents.rows["tokens"][numbers].astype(np.int64)
        breaks = np.flatnonzero(starts[1:] != ends[:-1])  # neighbours are copied together
        first, last = np.append(0, breaks + 1), np.append(breaks, len(numbers) - 1)
        for start, end in zip(starts[first].tolist(), ends[last].tolist(), strict=True):
            place = start
            while place < end:
                part = int(np.searchsorted(self._bounds, place, side="right")) - 1
                stop = min(end, int(self._bounds[part + 1]), place + _COPIED_BYTES // self._width)
                offset = (place - int(self._bounds[part])) * self._width
                writer.append_encoded(data := os.pread(self._file(part), (stop - place) * self._width, offset))
                progress(len(data))
                place = stop
        writer.documents += len(numbers)

    def _file(self, part: int) -> int:
        if part not in self._files:
            if len(self._files) == _MOST_OPEN:
                self.close()
            self._files[part] = os.open(self._paths[part], os.O_RDONLY)
        return self._files[part]

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

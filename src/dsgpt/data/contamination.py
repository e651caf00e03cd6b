"""Evaluation texts that stand in the training data, and documents that resemble each other.

Evaluation texts are found by runs of 13 words, as the GPT-3 paper counts them.
Brown et al. 2020, appendix C: words are lower-cased and without punctuation, and an evaluation text counts as
contaminated if it shares a run of N words with the training data. N is 13; a text of 8 to 12 words is compared as a
whole, and a shorter one not at all.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dsgpt.common.errors import UserError

RUN = 13
"""Words of a run."""
SHORTEST = 8
"""Words of the shortest text that is compared."""
_PUNCTUATION = re.compile(r"[^\w\s]|_")


def words_of(text: str) -> list[str]:
    """The words of a text, lower-cased and without punctuation."""
    return _PUNCTUATION.sub("", text.lower()).split()


@dataclass(kw_only=True)
class Evaluation:
    """Evaluation texts, and which of them stand in documents that ``read`` was given."""

    texts: int = 0
    too_short: int = 0
    """Texts of fewer than ``SHORTEST`` words, which are not compared."""
    found: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By the number of a contaminated text: the first run that it shares, and the document that has it."""
    _numbers: dict[str, int] = field(default_factory=dict)
    """Of the words of all texts."""
    _runs: dict[int, dict[bytes, set[int]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))
    """By the length of a run: the numbers of its words, and the texts that have it."""

    def add(self, texts: Iterable[str]) -> None:
        """Add texts, to be found in what is read from now on."""
        for text in texts:
            words = words_of(text)
            numbers = np.array([self._numbers.setdefault(word, len(self._numbers)) for word in words], dtype=np.int32)
            if (length := min(RUN, len(words))) < SHORTEST:
                self.too_short += 1
            else:
                for start in range(len(words) - length + 1):
                    self._runs[length][numbers[start : start + length].tobytes()].add(self.texts)
            self.texts += 1

    def read(self, text: str, *, document: int) -> None:
        """Look for runs of the texts in a ``document`` of the training data, which has this ``text``."""
        words = words_of(text)
        numbers = np.array([self._numbers.get(word, -1) for word in words], dtype=np.int32)
        for length, runs in self._runs.items():
            before = np.concatenate([[0], np.cumsum(numbers >= 0)])
            # Where ``length`` words in a row are known: in most of a text that is no evaluation's, nowhere.
            for start in np.flatnonzero(before[length:] - before[:-length] == length).tolist():
                for number in runs.get(numbers[start : start + length].tobytes(), ()):
                    self.found.setdefault(number, (" ".join(words[start : start + length]), document))


SHINGLE = 5
"""Ids of a run; documents resemble each other if they have many runs in common."""
_HASHES = 128
_RUNS_AT_ONCE = 1 << 12
_FACTORS = np.array([pow(0x9E3779B97F4A7C15, power, 1 << 64) for power in range(1, SHINGLE + 1)], dtype=np.uint64)


def resembling(
    documents: Iterable[NDArray[np.unsignedinteger]], *, threshold: float
) -> Iterator[tuple[int, int, float]]:
    """Each of the ``documents`` that resembles an earlier one: its number, that of the most similar one, and how much.

    The similarity is that of Jaccard (runs in both, by runs in either), estimated by MinHash with 128 hashes: its
    standard error is at most 0.045. Pairs are found by locality-sensitive hashing, which misses at most one in 20 of
    those that are as similar as ``threshold``, and fewer above it. The result is always the same.

    Args:
        documents: their ids, each of shape (tokens,).
        threshold: the least similarity, from 0.5 to 0.95.

    Raises:
        UserError: datasketch is not installed.
    """
    try:
        from datasketch import MinHash, MinHashLSH  # noqa: PLC0415 - optional
    except ImportError as error:
        raise UserError(
            "--near_duplicates needs datasketch: install it with .venv/bin/python -m pip install -e '.[near]'"
        ) from error
    index, seen = MinHashLSH(threshold=threshold, num_perm=_HASHES, weights=(0.02, 0.98)), list[MinHash]()
    for number, ids in enumerate(documents):
        padded = np.pad(ids.astype(np.uint64), (0, max(0, SHINGLE - len(ids))))
        runs = np.unique(np.lib.stride_tricks.sliding_window_view(padded, SHINGLE) @ _FACTORS >> np.uint64(32))
        sketch = MinHash(num_perm=_HASHES, seed=1, hashfunc=int, scheme="affine32")
        for first in range(0, len(runs), _RUNS_AT_ONCE):
            sketch.update_batch(runs[first : first + _RUNS_AT_ONCE].tolist())
        similar, earlier = max(((sketch.jaccard(seen[key]), -key) for key in index.query(sketch)), default=(0.0, 0))
        if similar >= threshold:
            yield number, -earlier, similar
        index.insert(number, sketch)
        seen.append(sketch)

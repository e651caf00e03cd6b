"""The order of the training windows: a pure function of (seed, sample index), the same at any number of ranks.

Window i of a data set is tokens[i*T : i*T + T + 1]: T inputs and, shifted by one, T targets. Sample n of a run is the
n-th window that it trains on; global batch k holds samples k*B to k*B + B - 1, at any number of ranks and workers.
Each epoch visits the windows in a new order without replacement. Nothing here grows with the data. Imports no torch,
and numpy only to compute.
"""

import hashlib
import heapq
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ROUNDS = 8


def window_count(tokens: int, seq_length: int) -> int:
    """Windows of ``seq_length`` inputs, each with its shifted targets, in ``tokens`` ids."""
    return max(0, (tokens - 1) // seq_length)


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The order of training windows over a whole run."""

    windows: int
    """Windows in the training data."""
    global_batch_size: int
    """Windows per optimizer step."""
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in one epoch; the remaining ``windows % global_batch_size`` windows are dropped."""
        return self.windows // self.global_batch_size

    def at(self, samples: "NDArray[np.int64]") -> "NDArray[np.int64]":
        """The windows of these samples of the run (the first is 0), int64, same shape.

        Many samples take little longer than one: most of the time is that of calling numpy.
        """
        import numpy as np  # noqa: PLC0415 - takes a sixth of the time of --help

        epochs, positions = np.divmod(samples, self.steps_per_epoch * self.global_batch_size)
        return in_epochs(epochs, positions, size=self.windows, key=f"dsgpt order {self.seed}")

    def batches(self, first: int, end: int) -> "NDArray[np.int64]":
        """The windows of the steps from ``first`` up to but not including ``end``, (steps, global_batch_size), int64.

        Steps are counted from 0 over the whole run.
        """
        import numpy as np  # noqa: PLC0415 - as above

        size = self.global_batch_size
        return self.at(np.arange(first * size, end * size)).reshape(-1, size)


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """Part of every global batch that one data-parallel rank reads."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    data_rank: int
    """Rank among the data-parallel ranks; ranks that share a copy of the model have the same one."""
    data_parallel_size: int

    def of(self, global_batch: "NDArray[np.int64]") -> "NDArray[np.int64]":
        """This rank's windows of a global batch (B,), as (gradient_accumulation_steps, micro_batch_size)."""
        shares = global_batch.reshape(self.data_parallel_size, self.gradient_accumulation_steps, self.micro_batch_size)
        own: NDArray[np.int64] = shares[self.data_rank]
        return own


@dataclass(frozen=True, kw_only=True)
class MixtureOrder(SampleOrder):
    """The order of a mixture: after any n samples each source had n times its share of them, to within one sample.

    Each source goes through its own windows, in a new order in each of its epochs. An epoch of the run takes as many
    samples as all sources have windows.
    """

    sizes: tuple[int, ...]
    """Windows of each source. The windows of the first source come first in the numbers that ``at`` returns."""
    parts: tuple[int, ...]
    """Samples of each source in each ``sum(parts)`` samples: its share."""

    @cached_property
    def _turns(self) -> "tuple[NDArray[np.int64], NDArray[np.int64]]":
        """The source of each sample of a period, and how many samples of the same source the period has before it."""
        import numpy as np  # noqa: PLC0415 - as above

        turns = np.array(interleaved(self.parts))
        before = np.empty_like(turns)
        for source, part in enumerate(self.parts):
            before[turns == source] = np.arange(part)
        return turns, before

    def at(self, samples: "NDArray[np.int64]") -> "NDArray[np.int64]":
        """See ``SampleOrder``."""
        import numpy as np  # noqa: PLC0415 - as above

        turns, before = self._turns
        periods, places = np.divmod(samples, len(turns))
        windows, first = np.empty_like(samples), 0
        for source, (size, part) in enumerate(zip(self.sizes, self.parts, strict=True)):
            own = turns[places] == source
            epochs, positions = np.divmod(periods[own] * part + before[places[own]], size)
            key = f"dsgpt order {self.seed} source {source}"
            windows[own] = first + in_epochs(epochs, positions, size=size, key=key)
            first += size
        return windows

    def consumed(self, samples: int) -> list[int]:
        """How many of the first ``samples`` of the run are of each source."""
        periods, rest = divmod(samples, len(self._turns[0]))
        own = self._turns[0][:rest]
        return [periods * part + int((own == source).sum()) for source, part in enumerate(self.parts)]


def interleaved(parts: tuple[int, ...]) -> list[int]:
    """``sum(parts)`` turns, of which source s has ``parts[s]``; after any number, each had its share to within one.

    Turn j of a source, from 0, comes at place j/share rounded down or later, and before (j + 1)/share rounded up. Of
    those that may come, the one with the earliest end is next. All meet their ends: proportionate progress
    (Baruah, Cohen, Plaxton and Varvel 1996, theorem 1) with a single resource.
    """
    period, turns = sum(parts), list[int]()
    released = sorted(
        (turn * period // part, -(-(turn + 1) * period // part), source)
        for source, part in enumerate(parts)
        for turn in range(part)
    )
    waiting: list[tuple[int, int]] = []
    following = iter([*released, (period, 0, 0)])
    release, due, source = next(following)
    for turn in range(period):
        while release <= turn:
            heapq.heappush(waiting, (due, source))
            release, due, source = next(following)
        turns.append(heapq.heappop(waiting)[1])
    return turns


def in_epochs(
    epochs: "NDArray[np.int64]", positions: "NDArray[np.int64]", *, size: int, key: str
) -> "NDArray[np.int64]":
    """Images of ``positions`` under the permutation of ``range(size)`` of each one's epoch; int64, same shape."""
    import numpy as np  # noqa: PLC0415 - as above

    windows = np.empty_like(positions)
    for epoch in np.unique(epochs):
        windows[epochs == epoch] = shuffled(positions[epochs == epoch], size=size, key=f"{key} {epoch}")
    return windows


def shuffled(positions: "NDArray[np.integer]", *, size: int, key: str) -> "NDArray[np.int64]":
    """Images of ``positions`` under a keyed permutation of ``range(size)``; int64, same shape.

    A balanced Feistel network over the next power of four, repeated until the value is below ``size`` (Black and
    Rogaway 2002, "Ciphers with arbitrary finite domains", the cycle-walking cipher). It needs no table, so the cost per
    position does not grow with ``size``, and it depends on no library's random generator. Its rounds mix with
    SplitMix64's finalizer (Steele, Lea, Flood 2014, figure 1).
    """
    import numpy as np  # noqa: PLC0415 - as above

    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
    values = np.asarray(positions).astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for round_key in np.frombuffer(digest, dtype="<u8"):
            mixed = right + round_key  # unsigned: it wraps
            mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
            mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
            left, right = right, left ^ ((mixed ^ (mixed >> 31)) & mask)
        values[outside] = (left << half) | right
        outside = values >= size
    return values.astype(np.int64)

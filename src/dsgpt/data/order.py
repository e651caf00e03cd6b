"""The order of the training windows: a pure function of (seed, position), the same at any number of ranks.

Window i of a token file is ``tokens[i*T : i*T + T + 1]``: T inputs and, shifted by one, T targets. Each epoch visits
the windows in a new order without replacement; global batch k holds the same windows at any number of ranks.
"""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ROUNDS = 8


def window_count(tokens: int, seq_length: int) -> int:
    """Windows of ``seq_length`` inputs, each with its shifted targets, in a file of ``tokens`` ids."""
    return max(0, (tokens - 1) // seq_length)


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The order of training windows over a whole run."""

    windows: int
    """Windows in the training file."""
    global_batch_size: int
    """Windows per optimizer step."""
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in one epoch; the remaining ``windows % global_batch_size`` windows are dropped."""
        return self.windows // self.global_batch_size

    def batch(self, step: int) -> "NDArray[np.int64]":
        """The windows of optimizer step ``step`` (from 0 over the whole run), shape (global_batch_size,), int64."""
        windows: NDArray[np.int64] = self.batches(step, step + 1)[0]
        return windows

    def batches(self, first: int, end: int) -> "NDArray[np.int64]":
        """The windows of the steps from ``first`` up to but not including ``end``, (steps, global_batch_size), int64.

        Many steps take little longer than one: most of the time is that of calling numpy.
        """
        import numpy as np  # noqa: PLC0415 - takes a sixth of the time of --help

        parts = []
        while first < end:
            epoch, index = divmod(first, self.steps_per_epoch)
            steps = min(end - first, self.steps_per_epoch - index)
            positions = np.arange(index * self.global_batch_size, (index + steps) * self.global_batch_size)
            windows = shuffled(positions, size=self.windows, key=f"dsgpt order {self.seed} {epoch}")
            parts.append(windows.reshape(steps, self.global_batch_size))
            first += steps
        return np.concatenate(parts)


def shuffled(positions: "NDArray[np.integer]", *, size: int, key: str) -> "NDArray[np.int64]":
    """Where a keyed permutation of ``range(size)`` sends each of ``positions``; int64, same shape.

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

"""A keyed permutation of the numbers below any size, for orders that need no table."""

import hashlib

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014, figure 1): uint64 to well-mixed uint64, wrapping."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def shuffled(positions: NDArray[np.integer], *, size: int, key: str) -> NDArray[np.int64]:
    """Where a keyed permutation of ``range(size)`` sends each of ``positions``; int64, same shape.

    A balanced Feistel network over the next power of four, repeated until the value is below ``size`` (Black and
    Rogaway 2002, "Ciphers with arbitrary finite domains", the cycle-walking cipher). It needs no table, so the cost per
    position does not grow with ``size``, and it depends on no library's random generator.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
    round_keys = np.frombuffer(digest, dtype="<u8")
    values = np.asarray(positions).astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right + round_key) & mask)
        values[outside] = (left << half) | right
        outside = values >= size
    return values.astype(np.int64)

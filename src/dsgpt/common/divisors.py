"""Divisors and multiples next to a number, for messages that name the nearest valid values."""

import math
from collections.abc import Iterable


def divisors(number: int) -> list[int]:
    """All divisors of ``number``, at least 1, in ascending order; takes milliseconds up to 2**31."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def largest_divisor(number: int, *, at_most: int) -> int:
    """The largest divisor of ``number`` that is not above ``at_most``, which is at least 1."""
    return max(d for d in divisors(number) if d <= at_most)


def divisors_around(number: int, wanted: int) -> str:
    """The nearest divisors of ``number`` below and above ``wanted``, in words: ``2 or 4``."""
    found = divisors(number)
    return in_words([d for d in found if d < wanted][-1:] + [d for d in found if d > wanted][:1])


def multiples_around(number: int, unit: int) -> str:
    """The nearest multiples of ``unit`` below (unless it is 0) and above ``number``, in words: ``6 or 9``."""
    below = number // unit * unit
    return in_words([below, below + unit] if below else [unit])


def in_words(numbers: Iterable[object]) -> str:
    """The numbers, or words, joined by "or": ``2 or 4``."""
    return " or ".join(map(str, numbers))

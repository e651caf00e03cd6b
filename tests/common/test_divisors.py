"""Divisors and multiples next to a number, against counting."""

import pytest

from dsgpt.common.text import divisors, divisors_around, largest_divisor, multiples_around


@pytest.mark.parametrize("number", [*range(1, 50), 97, 360, 4096])
def test_divisors_are_those_that_counting_finds(number):
    expected = [d for d in range(1, number + 1) if number % d == 0]
    assert divisors(number) == expected
    assert largest_divisor(number, at_most=8) == max(d for d in expected if d <= 8)


def test_neighbours_in_words():
    assert [divisors_around(12, wanted) for wanted in (5, 8, 13)] == ["4 or 6", "6 or 12", "12"]
    assert [multiples_around(number, 4) for number in (2, 5, 11)] == ["4", "4 or 8", "8 or 12"]

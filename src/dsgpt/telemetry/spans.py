"""Spans of time: how long at least one of them lasts, and how long two sets of them overlap. Imports no torch."""

from collections.abc import Iterable
from typing import NamedTuple


class Span(NamedTuple):
    """From ``start`` to ``end``, in any unit."""

    start: float
    end: float


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not touch, in order."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.start <= found[-1].end:
            found[-1] = Span(found[-1].start, max(found[-1].end, span.end))
        elif span.end > span.start:
            found.append(span)
    return found


def length(spans: Iterable[Span]) -> float:
    """How long at least one of them lasts."""
    return sum(span.end - span.start for span in merged(spans))


def common(one: Iterable[Span], other: Iterable[Span]) -> list[Span]:
    """The time in which a span of each lasts, as spans that do not touch."""
    first, second, found = merged(one), merged(other), []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i].start, second[j].start), min(first[i].end, second[j].end)
        if start < end:
            found.append(Span(start, end))
        if first[i].end < second[j].end:
            i += 1
        else:
            j += 1
    return found

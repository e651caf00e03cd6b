"""The layout of parameters in ZeRO-1 and 2: one flat buffer per optimizer group, in equal parts, one per rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dsgpt.planning.parameters import ParameterSize, optimizer_groups

_ALIGNMENT = 2
"""Each rank's part is padded to a multiple of this many elements (``nccl_start_alignment_factor``)."""


@dataclass(frozen=True, kw_only=True)
class FlatGroup:
    """One optimizer group in one buffer."""

    sizes: tuple[int, ...]
    """Elements of its parameters, in the order of the buffer."""
    ranks: int

    @property
    def part(self) -> int:
        """Elements that a rank holds, padding included."""
        unit = _ALIGNMENT * self.ranks
        return -(-sum(self.sizes) // unit) * _ALIGNMENT

    @property
    def padded(self) -> int:
        """Elements of the whole buffer."""
        return self.part * self.ranks

    def touched(self, rank: int) -> int:
        """Elements of the parameters that lie in ``rank``'s part, counted whole even where only a piece does."""
        return sum(size for size, _, _ in self._inside(rank))

    def is_one_piece(self, rank: int) -> bool:
        """Whether ``rank``'s part lies within a single parameter."""
        first, end = self._bounds(rank)
        return any(start <= first and start + size >= end for size, start, _ in self._inside(rank))

    def _bounds(self, rank: int) -> tuple[int, int]:
        return rank * self.part, (rank + 1) * self.part

    def _inside(self, rank: int) -> list[tuple[int, int, int]]:
        """Size, start and end of the parameters of which ``rank`` has at least a piece."""
        first, end = self._bounds(rank)
        ends = list(accumulate(self.sizes))
        spans = [(size, stop - size, stop) for size, stop in zip(self.sizes, ends, strict=True)]
        return [(size, start, stop) for size, start, stop in spans if start < end and stop > first]


def flat_groups(parameters: Sequence[ParameterSize], ranks: int) -> list[FlatGroup]:
    """The two groups of ``parameters``, over ``ranks``."""
    groups = filter(None, optimizer_groups(parameters))
    return [FlatGroup(sizes=tuple(part.numel for part in group), ranks=ranks) for group in groups]


def parts(groups: Iterable[FlatGroup]) -> int:
    """Elements of a rank's parts of all groups."""
    return sum(group.part for group in groups)

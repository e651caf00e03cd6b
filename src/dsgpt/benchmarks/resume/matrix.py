"""The cells of the resume suite: every strategy writes the checkpoint that it read, and seeded pairs share a run.

Strategies, and the recipes behind their names, are those of the parity suite.
"""

import random
from dataclasses import dataclass

from dsgpt.benchmarks.harness.cells import ACCUMULATIONS, Cell, by, executed_by
from dsgpt.benchmarks.harness.tested import STRATEGIES

PAIRS, SEED = 30, 4
SAME_TO_A_CHECKPOINT = ("ddp-copied-buckets", "fsdp-kept")
"""Strategies that differ from another one in how they communicate, but not in what is saved."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A run that one strategy starts and another one finishes."""

    source: Cell
    target: Cell

    @property
    def name(self) -> str:
        """The name in console lines, pages and test ids."""
        return f"{by(self.source)} to {by(self.target)}"


def cells(*, accumulation: int = 1, precision: str = "fp32") -> list[Cell]:
    """Every strategy but ``SAME_TO_A_CHECKPOINT``, on every number of ranks that the parity suite runs it on."""
    return [
        Cell(strategy=strategy.name, ranks=ranks, accumulation=accumulation, precision=precision)
        for strategy in STRATEGIES.values()
        for ranks in strategy.ranks
        if strategy.whole and strategy.name not in SAME_TO_A_CHECKPOINT
    ]


def seeded_pairs(count: int = PAIRS, *, seed: int = SEED) -> list[Pair]:
    """``count`` pairs, the same for the same seed. Each side has every strategy once before it has one again."""
    chance = random.Random(seed)
    found: list[Pair] = []
    while len(found) < count:
        drawn = [
            Pair(source=one, target=other) for one, other in zip(_shuffled(chance), _shuffled(chance), strict=True)
        ]
        names = [pair.name for pair in [*found, *drawn]]
        moves = all(executed_by(pair.source) != executed_by(pair.target) for pair in drawn)
        if moves and len(set(names)) == len(names):  # else all of them are drawn again
            found += drawn[: count - len(found)]
    return found


def _shuffled(chance: random.Random) -> list[Cell]:
    """Every strategy once, in a random order, on a random one of its numbers of ranks, with a random accumulation."""
    everywhere = cells()
    names = list(dict.fromkeys(cell.strategy for cell in everywhere))
    chance.shuffle(names)
    return [
        Cell(
            strategy=name,
            ranks=chance.choice([cell.ranks for cell in everywhere if cell.strategy == name]),
            accumulation=chance.choice(ACCUMULATIONS),
        )
        for name in names
    ]


def rewritten() -> list[Cell]:
    """The cells that write what they read: every strategy, in every precision that the product allows on a CPU."""
    low = [cell for cell in cells(precision="bf16") if not STRATEGIES[cell.strategy].fp32_only]
    return [*cells(), *low]


def core_pairs() -> list[Pair]:
    """The pairs of ``make test``: from and to every kind of split, in few launches."""
    return [
        Pair(source=Cell(strategy=one, ranks=here), target=Cell(strategy=other, ranks=there, accumulation=1))
        for one, here, other, there in (
            ("baseline", 1, "zero3", 2),
            ("zero3-offload", 2, "pipeline2-zero1", 4),
            ("pipeline2-zero0", 2, "fsdp", 4),
            ("fsdp", 2, "tensor2-zero1", 4),
            ("tensor2-zero0", 2, "baseline", 1),
            ("sequence2-zero2", 2, "zero2", 4),
        )
    ]


def core_rewritten() -> list[Cell]:
    """The rewritings of ``make test``.

    All strategies on two ranks in fp32. For bf16, and for four ranks, one strategy for each way to keep the state.
    """
    low = ("zero0", "zero1", "zero2", "zero3", "pipeline2-zero1")
    four = ("zero1", "zero3", "fsdp", "tensor2-zero1")
    chosen = {("fp32", 2): STRATEGIES, ("bf16", 2): low, ("fp32", 4): four}
    return [cell for cell in rewritten() if cell.strategy in chosen.get((cell.precision, cell.ranks), ())]

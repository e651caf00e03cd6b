"""What is shown: every strategy gives back the checkpoint that it took, and seeded pairs of strategies share a run.

Strategies, and the recipes behind their names, are those of the parity suite.
"""

import random
from dataclasses import dataclass

from dsgpt.benchmarks.parity.matrix import ACCUMULATIONS, STRATEGIES, Cell

PAIRS, SEED = 30, 4
SAME_TO_A_CHECKPOINT = ("ddp-copied-buckets", "fsdp-kept")
"""Strategies of the parity suite that differ from another one in how they communicate, and in nothing that is saved."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A run that one strategy begins and another one ends."""

    source: Cell
    target: Cell

    @property
    def name(self) -> str:
        """For people and for test ids."""
        return f"{by(self.source)} to {by(self.target)}"


def by(cell: Cell) -> str:
    """``fsdp-offload on 4 ranks``."""
    return _on_ranks(cell.strategy, cell.ranks)


def executed_by(cell: Cell) -> str:
    """The same as the product says it, in whose names a setting of PyTorch's strategies makes no difference."""
    strategy = STRATEGIES[cell.strategy]
    return _on_ranks(cell.strategy if strategy.run_type == "optimized" else strategy.run_type, cell.ranks)


def _on_ranks(strategy: str, ranks: int) -> str:
    return f"{strategy} on {ranks} rank{'s' * (ranks != 1)}"


def cells(*, accumulation: int = 1, precision: str = "fp32") -> list[Cell]:
    """Every strategy on every number of ranks that the parity suite runs it on."""
    return [
        Cell(strategy=strategy.name, ranks=ranks, accumulation=accumulation, precision=precision)
        for strategy in STRATEGIES.values()
        for ranks in strategy.ranks
        if strategy.whole and strategy.name not in SAME_TO_A_CHECKPOINT
    ]


def seeded_pairs(count: int = PAIRS, *, seed: int = SEED) -> list[Pair]:
    """``count`` pairs, the same for the same seed; no strategy comes again on a side before all have been there."""
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
    """Every strategy once, in any order, on any of its numbers of ranks, with any accumulation."""
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
    """Who takes a checkpoint and gives it back: everybody, in every precision that the product allows."""
    low = [cell for cell in cells(precision="bf16") if not STRATEGIES[cell.strategy].fp32_only]
    return [*cells(), *low]


def core_pairs() -> list[Pair]:
    """What ``make test`` runs: from and to every kind of split, in few launches."""
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
    """What ``make test`` runs: every strategy on two ranks, and each way to keep a state in bf16 and on four ranks."""
    low = ("zero0", "zero1", "zero2", "zero3", "pipeline2-zero1")
    four = ("zero1", "zero3", "fsdp", "tensor2-zero1")
    chosen = {("fp32", 2): STRATEGIES, ("bf16", 2): low, ("fp32", 4): four}
    return [cell for cell in rewritten() if cell.strategy in chosen.get((cell.precision, cell.ranks), ())]

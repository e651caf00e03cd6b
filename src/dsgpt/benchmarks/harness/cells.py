"""A cell: one strategy on a number of ranks under one setting. Every suite except ``saving`` launches cells."""

from dataclasses import dataclass

from dsgpt.benchmarks.harness.tested import STRATEGIES

ACCUMULATIONS = (1, 3)


@dataclass(frozen=True, kw_only=True, order=True)
class Cell:
    """One training of a suite."""

    strategy: str
    """A key of ``STRATEGIES``."""
    ranks: int
    accumulation: int = 3
    """Micro batches per optimizer step and data rank."""
    optimizer: str = "adamw"
    """``adamw``, clipped at 1; or ``sgd`` with learning rate 1, clipped at 0.3, which hides no wrong scale."""
    precision: str = "fp32"
    option: str = ""
    """``activation checkpointing``, ``compile``, or nothing."""
    bug: str = ""
    """The bug planted in the strategy, a key of ``parity.planted.BUGS``; the parity suite must report such a cell as
    failed."""

    @property
    def name(self) -> str:
        """The name in console lines, pages and test ids."""
        words = [self.strategy, counted(self.ranks, "rank"), f"accumulation {self.accumulation}"]
        return ", ".join(filter(None, [*words, self.optimizer, self.precision, self.option, self.bug]))

    @property
    def folder(self) -> str:
        """The name without blanks, for a folder."""
        return self.name.replace(", ", "_").replace(" ", "-")


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def by(cell: Cell) -> str:
    """``fsdp-offload on 4 ranks``."""
    return f"{cell.strategy} on {counted(cell.ranks, 'rank')}"


def executed_by(cell: Cell) -> str:
    """The same in the product's words, which do not name settings of PyTorch's strategies: ``fsdp on 4 ranks``."""
    strategy = STRATEGIES[cell.strategy]
    name = cell.strategy if strategy.run_type == "optimized" else strategy.run_type
    return f"{name} on {counted(cell.ranks, 'rank')}"

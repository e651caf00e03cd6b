"""What a cell computes: optimizer, precision, and how the global batch is split and rounded.

In fp32 the split changes none of the first five digits. In bf16 every product is rounded to 8 binary digits, and
differently for another split, so only a reference with the same split can be compared closely.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from dsgpt.benchmarks.harness.cells import Cell
from dsgpt.benchmarks.harness.tested import ACCUMULATED, EVERY, STRATEGIES

PIPELINES = ("pipeline.json", "3d.json")
"""Recipes with a pipeline."""


@dataclass(frozen=True, kw_only=True, order=True)
class Split:
    """How one training splits the global batch; the reference does the same in one process."""

    data_ranks: int = 1
    """Each takes an equal, contiguous part of the global batch."""
    accumulation: int = 1
    """Micro batches, equal and contiguous parts of a data rank's share."""
    low: str = ""
    """Where gradients are rounded to the low precision between ranks: ``ACCUMULATED``, ``EVERY``, or empty for nowhere:
    gradients are fp32 from the end of a micro batch's backward pass on."""

    whole_logits: bool = False
    """Whether the loss is that of all logits of a micro batch at once, as in a pipeline, which rounds the scale of the
    loss with them; in fp32 the reference always computes it so."""

    def simplest(self) -> "Split":
        """The canonical form of this split: cells that compute the same have equal forms, and so share a reference.

        A single micro batch is itself the accumulated sum; one data rank's gradients are in the low precision already.
        """
        low = self.low
        if self.accumulation == 1 and low == EVERY:
            low = ACCUMULATED
        if self.data_ranks == 1 and (self.accumulation == 1 or low == EVERY):
            low = ""
        return replace(self, low=low)


class Work(NamedTuple):
    """What is computed; cells that agree in this have the same reference."""

    optimizer: str
    precision: str
    training: str
    """A key of ``TRAININGS``."""
    split: Split = Split()
    """In a low precision the cell's; in fp32 the whole global batch at once."""


def work_of(cell: Cell) -> Work:
    """What the cell must compute."""
    strategy = STRATEGIES[cell.strategy]
    split = Split()
    if cell.precision != "fp32":
        data_ranks = cell.ranks // strategy.model_ranks
        split = Split(
            data_ranks=data_ranks,
            accumulation=cell.accumulation,
            low=strategy.low if cell.ranks > 1 or strategy.low_alone else "",
            whole_logits=strategy.recipe in PIPELINES,
        ).simplest()
    return Work(cell.optimizer, cell.precision, strategy.training, split)

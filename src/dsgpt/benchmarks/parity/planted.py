"""Known bugs, planted in real strategies, to show that the suite reports each one; see ``patches``."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from dsgpt.benchmarks.harness.cells import Cell
from dsgpt.benchmarks.parity import patches


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A mistake that parallel trainers have made, and the strategy in which it is planted."""

    description: str
    strategy: str
    patch: Callable[[], patches.Patch]
    ranks: int = 2
    optimizer: str = "adamw"
    precision: str = "fp32"

    def visible_on(self, device: str) -> bool:
        """Whether it is out of the bounds of ``device``: those of bf16 on a GPU are wider than what it changes."""
        return device == "cpu" or self.precision == "fp32"

    def cell(self, name: str) -> Cell:
        """The cell that must fail."""
        return Cell(
            strategy=self.strategy, ranks=self.ranks, optimizer=self.optimizer, precision=self.precision, bug=name
        )


def plant(name: str) -> patches.Patch:
    """A context in which the bug of this name is planted; without a name, one in which nothing is."""
    return BUGS[name].patch() if name else contextlib.nullcontext()


BUGS = {
    "sum-over-ranks": Bug(
        description="gradients are summed over the data ranks instead of averaged",
        strategy="ddp",
        patch=patches.sum_over_ranks,
    ),
    "accumulation-counted-twice": Bug(
        description="gradients are divided by the accumulation steps twice",
        strategy="zero2",
        patch=patches.accumulation_counted_twice,
    ),
    "clipping-before-averaging": Bug(
        description="every rank clips its own gradients before they are averaged",
        strategy="zero0",
        optimizer="sgd",
        patch=patches.clipping_before_averaging,
    ),
    "dropped-last-micro-batch": Bug(
        description="the last micro batch of every step is read, but adds no gradient",
        strategy="zero1",
        patch=patches.dropped_last_micro_batch,
    ),
    "positions-not-shifted": Bug(
        description="every sequence rank numbers its positions from 0",
        strategy="sequence2-zero1",
        patch=patches.positions_not_shifted,
    ),
    "not-reduced-over-sequence-ranks": Bug(
        description="gradients are reduced over data ranks, but not over sequence ranks",
        strategy="sequence2-zero0",
        patch=patches.gradients_not_reduced_over_sequence_ranks,
    ),
    "skipped-tied-gradient-sum": Bug(
        description="first and last stage each train their own copy of the tied embedding",
        strategy="pipeline2-zero1",
        patch=patches.skipped_tied_gradient_sum,
    ),
    "clipping-norm-of-one-stage": Bug(
        description="every pipeline stage clips by the norm of its own gradients",
        strategy="pipeline2-zero0",
        optimizer="sgd",
        patch=patches.clipping_norm_of_one_stage,
    ),
    "mean-of-ranks-means": Bug(
        description="validation averages the ranks' means, though ranks find unequal numbers of targets",
        strategy="zero1",
        patch=patches.mean_of_ranks_means,
    ),
    "micro-batches-summed-in-bf16": Bug(
        description="ZeRO-0 in bf16 adds up its micro batches in bf16",
        strategy="zero0",
        optimizer="sgd",
        precision="bf16",
        patch=patches.micro_batches_summed_in_bf16,
    ),
    "rounded-before-the-reduction": Bug(
        description="DDP in bf16 rounds its fp32 sums before it adds those of the other ranks",
        strategy="ddp",
        optimizer="sgd",
        precision="bf16",
        patch=patches.rounded_before_the_reduction,
    ),
    "scaled-after-the-norm": Bug(
        description="gradients are multiplied by the number of ranks after their norm was read",
        strategy="zero0-unclipped-sgd",
        optimizer="sgd",
        patch=patches.scaled_after_the_norm,
    ),
    "second-group-keeps-its-rate": Bug(
        description="the schedule reaches the first group of parameters alone, and is reported",
        strategy="zero2",
        patch=patches.second_group_keeps_its_rate,
    ),
    "biases-decay": Bug(
        description="weight decay acts on biases and LayerNorms too",
        strategy="zero1",
        precision="bf16",
        patch=patches.biases_decay,
    ),
    "large-epsilon": Bug(
        description="AdamW's epsilon is 1e-6 instead of 1e-8",
        strategy="ddp",
        patch=patches.large_epsilon,
    ),
}


def planted_cells(device: str) -> list[Cell]:
    """The cells that must fail on ``device``, ``cpu`` or ``cuda``."""
    return [bug.cell(name) for name, bug in BUGS.items() if bug.visible_on(device)]

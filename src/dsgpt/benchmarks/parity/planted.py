"""Known bugs, planted in real strategies, to show that the suite reports each one; see ``patches``."""

import contextlib
from dataclasses import dataclass
from typing import Protocol

from dsgpt.benchmarks.harness.cells import Cell
from dsgpt.benchmarks.parity import patches

RANKS = 2
"""The number of ranks of every planted cell."""


class PlantingFunction(Protocol):
    """A function of ``patches``, whose name is the bug's."""

    __name__: str

    def __call__(self) -> patches.Patch: ...


@dataclass(frozen=True)
class Bug:
    """A mistake that parallel trainers have made, and the strategy in which it is planted."""

    patch: PlantingFunction
    strategy: str
    description: str
    optimizer: str
    precision: str

    def visible_on(self, device: str) -> bool:
        """Whether the bounds of ``device`` detect it: those of bf16 on a GPU are wider than its effect."""
        return device == "cpu" or self.precision == "fp32"

    def cell(self, name: str) -> Cell:
        """The cell that must fail."""
        return Cell(strategy=self.strategy, ranks=RANKS, optimizer=self.optimizer, precision=self.precision, bug=name)


def plant(name: str) -> patches.Patch:
    """A context in which the bug of this name is planted; without a name, one in which nothing is."""
    return BUGS[name].patch() if name else contextlib.nullcontext()


def _bug(
    patch: PlantingFunction, strategy: str, description: str, *, optimizer: str = "adamw", precision: str = "fp32"
) -> tuple[str, Bug]:
    """``sum_over_ranks`` plants the bug ``sum-over-ranks``."""
    return patch.__name__.replace("_", "-"), Bug(patch, strategy, description, optimizer, precision)


BUGS = dict(
    (
        _bug(patches.sum_over_ranks, "ddp", "gradients are summed over the data ranks instead of averaged"),
        _bug(patches.accumulation_counted_twice, "zero2", "gradients are divided by the accumulation steps twice"),
        _bug(
            patches.clipping_before_averaging,
            "zero0",
            "every rank clips its own gradients before they are averaged",
            optimizer="sgd",
        ),
        _bug(
            patches.dropped_last_micro_batch,
            "zero1",
            "the last micro batch of every step is read, but adds no gradient",
        ),
        _bug(patches.positions_not_shifted, "sequence2-zero1", "every sequence rank numbers its positions from 0"),
        _bug(
            patches.not_reduced_over_sequence_ranks,
            "sequence2-zero0",
            "gradients are reduced over data ranks, but not over sequence ranks",
        ),
        _bug(
            patches.skipped_tied_gradient_sum,
            "pipeline2-zero1",
            "first and last stage each train their own copy of the tied embedding",
        ),
        _bug(
            patches.clipping_norm_of_one_stage,
            "pipeline2-zero0",
            "every pipeline stage clips by the norm of its own gradients",
            optimizer="sgd",
        ),
        _bug(
            patches.mean_of_ranks_means,
            "zero1",
            "validation averages the ranks' means, though ranks find unequal numbers of targets",
        ),
        _bug(
            patches.micro_batches_summed_in_bf16,
            "zero0",
            "ZeRO-0 in bf16 adds up its micro batches in bf16",
            optimizer="sgd",
            precision="bf16",
        ),
        _bug(
            patches.rounded_before_the_reduction,
            "ddp",
            "DDP in bf16 rounds its fp32 sums before it adds those of the other ranks",
            optimizer="sgd",
            precision="bf16",
        ),
        _bug(
            patches.scaled_after_the_norm,
            "zero0-unclipped-sgd",
            "gradients are multiplied by the number of ranks after their norm was read",
            optimizer="sgd",
        ),
        _bug(
            patches.second_group_keeps_its_rate,
            "zero2",
            "the schedule reaches the first group of parameters alone, and is reported",
        ),
        _bug(patches.biases_decay, "zero1", "weight decay acts on biases and LayerNorms too", precision="bf16"),
        _bug(patches.large_epsilon, "ddp", "AdamW's epsilon is 1e-6 instead of 1e-8"),
    )
)


def planted_cells(device: str) -> list[Cell]:
    """The cells that must fail on ``device``, ``cpu`` or ``cuda``."""
    return [bug.cell(name) for name, bug in BUGS.items() if bug.visible_on(device)]

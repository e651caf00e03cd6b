"""Known bugs, planted in real strategies, to show that the suite reports each one; see ``patches``."""

import contextlib
import inspect
from dataclasses import dataclass
from typing import Protocol

from dsgpt.benchmarks.harness.cells import Cell
from dsgpt.benchmarks.parity import patches

RANKS = 2
"""The number of ranks of every planted cell."""


class PlantingFunction(Protocol):
    """A function of ``patches``, whose name is the bug's."""

    __name__: str

    def __call__(self) -> patches.Patch:
        """A context in which the bug is planted."""


@dataclass(frozen=True)
class Bug:
    """A mistake that parallel trainers have made, and the strategy in which it is planted."""

    patch: PlantingFunction
    strategy: str
    optimizer: str
    precision: str

    @property
    def description(self) -> str:
        """What is wrong: the first line of the patch's docstring."""
        return (inspect.getdoc(self.patch) or "").split("\n")[0].removesuffix(".")

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
    patch: PlantingFunction, strategy: str, *, optimizer: str = "adamw", precision: str = "fp32"
) -> tuple[str, Bug]:
    """``sum_over_ranks`` plants the bug ``sum-over-ranks``."""
    return patch.__name__.replace("_", "-"), Bug(patch, strategy, optimizer, precision)


BUGS = dict(
    (
        _bug(patches.sum_over_ranks, "ddp"),
        _bug(patches.accumulation_counted_twice, "zero2"),
        _bug(
            patches.clipping_before_averaging,
            "zero0",
            optimizer="sgd",
        ),
        _bug(
            patches.dropped_last_micro_batch,
            "zero1",
        ),
        _bug(patches.positions_not_shifted, "sequence2-zero1"),
        _bug(
            patches.not_reduced_over_sequence_ranks,
            "sequence2-zero0",
        ),
        _bug(
            patches.skipped_tied_gradient_sum,
            "pipeline2-zero1",
        ),
        _bug(
            patches.clipping_norm_of_one_stage,
            "pipeline2-zero0",
            optimizer="sgd",
        ),
        _bug(
            patches.mean_of_ranks_means,
            "zero1",
        ),
        _bug(
            patches.micro_batches_summed_in_bf16,
            "zero0",
            optimizer="sgd",
            precision="bf16",
        ),
        _bug(
            patches.rounded_before_the_reduction,
            "ddp",
            optimizer="sgd",
            precision="bf16",
        ),
        _bug(
            patches.scaled_after_the_norm,
            "zero0-unclipped-sgd",
            optimizer="sgd",
        ),
        _bug(
            patches.second_group_keeps_its_rate,
            "zero2",
        ),
        _bug(patches.biases_decay, "zero1", precision="bf16"),
        _bug(patches.large_epsilon, "ddp"),
    )
)


def planted_cells(device: str) -> list[Cell]:
    """The cells that must fail on ``device``, ``cpu`` or ``cuda``."""
    return [bug.cell(name) for name, bug in BUGS.items() if bug.visible_on(device)]

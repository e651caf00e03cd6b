"""The cells of the parity suite: every strategy, on as many ranks as make sense, under every setting that matters.

A cell is one training of 20 optimizer steps that is compared with the reference, step by step. Each strategy takes the
shipped recipe of its name, so that what is proven here is what a user runs.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dsgpt.problems import Problems, did_you_mean

ACCUMULATIONS = (1, 3)
OPTIMIZERS = ("adamw", "sgd")


@dataclass(frozen=True, kw_only=True)
class TestedStrategy:
    """A strategy under test: how it is started, with which recipe, on how many ranks."""

    name: str
    """As ``RunConfig.strategy_name`` has it, with a suffix where a setting of the recipe is varied."""
    run_type: str
    recipe: str
    """The shipped recipe that it starts from, a file of ``ds_configs/``."""
    ranks: tuple[int, ...]
    launcher: str = "deepspeed"
    changes: dict[str, Any] = field(default_factory=dict)
    """What to change in the recipe, block by block."""
    replicas: str = "all"
    """How much every rank holds whole: ``all`` weights, ``some``, or ``none``."""
    fp32_only: bool = False
    """Whether the product refuses it in bf16 and fp16."""
    whole: bool = True
    """Whether it is run through all settings; otherwise one cell shows what the product answers."""


@dataclass(frozen=True, kw_only=True, order=True)
class Cell:
    """One training to be compared with the reference."""

    strategy: str
    ranks: int
    accumulation: int = 3
    """Micro batches per optimizer step and data rank."""
    optimizer: str = "adamw"
    """``adamw``, clipped at 1; or ``sgd`` with learning rate 1, clipped at 0.3, which hides no wrong scale."""
    precision: str = "fp32"
    option: str = ""
    """``activation checkpointing``, ``compile``, or nothing."""
    bug: str = ""
    """The bug planted in the strategy, of ``dsgpt.parity.planted``; the suite must report such a cell as failed."""

    @property
    def name(self) -> str:
        """For people and for test ids."""
        words = [self.strategy, f"{self.ranks} rank{'s' * (self.ranks > 1)}", f"accumulation {self.accumulation}"]
        return ", ".join(filter(None, [*words, self.optimizer, self.precision, self.option, self.bug]))

    @property
    def folder(self) -> str:
        """The name without blanks, for a folder."""
        return self.name.replace(", ", "_").replace(" ", "-")


def _zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}}


def _deepspeed(name: str, recipe: str, *, ranks: tuple[int, ...] = (1, 2, 4), **more: Any) -> TestedStrategy:
    return TestedStrategy(name=name, run_type="optimized", recipe=f"{recipe}.json", ranks=ranks, **more)


def _torch(name: str, *, ranks: tuple[int, ...] = (1, 2, 4), **more: Any) -> TestedStrategy:
    return TestedStrategy(
        name=name,
        run_type=name.split("-", maxsplit=1)[0],
        recipe="zero1.json",
        ranks=ranks,
        launcher="torchrun",
        **more,
    )


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        TestedStrategy(name="baseline", run_type="baseline", recipe="zero1.json", ranks=(1,), launcher="python"),
        _torch("ddp"),
        _torch("ddp-copied-buckets", ranks=(2,), changes={"dsgpt": {"ddp": {"gradient_as_bucket_view": False}}}),
        _torch("fsdp", replicas="none"),
        _torch("fsdp-kept", ranks=(2,), replicas="none", changes={"dsgpt": {"fsdp": {"reshard_after_forward": False}}}),
        _torch("fsdp-offload", ranks=(2,), replicas="none", changes={"dsgpt": {"fsdp": {"cpu_offload": True}}}),
        *(_deepspeed(f"zero{stage}", f"zero{stage}") for stage in (0, 1, 2)),
        _deepspeed("zero3", "zero3", replicas="some"),
        _deepspeed("zero2-offload", "zero2_offload"),
        _deepspeed("zero3-offload", "zero3_offload", replicas="some"),
        _deepspeed("zero3-nvme", "zero3_nvme", replicas="some"),
        *(
            _deepspeed(f"tensor2-zero{stage}", "tensor", ranks=(2, 4), changes=_zero(stage), replicas="some")
            for stage in (0, 1, 2)
        ),
        *(
            _deepspeed(
                f"pipeline2-zero{stage}",
                "pipeline",
                ranks=(2, 4),
                changes=_zero(stage),
                replicas="some",
                fp32_only=stage == 0,
            )
            for stage in (0, 1)
        ),
        *(_deepspeed(f"sequence2-zero{stage}", "sequence", ranks=(2, 4), changes=_zero(stage)) for stage in (0, 1, 2)),
        _deepspeed("pipeline2-tensor2-zero1", "3d", ranks=(8,), replicas="some"),
        *(
            _deepspeed(name, recipe, ranks=(ranks,), changes=_zero(stage), replicas="some", whole=False)
            for name, recipe, ranks, stage in (
                ("tensor2-zero3", "tensor", 2, 3),
                ("pipeline2-zero2", "pipeline", 2, 2),
                ("pipeline2-zero3", "pipeline", 2, 3),
                ("sequence2-zero3", "sequence", 2, 3),
                ("pipeline2-tensor2-zero0", "3d", 8, 0),
            )
        ),
    )
}


def whole_matrix() -> list[Cell]:
    """Every cell but the planted bugs'."""
    return [cell for strategy in STRATEGIES.values() for cell in _cells(strategy)]


def _cells(strategy: TestedStrategy) -> Iterable[Cell]:
    few = min((ranks for ranks in strategy.ranks if ranks > 1), default=1)
    if not strategy.whole:
        yield Cell(strategy=strategy.name, ranks=few)
        return
    for ranks in strategy.ranks:
        for optimizer, accumulation in itertools.product(OPTIMIZERS, ACCUMULATIONS):
            yield Cell(strategy=strategy.name, ranks=ranks, accumulation=accumulation, optimizer=optimizer)
        yield Cell(strategy=strategy.name, ranks=ranks, accumulation=1, precision="bf16")
        yield Cell(strategy=strategy.name, ranks=ranks, optimizer="sgd", precision="bf16")
    yield Cell(strategy=strategy.name, ranks=few, precision="fp16")
    yield Cell(strategy=strategy.name, ranks=few, option="activation checkpointing")
    yield Cell(strategy=strategy.name, ranks=few, option="compile")


def core() -> list[Cell]:
    """What ``make test`` runs: every strategy on the fewest ranks that split anything, and data parallelism beside it.

    AdamW without accumulation gives the first gradient; SGD with accumulation lets no wrong factor pass.
    """
    cells = []
    for strategy in STRATEGIES.values():
        if not strategy.whole:
            continue
        few = min((ranks for ranks in strategy.ranks if ranks > 1), default=1)
        cells.append(Cell(strategy=strategy.name, ranks=few, accumulation=1))
        cells.append(Cell(strategy=strategy.name, ranks=few, optimizer="sgd"))
        if not strategy.fp32_only:
            cells.append(Cell(strategy=strategy.name, ranks=few, precision="bf16"))
    cells.append(Cell(strategy="zero1", ranks=2, option="compile"))
    four = ("tensor2-zero1", "pipeline2-zero1", "sequence2-zero1")
    return [*cells, *(Cell(strategy=name, ranks=4, optimizer=optimizer) for name in four for optimizer in OPTIMIZERS)]


def select(cells: Iterable[Cell], *, ranks: Iterable[int], only: Iterable[str], problems: Problems) -> list[Cell]:
    """The cells of these numbers of ranks and strategies; all of them where nothing is named.

    Args:
        cells: to choose from.
        ranks: numbers of processes.
        only: names of strategies.
        problems: takes what names nothing.
    """
    cells = list(cells)
    known = {cell.strategy for cell in cells}
    for name in only:
        if name not in known:
            problems.add(f"--only {name}: is no strategy{did_you_mean(name, known)}; known are {', '.join(STRATEGIES)}")
    chosen = [cell for cell in cells if (not ranks or cell.ranks in ranks) and (not only or cell.strategy in only)]
    if not chosen and not problems:
        problems.add(f"--ranks {' '.join(map(str, ranks))}: no cell has so many ranks; give 1, 2, 4 or 8")
    return chosen

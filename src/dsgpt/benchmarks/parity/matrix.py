"""The cells of the parity suite: every strategy, on all numbers of ranks that make sense, under every setting.

A cell is one training of 20 optimizer steps that is compared with the reference, step by step. Each strategy uses the
shipped recipe of its name, so that the suite tests what a user runs.
"""

import itertools
from collections.abc import Iterable

from dsgpt.benchmarks.harness.cells import ACCUMULATIONS, Cell
from dsgpt.benchmarks.harness.tested import STRATEGIES, TestedStrategy
from dsgpt.common.problems import Problems, did_you_mean

OPTIMIZERS = ("adamw", "sgd")
_LITTLE_NEW = ("ddp-copied-buckets", "fsdp-kept", "fsdp-offload")
"""Variants of ``ddp`` and ``fsdp``; one training shows how they differ. The whole matrix has every setting of them."""
_CLIP_FP32_OTHERWISE = ("zero0", "pipeline2-zero0")
"""Strategies that clip fp32 gradients with other code than bf16 gradients, or cannot train in bf16."""


def refusal_expected(cell: Cell, *, device: str) -> bool:
    """Whether the product must refuse ``cell`` on ``device``, ``cpu`` or ``cuda``, instead of training it."""
    strategy = STRATEGIES[cell.strategy]
    return (
        strategy.refused
        or (cell.precision != "fp32" and strategy.fp32_only)
        or (cell.precision == "fp16" and device == "cpu")
        or (cell.option == "compile" and not strategy.compiles)
    )


def whole_matrix() -> list[Cell]:
    """Every cell except those with planted bugs."""
    return [cell for strategy in STRATEGIES.values() for cell in _cells(strategy)]


def _cells(strategy: TestedStrategy) -> Iterable[Cell]:
    few = min((ranks for ranks in strategy.ranks if ranks > 1), default=1)
    if not strategy.whole:
        yield Cell(strategy=strategy.name, ranks=few, optimizer=strategy.optimizer, precision=strategy.precision)
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
    """The cells of ``make test``: every strategy on the fewest ranks that split anything, and some on four.

    AdamW without accumulation shows a wrong first moment, SGD with accumulation a wrong scale, which Adam hides. In
    fp32, SGD runs without clipping if ``STRATEGIES`` has such a variant; in bf16 it is clipped. Cells on more than two
    ranks take longest and do not repeat SGD in fp32: first gradient and norms show a wrong scale with AdamW too.
    """
    cells = []
    for strategy in STRATEGIES.values():
        if not strategy.whole:
            continue
        few = min((ranks for ranks in strategy.ranks if ranks > 1), default=1)
        cells.append(Cell(strategy=strategy.name, ranks=few, accumulation=1))
        if strategy.name in _LITTLE_NEW:
            continue
        unclipped = f"{strategy.name}-unclipped-sgd"
        if unclipped in STRATEGIES:
            cells.append(Cell(strategy=unclipped, ranks=few, optimizer="sgd"))
        if few <= 2 and (unclipped not in STRATEGIES or strategy.name in _CLIP_FP32_OTHERWISE):
            cells.append(Cell(strategy=strategy.name, ranks=few, optimizer="sgd"))
        if not strategy.fp32_only:
            cells.append(Cell(strategy=strategy.name, ranks=few, optimizer="sgd", precision="bf16"))
    cells.append(Cell(strategy="zero1", ranks=2, option="compile"))
    # With any accumulation, it keeps other gradients in bf16 than in fp32, and so has other bytes per rank.
    cells.append(Cell(strategy="zero2-offload", ranks=2, accumulation=1, precision="bf16"))
    checkpointed = ("zero3", "pipeline2-zero1", "sequence2-zero1")
    cells += [Cell(strategy=name, ranks=2, option="activation checkpointing") for name in checkpointed]
    four = ("tensor2-zero1", "pipeline2-zero1", "sequence2-zero1")
    return [*cells, *(Cell(strategy=name, ranks=4) for name in four)]


def select(cells: Iterable[Cell], *, ranks: Iterable[int], only: Iterable[str], problems: Problems) -> list[Cell]:
    """The cells of these numbers of ranks and strategies; an empty argument selects all.

    Args:
        cells: to choose from.
        ranks: numbers of processes.
        only: names of strategies.
        problems: collects names and numbers that select nothing.
    """
    cells = list(cells)
    known = {cell.strategy for cell in cells}
    for name in only:
        if name not in known:
            meant = did_you_mean(name, known)
            problems.add(f"--only {name}: is not a strategy{meant}; known are {', '.join(STRATEGIES)}")
    chosen = [cell for cell in cells if (not ranks or cell.ranks in ranks) and (not only or cell.strategy in only)]
    if not chosen and not problems:
        *others, most = map(str, sorted({cell.ranks for cell in cells if not only or cell.strategy in only}))
        numbers = f"{', '.join(others)} or {most}" if others else most
        whose = f" of {', '.join(only)}" if only else ""
        problems.add(f"--ranks {' '.join(map(str, ranks))}: no cell{whose} has that many ranks; give {numbers}")
    return chosen

"""``benchmark.py parity``: every strategy against plain PyTorch, step by step.

The cells of the parity suite: every strategy, on all numbers of ranks that make sense, under every setting. A cell is
one training of 20 optimizer steps that is compared with the reference, step by step. Each strategy uses the shipped
recipe of its name, so that the suite tests what a user runs.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsgpt.benchmarks.cells import ACCUMULATIONS, STRATEGIES, Cell, TestedStrategy
from dsgpt.benchmarks.frame import Record, Suite, SuiteOptions, device_flag, only_flag
from dsgpt.benchmarks.parity_page import cell_name, failure_words, parity_page, summary_lines
from dsgpt.common.command_line import POSITIVE, flag, switch
from dsgpt.common.errors import Problems, did_you_mean
from dsgpt.common.text import counted

if TYPE_CHECKING:
    from dsgpt.benchmarks.parity_suite import Result


SCHEMA_VERSION = "1.1"
"""1.1: validation, the learning rate that optimizers used, the first update, and bounds by kind of arithmetic."""
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


@dataclass(frozen=True, kw_only=True)
class ParityOptions(SuiteOptions):
    """The command line."""

    ranks: tuple[int, ...] = flag(
        POSITIVE, "N", "only these numbers of ranks (default: 1, 2, 4 and 8)", default=(), nargs="+"
    )
    only: tuple[str, ...] = only_flag("STRATEGY", "strategies")
    core: bool = switch("only what `make test` runs: each strategy in a few trainings")
    device: str = device_flag("cpu, where every machine can run everything, or cuda with a GPU for each rank")


class Parity(Suite[ParityOptions, "Result"]):
    """Trains every cell and compares it with its reference."""

    name, record_of, schema_version, unit = "parity", "the parity suite", SCHEMA_VERSION, "training"
    flags, page, summary = ParityOptions, staticmethod(parity_page), staticmethod(summary_lines)
    description = """\
parity: train the same small model under every strategy, at 1, 2, 4 and 8 ranks, with and without accumulation, with
AdamW and SGD, in fp32 and bf16, and compare every step with plain PyTorch; then plant known bugs and show that each one
is caught. Exit code 0: all are equal and all bugs were caught; 1: otherwise."""
    examples = f"""\
examples:
  .venv/bin/python src/benchmark.py parity
  .venv/bin/python src/benchmark.py parity --core
  .venv/bin/python src/benchmark.py parity --only zero1 zero3 --ranks 2
  .venv/bin/python src/benchmark.py parity --table-from checkpoint/parity/parity.json

strategies: {", ".join(STRATEGIES)}"""

    def plan(self) -> int:
        from dsgpt.benchmarks.parity_rank import planted_cells  # noqa: PLC0415 - torch takes seconds
        from dsgpt.machine.device import cuda_devices  # noqa: PLC0415

        options, problems = self.options, Problems()
        everything = [*(core() if options.core else whole_matrix()), *planted_cells(options.device)]
        cells = select(everything, ranks=options.ranks, only=options.only, problems=problems)
        if options.device == "cuda" and (gpus := cuda_devices()) < max((cell.ranks for cell in cells), default=0):
            self.console.say(f"this machine has {gpus} GPUs: trainings on more ranks are left out")
            cells = [cell for cell in cells if cell.ranks <= gpus]
            if not cells:
                problems.add(f"--device cuda: no training runs on {gpus} GPUs or fewer; take --device cpu")
        problems.raise_if_any()
        self._cells = cells
        return len(cells)

    def begin(self) -> None:
        from dsgpt.benchmarks.parity_suite import ParitySuite  # noqa: PLC0415

        self._suite = ParitySuite(self.folder, repository=self.repository, device=self.options.device)
        self.console.say(f"{len(self._cells)} trainings; the text and the references come first")

    def results(self) -> Iterator["Result"]:
        return self._suite.run(
            self._cells,
            started=lambda launch: self.console.say(
                f"{launch.launcher} starts {counted(launch.ranks, 'rank')} for {counted(launch.cells, 'training')}"
            ),
        )

    def line(self, result: "Result", *, count: str, left: str) -> str:
        reasons = [failure_words(failure) for failure in result.failures] or result.message.splitlines()
        because = f": {reasons[0]}" if reasons else ""
        return f"{count} {result.cell.name}: {_verdict(result)} ({result.seconds:.1f} s{left}){because}"

    def record(self, results: Sequence["Result"]) -> Record:
        from dsgpt.benchmarks.parity_suite import suite_record  # noqa: PLC0415

        return suite_record(self._suite, results, device=self.options.device)

    def failures(self, record: Record) -> list[str]:
        return [cell_name(cell) for cell in record["cells"] if not cell["as_expected"]]

    def closing_lines(self, failures: Sequence[str]) -> list[str]:
        return [f"unexpected result: {name}" for name in failures]


def _verdict(result: "Result") -> str:
    """How the cell ended, in capitals if that is not as expected."""
    if result.cell.bug:
        return "caught" if result.status == "failed" else f"NOT CAUGHT ({result.status})"
    if result.refusal_expected and result.status != "refused":
        return f"NOT REFUSED ({result.status})"
    if result.status == "refused" and not result.refusal_expected:
        return "REFUSED, though it should train"
    return {"passed": "passed", "failed": "FAILED", "refused": "refused", "error": "ERROR"}[result.status]

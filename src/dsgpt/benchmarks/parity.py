"""``benchmark.py parity``: every strategy against plain PyTorch, step by step.

A cell is one training of 20 optimizer steps that is compared with the reference, step by step. Every strategy has
cells on all numbers of ranks that make sense, under every setting. Each strategy uses the shipped recipe of its name,
so that the suite tests what a user runs. The references are trained first, then one launch for each launcher and number
of ranks.

How far a training may differ from the reference, as its arithmetic allows. On a CPU no bound is wider than about three
times what was measured there. In fp32 only the order of sums differs. In bf16 every product is rounded to 8 binary
digits, but the reference takes the same micro batches and rounds where the strategy does. So the first gradient and
the first update are equal in six digits. A training that sums in another precision, drops or doubles a micro batch,
decays a bias or has another epsilon is out of bounds. Later steps differ more under every strategy, because one weight
that is rounded in the other direction changes the products of the next step. After 20 steps loss and weights differ as
if every product had been rounded once more.

On a GPU nothing was measured yet. The bounds of 16-bit precisions there allow for a different rounding of every
product, in the first step too. A sum in another precision, or a bias that decays, is within them
(``parity_rank.planted_cells``).
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from dsgpt.benchmarks import cells as shared
from dsgpt.benchmarks.cells import ACCUMULATED, EVERY, STEPS, STRATEGIES, Cell, CellEnd
from dsgpt.benchmarks.frame import Record, Suite, SuiteOptions, device_flag, only_flag, work_facts
from dsgpt.benchmarks.launch import Assignment
from dsgpt.benchmarks.parity_page import cell_name, failure_words, parity_page, summary_lines
from dsgpt.common.command_line import POSITIVE, flag, switch, whole
from dsgpt.common.errors import Problems, did_you_mean
from dsgpt.common.text import counted

# The cells of the suite.

OPTIMIZERS = ("adamw", "sgd")
_LITTLE_NEW = ("ddp-copied-buckets", "fsdp-kept", "fsdp-offload", "fsdp-sharded-sums")
"""Variants of ``ddp`` and ``fsdp``; one training shows how they differ. The whole matrix has every setting of them."""
_CLIP_FP32_OTHERWISE = ("zero0", "pipeline2-zero0")
"""Strategies that clip fp32 gradients with other code than bf16 gradients, or cannot train in bf16."""


def refusal_expected(cell: Cell, *, device: str) -> bool:
    """Whether the product must refuse ``cell`` on ``device``, ``cpu`` or ``cuda``, instead of training it."""
    strategy = STRATEGIES[cell.strategy]
    refused = strategy.refused or (cell.precision != "fp32" and strategy.fp32_only)
    return refused or (cell.precision == "fp16" and device == "cpu")


def whole_matrix() -> Iterator[Cell]:
    """Every cell except those with planted bugs."""
    for strategy in STRATEGIES.values():
        cell = partial(Cell, strategy=strategy.name)
        few = min((ranks for ranks in strategy.ranks if ranks > 1), default=1)
        if not strategy.whole:
            yield cell(ranks=few, optimizer=strategy.optimizer, precision=strategy.precision)
            continue
        for ranks in strategy.ranks:
            for optimizer, accumulation in itertools.product(OPTIMIZERS, shared.ACCUMULATIONS):
                yield cell(ranks=ranks, accumulation=accumulation, optimizer=optimizer)
            yield cell(ranks=ranks, accumulation=1, precision="bf16")
            yield cell(ranks=ranks, optimizer="sgd", precision="bf16")
        yield cell(ranks=few, precision="fp16")
        for option in ("activation checkpointing", "compile", "pad logits"):
            yield cell(ranks=few, option=option)


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
    compiled = ("zero1", "zero3", "tensor2-zero1", "pipeline2-zero1", "sequence2-zero1")
    cells += [Cell(strategy=name, ranks=2, option="compile") for name in compiled]
    cells += [Cell(strategy=name, ranks=2, option="pad logits") for name in ("zero3", "pipeline2-zero1")]
    # With any accumulation, it keeps other gradients in bf16 than in fp32, and so has other bytes per rank.
    cells.append(Cell(strategy="zero2-offload", ranks=2, accumulation=1, precision="bf16"))
    checkpointed = ("zero3", "pipeline2-zero1", "sequence2-zero1")
    cells += [Cell(strategy=name, ranks=2, option="activation checkpointing") for name in checkpointed]
    return [*cells, *(Cell(strategy=name, ranks=4) for name in ("tensor2-zero1", "pipeline2-zero1", "sequence2-zero1"))]


def core_on_one() -> list[Cell]:
    """The cells of a machine with one GPU: every strategy that runs on one rank, with three micro batches a step."""
    return [
        Cell(strategy=strategy.name, ranks=1, optimizer=optimizer, precision=precision)
        for strategy in STRATEGIES.values()
        if strategy.whole and 1 in strategy.ranks
        for optimizer, precision in (("adamw", "fp32"), ("sgd", "bf16"), ("adamw", "fp16"))
    ]


def select(cells: Iterable[Cell], *, ranks: Iterable[int], only: Iterable[str], problems: Problems) -> list[Cell]:
    """The cells of these numbers of ranks and strategies; an empty argument selects all.

    Args:
        cells: to choose from.
        ranks: numbers of processes.
        only: names of strategies.
        problems: collects names and numbers that select nothing.
    """
    cells = list(cells)
    names = {cell.strategy for cell in cells}
    for name in only:
        if name not in names:
            meant = did_you_mean(name, names)
            problems.add(f"--only {name}: is not a strategy{meant}; known are {', '.join(STRATEGIES)}")
    chosen = [cell for cell in cells if (not ranks or cell.ranks in ranks) and (not only or cell.strategy in only)]
    if not chosen and not problems:
        *others, most = map(str, sorted({cell.ranks for cell in cells if not only or cell.strategy in only}))
        numbers = f"{', '.join(others)} or {most}" if others else most
        whose = f" of {', '.join(only)}" if only else ""
        problems.add(f"--ranks {' '.join(map(str, ranks))}: no cell{whose} has that many ranks; give {numbers}")
    return chosen


# What a cell computes: optimizer, precision, and how the global batch is split and rounded. In fp32 the split changes
# none of the first five digits. In bf16 every product is rounded to 8 binary digits, and differently for another split,
# so only a reference with the same split can be compared closely.

PIPELINES = ("pipeline.json", "3d.json")
"""Recipes with a pipeline."""


@dataclass(frozen=True, kw_only=True, order=True)
class Split:
    """Split of the global batch in a training; the reference computes the same split in one process."""

    data_ranks: int = 1
    """Each takes an equal, contiguous part of the global batch."""
    accumulation: int = 1
    """Micro batches, equal and contiguous parts of a data rank's share."""
    low: str = ""
    """Gradients rounded to the low precision between ranks: ``ACCUMULATED``, ``EVERY``, or empty for none: then
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


class ReferenceKey(NamedTuple):
    """Settings that decide the result. Cells with equal keys share one reference training."""

    optimizer: str
    precision: str
    training: str
    """A key of ``TRAININGS``."""
    split: Split = Split()
    """Split of the global batch: the cell's in a low precision; in fp32 the whole batch at once."""


def reference_key(cell: Cell) -> ReferenceKey:
    """Key of the reference training that the cell is compared with."""
    strategy = STRATEGIES[cell.strategy]
    split = Split()
    if cell.precision != "fp32":
        split = Split(
            data_ranks=cell.ranks // strategy.model_ranks,
            accumulation=cell.accumulation,
            low=strategy.low if cell.ranks > 1 or strategy.low_alone else "",
            whole_logits=strategy.recipe in PIPELINES,
        ).simplest()
    return ReferenceKey(cell.optimizer, cell.precision, strategy.training, split)


# How far a training may be from its reference.


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """A bound for every fact of a training; relative distances are of 2-norms."""

    loss: float
    """Nats per token, at every step."""
    validation: float
    """Nats per token, at every validation."""
    norm: float
    """Bound on the gradient's norm at every step, relative."""
    gradient: float
    """Bound on the first step's gradient: relative distance, for every parameter."""
    layer_norm_gradient: float | None = None
    """Bound on the gradients of weights and biases of LayerNorms; None if ``gradient`` applies to them."""
    update: float
    """Bound on the weights after the first step that changes them: relative distance, for every parameter."""
    weights: float
    """Bound on the weights after the last step: relative distance, for every parameter."""
    tied_gradient: float | None = None
    """Bound on the first step's gradient of the tied embedding; None if ``gradient`` applies to it."""
    tied_update: float | None = None
    """Bound on the tied embedding after the first step that changes it; None if ``update`` applies to it."""

    def for_gradient(self, name: str) -> float:
        """The bound of one parameter's first gradient, by its canonical name."""
        special = {"wte.weight": self.tied_gradient}.get(name, self.layer_norm_gradient if "ln_" in name else None)
        return self.gradient if special is None else special

    def for_update(self, name: str) -> float:
        """The bound of one parameter after its first change, by its canonical name."""
        return self.tied_update if name == "wte.weight" and self.tied_update is not None else self.update


FP32, BF16, FP16 = "fp32", "bf16", "fp16"
CONSTANT_RATE = "constant rate"
"""The training without a schedule, as ``dsgpt.benchmarks.cells`` names it."""
FP32_CONSTANT_RATE = f"fp32, {CONSTANT_RATE}"
BF16_MANY, BF16_PIPELINE, BF16_SPLIT = "bf16, 4 data ranks", "bf16, pipeline", "bf16, tensor or sequence"
_AFTER_20_STEPS = {"loss": 2.4e-3, "validation": 1.8e-3, "norm": 1.7e-2, "weights": 3.3e-2}

CPU = {
    # Only the order of sums over micro batches or ranks differs.
    FP32: Bounds(loss=5e-6, validation=2e-6, norm=2e-6, gradient=2e-6, update=2e-6, weights=2e-6),
    # The rate is whole from the first step on, so the "first" update is that of three steps, in which Adam enlarges the
    # differences of the smallest gradients. Plain PyTorch with three micro batches instead of one differs by 4.3e-5 in
    # the update and by 2.7e-5 in the last weights, all of it in one element of a matrix of 1,156.
    FP32_CONSTANT_RATE: Bounds(loss=5e-6, validation=2e-6, norm=2e-6, gradient=2e-6, update=1.3e-4, weights=8e-5),
    # The same roundings in the same places. Only the order of fp32 sums differs, and a product of DeepSpeed's CPU Adam.
    BF16: Bounds(gradient=1e-6, update=1e-6, **_AFTER_20_STEPS),
    # Gradients of more than two ranks are added up in bf16, in no defined order.
    BF16_MANY: Bounds(gradient=1.6e-2, update=1.3e-2, **_AFTER_20_STEPS),
    # The tied embedding's two gradients are summed in fp32 over stages, where the reference's backward pass adds them
    # in bf16; clipping by the norm carries the difference to all others.
    BF16_PIPELINE: Bounds(gradient=1e-6, tied_gradient=9e-3, update=3.6e-5, tied_update=4.8e-4, **_AFTER_20_STEPS),
    # Activations are summed in parts, or gradients over half of the positions, so every product is rounded differently.
    # The gradients of LayerNorms are sums over all positions that almost cancel, and differ most.
    BF16_SPLIT: Bounds(gradient=1.5e-2, layer_norm_gradient=6e-2, update=4e-2, **_AFTER_20_STEPS),
}
"""fp16 is refused on a CPU."""
_WIDE = {"loss": 3e-3, "validation": 3e-3, "norm": 2e-2, "gradient": 1.5e-2, "layer_norm_gradient": 1.5e-1}
_LOW_ON_GPU = Bounds(**_WIDE, update=4e-2, weights=5e-2)
CUDA = {
    FP32: Bounds(loss=2e-4, validation=2e-4, norm=1e-4, gradient=1e-5, update=1e-4, weights=1e-3),
    FP32_CONSTANT_RATE: Bounds(loss=2e-4, validation=2e-4, norm=1e-4, gradient=1e-5, update=1e-3, weights=1e-3),
    **dict.fromkeys((BF16, BF16_MANY, BF16_PIPELINE, BF16_SPLIT), _LOW_ON_GPU),
    # The reference keeps its scale of the loss, so other small gradients vanish. Under AdamW the norm of step 15 is
    # five times that of its neighbours and enlarges the difference: 2.7e-2 on a stand-in GPU.
    FP16: replace(_LOW_ON_GPU, norm=5e-2),
}
"""Wider, because not measured yet: kernels of GPUs add up in an order that changes from call to call."""
BOUNDS = {"cpu": CPU, "cuda": CUDA}


def bounds_of(cell: Cell, device: str) -> Bounds:
    """Bounds on the difference between the cell and its reference on ``device``, ``cpu`` or ``cuda``."""
    strategy, key = STRATEGIES[cell.strategy], reference_key(cell)
    kind = cell.precision
    if kind == FP32 and key.training == CONSTANT_RATE:
        kind = FP32_CONSTANT_RATE
    elif kind == BF16 and strategy.model_ranks > 1 and strategy.recipe != "pipeline.json":
        kind = BF16_SPLIT
    elif kind == BF16 and key.split.data_ranks > 2 and key.split.low:
        kind = BF16_MANY
    elif kind == BF16 and strategy.model_ranks > 1:
        kind = BF16_PIPELINE
    return BOUNDS[device][kind]


# The suite: references first, then the cells. Every cell gives a result.

SCHEMA_VERSION = "1.1"
"""1.1: validation, the learning rate that optimizers used, the first update, and bounds by kind of arithmetic."""
RANK = "dsgpt.benchmarks.parity_rank:"


@dataclass(frozen=True, kw_only=True)
class ParityOptions(SuiteOptions):
    """The command line."""

    ranks: tuple[int, ...] = flag(POSITIVE, "N", default=(), nargs="+")
    """only these numbers of ranks (default: 1, 2, 4 and 8)"""
    only: tuple[str, ...] = only_flag("STRATEGY", "strategies")
    core: bool = switch("only what `make test` runs: each strategy in a few trainings; on GPUs also on one rank")
    device: str = device_flag("cpu, where every machine can run everything, or cuda with a GPU for each rank")
    steps: int = flag(whole(low=6), "N", default=STEPS)
    """optimizer steps of every training; 6, the fewest, show every planted bug (default: %(default)s)"""


Result = dict[str, Any]
"""A cell with how it ended, as the record has it."""


class Parity(Suite[ParityOptions, Result]):
    """Trains every cell and compares it with its reference.

    parity: train the same small model under every strategy, and compare every step with plain PyTorch. The cells: 1, 2,
    4 and 8 ranks, with and without accumulation, AdamW and SGD, fp32 and bf16. Then plant known bugs, each of which
    must be caught. Exit code 0: all are equal and all bugs were caught; 1: otherwise.

    Examples:
      .venv/bin/python src/benchmark.py parity
      .venv/bin/python src/benchmark.py parity --core
      .venv/bin/python src/benchmark.py parity --only zero1 zero3 --ranks 2
      .venv/bin/python src/benchmark.py parity --table-from checkpoint/parity/parity.json
    """

    name, record_of, schema_version, unit = "parity", "the parity suite", SCHEMA_VERSION, "training"
    failure_line = "unexpected result: {}"
    flags, page, summary = ParityOptions, staticmethod(parity_page), staticmethod(summary_lines)
    names = f"strategies: {', '.join(STRATEGIES)}"

    def plan(self) -> int:
        from dsgpt.benchmarks.parity_rank import planted_cells  # noqa: PLC0415 - torch takes seconds
        from dsgpt.machine.device import cuda_devices  # noqa: PLC0415

        options, problems = self.options, Problems()
        on_one = core_on_one() if options.device == "cuda" else []
        chosen = dict.fromkeys([*core(), *on_one]) if options.core else whole_matrix()
        everything = [*chosen, *planted_cells(options.device)]
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
        device, steps = self.options.device, self.options.steps
        self._runner = shared.CellRunner(self.folder, repository=self.repository, device=device, steps=steps)
        self._references: dict[ReferenceKey, CellEnd] = {}
        self._reference_facts: list[Result] = []
        self._without_reference: dict[ReferenceKey, str] = {}

    def results(self) -> Iterator[Result]:
        """Run the cells launch by launch.

        Raises:
            UserError: the text could not be prepared.
        """
        self.console.say(f"{len(self._cells)} trainings; the text and the references come first")
        cells = sorted(self._cells, key=lambda cell: list(STRATEGIES).index(cell.strategy))
        keys = sorted({reference_key(cell) for cell in cells})
        for key, end in self._runner.run(keys, place=lambda _: (1, "python"), assign=self.reference):
            if end.status != "done":  # if the product refuses it, it refuses its cells for the same reason
                self._without_reference[key] = end.message
                continue
            steps, validations = end.ranks[0]["steps"], end.ranks[0]["validations"]
            clipping = shared.TRAININGS[key.training].get("gradient_clipping", shared.CLIPPING[key.optimizer])
            smallest = min(step["grad_norm"] for step in steps)
            if smallest <= clipping and key.optimizer == "sgd":
                self._without_reference[key] = f"it is not clipped at every step, a gradient norm is {smallest:g}"
                continue
            self._references[key] = end
            facts = key._asdict() | asdict(key.split) | {"first_loss": steps[0]["loss"], "last_loss": steps[-1]["loss"]}
            facts |= {"smallest_grad_norm": smallest, "last_validation_loss": validations[-1]["loss"]}
            del facts["split"]
            self._reference_facts.append(facts | {"clipping": clipping})
        ends = self._runner.run(
            cells,
            place=lambda cell: (cell.ranks, STRATEGIES[cell.strategy].launcher),
            assign=lambda cell: self._runner.assignment(cell, call=f"{RANK}train_cell", arguments={"bug": cell.bug}),
            started=lambda launch: self.console.say(
                f"{launch.launcher} starts {counted(launch.ranks, 'rank')} for {counted(launch.cells, 'training')}"
            ),
        )
        for cell, end in ends:
            yield self._judge(cell, end)

    def reference(self, key: ReferenceKey) -> Assignment:
        """Assignment that trains the reference of ``key``."""
        cell = Cell(strategy="baseline", ranks=1, accumulation=1, optimizer=key.optimizer, precision=key.precision)
        split = asdict(key.split)
        words = ["reference", key.training, *map(str, split.values()), cell.folder]
        name = "_".join(word.replace(" ", "-") for word in words if word)
        return self._runner.assignment(
            cell, call=f"{RANK}train_reference_cell", name=name, training=key.training, arguments={"split": split}
        )

    def _judge(self, cell: Cell, end: CellEnd) -> Result:
        from dsgpt.benchmarks.parity_rank import BUGS  # noqa: PLC0415 - torch takes seconds
        from dsgpt.benchmarks.parity_reference import Comparison, compare  # noqa: PLC0415

        device, key, cost, compared = self.options.device, reference_key(cell), None, Comparison()
        refused = not cell.bug and refusal_expected(cell, device=device)
        status, message = end.status, end.message
        if status == "done" and key in self._without_reference:
            why = self._without_reference[key]
            status, message = "error", f"cannot be compared, because its reference failed: {why}"
        elif status == "done":
            replicas = STRATEGIES[cell.strategy].replicas
            compared = compare(end, self._references[key], bounds=bounds_of(cell, device), replicas=replicas)
            status, cost = "failed" if compared.failures else "passed", end.ranks[0]["bytes_per_rank"]
        described = {"bug_description": (BUGS[cell.bug].function.__doc__ or "").removesuffix(".")} if cell.bug else {}
        return {
            **asdict(cell),
            **described,
            "status": status,
            "refusal_expected": refused,
            "as_expected": status == ("failed" if cell.bug else "refused" if refused else "passed"),
            "measured": compared.measured,
            "failures": compared.failures,
            "seconds": round(end.seconds, 2),
            "message": message or None,
            "cost": cost or None,
        }

    def line(self, result: Result, *, count: str, left: str) -> str:
        verdict = f"{result['status'].upper()}, which is not expected"
        if result["as_expected"]:
            verdict = "caught" if result["bug"] else result["status"]
        reasons = [*map(failure_words, result["failures"]), *(result["message"] or "").splitlines()]
        because = f": {reasons[0]}" if reasons else ""
        return f"{count} {cell_name(result)}: {verdict} ({result['seconds']:.1f} s{left}){because}"

    def record(self, results: Sequence[Result]) -> Record:
        windows = {"validation_windows": shared.VALIDATION_WINDOWS}
        return {
            "work": {"steps": self.options.steps, **work_facts(self.options.device), **windows},
            "bounds": {name: asdict(bounds) for name, bounds in BOUNDS[self.options.device].items()},
            "references": self._reference_facts,
            "launches": [
                {name: round(value, 1) if isinstance(value, float) else value for name, value in asdict(launch).items()}
                for launch in self._runner.launches
            ],
            "cells": list(results),
        }

    def failures(self, record: Record) -> list[str]:
        return [cell_name(cell) for cell in record["cells"] if not cell["as_expected"]]

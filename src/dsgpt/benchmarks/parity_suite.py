"""Runs the cells of the parity suite, and writes its record."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.cells import CLIPPING, STEPS, STRATEGIES, TRAININGS, VALIDATION_WINDOWS, Cell, CellEnd, CellRunner
from dsgpt.benchmarks.frame import work_facts
from dsgpt.benchmarks.launch import Assignment, Launch, RankEnd
from dsgpt.benchmarks.parity import refusal_expected
from dsgpt.benchmarks.parity_bounds import BOUNDS, Bounds, Work, bounds_class, work_of
from dsgpt.benchmarks.parity_rank import BUGS
from dsgpt.benchmarks.parity_reference import compare

# Runs cells: references first, then one launch for each launcher and number of ranks. Every cell gives a result.

CALL = "dsgpt.benchmarks.parity_rank:"


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one cell ended."""

    cell: Cell
    refusal_expected: bool = False
    """Whether the product must refuse the cell."""
    status: str
    """``passed``, ``failed``, ``refused`` by the product, or ``error``."""
    seconds: float
    measured: dict[str, Any] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    message: str = ""
    """The message of a refusal or an error."""
    bytes_per_rank: dict[str, Any] = field(default_factory=dict)
    """Model state and traffic, measured and by formula; see ``rank.compared_bytes``."""

    @property
    def as_expected(self) -> bool:
        """For a planted bug, whether the cell failed; for any other cell, whether it passed or was rightly refused."""
        if self.cell.bug:
            return self.status == "failed"
        return self.status == ("refused" if self.refusal_expected else "passed")


def bounds_of(cell: Cell, device: str) -> Bounds:
    """How far the cell may be from its reference on ``device``, ``cpu`` or ``cuda``."""
    strategy, work = STRATEGIES[cell.strategy], work_of(cell)
    pipeline = strategy.recipe == "pipeline.json"
    known = bounds_class(
        cell.precision, work.split, training=work.training, model_ranks=strategy.model_ranks, pipeline=pipeline
    )
    return BOUNDS[device][known]


class ParitySuite:
    """One run of the suite.

    Args:
        folder: exists; the suite works in it.
        repository: holds the scripts and recipes.
        device: ``cpu`` or ``cuda``.
        steps: optimizer steps of every training.
    """

    def __init__(self, folder: Path, *, repository: Path, device: str, steps: int = STEPS) -> None:
        self._runner, self.device = CellRunner(folder, repository=repository, device=device, steps=steps), device
        self._references: dict[Work, CellEnd] = {}
        self._without_reference: dict[Work, str] = {}

    @property
    def launches(self) -> list[Launch]:
        """The launches of the cells, without those of the references."""
        return self._runner.launches

    @property
    def references(self) -> list[dict[str, Any]]:
        """Losses and norms of the reference trainings, for the record."""
        return [_reference_facts(work, end.ranks[0]) for work, end in sorted(self._references.items(), key=_by_work)]

    def run(self, cells: Iterable[Cell], *, started: Callable[[Launch], None] = lambda _: None) -> Iterator[Result]:
        """Run ``cells``, launch by launch; yield their results as they come.

        Args:
            cells: what to run, in any order.
            started: called with every launch before it starts.

        Raises:
            UserError: the text could not be prepared.
        """
        cells = list(cells)
        known = self._references.keys() | self._without_reference.keys()
        self._run_references(sorted({work_of(cell) for cell in cells} - known))

        def place(cell: Cell) -> tuple[str, int]:
            return STRATEGIES[cell.strategy].launcher, cell.ranks

        order = list(STRATEGIES)
        cells.sort(key=lambda cell: (cell.ranks, place(cell)[0], order.index(cell.strategy)))
        for (launcher, ranks), group in itertools.groupby(cells, key=place):
            part = list(group)
            assignments = [
                self._runner.assignment(cell, call=f"{CALL}train_cell", arguments={"bug": cell.bug}) for cell in part
            ]
            ends = self._runner.run(launcher, ranks, assignments, started=started)
            for cell, end in zip(part, ends, strict=True):
                yield self._judge(cell, end)

    def _run_references(self, wanted: list[Work]) -> None:
        if not wanted:
            return
        ends = self._runner.run("python", 1, [self._reference(work) for work in wanted])
        for work, end in zip(wanted, ends, strict=True):
            if end.status != "done":  # if the product refuses it, it refuses its cells for the same reason
                self._without_reference[work] = end.message
            elif (smallest := _smallest_norm(end.ranks[0])) <= _clipping(work) and work.optimizer == "sgd":
                self._without_reference[work] = f"it is not clipped at every step, a gradient norm is {smallest:g}"
            else:
                self._references[work] = end

    def _reference(self, work: Work) -> Assignment:
        cell = Cell(strategy="baseline", ranks=1, accumulation=1, optimizer=work.optimizer, precision=work.precision)
        split = asdict(work.split)
        words = ["reference", work.training, *map(str, split.values())]
        prefix = "".join(f"{word.replace(' ', '-')}_" for word in words if word)
        return self._runner.assignment(
            cell,
            call=f"{CALL}train_reference_cell",
            name=f"{prefix}{cell.folder}",
            training=work.training,
            arguments={"split": split},
        )

    def _judge(self, cell: Cell, end: CellEnd) -> Result:
        if end.status != "done":
            return self._result(cell, end, status=end.status, message=end.message)
        work = work_of(cell)
        reference = self._references.get(work)
        if reference is None:
            why = f"cannot be compared, because its reference failed: {self._without_reference[work]}"
            return self._result(cell, end, status="error", message=why)
        found = compare(
            end.ranks,
            end.folder,
            reference=reference.ranks[0],
            reference_folder=reference.folder,
            bounds=bounds_of(cell, self.device),
            replicas=STRATEGIES[cell.strategy].replicas,
        )
        return self._result(
            cell,
            end,
            status="failed" if found.failures else "passed",
            measured=found.measured,
            failures=found.failures,
            bytes_per_rank=end.ranks[0].get("bytes_per_rank", {}),
        )

    def _result(self, cell: Cell, end: CellEnd, **more: Any) -> Result:
        expected = not cell.bug and refusal_expected(cell, device=self.device)
        return Result(cell=cell, refusal_expected=expected, seconds=end.seconds, **more)


def _by_work(item: tuple[Work, CellEnd]) -> Work:
    return item[0]


def _reference_facts(work: Work, end: RankEnd) -> dict[str, Any]:
    return {
        **{key: value for key, value in work._asdict().items() if key != "split"},
        **asdict(work.split),
        "first_loss": end["steps"][0]["loss"],
        "last_loss": end["steps"][-1]["loss"],
        "smallest_grad_norm": _smallest_norm(end),
        "last_validation_loss": end["validations"][-1]["loss"],
        "clipping": _clipping(work),
    }


def _smallest_norm(end: RankEnd) -> float:
    norms: list[float] = [step["grad_norm"] for step in end["steps"]]
    return min(norms)


def _clipping(work: Work) -> float:
    changed: float | None = TRAININGS[work.training].get("gradient_clipping")
    return CLIPPING[work.optimizer] if changed is None else changed


# The record of one run of the suite, as JSON: machine, bounds, references, and every cell with its figures.


def suite_record(suite: ParitySuite, results: Sequence[Result], *, device: str) -> dict[str, Any]:
    """The record of one run of the suite, without its head.

    Args:
        suite: what ran.
        results: of all its cells.
        device: ``cpu`` or ``cuda``.
    """
    return {
        "work": {"steps": STEPS, **work_facts(device), "validation_windows": VALIDATION_WINDOWS},
        "bounds": {name: asdict(bounds) for name, bounds in BOUNDS[device].items()},
        "references": suite.references,
        "launches": [
            {name: round(value, 1) if isinstance(value, float) else value for name, value in asdict(launch).items()}
            for launch in suite.launches
        ],
        "cells": [_cell(result) for result in results],
    }


def _cell(result: Result) -> dict[str, Any]:
    bug = {"bug_description": BUGS[result.cell.bug].description} if result.cell.bug else {}
    return {
        **asdict(result.cell),
        **bug,
        "status": result.status,
        "refusal_expected": result.refusal_expected,
        "as_expected": result.as_expected,
        "seconds": round(result.seconds, 2),
        "message": result.message or None,
        "measured": result.measured,
        "failures": result.failures,
        "cost": result.bytes_per_rank or None,
    }

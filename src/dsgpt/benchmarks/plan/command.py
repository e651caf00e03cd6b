"""``.venv/bin/python src/benchmark.py plan``: the planner's predictions, held against measurements."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dsgpt.benchmarks.harness.cells import counted
from dsgpt.benchmarks.harness.command import SuiteCommand, SuiteOptions, record_head, run_suite
from dsgpt.benchmarks.harness.pages import Record, SuitePage
from dsgpt.benchmarks.plan.page import failed, line_of, plan_page, summary_lines
from dsgpt.common.errors import UserError
from dsgpt.telemetry.console import Console

if TYPE_CHECKING:
    from dsgpt.benchmarks.plan.cells import PlanCell
    from dsgpt.benchmarks.plan.suite import PlanSuite

PAGE = SuitePage(name="plan", of="predictions", text=plan_page, summary=summary_lines)
SCHEMA_VERSION = "1.0"

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PlanOptions(SuiteOptions):
    """The options of the command line."""

    rounds: int
    """Of step times."""
    only: Sequence[str]
    """Beginnings of the keys of cells; empty for all."""

    @property
    def whole(self) -> bool:
        """See ``SuiteOptions``."""
        return not self.only and self.rounds > 0


def run_plan(options: PlanOptions, *, repository: Path) -> int:
    """Measure; return 0 if every prediction is within its bounds.

    Raises:
        UserError: nothing is selected.
    """
    return run_suite(_PlanCommand(options, repository), options, repository=repository)


class _PlanCommand(SuiteCommand[Result]):
    page: ClassVar[SuitePage] = PAGE
    unit: ClassVar[str] = "cell"
    count_width: ClassVar[int] = 2

    def __init__(self, options: PlanOptions, repository: Path) -> None:
        self._options, self._repository = options, repository
        self._cells: list[PlanCell] = []
        self._suite: PlanSuite
        self._console: Console

    def plan(self, console: Console) -> int:
        """See ``SuiteCommand``."""
        from dsgpt.benchmarks.plan.cells import cells  # noqa: PLC0415 - pydantic takes its time

        self._console, wanted, every = console, self._options.only, cells()
        self._cells = [cell for cell in every if not wanted or any(cell.key.startswith(word) for word in wanted)]
        if not self._cells:
            keys = ", ".join(cell.key for cell in every)
            raise UserError(f"--only {' '.join(wanted)}: selects nothing; there are {keys}")
        return len(self._cells)

    def begin(self, folder: Path, console: Console) -> None:
        from dsgpt.benchmarks.plan.suite import PlanSuite  # noqa: PLC0415 - torch takes seconds

        rounds = self._options.rounds
        self._suite = PlanSuite(folder.resolve(), repository=self._repository, rounds=rounds, started=self._say_launch)
        console.say(
            f"peak memory of {counted(len(self._cells), 'cell')}, then {counted(rounds, 'round')} of step times"
        )

    def _say_launch(self, launch: Any) -> None:
        self._console.say(f"starting {counted(launch.cells, 'cell')} on {counted(launch.ranks, 'rank')}")

    def results(self) -> Iterator[Result]:
        return self._suite.run(self._cells)

    def line(self, result: Result, *, count: str, left: str) -> str:
        return f"{count} {line_of(result)}{left}"

    def record(self, results: Sequence[Result], *, seconds: float) -> Record:
        return record_head(SCHEMA_VERSION, device="cpu") | {
            "rounds": self._options.rounds,
            "seconds": round(seconds, 1),
            "calibration": self._suite.calibration and asdict(self._suite.calibration),
            "factors": self._suite.factors and asdict(self._suite.factors),
            "cells": list(results),
        }

    def failures(self, results: Sequence[Result], record: Record) -> list[str]:  # noqa: ARG002
        return [why for result in results for why in failed(result)]

    def closing_lines(self, failures: Sequence[str]) -> list[str]:
        return [f"outside the bounds: {failure}" for failure in failures]

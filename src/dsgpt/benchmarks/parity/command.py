"""``.venv/bin/python src/benchmark.py parity``: what the parity suite runs, prints and records."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from dsgpt.benchmarks.harness.cells import Cell, counted
from dsgpt.benchmarks.harness.command import SuiteCommand, SuiteOptions, run_suite
from dsgpt.benchmarks.harness.pages import Record, SuitePage
from dsgpt.benchmarks.parity.matrix import core, select, whole_matrix
from dsgpt.benchmarks.parity.page import failure_words, parity_page, summary_lines
from dsgpt.common.problems import Problems
from dsgpt.telemetry.console import Console

if TYPE_CHECKING:
    from dsgpt.benchmarks.harness.launch import Launch
    from dsgpt.benchmarks.parity.suite import Result, Suite

PAGE = SuitePage(name="parity", of="the parity suite", text=parity_page, summary=summary_lines)


@dataclass(frozen=True, kw_only=True)
class ParityOptions(SuiteOptions):
    """The options of the command line."""

    ranks: Sequence[int]
    """Numbers of processes; empty for all."""
    only: Sequence[str]
    """Strategies; empty for all."""
    core: bool
    """Only what ``make test`` runs."""
    device: str
    """``cpu`` or ``cuda``."""

    @property
    def whole(self) -> bool:
        """Whether the options select the whole suite."""
        return not (self.core or self.only or self.ranks)


def run_parity(options: ParityOptions, *, repository: Path) -> int:
    """Run the suite; return 0 if no training is out of bounds and all planted bugs were caught.

    Raises:
        UserError: there is nothing to run, or the text could not be prepared.
    """
    return run_suite(_ParityCommand(options, repository), options, repository=repository)


class _ParityCommand(SuiteCommand["Result"]):
    page: ClassVar[SuitePage] = PAGE
    unit: ClassVar[str] = "training"

    def __init__(self, options: ParityOptions, repository: Path) -> None:
        self._options, self._repository = options, repository
        self._cells: list[Cell] = []
        self._suite: Suite
        self._console: Console

    def plan(self, console: Console) -> int:
        self._cells, self._console = _choose(self._options, console), console
        return len(self._cells)

    def begin(self, folder: Path, console: Console) -> None:
        from dsgpt.benchmarks.parity.suite import Suite  # noqa: PLC0415 - torch takes seconds

        self._suite = Suite(folder, repository=self._repository, device=self._options.device)
        console.say(f"{len(self._cells)} trainings; the text and the references come first")

    def results(self) -> Iterator["Result"]:
        return self._suite.run(self._cells, started=lambda launch: self._console.say(_announce(launch)))

    def line(self, result: "Result", *, count: str, left: str) -> str:
        reasons = [failure_words(failure) for failure in result.failures] or result.message.splitlines()
        because = f": {reasons[0]}" if reasons else ""
        return f"{count} {result.cell.name}: {_verdict(result)} ({result.seconds:.1f} s{left}){because}"

    def record(self, results: Sequence["Result"], *, seconds: float) -> Record:
        from dsgpt.benchmarks.parity.record import suite_record  # noqa: PLC0415

        return suite_record(self._suite, results, seconds=seconds, device=self._options.device)

    def failures(self, results: Sequence["Result"], record: Record) -> list[str]:  # noqa: ARG002
        return [result.cell.name for result in results if not result.as_expected]

    def closing_lines(self, failures: Sequence[str]) -> list[str]:
        return [f"unexpected result: {name}" for name in failures]


def _choose(options: ParityOptions, console: Console) -> list[Cell]:
    from dsgpt.benchmarks.parity.planted import planted_cells  # noqa: PLC0415
    from dsgpt.runtime.device import cuda_devices  # noqa: PLC0415

    problems = Problems()
    everything = [*(core() if options.core else whole_matrix()), *planted_cells(options.device)]
    cells = select(everything, ranks=options.ranks, only=options.only, problems=problems)
    if options.device == "cuda" and (gpus := cuda_devices()) < max((cell.ranks for cell in cells), default=0):
        console.say(f"this machine has {gpus} GPUs: trainings on more ranks are left out")
        cells = [cell for cell in cells if cell.ranks <= gpus]
        if not cells:
            problems.add(f"--device cuda: no training runs on {gpus} GPUs or fewer; take --device cpu")
    problems.raise_if_any()
    return cells


def _announce(launch: "Launch") -> str:
    return f"{launch.launcher} starts {counted(launch.ranks, 'rank')} for {counted(launch.cells, 'training')}"


def _verdict(result: "Result") -> str:
    """How the cell ended, in capitals if that is not as expected."""
    if result.cell.bug:
        return "caught" if result.status == "failed" else f"NOT CAUGHT ({result.status})"
    if result.refusal_expected and result.status != "refused":
        return f"NOT REFUSED ({result.status})"
    if result.status == "refused" and not result.refusal_expected:
        return "REFUSED, though it should train"
    return {"passed": "passed", "failed": "FAILED", "refused": "refused", "error": "ERROR"}[result.status]

"""``.venv/bin/python src/benchmark.py faults``: what the fault suite runs, prints and records."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from dsgpt.benchmarks.faults.page import faults_page, summary_lines
from dsgpt.benchmarks.faults.plan import DROPOUT, KILLS, RUNS, SAVE_EVERY, STEPS
from dsgpt.benchmarks.harness.cells import by
from dsgpt.benchmarks.harness.command import SuiteCommand, SuiteOptions, record_head, run_suite, work_facts
from dsgpt.benchmarks.harness.pages import Record, SuitePage
from dsgpt.telemetry.console import Console

if TYPE_CHECKING:
    from dsgpt.benchmarks.faults.outcome import Outcome
    from dsgpt.benchmarks.faults.runs import Runs
    from dsgpt.benchmarks.faults.suite import Fault

PAGE = SuitePage(name="faults", of="the fault campaign", text=faults_page, summary=summary_lines)
SCHEMA_VERSION = "1.0"


@dataclass(frozen=True, kw_only=True)
class FaultOptions(SuiteOptions):
    """The options of the command line."""

    kills: int
    seed: int
    """Decides the instants and victims of the kills."""
    core: bool
    """Only what ``make test`` runs."""

    @property
    def whole(self) -> bool:
        """Whether the options select the whole suite."""
        return not self.core and self.kills >= KILLS


def run_faults(options: FaultOptions, *, repository: Path) -> int:
    """Run the campaign; return 0 if every run recovered.

    Raises:
        UserError: the text could not be prepared.
    """
    return run_suite(_FaultsCommand(options, repository), options, repository=repository)


class _FaultsCommand(SuiteCommand["Outcome"]):
    page: ClassVar[SuitePage] = PAGE
    unit: ClassVar[str] = "fault"
    count_width: ClassVar[int] = 2

    def __init__(self, options: FaultOptions, repository: Path) -> None:
        self._options, self._repository = options, repository
        self._faults: list[Fault] = []
        self._runs: Runs

    def plan(self, console: Console) -> int:  # noqa: ARG002
        from dsgpt.benchmarks.faults.suite import all_faults, core_faults  # noqa: PLC0415 - torch takes seconds

        options = self._options
        self._faults = core_faults() if options.core else all_faults(kills=options.kills, seed=options.seed)
        return len(self._faults)

    def begin(self, folder: Path, console: Console) -> None:
        from dsgpt.benchmarks.faults.runs import Runs  # noqa: PLC0415

        self._runs = Runs(folder, repository=self._repository)
        console.say(f"{len(self._faults)} faults; each run is first trained undisturbed")

    def results(self) -> Iterator["Outcome"]:
        from dsgpt.benchmarks.faults.suite import try_faults  # noqa: PLC0415

        return try_faults(self._runs, self._faults)

    def line(self, result: "Outcome", *, count: str, left: str) -> str:
        word = {"passed": "recovered", "failed": "FAILED", "not run": "not run"}[result.status]
        reasons = (result.wrong or result.not_run).splitlines()
        because = f": {reasons[0]}" if reasons else ""
        return f"{count} {result.name}: {word} ({result.seconds:.1f} s{left}){because}"

    def record(self, results: Sequence["Outcome"], *, seconds: float) -> Record:
        """The record of ``results``, which took ``seconds``."""
        runs = {name: {"executed_by": by(cell), "accumulation": cell.accumulation} for name, cell in RUNS.items()}
        settings = {"steps": STEPS, "save_every": SAVE_EVERY, "dropout": DROPOUT}
        return record_head(SCHEMA_VERSION, device="cpu") | {
            "work": settings | work_facts("cpu") | {"runs": runs},
            "seed": self._options.seed,
            "seconds": round(seconds, 1),
            "faults": [
                asdict(outcome) | {"status": outcome.status, "seconds": round(outcome.seconds, 2)}
                for outcome in results
            ],
        }

    def failures(self, results: Sequence["Outcome"], record: Record) -> list[str]:  # noqa: ARG002
        return [outcome.name for outcome in results if outcome.status == "failed"]

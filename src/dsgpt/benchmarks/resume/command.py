"""``.venv/bin/python src/benchmark.py resume``: what the resume suite runs, prints and records."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dsgpt.benchmarks.harness.cells import Cell, by, counted
from dsgpt.benchmarks.harness.command import SuiteCommand, SuiteOptions, record_head, run_suite, work_facts
from dsgpt.benchmarks.harness.pages import Record, SuitePage
from dsgpt.benchmarks.resume.matrix import PAIRS, Pair, core_pairs, core_rewritten, rewritten, seeded_pairs
from dsgpt.benchmarks.resume.page import resume_page, summary_lines
from dsgpt.telemetry.console import Console

if TYPE_CHECKING:
    from dsgpt.benchmarks.resume.suite import Result, ResumeSuite

PAGE = SuitePage(name="resume", of="the resume suite", text=resume_page, summary=summary_lines)
SCHEMA_VERSION = "1.1"


@dataclass(frozen=True, kw_only=True)
class ResumeOptions(SuiteOptions):
    """The options of the command line."""

    pairs: int
    seed: int
    """Decides the choice of pairs."""
    core: bool
    """Only what ``make test`` runs."""

    @property
    def whole(self) -> bool:
        """Whether the options select the whole suite."""
        return not self.core and self.pairs >= PAIRS


def run_resume(options: ResumeOptions, *, repository: Path) -> int:
    """Run the suite; return 0 if nothing failed.

    Raises:
        UserError: the text could not be prepared.
    """
    return run_suite(_ResumeCommand(options, repository), options, repository=repository)


class _ResumeCommand(SuiteCommand["Result"]):
    page: ClassVar[SuitePage] = PAGE
    unit: ClassVar[str] = "result"

    def __init__(self, options: ResumeOptions, repository: Path) -> None:
        self._options, self._repository = options, repository
        self._cells: list[Cell] = []
        self._pairs: list[Pair] = []
        self._suite: ResumeSuite
        self._console: Console

    def plan(self, console: Console) -> int:
        options, self._console = self._options, console
        self._cells = core_rewritten() if options.core else rewritten()
        self._pairs = core_pairs() if options.core else seeded_pairs(options.pairs, seed=options.seed)
        return len(self._cells) + len(self._pairs)

    def begin(self, folder: Path, console: Console) -> None:
        from dsgpt.benchmarks.resume.suite import ResumeSuite  # noqa: PLC0415 - torch takes seconds

        self._suite = ResumeSuite(folder, repository=self._repository)
        console.say(f"{len(self._pairs)} pairs and {len(self._cells)} rewritings; text and source runs come first")

    def results(self) -> Iterator["Result"]:
        return self._suite.run(
            self._cells,
            self._pairs,
            started=lambda launch: self._console.say(f"starting {counted(launch.ranks, 'rank')}"),
        )

    def line(self, result: "Result", *, count: str, left: str) -> str:
        word = {"passed": "passed", "failed": "FAILED", "refused": "refused", "error": "ERROR"}[result.status]
        off = f", loss off by {result.measured['loss']:.1e}" if "loss" in result.measured else ""
        because = f": {result.message.splitlines()[0]}" if result.message else ""
        return f"{count} {result.name}: {word}{off} ({result.seconds:.1f} s{left}){because}"

    def record(self, results: Sequence["Result"], *, seconds: float) -> Record:
        """The record of ``results``, which took ``seconds``."""
        from dsgpt.benchmarks.harness.work import VALIDATION_WINDOWS  # noqa: PLC0415 - torch takes seconds
        from dsgpt.benchmarks.resume.suite import BOUND, REWRITTEN_BOUNDS, WHOLE  # noqa: PLC0415

        steps = {"steps": WHOLE.steps, "saved": WHOLE.saved, "validated_every": WHOLE.validated}
        steps |= {"validation_windows": VALIDATION_WINDOWS}
        return record_head(SCHEMA_VERSION, device="cpu") | {
            "work": steps | work_facts("cpu"),
            "bound": BOUND,
            "rewritten_bounds": REWRITTEN_BOUNDS,
            "seed": self._options.seed,
            "seconds": round(seconds, 1),
            "reference": self._suite.reference(),
            "launches": [asdict(launch) for launch in self._suite.launches],
            "pairs": [
                _pair_facts(result.subject) | _end_facts(result)
                for result in results
                if isinstance(result.subject, Pair)
            ],
            "rewritten": [
                _cell_facts(result.subject) | _end_facts(result)
                for result in results
                if isinstance(result.subject, Cell)
            ],
        }

    def failures(self, results: Sequence["Result"], record: Record) -> list[str]:  # noqa: ARG002
        return [result.name for result in results if result.status in {"failed", "error"}]


def _pair_facts(pair: Pair) -> dict[str, Any]:
    return {
        "source": by(pair.source),
        "source_accumulation": pair.source.accumulation,
        "target": by(pair.target),
        "target_accumulation": pair.target.accumulation,
    }


def _cell_facts(cell: Cell) -> dict[str, Any]:
    return {"strategy": cell.strategy, "ranks": cell.ranks, "precision": cell.precision}


def _end_facts(result: "Result") -> dict[str, Any]:
    return {
        "name": result.name,
        "status": result.status,
        "seconds": round(result.seconds, 2),
        "measured": result.measured,
        "message": result.message or None,
    }

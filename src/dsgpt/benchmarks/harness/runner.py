"""Runs cells in a folder: text, recipes and flags for each, then one launch for many of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.harness.cells import Cell
from dsgpt.benchmarks.harness.corpus import Corpus, cut_validation, prepare_corpus
from dsgpt.benchmarks.harness.launch import Assignment, Launch, run_job
from dsgpt.benchmarks.harness.rank_files import RankEnd, first_failure, read_ranks
from dsgpt.benchmarks.harness.work import SEQUENCE, STEPS, VALIDATION_WINDOWS, flags, write_recipe


@dataclass(frozen=True, kw_only=True)
class CellEnd:
    """How all ranks of one assignment ended."""

    folder: Path
    ranks: list[RankEnd]
    """The file of every rank; empty if the launch was lost."""
    status: str
    """``done``, or that of the rank that failed first: ``refused`` or ``error``."""
    message: str = ""
    """The error of the rank that failed first, without the paths of this machine."""
    seconds: float = 0.0


class CellRunner:
    """Runs cells.

    Args:
        folder: an existing folder; every cell gets a folder in it.
        repository: holds the scripts and recipes.
        device: ``cpu`` or ``cuda``.
        steps: optimizer steps of a cell.
    """

    def __init__(self, folder: Path, *, repository: Path, device: str, steps: int = STEPS) -> None:
        self.folder, self.device, self._repository, self._steps = folder, device, repository, steps
        self.launches: list[Launch] = []
        """Those that the record lists."""

    @cached_property
    def corpus(self) -> Corpus:
        """The text, prepared when it is first needed.

        Raises:
            UserError: it could not be prepared.
        """
        whole = prepare_corpus(self._repository, self.folder / "corpus")
        return cut_validation(whole, windows=VALIDATION_WINDOWS, length=SEQUENCE)

    def assignment(
        self,
        cell: Cell,
        *,
        call: str,
        name: str = "",
        training: str | None = None,
        more: Sequence[str] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> Assignment:
        """Make the cell's folder with its recipe; return what its ranks must call.

        Args:
            cell: what to run.
            call: ``module:function``.
            name: of the folder; by default the cell's.
            training: a key of ``TRAININGS``; by default that of the cell's strategy.
            more: further flags of ``src/gpt2.py``.
            arguments: of the call.
        """
        folder = self.folder / (name or cell.folder)
        folder.mkdir()
        recipe = write_recipe(folder / "recipe.json", cell, recipes=self._repository / "ds_configs", training=training)
        words = flags(
            cell, recipe=recipe, corpus=self.corpus, run_dir=folder / "run", device=self.device, steps=self._steps
        )
        return Assignment(folder=str(folder), flags=[*words, *more], call=call, arguments=dict(arguments or {}))

    def run(
        self,
        launcher: str,
        ranks: int,
        assignments: Sequence[Assignment],
        *,
        started: Callable[[Launch], None] | None = None,
        imports: Sequence[str] | None = None,
    ) -> Iterator[CellEnd]:
        """Run ``assignments`` under one launcher; yield how each ended, in order, including the lost ones.

        Args:
            launcher: ``python``, ``torchrun`` or ``deepspeed``.
            ranks: how many it starts.
            assignments: for all of these ranks.
            started: called with the launch before it starts; without it, the record does not list the launch.
            imports: as for ``run_job``.
        """
        launch = Launch(launcher=launcher, ranks=ranks, cells=len(assignments))
        if started:
            self.launches.append(launch)
            started(launch)
        job_file, done = self.folder / f"job-{len(list(self.folder.glob('job-*.json'))) + 1}.json", 0
        for index, seconds in run_job(launch, assignments, job_file=job_file, device=self.device, imports=imports):
            done = index + 1
            yield self._end_of(Path(assignments[index].folder), ranks, seconds)
        for assignment in assignments[done:]:
            message = f"the launch ended before this cell did; {_last_lines(job_file)}"
            yield CellEnd(folder=Path(assignment.folder), ranks=[], status="error", message=message)

    def _end_of(self, folder: Path, ranks: int, seconds: float) -> CellEnd:
        ends = read_ranks(folder, ranks)
        failure = first_failure(ends)
        if failure is None:
            return CellEnd(folder=folder, ranks=ends, status="done", seconds=seconds)
        message = failure["message"].replace(f"{folder}/", "").replace(f"{self.folder}/", "")
        return CellEnd(folder=folder, ranks=ends, status=failure["status"], message=message, seconds=seconds)


def _last_lines(job_file: Path) -> str:
    lines = job_file.with_suffix(".log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"the last lines of its log: {' / '.join(lines[-3:])}"

"""Runs cells: reference first, then one launch per launcher and number of ranks; every end is a result."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dsgpt.benchmarks.harness.corpus import Corpus, cut_validation, prepare_corpus
from dsgpt.benchmarks.harness.launch import Assignment, Launch, run_job
from dsgpt.benchmarks.harness.measurement import read_rank
from dsgpt.benchmarks.harness.work import CLIPPING, SEQUENCE, VALIDATION_WINDOWS, flags, write_recipe
from dsgpt.benchmarks.parity.bounds import BOUNDS, Bounds, bounds_class
from dsgpt.benchmarks.parity.comparison import compare
from dsgpt.benchmarks.parity.matrix import Cell, refusal_expected
from dsgpt.benchmarks.parity.split import Split
from dsgpt.benchmarks.parity.tested import STRATEGIES, TRAININGS


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
    """What a refusal or an error said."""
    cost: dict[str, Any] = field(default_factory=dict)
    """Bytes of model state and of communication, measured and by formula; see ``dsgpt.benchmarks.parity.traffic``."""

    @property
    def as_expected(self) -> bool:
        """Whether the suite may be content: a bug must fail, all else pass, or be refused where that is known."""
        if self.cell.bug:
            return self.status == "failed"
        return self.status == ("refused" if self.refusal_expected else "passed")


class Work(NamedTuple):
    """What is computed; cells that agree in this have the same reference."""

    optimizer: str
    precision: str
    training: str
    """Of ``TRAININGS``."""
    split: Split = Split()
    """Of a low precision; in fp32 the whole global batch at once."""


def work_of(cell: Cell) -> Work:
    """What the cell must compute."""
    strategy = STRATEGIES[cell.strategy]
    split = Split()
    if cell.precision != "fp32":
        data_ranks = cell.ranks // strategy.model_ranks
        split = Split(data_ranks=data_ranks, accumulation=cell.accumulation, low=strategy.low).simplest()
    return Work(cell.optimizer, cell.precision, strategy.training, split)


def bounds_of(cell: Cell, device: str) -> Bounds:
    """How far the cell may be from its reference on ``device``, ``cpu`` or ``cuda``."""
    strategy, work = STRATEGIES[cell.strategy], work_of(cell)
    pipeline = strategy.recipe == "pipeline.json"
    known = bounds_class(cell.precision, work.split, model_ranks=strategy.model_ranks, pipeline=pipeline)
    return BOUNDS[device][known]


class Suite:
    """One run of the suite in a folder of its own."""

    def __init__(self, folder: Path, *, repository: Path, device: str) -> None:
        """Work in ``folder``, which exists; ``repository`` holds the scripts and recipes, ``device`` is cpu or cuda."""
        self._folder, self._repository, self.device = folder, repository, device
        self._corpus: Corpus | None = None
        self._references: dict[Work, tuple[dict[str, Any], Path]] = {}
        self._without_reference: dict[Work, str] = {}
        self.launches: list[Launch] = []

    @property
    def references(self) -> list[dict[str, Any]]:
        """What the reference trainings came to, for the record."""
        return [
            {
                **{key: value for key, value in work._asdict().items() if key != "split"},
                **asdict(work.split),
                "first_loss": end["steps"][0]["loss"],
                "last_loss": end["steps"][-1]["loss"],
                "smallest_grad_norm": _smallest_norm(end),
                "last_validation_loss": end["validations"][-1]["loss"],
                "clipping": _clipping(work),
            }
            for work, (end, _) in sorted(self._references.items())
        ]

    @property
    def corpus(self) -> Corpus:
        """The text, prepared when it is first needed."""
        if self._corpus is None:
            whole = prepare_corpus(self._repository, self._folder / "corpus")
            self._corpus = cut_validation(whole, windows=VALIDATION_WINDOWS, length=SEQUENCE)
        return self._corpus

    def run(self, cells: Iterable[Cell], *, started: Callable[[Launch], None] = lambda _: None) -> Iterator[Result]:
        """Run ``cells``, launch by launch; their results come as they finish.

        Args:
            cells: what to run, in any order.
            started: told of every launch before it starts.

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
            launch = Launch(launcher=launcher, ranks=ranks, cells=len(part))
            self.launches.append(launch)
            started(launch)
            yield from self._run_launch(launch, part)

    def _run_references(self, wanted: list[Work]) -> None:
        if not wanted:
            return
        assignments = [self._reference(work) for work in wanted]
        launch, job_file = Launch(launcher="python", ranks=1, cells=len(wanted)), self._job_file()
        list(run_job(launch, assignments, job_file=job_file, device=self.device))
        for work, assignment in zip(wanted, assignments, strict=True):
            folder = Path(assignment.folder)
            end = read_rank(folder, 0)
            if end is None:
                self._without_reference[work] = f"never ended; {_last_words(job_file)}"
            elif end["status"] != "done":  # refused: its cells will be so for the same reason
                self._without_reference[work] = end["message"]
            elif (smallest := _smallest_norm(end)) <= _clipping(work) and work.optimizer == "sgd":
                self._without_reference[work] = f"is not clipped at every step: gradient norm {smallest:g}"
            else:
                self._references[work] = (end, folder)

    def _reference(self, work: Work) -> Assignment:
        cell = Cell(strategy="baseline", ranks=1, accumulation=1, optimizer=work.optimizer, precision=work.precision)
        words = ["reference", work.training, *(map(str, asdict(work.split).values()))]
        prefix = "".join(f"{word.replace(' ', '-')}_" for word in words if word)
        return self._assignment(cell, prefix=prefix, training=work.training, reference=asdict(work.split))

    def _job_file(self) -> Path:
        return self._folder / f"job-{len(list(self._folder.glob('job-*.json'))) + 1}.json"

    def _assignment(
        self, cell: Cell, *, prefix: str = "", training: str | None = None, reference: dict[str, Any] | None = None
    ) -> Assignment:
        folder = self._folder / f"{prefix}{cell.folder}"
        folder.mkdir()
        recipe = write_recipe(folder / "recipe.json", cell, recipes=self._repository / "ds_configs", training=training)
        words = flags(cell, recipe=recipe, corpus=self.corpus, run_dir=folder / "run", device=self.device)
        return Assignment(folder=str(folder), flags=words, bug=cell.bug, reference=reference)

    def _run_launch(self, launch: Launch, cells: list[Cell]) -> Iterator[Result]:
        assignments = [self._assignment(cell) for cell in cells]
        job_file, done = self._job_file(), 0
        for index, seconds in run_job(launch, assignments, job_file=job_file, device=self.device):
            done = index + 1
            yield self._judge(cells[index], Path(assignments[index].folder), seconds)
        for cell in cells[done:]:
            yield self._result(cell, "error", message=f"the launch ended before it; {_last_words(job_file)}")

    def _result(self, cell: Cell, status: str, *, seconds: float = 0.0, **more: Any) -> Result:
        expected = not cell.bug and refusal_expected(cell, device=self.device)
        return Result(cell=cell, refusal_expected=expected, status=status, seconds=seconds, **more)

    def _judge(self, cell: Cell, folder: Path, seconds: float) -> Result:
        ends = [read_rank(folder, rank) for rank in range(cell.ranks)]
        bad = [end for end in ends if end["status"] != "done"]
        if bad:
            first = min(bad, key=lambda end: end["time"])  # the others only miss it
            message = first["message"].replace(f"{folder}/", "").replace(f"{self._folder}/", "")
            return self._result(cell, first["status"], seconds=seconds, message=message)
        work = work_of(cell)
        if work not in self._references:
            why = f"there is nothing to compare with: the reference {self._without_reference[work]}"
            return self._result(cell, "error", seconds=seconds, message=why)
        reference, reference_folder = self._references[work]
        found = compare(
            ends,
            folder,
            reference=reference,
            reference_folder=reference_folder,
            bounds=bounds_of(cell, self.device),
            replicas=STRATEGIES[cell.strategy].replicas,
        )
        return self._result(
            cell,
            "failed" if found.failures else "passed",
            seconds=seconds,
            measured=found.measured,
            failures=found.failures,
            cost=ends[0].get("cost", {}),
        )


def _smallest_norm(end: dict[str, Any]) -> float:
    return min(step["grad_norm"] for step in end["steps"])


def _clipping(work: Work) -> float:
    return TRAININGS[work.training].get("gradient_clipping", CLIPPING[work.optimizer])


def _last_words(job_file: Path) -> str:
    said = job_file.with_suffix(".log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"the last words of its launch: {' / '.join(said[-3:])}"

"""Runs cells: reference first, then one launch per launcher and number of ranks; every end is a result."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsgpt.parity.comparison import BOUNDS, compare
from dsgpt.parity.corpus import Corpus, prepare_corpus
from dsgpt.parity.launch import Assignment, Launch, run_job
from dsgpt.parity.matrix import STRATEGIES, Cell
from dsgpt.parity.measurement import read_rank
from dsgpt.parity.work import CLIPPING, flags, write_recipe


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one cell ended."""

    cell: Cell
    status: str
    """``passed``, ``failed``, ``refused`` by the product, or ``error``."""
    seconds: float
    measured: dict[str, Any] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    message: str = ""
    """What a refusal or an error said."""
    cost: dict[str, Any] = field(default_factory=dict)
    """Bytes of model state and of communication, measured and by formula; see ``dsgpt.parity.cost``."""

    @property
    def as_expected(self) -> bool:
        """Whether the suite may be content: a planted bug must fail, everything else must pass or be refused."""
        return self.status == "failed" if self.cell.bug else self.status in {"passed", "refused"}


class Suite:
    """One run of the suite in a folder of its own."""

    def __init__(self, folder: Path, *, repository: Path, device: str) -> None:
        """Work in ``folder``, which exists; ``repository`` holds the scripts and recipes, ``device`` is cpu or cuda."""
        self._folder, self._repository, self._device = folder, repository, device
        self._corpus: Corpus | None = None
        self._references: dict[tuple[str, str], tuple[dict[str, Any], Path]] = {}
        self.launches: list[Launch] = []

    @property
    def references(self) -> list[dict[str, Any]]:
        """What the reference trainings came to, for the record."""
        return [
            {
                "optimizer": optimizer,
                "precision": precision,
                "first_loss": end["steps"][0]["loss"],
                "last_loss": end["steps"][-1]["loss"],
                "smallest_grad_norm": min(step["grad_norm"] for step in end["steps"]),
                "clipping": CLIPPING[optimizer],
            }
            for (optimizer, precision), (end, _) in sorted(self._references.items())
        ]

    @property
    def corpus(self) -> Corpus:
        """The text, prepared when it is first needed."""
        if self._corpus is None:
            self._corpus = prepare_corpus(self._repository, self._folder / "corpus")
        return self._corpus

    def run(self, cells: Iterable[Cell], *, started: Callable[[Launch], None] = lambda _: None) -> Iterator[Result]:
        """Run ``cells``, launch by launch; their results come as they finish.

        Args:
            cells: what to run, in any order.
            started: told of every launch before it starts.

        Raises:
            UserError: the text could not be prepared.
            RuntimeError: the reference itself failed.
        """
        cells = list(cells)
        self._run_references({(cell.optimizer, cell.precision) for cell in cells} - self._references.keys())

        def place(cell: Cell) -> tuple[str, int]:
            return STRATEGIES[cell.strategy].launcher, cell.ranks

        order = list(STRATEGIES)
        cells.sort(key=lambda cell: (cell.ranks, place(cell)[0], order.index(cell.strategy)))
        for (launcher, ranks), group in itertools.groupby(cells, key=place):
            for part in self._parts(list(group)):
                launch = Launch(launcher=launcher, ranks=ranks, cells=len(part))
                self.launches.append(launch)
                started(launch)
                yield from self._run_launch(launch, part)

    def _parts(self, cells: list[Cell]) -> list[list[Cell]]:
        """All cells in one launch on CPU; a launch each on GPUs, which cannot be shared with a forked child."""
        return [cells] if self._device == "cpu" else [[cell] for cell in cells]

    def _run_references(self, wanted: set[tuple[str, str]]) -> None:
        cells = [
            Cell(strategy="baseline", ranks=1, accumulation=1, optimizer=optimizer, precision=precision)
            for optimizer, precision in sorted(wanted)
        ]
        assignments = [self._assignment(cell, prefix="reference_", reference=True) for cell in cells]
        for part in [assignments] if self._device == "cpu" else [[assignment] for assignment in assignments]:
            if part:
                list(
                    run_job(
                        Launch(launcher="python", ranks=1, cells=len(part)),
                        part,
                        job_file=self._job_file(),
                        device=self._device,
                    )
                )
        for cell, assignment in zip(cells, assignments, strict=True):
            folder = Path(assignment.folder)
            end = read_rank(folder, 0)
            if end is None or end["status"] == "error":
                raise RuntimeError(f"the reference for {cell.name} failed: {end and end['message']}; see {folder}")
            if end["status"] == "refused":  # its cells will be refused for the same reason
                continue
            smallest = min(step["grad_norm"] for step in end["steps"])
            if cell.optimizer == "sgd" and smallest <= CLIPPING["sgd"]:
                raise RuntimeError(f"the reference for {cell.name} is not clipped at every step: norm {smallest:g}")
            self._references[cell.optimizer, cell.precision] = (end, folder)

    def _job_file(self) -> Path:
        return self._folder / f"job-{len(list(self._folder.glob('job-*.json'))) + 1}.json"

    def _assignment(self, cell: Cell, *, prefix: str = "", reference: bool = False) -> Assignment:
        folder = self._folder / f"{prefix}{cell.folder}"
        folder.mkdir()
        recipe = write_recipe(folder / "recipe.json", cell, recipes=self._repository / "ds_configs")
        words = flags(cell, recipe=recipe, corpus=self.corpus, run_dir=folder / "run", device=self._device)
        return Assignment(folder=str(folder), flags=words, bug=cell.bug, reference=reference)

    def _run_launch(self, launch: Launch, cells: list[Cell]) -> Iterator[Result]:
        assignments = [self._assignment(cell) for cell in cells]
        job_file, done = self._job_file(), 0
        for index, seconds in run_job(launch, assignments, job_file=job_file, device=self._device):
            done = index + 1
            yield self._judge(cells[index], Path(assignments[index].folder), seconds)
        said = job_file.with_suffix(".log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        for cell in cells[done:]:
            why = f"the launch ended before it; its last words: {' / '.join(said[-3:])}"
            yield Result(cell=cell, status="error", seconds=0.0, message=why)

    def _judge(self, cell: Cell, folder: Path, seconds: float) -> Result:
        ends = [read_rank(folder, rank) for rank in range(cell.ranks)]
        bad = [end for end in ends if end["status"] != "done"]
        if bad:
            first = min(bad, key=lambda end: end["time"])  # the others only miss it
            message = first["message"].replace(f"{folder}/", "").replace(f"{self._folder}/", "")
            return Result(cell=cell, status=first["status"], seconds=seconds, message=message)
        reference, reference_folder = self._references[cell.optimizer, cell.precision]
        found = compare(
            ends,
            folder,
            reference=reference,
            reference_folder=reference_folder,
            bounds=BOUNDS[cell.precision],
            replicas=STRATEGIES[cell.strategy].replicas,
        )
        status = "failed" if found.failures else "passed"
        return Result(
            cell=cell,
            status=status,
            seconds=seconds,
            measured=found.measured,
            failures=found.failures,
            cost=ends[0].get("cost", {}),
        )

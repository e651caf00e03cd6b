"""Runs it: first every source from the beginning, then who goes on from them; a launch for each number of ranks."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dsgpt.benchmarks.harness.corpus import cut_validation, prepare_corpus
from dsgpt.benchmarks.harness.launch import IMPORTS, Assignment, Launch, run_job
from dsgpt.benchmarks.harness.measurement import rank_file
from dsgpt.benchmarks.harness.work import SEQUENCE, STEPS, VALIDATION_WINDOWS, flags, write_recipe
from dsgpt.benchmarks.parity.matrix import Cell
from dsgpt.benchmarks.resume.matrix import Pair, by, executed_by
from dsgpt.telemetry.record import RECORD_FILE, STEPS_FILE

SAVED = 10
"""The step at which a source leaves; the target takes those to ``STEPS``."""
VALIDATED = 5
"""The undisturbed baseline validates every so many steps, and a target from the step on at which it takes over."""
BOUND = 5e-6
"""On the loss of every step and on every validation loss, against the baseline that nobody disturbed: five times what
was measured. Adam's moments or its count of steps lost at the takeover change the loss by more than 2e-3."""
REWRITTEN_BOUNDS = {"fp32": 2e-6, "bf16": 8e-4}
"""By precision, on the validation loss of the weights that were taken up, against the fp32 baseline's: in bf16 three
times what rounding them changed it by. A mean of the ranks' means, as the last batch is padded, is off by 0.7."""
BASELINE = Cell(strategy="baseline", ranks=1, accumulation=1)
CALL = "dsgpt.benchmarks.resume.rank:"


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one pair, or one rewriting, ended."""

    subject: Pair | Cell
    status: str
    """``passed``, ``failed``, ``refused`` by the product, or ``error``."""
    seconds: float = 0.0
    measured: dict[str, Any] = field(default_factory=dict)
    message: str = ""
    """What failed, or was said."""

    @property
    def name(self) -> str:
        """For people."""
        if isinstance(self.subject, Pair):
            return self.subject.name
        return f"{by(self.subject)}, {self.subject.precision}, writes what it read"


@dataclass(frozen=True, kw_only=True)
class _Task:
    """One assignment of a launch."""

    cell: Cell
    assignment: Assignment
    subject: Pair | Cell | None
    """None for a source."""


class AnyToAny:
    """One run of the suite in a folder of its own.

    Args:
        folder: exists.
        repository: holds the scripts and recipes.
    """

    def __init__(self, folder: Path, *, repository: Path) -> None:
        self._folder, self._repository = folder, repository
        whole = prepare_corpus(repository, folder / "corpus")
        self._corpus = cut_validation(whole, windows=VALIDATION_WINDOWS, length=SEQUENCE)
        self._trouble: dict[Cell, str] = {}
        self.launches: list[Launch] = []

    def run(
        self,
        cells: Iterable[Cell],
        pairs: Iterable[Pair],
        *,
        started: Callable[[Launch], None] = lambda _: None,
    ) -> Iterator[Result]:
        """Show it for ``cells``, who write again what they read, and for ``pairs``; results come as they finish.

        Raises:
            UserError: the text could not be prepared.
            RuntimeError: the baseline itself failed.
        """
        pairs = list(pairs)
        sources = dict.fromkeys([BASELINE, *(pair.source for pair in pairs)])
        self._train_sources([self._source(cell) for cell in sources], started)
        if BASELINE in self._trouble:
            raise RuntimeError(f"the baseline failed: {self._trouble[BASELINE]}; see {self._run_of(BASELINE)}")
        possible = [pair for pair in pairs if pair.source not in self._trouble]
        for pair in pairs:
            if pair not in possible:
                yield Result(subject=pair, status="error", message=f"its source: {self._trouble[pair.source]}")
        tasks = [*map(self._rewriting, cells), *map(self._going_on, possible)]
        for task, end, seconds in self._run(tasks, started):
            yield self._judge(task, end, seconds)

    def reference(self) -> dict[str, float]:
        """What the baseline came to."""
        losses = read_losses(self._run_of(BASELINE), "loss")
        return {"first_loss": losses[1], "last_loss": losses[STEPS]}

    def _train_sources(self, tasks: list[_Task], started: Callable[[Launch], None]) -> None:
        for task, end, _ in self._run(tasks, started):
            if end["status"] != "done":
                self._trouble[task.cell] = end["message"]

    def _source(self, cell: Cell) -> _Task:
        more = ("--eval_every", str(VALIDATED)) if cell == BASELINE else ()
        return self._task(cell, None, "train", f"source_{cell.folder}", *more)

    def _rewriting(self, cell: Cell) -> _Task:
        checkpoint = self._checkpoint_of(BASELINE)
        return self._task(cell, cell, "rewrite", f"rewritten_{cell.folder}", checkpoint=str(checkpoint))

    def _going_on(self, pair: Pair) -> _Task:
        checkpoint, name = self._checkpoint_of(pair.source), f"{pair.source.folder}_to_{pair.target.folder}"
        more = ("--resume", "--eval_every", str(VALIDATED))  # due at once: the source has not validated
        return self._task(pair.target, pair, "train", name, *more, checkpoint=str(checkpoint))

    def _task(self, cell: Cell, subject: Pair | Cell | None, call: str, name: str, *more: str, **where: str) -> _Task:
        folder = self._folder / name
        folder.mkdir()
        recipe = write_recipe(folder / "recipe.json", cell, recipes=self._repository / "ds_configs")
        words = flags(cell, recipe=recipe, corpus=self._corpus, run_dir=folder / "run", device="cpu")
        words += ["--save_every", str(SAVED), "--keep_checkpoints", "9", *more]
        assignment = Assignment(folder=str(folder), flags=words, call=CALL + call, arguments=where)
        return _Task(cell=cell, assignment=assignment, subject=subject)

    def _run_of(self, cell: Cell) -> Path:
        return self._folder / f"source_{cell.folder}" / "run"

    def _checkpoint_of(self, cell: Cell) -> Path:
        return self._run_of(cell) / f"step-{SAVED:08d}"

    def _run(
        self, tasks: list[_Task], started: Callable[[Launch], None]
    ) -> Iterator[tuple[_Task, dict[str, Any], float]]:
        """Each task with how its ranks ended together, and its seconds."""
        tasks.sort(key=lambda task: task.cell.ranks)
        for ranks, group in itertools.groupby(tasks, key=lambda task: task.cell.ranks):
            part = list(group)
            launch = Launch(launcher="torchrun" if ranks > 1 else "python", ranks=ranks, cells=len(part))
            self.launches.append(launch)
            started(launch)
            job_file, done = self._folder / f"job-{len(self.launches)}.json", 0
            imports = [*IMPORTS["torchrun"], *IMPORTS["deepspeed"]]
            assignments = [task.assignment for task in part]
            for index, seconds in run_job(launch, assignments, job_file=job_file, device="cpu", imports=imports):
                done = index + 1
                yield part[index], _end_of(Path(assignments[index].folder), ranks), seconds
            for task in part[done:]:
                said = job_file.with_suffix(".log").read_text(encoding="utf-8", errors="replace").strip()
                yield task, {"status": "error", "message": f"its launch ended before it: {said[-300:]}"}, 0.0

    def _judge(self, task: _Task, end: dict[str, Any], seconds: float) -> Result:
        if end["status"] != "done":
            message = end["message"].replace(f"{self._folder}/", "")
            return Result(subject=task.subject, status=end["status"], seconds=seconds, message=message)
        if isinstance(task.subject, Cell):
            measured, message = self._compare_rewritten(task.subject, end)
        else:
            measured = self._compare(Path(task.assignment.folder) / "run")
            message = self._wrong_in(task.subject, measured)
        status = "failed" if message else "passed"
        return Result(subject=task.subject, status=status, seconds=seconds, measured=measured, message=message)

    def _compare_rewritten(self, cell: Cell, end: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """What was equal, how far the validation loss was off, and what of it is wrong."""
        wrong = [name for name, good in end["facts"].items() if not good]
        message = f"not as they were: {', '.join(wrong)}" if wrong else ""
        expected = read_losses(self._run_of(BASELINE), "val_loss")[SAVED]
        off = max(abs(loss - expected) for loss in end["val_losses"])
        if not message and not off <= REWRITTEN_BOUNDS[cell.precision]:
            message = f"validation loss is off by {off:.1e}"
        return {**end["facts"], "validation loss": off}, message

    def _compare(self, run_dir: Path) -> dict[str, Any]:
        """The run beside the baseline that nobody disturbed."""
        undisturbed = self._run_of(BASELINE)
        expected, found = read_losses(undisturbed, "loss"), read_losses(run_dir, "loss")
        theirs, ours = (
            load_file(folder / f"step-{STEPS:08d}" / "model.safetensors") for folder in (undisturbed, run_dir)
        )
        known, validated = read_losses(undisturbed, "val_loss"), read_losses(run_dir, "val_loss")
        (line,) = [line for line in _log(run_dir) if line.startswith("resuming from")]
        record = json.loads((run_dir / RECORD_FILE).read_text(encoding="utf-8"))
        return {
            "changes": record["changed_at_resume"],
            "line": line.replace(f"{self._folder}/", ""),
            "steps": sorted(found),
            "loss": max(abs(found[step] - expected[step]) for step in range(SAVED + 1, STEPS + 1)),
            "validated": [step for step in sorted(validated) if step >= SAVED],
            "validation loss": max(abs(validated[step] - known[step]) for step in validated if step >= SAVED),
            "weights": max(relative(ours[name], theirs[name]) for name in theirs),
        }

    @staticmethod
    def _wrong_in(pair: Pair, measured: dict[str, Any]) -> str:
        wrong = [
            f"{fact} is off by {measured[fact]:.1e}"
            for fact in ("loss", "validation loss")
            if not measured[fact] <= BOUND
        ]
        if measured["steps"] != list(range(1, STEPS + 1)):
            wrong.append(f"its steps are {measured['steps']}")
        if measured["validated"] != list(range(SAVED, STEPS + 1, VALIDATED)):
            wrong.append(f"it validated after steps {measured['validated']}")
        before, after = executed_by(pair.source), executed_by(pair.target)
        said = f"({before}) as {after}"
        if said not in measured["line"]:
            wrong.append(f"it said: {measured['line']}")
        moved = {"step": SAVED, "name": "executed by", "before": before, "after": after}
        if measured["changes"] != [moved]:
            wrong.append(f"its record says: {measured['changes']}")
        return "; ".join(wrong)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The 2-norm of the difference over that of ``theirs``."""
    return float((ours - theirs).norm() / theirs.norm())


def read_losses(run_dir: Path, key: str) -> dict[int, float]:
    """``loss`` or ``val_loss`` of every step that has one."""
    lines = [json.loads(line) for line in (run_dir / STEPS_FILE).read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def _log(run_dir: Path) -> list[str]:
    return (run_dir / "train.log").read_text(encoding="utf-8").splitlines()


def _end_of(folder: Path, ranks: int) -> dict[str, Any]:
    ends = [json.loads(rank_file(folder, rank).read_text(encoding="utf-8")) for rank in range(ranks)]
    bad = [end for end in ends if end["status"] != "done"]
    if bad:
        return min(bad, key=lambda end: end["time"])  # the others only miss it
    facts = dict(ends[0].get("same", {}))
    facts["weights that a rank computes with"] = not any(end.get("wrong") for end in ends)
    return {"status": "done", "facts": facts, "val_losses": [end["val_loss"] for end in ends if "val_loss" in end]}

"""Runs the resume suite: its phases, and one rank of one cell."""

import contextlib
import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dsgpt.benchmarks.cells import STEPS, Cell, CellEnd, CellRunner, by, executed_by
from dsgpt.benchmarks.launch import IMPORTS, Assignment, Launch, RankEnd, rank_file
from dsgpt.benchmarks.resume import Pair
from dsgpt.checkpoints.training_state import COUNTERS, MOMENTS, StateReader, write_training_state
from dsgpt.common.files import sha256_of, write_json_atomic
from dsgpt.config.options import parse_arguments
from dsgpt.config.run_config import RunConfig, resolve
from dsgpt.machine.console import logging_to_console
from dsgpt.machine.device import bring_up
from dsgpt.machine.launcher import Interruption
from dsgpt.machine.process_group import barrier, joined
from dsgpt.machine.topology import read_topology
from dsgpt.model.gpt2 import parameter_shapes
from dsgpt.record.schema import COMPLETE_FILE, RECORD_FILE, STEPS_FILE, read_steps
from dsgpt.strategies.base import Strategy, build_strategy
from dsgpt.training.run import run
from dsgpt.training.trainer import validation_loss

STATE_FILES = ("model.safetensors", MOMENTS, COUNTERS)


def train(flags: list[str], folder: Path, *, checkpoint: str = "") -> None:
    """Train as ``src/gpt2.py`` does with ``flags``; with a ``checkpoint``, resume from it.

    Raises:
        UserError: the product refuses the combination.
    """
    config = _resolved(flags)
    if checkpoint and config.topology.is_main:
        _leave_at(Path(checkpoint), config.run_dir)
    speaks = config.topology.is_main
    with logging_to_console(speaks=speaks), Interruption(speaks=speaks) as interruption:
        run(config, interruption)
    _done(folder, config)


def _leave_at(checkpoint: Path, run_dir: Path) -> None:
    """Copy the run of ``checkpoint`` to ``run_dir`` as a kill after that save would have left it."""
    others = [path.name for path in checkpoint.parent.glob("step-*") if path != checkpoint]
    shutil.copytree(checkpoint.parent, run_dir, ignore=shutil.ignore_patterns(COMPLETE_FILE, ".lock", *others))


def rewrite(flags: list[str], folder: Path, *, checkpoint: str) -> None:
    """Let the strategy of ``flags`` load a checkpoint, write it again, and validate.

    Raises:
        UserError: the product refuses the combination.
    """
    config, out = _resolved(flags), folder / "rewritten"
    device = bring_up(config.device, local_rank=config.topology.local_rank, threads=config.threads_per_device)
    with contextlib.nullcontext() if config.run_type == "baseline" else joined(config.topology, device):
        if config.topology.is_main:
            out.mkdir()
        reader = StateReader(Path(checkpoint))
        reader.require_shapes(parameter_shapes(config.model))
        with contextlib.closing(build_strategy(config, device)) as strategy:
            strategy.load_state(reader)
            shapes, writes = parameter_shapes(config.model), config.topology.is_main
            write_training_state(out, strategy.iter_state(), strategy.counters(), shapes=shapes, writes=writes)
            wrong = _wrong_weights(strategy, reader)
            val_loss, _ = validation_loss(config, strategy) or (math.nan, 0)
            barrier()
        same = {name: sha256_of(out / name) == sha256_of(Path(checkpoint) / name) for name in STATE_FILES if writes}
        _done(folder, config, same=same, wrong=wrong, val_loss=val_loss)
        barrier()


def _wrong_weights(strategy: Strategy, reader: StateReader) -> list[str]:
    """The weights that this rank holds whole and that differ from the checkpoint's rounded to the precision."""
    return [
        name
        for name, value in strategy.replicated_weights()
        if not torch.equal(value.cpu(), reader.state(name).weight.to(value.dtype))
    ]


def _resolved(flags: list[str]) -> RunConfig:
    options, problems = parse_arguments(flags)
    return resolve(options, topology=read_topology(), problems=problems)


def _done(folder: Path, config: RunConfig, **facts: Any) -> None:
    write_json_atomic(rank_file(folder, config.topology.rank), {"status": "done", "time": time.time(), **facts})


# Runs the resume suite in two phases: source runs, then resumes and rewritings. Each launches once per rank count.


@dataclass(frozen=True, kw_only=True)
class Length:
    """The steps of every training."""

    steps: int = STEPS
    """A multiple of 4."""

    @property
    def saved(self) -> int:
        """The step at which a source saves. The target takes the steps after it."""
        return self.steps // 2

    @property
    def validated(self) -> int:
        """Steps between validations of the undisturbed baseline, and of a target from where it resumes."""
        return self.steps // 4


WHOLE = Length()
BOUND = 5e-6
"""Bound on the loss of every step and on every validation loss, against the undisturbed baseline: five times what was
measured. If the resume loses Adam's moments or its step count, the loss changes by more than 2e-3."""
REWRITTEN_BOUNDS = {"fp32": 2e-6, "bf16": 8e-4}
"""Bounds by precision on the validation loss of the weights that were loaded, against the fp32 baseline's: in bf16
three times the effect of rounding them. A mean of the ranks' means would be off by 0.7, as the last batch is padded."""
BASELINE = Cell(strategy="baseline", ranks=1, accumulation=1)
CALL = "dsgpt.benchmarks.resume_rank:"


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one pair, or one rewriting, ended."""

    subject: Pair | Cell
    status: str
    """``passed``, ``failed``, ``refused`` by the product, or ``error``."""
    seconds: float = 0.0
    measured: dict[str, Any] = field(default_factory=dict)
    message: str = ""
    """What failed, or the message of a refusal or an error."""

    @property
    def name(self) -> str:
        """The name in console lines, pages and test ids."""
        if isinstance(self.subject, Pair):
            return self.subject.name
        return f"{by(self.subject)}, {self.subject.precision}, writes what it read"


@dataclass(frozen=True, kw_only=True)
class _Task:
    """One assignment of a launch."""

    cell: Cell
    subject: Pair | Cell
    """The pair or cell whose result it gives; the cell itself for a source."""
    assignment: Assignment


class ResumeSuite:
    """One run of the suite in its folder.

    Args:
        folder: an existing folder.
        repository: holds the scripts and recipes.
        length: of every training.
    """

    def __init__(self, folder: Path, *, repository: Path, length: Length = WHOLE) -> None:
        self._folder, self._length = folder, length
        self._runner = CellRunner(folder, repository=repository, device="cpu", steps=length.steps)
        self._broken_sources: dict[Cell, str] = {}

    @property
    def launches(self) -> list[Launch]:
        """All launches so far."""
        return self._runner.launches

    def run(
        self,
        cells: Iterable[Cell],
        pairs: Iterable[Pair],
        *,
        started: Callable[[Launch], None] = lambda _: None,
    ) -> Iterator[Result]:
        """Let ``cells`` load and rewrite a checkpoint, and run ``pairs``; yield the results as they come.

        Raises:
            UserError: the text could not be prepared.
            RuntimeError: the baseline itself failed.
        """
        pairs = list(pairs)
        sources = dict.fromkeys([BASELINE, *(pair.source for pair in pairs)])
        for task, end in self._run([self._source(cell) for cell in sources], started):
            if end.status != "done":
                self._broken_sources[task.cell] = end.message
        if BASELINE in self._broken_sources:
            raise RuntimeError(f"the baseline failed: {self._broken_sources[BASELINE]}; see {self._run_of(BASELINE)}")
        for pair in pairs:
            if pair.source in self._broken_sources:
                message = f"its source run failed: {self._broken_sources[pair.source]}"
                yield Result(subject=pair, status="error", message=message)
        possible = [pair for pair in pairs if pair.source not in self._broken_sources]
        for task, end in self._run([*map(self._rewriting, cells), *map(self._resuming, possible)], started):
            yield self._judge(task.subject, end)

    def reference(self) -> dict[str, float]:
        """First and last loss of the undisturbed baseline."""
        losses = read_losses(self._run_of(BASELINE), "loss")
        return {"first_loss": losses[1], "last_loss": losses[self._length.steps]}

    def _source(self, cell: Cell) -> _Task:
        more = ("--eval_every", str(self._length.validated)) if cell == BASELINE else ()
        return _Task(cell=cell, subject=cell, assignment=self._assignment(cell, "train", f"source_{cell.folder}", more))

    def _rewriting(self, cell: Cell) -> _Task:
        name, checkpoint = f"rewritten_{cell.folder}", self._checkpoint_of(BASELINE)
        return _Task(
            cell=cell, subject=cell, assignment=self._assignment(cell, "rewrite", name, checkpoint=str(checkpoint))
        )

    def _resuming(self, pair: Pair) -> _Task:
        name, checkpoint = f"{pair.source.folder}_to_{pair.target.folder}", self._checkpoint_of(pair.source)
        more = (
            "--resume",
            "--eval_every",
            str(self._length.validated),
        )  # validates at once, because the source has not
        assignment = self._assignment(pair.target, "train", name, more, checkpoint=str(checkpoint))
        return _Task(cell=pair.target, subject=pair, assignment=assignment)

    def _assignment(self, cell: Cell, call: str, name: str, more: Sequence[str] = (), **arguments: str) -> Assignment:
        words = ("--save_every", str(self._length.saved), "--keep_checkpoints", "9", *more)
        return self._runner.assignment(cell, call=f"{CALL}{call}", name=name, more=words, arguments=arguments)

    def _run_of(self, cell: Cell) -> Path:
        return self._folder / f"source_{cell.folder}" / "run"

    def _checkpoint_of(self, cell: Cell) -> Path:
        return self._run_of(cell) / f"step-{self._length.saved:08d}"

    def _run(self, tasks: list[_Task], started: Callable[[Launch], None]) -> Iterator[tuple[_Task, CellEnd]]:
        """Every task with how it ended."""
        tasks.sort(key=lambda task: task.cell.ranks)
        imports = [*IMPORTS["torchrun"], *IMPORTS["deepspeed"]]
        for ranks, group in itertools.groupby(tasks, key=lambda task: task.cell.ranks):
            part = list(group)
            launcher, assignments = "torchrun" if ranks > 1 else "python", [task.assignment for task in part]
            ends = self._runner.run(launcher, ranks, assignments, started=started, imports=imports)
            yield from zip(part, ends, strict=True)

    def _judge(self, subject: Pair | Cell, end: CellEnd) -> Result:
        if end.status != "done":
            return Result(subject=subject, status=end.status, seconds=end.seconds, message=end.message)
        if isinstance(subject, Cell):
            measured, message = self._compare_rewritten(subject, end.ranks)
        else:
            measured = self._compare(end.folder / "run")
            message = wrong_in(subject, measured, self._length)
        status = "failed" if message else "passed"
        return Result(subject=subject, status=status, seconds=end.seconds, measured=measured, message=message)

    def _compare_rewritten(self, cell: Cell, ranks: list[RankEnd]) -> tuple[dict[str, Any], str]:
        """Which files are equal and how far the validation loss is off; and what is wrong, empty if nothing is."""
        facts: dict[str, bool] = dict(ranks[0]["same"])
        facts["weights that a rank computes with"] = not any(end["wrong"] for end in ranks)
        wrong = [name for name, good in facts.items() if not good]
        message = f"not as they were: {', '.join(wrong)}" if wrong else ""
        expected = read_losses(self._run_of(BASELINE), "val_loss")[self._length.saved]
        off = max(abs(end["val_loss"] - expected) for end in ranks)
        if not message and not off <= REWRITTEN_BOUNDS[cell.precision]:
            message = f"validation loss is off by {off:.1e}"
        return {**facts, "validation loss": off}, message

    def _compare(self, run_dir: Path) -> dict[str, Any]:
        """The facts of the run, and its differences from the undisturbed baseline."""
        undisturbed, saved, last = self._run_of(BASELINE), self._length.saved, self._length.steps
        expected, found = read_losses(undisturbed, "loss"), read_losses(run_dir, "loss")
        theirs, ours = (
            load_file(folder / f"step-{last:08d}" / "model.safetensors") for folder in (undisturbed, run_dir)
        )
        known, validated = read_losses(undisturbed, "val_loss"), read_losses(run_dir, "val_loss")
        (line,) = [line for line in _log(run_dir) if line.startswith("resuming from")]
        record = json.loads((run_dir / RECORD_FILE).read_text(encoding="utf-8"))
        return {
            "changes": record["changed_at_resume"],
            "line": line.replace(f"{self._folder}/", ""),
            "steps": sorted(found),
            "loss": max(abs(found[step] - expected[step]) for step in range(saved + 1, last + 1)),
            "validated": [step for step in sorted(validated) if step >= saved],
            "validation loss": max(abs(validated[step] - known[step]) for step in validated if step >= saved),
            "weights": max(relative(ours[name], theirs[name]) for name in theirs),
        }


def wrong_in(pair: Pair, measured: dict[str, Any], length: Length = WHOLE) -> str:
    """Why a pair failed; empty if nothing is wrong.

    Args:
        pair: which cell saved and which resumed.
        measured: its losses, steps and validations, the console's line and the record's entry about the resume.
        length: of its training.
    """
    facts = ("loss", "validation loss")
    wrong = [f"{fact} is off by {measured[fact]:.1e}" for fact in facts if not measured[fact] <= BOUND]
    if measured["steps"] != list(range(1, length.steps + 1)):
        wrong.append(f"its steps are {measured['steps']}")
    if measured["validated"] != list(range(length.saved, length.steps + 1, length.validated)):
        wrong.append(f"it validated after steps {measured['validated']}")
    before, after = executed_by(pair.source), executed_by(pair.target)
    if f"({before}) as {after}" not in measured["line"]:
        wrong.append(f"it printed: {measured['line']}")
    moved = {"step": length.saved, "name": "executed by", "before": before, "after": after}
    if measured["changes"] != [moved]:
        wrong.append(f"its record says: {measured['changes']}")
    return "; ".join(wrong)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The 2-norm of the difference over that of ``theirs``."""
    return float((ours - theirs).norm() / theirs.norm())


def read_losses(run_dir: Path, key: str) -> dict[int, float]:
    """``loss`` or ``val_loss`` of every step that has one."""
    return {line["step"]: line[key] for line in read_steps(run_dir / STEPS_FILE) if key in line}


def _log(run_dir: Path) -> list[str]:
    return (run_dir / "train.log").read_text(encoding="utf-8").splitlines()

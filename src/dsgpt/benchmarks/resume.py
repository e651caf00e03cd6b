"""``benchmark.py resume``: every strategy resumes from the checkpoint of every other.

The cells of the resume suite: every strategy writes the checkpoint that it read, and seeded pairs share a run.
Strategies, and the recipes behind their names, are those of the parity suite.
"""

import contextlib
import math
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsgpt.benchmarks import cells as shared
from dsgpt.benchmarks import frame
from dsgpt.benchmarks.cells import STEPS, STRATEGIES, Cell, CellEnd, by, executed_by
from dsgpt.benchmarks.launch import ALL_IMPORTS, Assignment, config_of, joined_run, train_rank, write_end
from dsgpt.checkpoints.store import WEIGHTS
from dsgpt.common.command_line import COUNT, flag, switch
from dsgpt.common.files import sha256_of
from dsgpt.common.json_files import read_object
from dsgpt.common.text import counted
from dsgpt.record.schema import COMPLETE_FILE, RECORD_FILE, STEPS_FILE, read_steps

PAIRS, SEED = 30, 4
SAME_TO_A_CHECKPOINT = ("ddp-copied-buckets", "fsdp-kept", "fsdp-sharded-sums")
"""Strategies that differ from another one in how they communicate, but not in what is saved."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A run that one strategy starts and another one finishes."""

    source: Cell
    target: Cell

    @property
    def name(self) -> str:
        """The name in console lines, pages and test ids."""
        return f"{by(self.source)} to {by(self.target)}"


def cells(*, precision: str = "fp32") -> list[Cell]:
    """Every strategy but ``SAME_TO_A_CHECKPOINT``, on every number of ranks that the parity suite runs it on."""
    return [
        Cell(strategy=strategy.name, ranks=ranks, accumulation=1, precision=precision)
        for strategy in STRATEGIES.values()
        for ranks in strategy.ranks
        if strategy.whole and strategy.name not in SAME_TO_A_CHECKPOINT
    ]


def seeded_pairs(count: int = PAIRS, *, seed: int = SEED) -> list[Pair]:
    """``count`` pairs, the same for the same seed. Each side has every strategy once before it has one again."""
    chance, every = random.Random(seed), dict.fromkeys(cell.strategy for cell in cells())

    def shuffled() -> list[Cell]:
        """Every strategy, in a random order, on a random one of its numbers of ranks, with a random accumulation."""
        names, draw = list(every), chance.choice
        chance.shuffle(names)
        drawn = [(name, draw(STRATEGIES[name].ranks), draw(shared.ACCUMULATIONS)) for name in names]
        return [Cell(strategy=name, ranks=ranks, accumulation=accumulation) for name, ranks, accumulation in drawn]

    pairs: list[Pair] = []
    while len(pairs) < count:
        drawn = [Pair(source=one, target=other) for one, other in zip(shuffled(), shuffled(), strict=True)]
        names = [pair.name for pair in [*pairs, *drawn]]
        moves = all(executed_by(pair.source) != executed_by(pair.target) for pair in drawn)
        if moves and len(set(names)) == len(names):  # else all of them are drawn again
            pairs += drawn[: count - len(pairs)]
    return pairs


def rewritten() -> list[Cell]:
    """The cells that write what they read: every strategy, in every precision that the product allows on a CPU."""
    return [*cells(), *(cell for cell in cells(precision="bf16") if not STRATEGIES[cell.strategy].fp32_only)]


def core_pairs() -> list[Pair]:
    """The pairs of ``make test``: from and to every kind of split, in few launches."""
    return [
        Pair(source=Cell(strategy=one, ranks=here), target=Cell(strategy=other, ranks=there, accumulation=1))
        for one, here, other, there in (
            ("baseline", 1, "zero3", 2),
            ("zero3-offload", 2, "pipeline2-zero1", 4),
            ("pipeline2-zero0", 2, "fsdp", 4),
            ("fsdp", 2, "tensor2-zero1", 4),
            ("tensor2-zero0", 2, "baseline", 1),
            ("sequence2-zero2", 2, "zero2", 4),
        )
    ]


def core_rewritten() -> list[Cell]:
    """The rewritings of ``make test``.

    All strategies on two ranks in fp32. For bf16, and for four ranks, one strategy for each way to keep the state.
    """
    low = ("zero0", "zero1", "zero2", "zero3", "pipeline2-zero1")
    chosen = {("fp32", 2): STRATEGIES, ("bf16", 2): low, ("fp32", 4): ("zero1", "zero3", "fsdp", "tensor2-zero1")}
    return [cell for cell in rewritten() if cell.strategy in chosen.get((cell.precision, cell.ranks), ())]


STATUS_WORDS = {"passed": "yes", "failed": "**NO**", "refused": "refused", "error": "**ERROR**"}


def resume_page(record: frame.Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.resume`` makes it.
        source: the record's path, for the reader.
    """
    work, pairs, rewritten = record["work"], record["pairs"], record["rewritten"]
    passed = [sum(one["status"] == "passed" for one in results) for results in (pairs, rewritten)]
    losses = []
    for precision, bound in record["rewritten_bounds"].items():
        measurements = [one["measured"] for one in rewritten if one["precision"] == precision]
        off = [measured["validation loss"] for measured in measurements if measured]
        if off:
            losses.append(f"off by at most {max(off):.1e} in {precision} (allowed {bound:g})")
    facts: dict[str, Any] = {"tried": [len(pairs), len(rewritten)], "losses": ", ".join(losses) or "not measured"}
    head = frame.filled("resume", record, record_at=source, passed=passed, more=work["steps"] - work["saved"], **facts)
    groups: dict[str, dict[tuple[int, str], str]] = {}
    for one in rewritten:
        groups.setdefault(one["strategy"], {})[one["ranks"], one["precision"]] = STATUS_WORDS[one["status"]]
    places = sorted({place for group in groups.values() for place in group}, key=lambda one: (one[1] != "fp32", one))
    header = ["strategy", *(f"{counted(ranks, 'rank')}, {precision}" for ranks, precision in places)]
    rows = [[strategy, *(group.get(place, "") for place in places)] for strategy, group in groups.items()]
    troubles = frame.troubles([*pairs, *rewritten], STATUS_WORDS)
    return frame.page_of(head, _pairs(record), frame.section("Rewritings", header, rows), troubles)


def summary_lines(record: frame.Record) -> list[str]:
    """The table of pairs, for a console."""
    return _pairs(record).removeprefix("## ").splitlines()


def _pairs(record: frame.Record) -> str:
    header = ["from", "to", "largest loss difference", "validation loss", "weights, relative", "equal"]
    rows = []
    for pair in record["pairs"]:
        sides = [(pair[side], pair[f"{side}_accumulation"]) for side in ("source", "target")]
        runs = [run + (f", accumulation {steps}" if steps > 1 else "") for run, steps in sides]
        facts = [pair["measured"].get(fact) for fact in ("loss", "validation loss", "weights")]
        rows.append([*runs, *("-" if fact is None else f"{fact:.1e}" for fact in facts), STATUS_WORDS[pair["status"]]])
    return frame.section("Pairs", header, rows)


# The suite: source runs first, then resumes and rewritings, one launch for each number of ranks.

SCHEMA_VERSION = "1.1"


VALIDATIONS = 4
"""Of the undisturbed baseline, evenly spaced. A source saves after half of the steps; the target takes the others, and
validates from where it resumes."""
BOUND = 5e-6
"""Bound on the loss of every step and on every validation loss, against the undisturbed baseline: five times what was
measured. If the resume loses Adam's moments or its step count, the loss changes by more than 2e-3."""
REWRITTEN_BOUNDS = {"fp32": 2e-6, "bf16": 8e-4}
"""Bounds by precision on the validation loss of the weights that were loaded, against the fp32 baseline's: in bf16
three times the effect of rounding them. A mean of the ranks' means would be off by 0.7, as the last batch is padded."""
ON_GPU = 1e-4
"""The same on a GPU, not measured yet: its sums have no fixed order."""
BASELINE = Cell(strategy="baseline", ranks=1, accumulation=1)
RANK = "dsgpt.benchmarks.resume:"

Subject = Pair | Cell
"""A pair that shares a run, or a cell that writes what it read."""


Result = dict[str, Any]
"""A pair, or a rewriting, with how it ended, as the record has it."""


@dataclass(frozen=True, kw_only=True)
class ResumeOptions(frame.SuiteOptions):
    """The command line."""

    pairs: int = flag(COUNT, "N", "how many pairs of strategies (default: %(default)s)", default=PAIRS)
    seed: int = flag(COUNT, "N", "seed that draws the pairs (default: %(default)s, as in docs/resume.md)", default=SEED)
    core: bool = switch("only what `make test` runs")
    device: str = frame.device_flag("cpu, or cuda, where strategies on one rank write what they read")


class Resume(frame.Suite[ResumeOptions, Result]):
    """Lets every strategy write what it read, and pairs of strategies share a run.

    resume: let every strategy load the same checkpoint and write it again, which must give the same bytes. Then let
    pairs of strategies share a run: one trains 10 steps and saves, the other resumes for 10 more, which must give the
    losses of an undisturbed run. Exit code 0: they do; 1: otherwise.

    Examples:
      .venv/bin/python src/benchmark.py resume
      .venv/bin/python src/benchmark.py resume --pairs 100 --seed 1
      .venv/bin/python src/benchmark.py resume --table-from checkpoint/resume/resume.json
    """

    steps = STEPS
    """Steps of every training: a multiple of ``VALIDATIONS``."""
    name, record_of, schema_version, unit = "resume", "the resume suite", SCHEMA_VERSION, "result"
    flags, page, summary = ResumeOptions, staticmethod(resume_page), staticmethod(summary_lines)

    def plan(self) -> int:
        options = self.options
        self._cells = core_rewritten() if options.core else rewritten()
        self._pairs = core_pairs() if options.core else seeded_pairs(options.pairs, seed=options.seed)
        if options.device == "cuda":  # a pair needs as many GPUs as its strategies have ranks
            alone = [cell for cell in cells() if cell.ranks == 1]
            self._cells = [cell for cell in alone if not (options.core and "-" in cell.strategy)]
            self._pairs = []
        return len(self._cells) + len(self._pairs)

    def begin(self) -> None:
        device, self._saved = self.options.device, self.steps // 2
        self._runner = shared.CellRunner(self.folder, repository=self.repository, device=device, steps=self.steps)

    def results(self) -> Iterator[Result]:
        """Let the cells load and rewrite a checkpoint, and run the pairs.

        Raises:
            UserError: the text could not be prepared.
            RuntimeError: the baseline itself failed.
        """
        cells, pairs = self._cells, self._pairs
        self.console.say(f"{len(pairs)} pairs and {len(cells)} rewritings; text and source runs come first")
        sources = self._launched(dict.fromkeys([BASELINE, *(pair.source for pair in pairs)]), self._source)
        broken = {cell: end.message for cell, end in sources if end.status != "done"}
        if BASELINE in broken:
            raise RuntimeError(f"the baseline failed: {broken[BASELINE]}; see {self._run_of(BASELINE)}")
        for pair in pairs:
            if pair.source in broken:
                message = f"its source run failed: {broken[pair.source]}"
                yield self._judge(pair, CellEnd(folder=self.folder, ranks=[], status="error", message=message))
        possible = [pair for pair in pairs if pair.source not in broken]
        for subject, end in self._launched([*cells, *possible], self._continued):
            yield self._judge(subject, end)

    def _launched(
        self, subjects: Iterable[Subject], assign: Callable[[Any], Assignment]
    ) -> Iterator[tuple[Subject, CellEnd]]:
        """Every subject with how it ended."""
        return self._runner.run(
            subjects,
            place=lambda one: (one.target if isinstance(one, Pair) else one).place,
            assign=assign,
            started=lambda launch: self.console.say(f"starting {counted(launch.ranks, 'rank')}"),
            imports=ALL_IMPORTS,
        )

    def _source(self, cell: Cell) -> Assignment:
        return self._assignment(cell, "train", f"source_{cell.folder}", validates=cell == BASELINE)

    def _continued(self, subject: Subject) -> Assignment:
        """Assignment that loads the checkpoint of a source: to resume its run, or to write it again."""
        source = BASELINE if isinstance(subject, Cell) else subject.source
        checkpoint = str(self._run_of(source) / f"step-{self._saved:08d}")
        if isinstance(subject, Cell):
            return self._assignment(subject, "rewrite", f"rewritten_{subject.folder}", checkpoint=checkpoint)
        name = f"{source.folder}_to_{subject.target.folder}"  # validates at once, because the source has not
        return self._assignment(subject.target, "train", name, "--resume", validates=True, checkpoint=checkpoint)

    def _assignment(
        self, cell: Cell, call: str, name: str, *more: str, validates: bool = False, **arguments: str
    ) -> Assignment:
        words = ["--save_every", str(self._saved), "--keep_checkpoints", "9", *more]
        words += ["--eval_every", str(self.steps // VALIDATIONS)] if validates else []
        return self._runner.assignment(cell, call=f"{RANK}{call}", name=name, more=words, arguments=arguments)

    def _run_of(self, cell: Cell) -> Path:
        return self.folder / f"source_{cell.folder}" / "run"

    def _judge(self, subject: Subject, end: CellEnd) -> Result:
        """The result, with its differences from the undisturbed baseline, or its refusal or error."""
        measured, message, status = dict[str, Any](), end.message, end.status
        undisturbed, saved = self._run_of(BASELINE), self._saved
        if isinstance(subject, Cell):
            result: Result = {"strategy": subject.strategy, "ranks": subject.ranks, "precision": subject.precision}
            result["name"] = f"{by(subject)}, {subject.precision}, writes what it read"
            if status == "done":
                expected = read_losses(undisturbed, "val_loss")[saved]
                off = max(abs(rank["val_loss"] - expected) for rank in end.ranks)
                measured = {**end.ranks[0]["same"]}
                measured["weights that a rank computes with"] = not any(rank["wrong"] for rank in end.ranks)
                bound = max(REWRITTEN_BOUNDS[subject.precision], ON_GPU * (self.options.device == "cuda"))
                if wrong := [name for name, good in measured.items() if not good]:
                    message = f"not as they were: {', '.join(wrong)}"
                elif not off <= bound:
                    message = f"validation loss is off by {off:.1e}"
                measured["validation loss"] = off
        else:
            result = {"source": by(subject.source), "source_accumulation": subject.source.accumulation}
            result |= {"target": by(subject.target), "target_accumulation": subject.target.accumulation}
            result["name"] = subject.name
            if status == "done":
                measured = self._compare(end.folder / "run")
                message = wrong_in(subject, measured, self.steps)
        if status == "done":
            status = "failed" if message else "passed"
        facts = {"status": status, "seconds": round(end.seconds, 2), "measured": measured}
        return result | facts | {"message": message or None}

    def _compare(self, run_dir: Path) -> dict[str, Any]:
        """The facts of a pair's run, and its differences from the undisturbed baseline."""
        undisturbed, saved, last = self._run_of(BASELINE), self._saved, self.steps
        expected, losses = read_losses(undisturbed, "loss"), read_losses(run_dir, "loss")
        expected_val, val = read_losses(undisturbed, "val_loss"), read_losses(run_dir, "val_loss")
        validated = sorted(step for step in val if step >= saved)
        log = (run_dir / "train.log").read_text(encoding="utf-8").splitlines()
        (line,) = [line for line in log if line.startswith("resuming from")]
        return {
            "changes": read_object(run_dir / RECORD_FILE)["changed_at_resume"],
            "line": line.replace(f"{self.folder}/", ""),
            "steps": sorted(losses),
            "loss": max(abs(losses[step] - expected[step]) for step in range(saved + 1, last + 1)),
            "validated": validated,
            "validation loss": max(abs(val[step] - expected_val[step]) for step in validated),
            "weights": shared.weights_apart(*(folder / f"step-{last:08d}" for folder in (run_dir, undisturbed))),
        }

    def line(self, result: Result, *, count: str, left: str) -> str:
        status, measured = result["status"], result["measured"]
        word = status.upper() if status in {"failed", "error"} else status
        off = f", loss off by {measured['loss']:.1e}" if "loss" in measured else ""
        because = f": {result['message'].splitlines()[0]}" if result["message"] else ""
        return f"{count} {result['name']}: {word}{off} ({result['seconds']:.1f} s{left}){because}"

    def record(self, results: Sequence[Result]) -> frame.Record:
        losses = read_losses(self._run_of(BASELINE), "loss")
        steps = {"steps": STEPS, "saved": STEPS // 2, "validated_every": STEPS // VALIDATIONS}
        steps |= {"validation_windows": shared.VALIDATION_WINDOWS}
        return {
            "work": steps | frame.work_facts(self.options.device),
            "bound": BOUND,
            "rewritten_bounds": REWRITTEN_BOUNDS,
            "seed": self.options.seed,
            "reference": {"first_loss": losses[1], "last_loss": losses[self.steps]},
            "launches": [asdict(launch) for launch in self._runner.launches],
            "pairs": [result for result in results if "target" in result],
            "rewritten": [result for result in results if "strategy" in result],
        }

    def failures(self, record: frame.Record) -> list[str]:
        return [end["name"] for end in [*record["pairs"], *record["rewritten"]] if end["status"] in {"failed", "error"}]


def wrong_in(pair: Pair, measured: dict[str, Any], steps: int) -> str:
    """Why a pair failed; empty if nothing is wrong.

    Args:
        pair: which cell saved and which resumed.
        measured: its losses, steps and validations, the console's line and the record's entry about the resume.
        steps: of its training.
    """
    facts = ("loss", "validation loss")
    wrong = [f"{fact} is off by {measured[fact]:.1e}" for fact in facts if not measured[fact] <= BOUND]
    if measured["steps"] != list(range(1, steps + 1)):
        wrong.append(f"its steps are {measured['steps']}")
    if measured["validated"] != list(range(steps // 2, steps + 1, steps // VALIDATIONS)):
        wrong.append(f"it validated after steps {measured['validated']}")
    before, after = executed_by(pair.source), executed_by(pair.target)
    if f"({before}) as {after}" not in measured["line"]:
        wrong.append(f"it printed: {measured['line']}")
    if measured["changes"] != [{"step": steps // 2, "name": "executed by", "before": before, "after": after}]:
        wrong.append(f"its record says: {measured['changes']}")
    return "; ".join(wrong)


def read_losses(run_dir: Path, key: str) -> dict[int, float]:
    """``loss`` or ``val_loss`` of every step that has one."""
    return {line["step"]: line[key] for line in read_steps(run_dir / STEPS_FILE) if key in line}


# One rank of one cell.


def train(flags: list[str], folder: Path, *, checkpoint: str = "") -> None:
    """Train as ``src/gpt2.py`` does with ``flags``; with a ``checkpoint``, resume from it.

    Raises:
        UserError: the product refuses the combination.
    """
    config = config_of(flags)
    if checkpoint and config.topology.is_main:  # copy its run as a kill after that save would have left it
        saved = Path(checkpoint)
        others = [path.name for path in saved.parent.glob("step-*") if path != saved]
        shutil.copytree(saved.parent, config.run_dir, ignore=shutil.ignore_patterns(COMPLETE_FILE, ".lock", *others))
    train_rank(config, folder)


def rewrite(flags: list[str], folder: Path, *, checkpoint: str) -> None:
    """Let the strategy of ``flags`` load a checkpoint, write it again, and validate.

    Raises:
        UserError: the product refuses the combination.
    """
    import torch  # noqa: PLC0415 - takes seconds, as what follows

    from dsgpt.checkpoints import training_state as states  # noqa: PLC0415
    from dsgpt.checkpoints.pieces import MOMENTS  # noqa: PLC0415
    from dsgpt.machine import device as devices  # noqa: PLC0415
    from dsgpt.model.gpt2 import parameter_shapes  # noqa: PLC0415
    from dsgpt.strategies.base import build_strategy  # noqa: PLC0415
    from dsgpt.training.trainer import validation_loss  # noqa: PLC0415

    with joined_run(flags) as (config, device):
        topology, shapes, out = config.topology, parameter_shapes(config.model), folder / "rewritten"
        if topology.is_main:
            out.mkdir()
        reader = states.StateReader(Path(checkpoint))
        reader.require_shapes(shapes)
        with contextlib.closing(build_strategy(config, device)) as strategy:
            strategy.load_state(reader)
            written = states.write_shards(out, strategy.shards(), rank=topology.rank, ranks=topology.world_size)
            parts = devices.gather_objects(written)
            if topology.is_main:
                states.complete_state(out, parts, strategy.counters(), shapes=shapes)
            wrong = [  # what this rank holds whole must be the checkpoint's weights, rounded to the precision
                name
                for name, value in strategy.replicated_weights()
                if not torch.equal(value.cpu(), reader.read(name).to(value.dtype))
            ]
            val_loss, *_ = validation_loss(config, strategy) or (math.nan, 0, {})
            devices.barrier()
        same = {states.COUNTERS: sha256_of(out / states.COUNTERS) == sha256_of(Path(checkpoint) / states.COUNTERS)}
        again = states.StateReader(out)
        for file, moments in ((WEIGHTS, (None,)), (MOMENTS, ("exp_avg", "exp_avg_sq"))):
            values = ((again.read(name, key), reader.read(name, key)) for name in shapes for key in moments)
            same[file] = all(torch.equal(one, two) for one, two in values)
        write_end(folder, topology.rank, same=same, wrong=wrong, val_loss=val_loss)
        devices.barrier()

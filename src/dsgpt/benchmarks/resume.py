"""``benchmark.py resume``: every strategy resumes from the checkpoint of every other.

The cells of the resume suite: every strategy writes the checkpoint that it read, and seeded pairs share a run.
Strategies, and the recipes behind their names, are those of the parity suite.
"""

import contextlib
import math
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsgpt.benchmarks import frame
from dsgpt.benchmarks.cells import (
    ACCUMULATIONS,
    STEPS,
    STRATEGIES,
    VALIDATION_WINDOWS,
    Cell,
    CellEnd,
    CellRunner,
    by,
    executed_by,
    weights_apart,
)
from dsgpt.benchmarks.launch import IMPORTS, Assignment, RankEnd, config_of, train_rank, write_end
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
    chance, every = random.Random(seed), cells()

    def shuffled() -> list[Cell]:
        """Every strategy, in a random order, on a random one of its numbers of ranks, with a random accumulation."""
        names = list(dict.fromkeys(cell.strategy for cell in every))
        chance.shuffle(names)
        return [
            Cell(
                strategy=name,
                ranks=chance.choice([cell.ranks for cell in every if cell.strategy == name]),
                accumulation=chance.choice(ACCUMULATIONS),
            )
            for name in names
        ]

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
    low = [cell for cell in cells(precision="bf16") if not STRATEGIES[cell.strategy].fp32_only]
    return [*cells(), *low]


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
    four = ("zero1", "zero3", "fsdp", "tensor2-zero1")
    chosen = {("fp32", 2): STRATEGIES, ("bf16", 2): low, ("fp32", 4): four}
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
    head = frame.filled(
        "resume",
        record,
        passed=passed,
        tried=[len(pairs), len(rewritten)],
        more=work["steps"] - work["saved"],
        losses=", ".join(losses) or "not measured",
        made=frame.made_from(record, source=source, name="resume"),
    )
    return frame.page_of(head, _pairs(record), _rewritten(record), frame.troubles([*pairs, *rewritten], STATUS_WORDS))


def summary_lines(record: frame.Record) -> list[str]:
    """The table of pairs, for a console."""
    return _pairs(record).removeprefix("## ").splitlines()


def _pairs(record: frame.Record) -> str:
    header = ["from", "to", "largest loss difference", "validation loss", "weights, relative", "equal"]
    rows = []
    for pair in record["pairs"]:
        runs = [
            pair[side] + (f", accumulation {steps}" if (steps := pair[f"{side}_accumulation"]) > 1 else "")
            for side in ("source", "target")
        ]
        facts = [pair["measured"].get(fact) for fact in ("loss", "validation loss", "weights")]
        figures = ["-" if fact is None else f"{fact:.1e}" for fact in facts]
        rows.append([*runs, *figures, STATUS_WORDS[pair["status"]]])
    return frame.section("Pairs", header, rows)


def _rewritten(record: frame.Record) -> str:
    groups: dict[str, dict[tuple[int, str], str]] = {}
    for one in record["rewritten"]:
        groups.setdefault(one["strategy"], {})[one["ranks"], one["precision"]] = STATUS_WORDS[one["status"]]
    places = sorted(
        {place for by_place in groups.values() for place in by_place}, key=lambda place: (place[1] != "fp32", place)
    )
    header = ["strategy", *(f"{counted(ranks, 'rank')}, {precision}" for ranks, precision in places)]
    rows = [[strategy, *(by_place.get(place, "") for place in places)] for strategy, by_place in groups.items()]
    return frame.section("Rewritings", header, rows)


# The suite: source runs first, then resumes and rewritings, one launch for each number of ranks.

SCHEMA_VERSION = "1.1"


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
ON_GPU = 1e-4
"""The same on a GPU, not measured yet: its sums have no fixed order."""
BASELINE = Cell(strategy="baseline", ranks=1, accumulation=1)
RANK = "dsgpt.benchmarks.resume:"

Subject = Pair | Cell
"""A pair that shares a run, or a cell that writes what it read."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of one pair, or of one rewriting."""

    subject: Subject
    status: str
    """``passed``, ``failed``, ``refused`` by the product, or ``error``."""
    seconds: float = 0.0
    measured: dict[str, Any] = field(default_factory=dict)
    message: str = ""
    """The failure, or the message of a refusal or an error."""

    @property
    def name(self) -> str:
        """The name in console lines, pages and test ids."""
        if isinstance(self.subject, Pair):
            return self.subject.name
        return f"{by(self.subject)}, {self.subject.precision}, writes what it read"


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

    length = WHOLE
    """Steps of every training."""
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
        device = self.options.device
        self._runner = CellRunner(self.folder, repository=self.repository, device=device, steps=self.length.steps)

    def results(self) -> Iterator[Result]:
        self.console.say(f"{len(self._pairs)} pairs and {len(self._cells)} rewritings; text and source runs come first")
        return self.run(self._cells, self._pairs)

    def run(self, cells: Iterable[Cell], pairs: Iterable[Pair]) -> Iterator[Result]:
        """Let ``cells`` load and rewrite a checkpoint, and run ``pairs``; yield the results as they come.

        Raises:
            UserError: the text could not be prepared.
            RuntimeError: the baseline itself failed.
        """
        pairs = list(pairs)
        sources = self._launched(dict.fromkeys([BASELINE, *(pair.source for pair in pairs)]), self._source)
        broken = {cell: end.message for cell, end in sources if end.status != "done"}
        if BASELINE in broken:
            raise RuntimeError(f"the baseline failed: {broken[BASELINE]}; see {self._run_of(BASELINE)}")
        for pair in pairs:
            if pair.source in broken:
                yield Result(subject=pair, status="error", message=f"its source run failed: {broken[pair.source]}")
        possible = [pair for pair in pairs if pair.source not in broken]
        for subject, end in self._launched([*cells, *possible], self._continued):
            yield self._judge(subject, end)

    def _launched(
        self, subjects: Iterable[Subject], assign: Callable[[Any], Assignment]
    ) -> Iterator[tuple[Subject, CellEnd]]:
        """Every subject with how it ended."""

        def place(subject: Subject) -> tuple[int, str]:
            ranks = subject.target.ranks if isinstance(subject, Pair) else subject.ranks
            return ranks, "torchrun" if ranks > 1 else "python"

        return self._runner.run(
            subjects,
            place=place,
            assign=assign,
            started=lambda launch: self.console.say(f"starting {counted(launch.ranks, 'rank')}"),
            imports=[*IMPORTS["torchrun"], *IMPORTS["deepspeed"], "dsgpt.training.run"],
        )

    def _source(self, cell: Cell) -> Assignment:
        more = ("--eval_every", str(self.length.validated)) if cell == BASELINE else ()
        return self._assignment(cell, "train", f"source_{cell.folder}", more)

    def _continued(self, subject: Subject) -> Assignment:
        """Assignment that loads the checkpoint of a source: to resume its run, or to write it again."""
        if isinstance(subject, Cell):
            cell, source, call, name = subject, BASELINE, "rewrite", f"rewritten_{subject.folder}"
            more: Sequence[str] = ()
        else:
            cell, source, call = subject.target, subject.source, "train"
            name = f"{source.folder}_to_{cell.folder}"
            more = ("--resume", "--eval_every", str(self.length.validated))  # at once, because the source has not
        checkpoint = self._run_of(source) / f"step-{self.length.saved:08d}"
        return self._assignment(cell, call, name, more, checkpoint=str(checkpoint))

    def _assignment(self, cell: Cell, call: str, name: str, more: Sequence[str] = (), **arguments: str) -> Assignment:
        words = ("--save_every", str(self.length.saved), "--keep_checkpoints", "9", *more)
        return self._runner.assignment(cell, call=f"{RANK}{call}", name=name, more=words, arguments=arguments)

    def _run_of(self, cell: Cell) -> Path:
        return self.folder / f"source_{cell.folder}" / "run"

    def _judge(self, subject: Subject, end: CellEnd) -> Result:
        if end.status != "done":
            return Result(subject=subject, status=end.status, seconds=end.seconds, message=end.message)
        if isinstance(subject, Cell):
            measured, message = self._compare_rewritten(subject, end.ranks)
        else:
            measured = self._compare(end.folder / "run")
            message = wrong_in(subject, measured, self.length)
        status = "failed" if message else "passed"
        return Result(subject=subject, status=status, seconds=end.seconds, measured=measured, message=message)

    def _compare_rewritten(self, cell: Cell, ranks: list[RankEnd]) -> tuple[dict[str, Any], str]:
        """Files that are equal and the difference of the validation loss; and the mistake, empty if there is none."""
        facts: dict[str, bool] = dict(ranks[0]["same"])
        facts["weights that a rank computes with"] = not any(end["wrong"] for end in ranks)
        wrong = [name for name, good in facts.items() if not good]
        message = f"not as they were: {', '.join(wrong)}" if wrong else ""
        expected = read_losses(self._run_of(BASELINE), "val_loss")[self.length.saved]
        off = max(abs(end["val_loss"] - expected) for end in ranks)
        if not message and not off <= max(REWRITTEN_BOUNDS[cell.precision], ON_GPU * (self.options.device == "cuda")):
            message = f"validation loss is off by {off:.1e}"
        return {**facts, "validation loss": off}, message

    def _compare(self, run_dir: Path) -> dict[str, Any]:
        """The facts of the run, and its differences from the undisturbed baseline."""
        undisturbed, saved, last = self._run_of(BASELINE), self.length.saved, self.length.steps
        expected, losses = read_losses(undisturbed, "loss"), read_losses(run_dir, "loss")
        expected_val, val = read_losses(undisturbed, "val_loss"), read_losses(run_dir, "val_loss")
        validated = sorted(step for step in val if step >= saved)
        log = (run_dir / "train.log").read_text(encoding="utf-8").splitlines()
        (line,) = [line for line in log if line.startswith("resuming from")]
        record = read_object(run_dir / RECORD_FILE)
        return {
            "changes": record["changed_at_resume"],
            "line": line.replace(f"{self.folder}/", ""),
            "steps": sorted(losses),
            "loss": max(abs(losses[step] - expected[step]) for step in range(saved + 1, last + 1)),
            "validated": validated,
            "validation loss": max(abs(val[step] - expected_val[step]) for step in validated),
            "weights": weights_apart(*(folder / f"step-{last:08d}" for folder in (run_dir, undisturbed))),
        }

    def line(self, result: Result, *, count: str, left: str) -> str:
        word = {"passed": "passed", "failed": "FAILED", "refused": "refused", "error": "ERROR"}[result.status]
        off = f", loss off by {result.measured['loss']:.1e}" if "loss" in result.measured else ""
        because = f": {result.message.splitlines()[0]}" if result.message else ""
        return f"{count} {result.name}: {word}{off} ({result.seconds:.1f} s{left}){because}"

    def record(self, results: Sequence[Result]) -> frame.Record:
        losses = read_losses(self._run_of(BASELINE), "loss")
        steps = {"steps": WHOLE.steps, "saved": WHOLE.saved, "validated_every": WHOLE.validated}
        steps |= {"validation_windows": VALIDATION_WINDOWS}
        return {
            "work": steps | frame.work_facts(self.options.device),
            "bound": BOUND,
            "rewritten_bounds": REWRITTEN_BOUNDS,
            "seed": self.options.seed,
            "reference": {"first_loss": losses[1], "last_loss": losses[self.length.steps]},
            "launches": [asdict(launch) for launch in self._runner.launches],
            "pairs": [
                {
                    "source": by(pair.source),
                    "source_accumulation": pair.source.accumulation,
                    "target": by(pair.target),
                    "target_accumulation": pair.target.accumulation,
                    **_end_facts(result),
                }
                for result in results
                if isinstance(pair := result.subject, Pair)
            ],
            "rewritten": [
                {"strategy": cell.strategy, "ranks": cell.ranks, "precision": cell.precision, **_end_facts(result)}
                for result in results
                if isinstance(cell := result.subject, Cell)
            ],
        }

    def failures(self, record: frame.Record) -> list[str]:
        ends = [*record["pairs"], *record["rewritten"]]
        return [end["name"] for end in ends if end["status"] in {"failed", "error"}]


def _end_facts(result: Result) -> dict[str, Any]:
    return {
        "name": result.name,
        "status": result.status,
        "seconds": round(result.seconds, 2),
        "measured": result.measured,
        "message": result.message or None,
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
        left_out = shutil.ignore_patterns(COMPLETE_FILE, ".lock", *others)
        shutil.copytree(saved.parent, config.run_dir, ignore=left_out)
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

    config, out = config_of(flags), folder / "rewritten"
    topology, shapes = config.topology, parameter_shapes(config.model)
    device = devices.bring_up(config.device, local_rank=topology.local_rank, threads=config.threads_per_device)
    with contextlib.nullcontext() if config.run_type == "baseline" else devices.joined(topology, device):
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

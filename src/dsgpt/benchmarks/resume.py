"""``benchmark.py resume``: every strategy resumes from the checkpoint of every other.

The cells of the resume suite: every strategy writes the checkpoint that it read, and seeded pairs share a run.
Strategies, and the recipes behind their names, are those of the parity suite.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dsgpt.benchmarks.cells import ACCUMULATIONS, STRATEGIES, Cell, by, executed_by
from dsgpt.benchmarks.frame import Record, Suite, SuiteOptions, work_facts
from dsgpt.common.command_line import COUNT, flag, switch
from dsgpt.common.text import counted, machine_words, table

if TYPE_CHECKING:
    from dsgpt.benchmarks.resume_rank import Result


PAIRS, SEED = 30, 4
SAME_TO_A_CHECKPOINT = ("ddp-copied-buckets", "fsdp-kept")
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


def cells(*, accumulation: int = 1, precision: str = "fp32") -> list[Cell]:
    """Every strategy but ``SAME_TO_A_CHECKPOINT``, on every number of ranks that the parity suite runs it on."""
    return [
        Cell(strategy=strategy.name, ranks=ranks, accumulation=accumulation, precision=precision)
        for strategy in STRATEGIES.values()
        for ranks in strategy.ranks
        if strategy.whole and strategy.name not in SAME_TO_A_CHECKPOINT
    ]


def seeded_pairs(count: int = PAIRS, *, seed: int = SEED) -> list[Pair]:
    """``count`` pairs, the same for the same seed. Each side has every strategy once before it has one again."""
    chance = random.Random(seed)
    found: list[Pair] = []
    while len(found) < count:
        drawn = [
            Pair(source=one, target=other) for one, other in zip(_shuffled(chance), _shuffled(chance), strict=True)
        ]
        names = [pair.name for pair in [*found, *drawn]]
        moves = all(executed_by(pair.source) != executed_by(pair.target) for pair in drawn)
        if moves and len(set(names)) == len(names):  # else all of them are drawn again
            found += drawn[: count - len(found)]
    return found


def _shuffled(chance: random.Random) -> list[Cell]:
    """Every strategy once, in a random order, on a random one of its numbers of ranks, with a random accumulation."""
    everywhere = cells()
    names = list(dict.fromkeys(cell.strategy for cell in everywhere))
    chance.shuffle(names)
    return [
        Cell(
            strategy=name,
            ranks=chance.choice([cell.ranks for cell in everywhere if cell.strategy == name]),
            accumulation=chance.choice(ACCUMULATIONS),
        )
        for name in names
    ]


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


def resume_page(record: Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.resume`` makes it.
        source: the record's path, for the reader.
    """
    parts = [_head(record, source), _pairs(record), _rewritten(record), _troubles(record)]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary_lines(record: Record) -> list[str]:
    """The table of pairs, for a console."""
    return _pairs(record).removeprefix("## ").splitlines()


def _head(record: Record, source: str) -> str:
    hardware, env, work = record["hardware"], record["env"], record["work"]
    pairs, rewritten = record["pairs"], record["rewritten"]
    return f"""# Any strategy resumes the run of any other

Generated from `{source}` by
`.venv/bin/python src/benchmark.py resume --table-from {source} --page docs/resume.md`;
`.venv/bin/python src/benchmark.py resume` runs it on your machine.

* **{_passed(pairs)} of {len(pairs)} pairs**, drawn with seed {record["seed"]}: one strategy trains
  {work["saved"]} steps and saves, another one resumes with `--resume` for {work["steps"] - work["saved"]} more, on
  other ranks and with other accumulation. Every loss may differ by at most {record["bound"]:g} from that of an
  undisturbed baseline, at every step and {_validations(work)}.
* **{_passed(rewritten)} of {len(rewritten)} rewritings**: every strategy loads the same checkpoint and writes it
  again. The two checkpoints must be equal, byte for byte, and the ranks must compute with the checkpoint's weights,
  rounded to the precision. Validation loss of the loaded weights, against the baseline's:
  {_rewritten_validation(record)}.

Machine: {machine_words(hardware)}; {hardware["device"]}. Python {env["python_version"]},
torch {env["torch_version"]}, DeepSpeed {env["deepspeed_version"]}. Commit `{record["git_commit"]}`,
{record["timestamp_utc"]}. It took {record["seconds"] / 60:.0f} minutes. Work: {work["global_batch_size"]} sequences of
{work["seq_len"]} tokens per step, {work["model"]["num_layers"]} layers of width
{work["model"]["embedding_size"]}, fp32, AdamW, dropout 0; the loss falls from
{record["reference"]["first_loss"]:.3f} to
{record["reference"]["last_loss"]:.3f}."""


def _validations(work: dict[str, Any]) -> str:
    if "validated_every" not in work:
        return "in the last validation"
    return (
        f"in the validations after steps {work['saved']} (before the target's first step) to {work['steps']}, every "
        f"{work['validated_every']}.\n"
        f"  They are of {work['validation_windows']} sequences, which leave the last batch padded"
    )


def _rewritten_validation(record: Record) -> str:
    """The largest difference by precision; records before version 1.1 have none."""
    parts = []
    for precision, bound in record.get("rewritten_bounds", {}).items():
        found = [one["measured"] for one in record["rewritten"] if one["precision"] == precision]
        off = [measured["validation loss"] for measured in found if "validation loss" in measured]
        if off:
            parts.append(f"off by at most {max(off):.1e} in {precision} (allowed {bound:g})")
    return ", ".join(parts) or "not measured"


def _passed(results: list[dict[str, Any]]) -> int:
    return sum(result["status"] == "passed" for result in results)


def _pairs(record: Record) -> str:
    header = ["from", "to", "largest loss difference", "validation loss", "weights, relative", "equal"]
    rows = [
        [
            f"{pair['source']}{_steps(pair['source_accumulation'])}",
            f"{pair['target']}{_steps(pair['target_accumulation'])}",
            *(_figure(pair["measured"].get(fact)) for fact in ("loss", "validation loss", "weights")),
            STATUS_WORDS[pair["status"]],
        ]
        for pair in record["pairs"]
    ]
    return f"## Pairs\n\n{table(header, rows)}"


def _steps(accumulation: int) -> str:
    return f", accumulation {accumulation}" if accumulation > 1 else ""


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _rewritten(record: Record) -> str:
    groups: dict[str, dict[tuple[int, str], str]] = {}
    for one in record["rewritten"]:
        groups.setdefault(one["strategy"], {})[one["ranks"], one["precision"]] = STATUS_WORDS[one["status"]]
    places = sorted(
        {place for found in groups.values() for place in found}, key=lambda place: (place[1] != "fp32", place)
    )
    header = ["strategy", *(f"{counted(ranks, 'rank')}, {precision}" for ranks, precision in places)]
    rows = [[strategy, *(found.get(place, "") for place in places)] for strategy, found in groups.items()]
    return f"## Rewritings\n\n{table(header, rows)}"


def _troubles(record: Record) -> str:
    bad = [one for one in [*record["pairs"], *record["rewritten"]] if one["status"] != "passed"]
    lines = [f"* {one['name']}: {STATUS_WORDS[one['status']]}: {one['message']}" for one in bad]
    return "## Not passed\n\n" + "\n".join(lines) if lines else ""


SCHEMA_VERSION = "1.1"


@dataclass(frozen=True, kw_only=True)
class ResumeOptions(SuiteOptions):
    """The command line."""

    pairs: int = flag(COUNT, "N", "how many pairs of strategies (default: %(default)s)", default=PAIRS)
    seed: int = flag(COUNT, "N", "seed that draws the pairs (default: %(default)s, as in docs/resume.md)", default=SEED)
    core: bool = switch("only what `make test` runs")


class Resume(Suite[ResumeOptions, "Result"]):
    """Lets every strategy write what it read, and pairs of strategies share a run."""

    name, record_of, schema_version, unit = "resume", "the resume suite", SCHEMA_VERSION, "result"
    flags, page, summary = ResumeOptions, staticmethod(resume_page), staticmethod(summary_lines)
    description = """\
resume: let every strategy load the same checkpoint and write it again, which must give the same bytes. Then let pairs
of strategies share a run: one trains 10 steps and saves, the other resumes for 10 more, which must give the losses of
an undisturbed run. Exit code 0: they do; 1: otherwise."""
    examples = """\
examples:
  .venv/bin/python src/benchmark.py resume
  .venv/bin/python src/benchmark.py resume --pairs 100 --seed 1
  .venv/bin/python src/benchmark.py resume --table-from checkpoint/resume/resume.json"""

    def plan(self) -> int:
        options = self.options
        self._cells = core_rewritten() if options.core else rewritten()
        self._pairs = core_pairs() if options.core else seeded_pairs(options.pairs, seed=options.seed)
        return len(self._cells) + len(self._pairs)

    def begin(self) -> None:
        from dsgpt.benchmarks.resume_rank import ResumeSuite  # noqa: PLC0415 - torch takes seconds

        self._suite = ResumeSuite(self.folder, repository=self.repository)
        self.console.say(f"{len(self._pairs)} pairs and {len(self._cells)} rewritings; text and source runs come first")

    def results(self) -> Iterator["Result"]:
        return self._suite.run(
            self._cells,
            self._pairs,
            started=lambda launch: self.console.say(f"starting {counted(launch.ranks, 'rank')}"),
        )

    def line(self, result: "Result", *, count: str, left: str) -> str:
        word = {"passed": "passed", "failed": "FAILED", "refused": "refused", "error": "ERROR"}[result.status]
        off = f", loss off by {result.measured['loss']:.1e}" if "loss" in result.measured else ""
        because = f": {result.message.splitlines()[0]}" if result.message else ""
        return f"{count} {result.name}: {word}{off} ({result.seconds:.1f} s{left}){because}"

    def record(self, results: Sequence["Result"]) -> Record:
        from dsgpt.benchmarks.cells import VALIDATION_WINDOWS  # noqa: PLC0415 - torch takes seconds
        from dsgpt.benchmarks.resume_rank import BOUND, REWRITTEN_BOUNDS, WHOLE  # noqa: PLC0415

        steps = {"steps": WHOLE.steps, "saved": WHOLE.saved, "validated_every": WHOLE.validated}
        steps |= {"validation_windows": VALIDATION_WINDOWS}
        return {
            "work": steps | work_facts("cpu"),
            "bound": BOUND,
            "rewritten_bounds": REWRITTEN_BOUNDS,
            "seed": self.options.seed,
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

    def failures(self, record: Record) -> list[str]:
        ends = [*record["pairs"], *record["rewritten"]]
        return [end["name"] for end in ends if end["status"] in {"failed", "error"}]


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

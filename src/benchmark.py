"""Measure what strategies do, and remake the committed records of these measurements (``records``).

``parity`` shows that all strategies train the same model, ``resume`` that each resumes the run of any other, and
``faults`` that no fault costs more than the steps since the last checkpoint. ``saving`` measures how long training
waits for checkpoints, and ``speed`` how fast a step is beside other trainers. ``decoding`` measures how fast a model
generates beside other implementations, and ``inference`` how engines answer many requests at once; ``serving`` asks a
server for more than it can answer. ``recipes`` searches the settings of small models. ``run`` trains under many
settings and writes what each costs. Every measurement is a command with its own flags, and writes a JSON record and a
page of it. ``compare`` says whether one run or sweep is slower than another.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from dsgpt.benchmarks.decoding import command as decoding
from dsgpt.benchmarks.faults import command as faults
from dsgpt.benchmarks.faults.plan import KILLS
from dsgpt.benchmarks.faults.plan import SEED as FAULT_SEED
from dsgpt.benchmarks.harness.command import SuiteOptions
from dsgpt.benchmarks.harness.flags import SuiteFlags
from dsgpt.benchmarks.harness.pages import SuitePage, make_page
from dsgpt.benchmarks.harness.records import RECORDS, check_lines, remake_records
from dsgpt.benchmarks.harness.tested import STRATEGIES
from dsgpt.benchmarks.inference import command as inference
from dsgpt.benchmarks.inference.trace import COMMITTED
from dsgpt.benchmarks.inference.worker import ENGINES
from dsgpt.benchmarks.parity import command as parity
from dsgpt.benchmarks.plan import command as plan
from dsgpt.benchmarks.recipes import command as recipes
from dsgpt.benchmarks.recipes.grid import SEARCHES
from dsgpt.benchmarks.resume import command as resume
from dsgpt.benchmarks.resume.matrix import PAIRS, SEED
from dsgpt.benchmarks.saving import command as saving
from dsgpt.benchmarks.serving import command as serving
from dsgpt.benchmarks.speed import command as speed
from dsgpt.benchmarks.sweep import flags as sweep
from dsgpt.common.command_line import Parser, Reader, read_words
from dsgpt.common.errors import EXIT_DONE
from dsgpt.common.script import run_script

Options = TypeVar("Options", bound=SuiteOptions)
Options_contra = TypeVar("Options_contra", bound=SuiteOptions, contravariant=True)


class RunSuite(Protocol[Options_contra]):
    """Runs a suite and returns its exit code."""

    def __call__(self, options: Options_contra, *, repository: Path) -> int:
        """Run it as ``options`` say, with the scripts and recipes of ``repository``."""


@dataclass(frozen=True)
class Suite(Generic[Options]):
    """A measurement: its options (the fields are its flags), the function that runs it, and its page."""

    options: type[Options]
    run: RunSuite[Options]
    page: SuitePage


SUITES: dict[str, Suite[Any]] = {
    "parity": Suite(parity.ParityOptions, parity.run_parity, parity.PAGE),
    "resume": Suite(resume.ResumeOptions, resume.run_resume, resume.PAGE),
    "faults": Suite(faults.FaultOptions, faults.run_faults, faults.PAGE),
    "saving": Suite(saving.SavingOptions, saving.run_saving, saving.PAGE),
    "speed": Suite(speed.SpeedOptions, speed.run_speed, speed.PAGE),
    "decoding": Suite(decoding.DecodingOptions, decoding.run_decoding, decoding.PAGE),
    "plan": Suite(plan.PlanOptions, plan.run_plan, plan.PAGE),
    "inference": Suite(inference.InferenceOptions, inference.run_inference, inference.PAGE),
    "serving": Suite(serving.ServingOptions, serving.run_serving, serving.PAGE),
    "recipes": Suite(recipes.RecipesOptions, recipes.run_recipes, recipes.PAGE),
}
SWEEPS: dict[str, tuple[Callable[[SuiteFlags], None], Callable[..., int]]] = {
    "run": (sweep.add_run_flags, sweep.run),
    "compare": (sweep.add_compare_flags, sweep.compare),
}
COMMANDS = (*SUITES, *SWEEPS, "records")
REPOSITORY = Path(__file__).resolve().parent.parent
DESCRIPTIONS = {
    "parity": """\
parity: train the same small model under every strategy, at 1, 2, 4 and 8 ranks, with and without accumulation, with
AdamW and SGD, in fp32 and bf16, and compare every step with plain PyTorch; then plant known bugs and show that each one
is caught. Exit code 0: all are equal and all bugs were caught; 1: otherwise.""",
    "resume": """\
resume: let every strategy load the same checkpoint and write it again, which must give the same bytes. Then let pairs
of strategies share a run: one trains 10 steps and saves, the other resumes for 10 more, which must give the losses of
an undisturbed run. Exit code 0: they do; 1: otherwise.""",
    "faults": """\
faults: kill ranks, launchers and whole runs at seeded instants, send signals, damage checkpoints, fill the disk; then
resume every run, which must end with the losses of an undisturbed run, to the last bit. Exit code 0: they all do; 1:
otherwise.""",
    "saving": """\
saving: train the model `tiny` with --save_mode sync and async in turn, and compare how long training waits for each
checkpoint. Exit code 0: async waits at most a fifth of the time; 1: longer.""",
    "speed": """\
speed: let this program, nanoGPT and Hugging Face's GPT-2 train in turn with the same shapes, precision, threads and
tokens, and compare their tokens per second; compare DeepSpeed's engine with the plain loop, and several devices with
one; measure peak memory, start-up, and what this machine can do. Exit code 0: every goal was reached; 1: otherwise.""",
    "decoding": """\
decoding: let this program, transformers and nanoGPT continue the same prompts in turn, with one text and with eight, in
fp32 and bf16, and compare their seconds; measure how far the time of a token is from that of reading the weights. Exit
code 0: every goal was reached, and in fp32 every id is that of transformers; 1: otherwise.""",
    "plan": """\
plan: predict the peak memory, the bytes sent and the step time of small trainings under every strategy, then measure
them: the most memory of tensors in a step on every rank, PyTorch's MemTracker as a second witness, DeepSpeed's own
estimator beside it, and step times in rounds without a profiler. Takes about 6 minutes on 2 cores. Exit code 0: every
predicted peak is at most 10% over and 3% under the measured one, and the bytes sent are exact; 1: otherwise.""",
    "inference": """\
inference: let engines answer the same requests, which arrive at random instants, with 1, 2, 4, 8 and 16 of them at
once: this project one at a time and in static batches, transformers' continuous batching, and vLLM. Compare time to the
first token, time per token, latency, queue time, throughput and memory, and every token. The run of the checkpoint gets
the figures, too. Exit code 0: all engines generated the same tokens; 1: otherwise.""",
    "serving": """\
serving: ask a server of src/serve.py for several times the completions that it can give, and ask again when it refuses.
Exit code 0: every request got one answer, the right text, and the memory did not grow; 1: otherwise.""",
    "recipes": """\
recipes: train small models with many learning rates, batches and schedules on the same tokens, and show which learns
most; the recipes in ds_configs/sizes come from it. Exit code 0: every training ended.""",
    **sweep.DESCRIPTIONS,
    "records": """\
records: remake each committed record of checkpoint/reference/cpu-2-cores that was not made from the present sources,
and the pages and pictures of all. The committed records are replaced when all are remade. A record that is up to date
is skipped, so an interrupted command continues with the record that it was remaking. It says how long the others will
take, by the committed records. Without --peer, the record of speed names the rows that are missing. Exit code 0: all
are up to date, or --check; 1: a source changed meanwhile; otherwise that of the command that failed.""",
}
EXAMPLES = {
    "parity": f"""\
examples:
  python src/benchmark.py parity
  python src/benchmark.py parity --core
  python src/benchmark.py parity --only zero1 zero3 --ranks 2
  python src/benchmark.py parity --table-from checkpoint/parity/parity.json

strategies: {", ".join(STRATEGIES)}""",
    "resume": """\
examples:
  python src/benchmark.py resume
  python src/benchmark.py resume --pairs 100 --seed 1
  python src/benchmark.py resume --table-from checkpoint/resume/resume.json""",
    "faults": """\
examples:
  python src/benchmark.py faults
  python src/benchmark.py faults --kills 200 --seed 1
  python src/benchmark.py faults --table-from checkpoint/faults/faults.json""",
    "saving": """\
examples:
  python src/benchmark.py saving
  python src/benchmark.py saving --rounds 10""",
    "speed": """\
examples:
  git clone https://github.com/karpathy/nanoGPT /tmp/nanoGPT
  python src/benchmark.py speed --peer nanogpt=/tmp/nanoGPT
  python src/benchmark.py speed --peer nanogpt=/tmp/nanoGPT --only small memory --rounds 9
  python src/benchmark.py speed --device cuda --peer nanogpt=/tmp/nanoGPT""",
    "decoding": """\
examples:
  python src/benchmark.py decoding
  python src/benchmark.py decoding --only fp32 --rounds 9
  python src/benchmark.py decoding --model_size demo --peer nanogpt=/tmp/nanoGPT""",
    "plan": """\
examples:
  python src/benchmark.py plan
  python src/benchmark.py plan --only zero fsdp --rounds 0
  python src/benchmark.py plan --table-from checkpoint/plan/plan.json""",
    "inference": """\
examples:
  python src/benchmark.py inference --checkpoint checkpoint/demo-zero1
  python src/benchmark.py inference --concurrency 1,2,4,8,16 --engines one,static,continuous,vllm
  python src/benchmark.py inference --concurrency 1,8 --engines one,continuous --repeats 1 --requests 16

`make vllm` installs vLLM into .venv-vllm.""",
    "serving": """\
examples:
  python src/benchmark.py serving --checkpoint checkpoint/demo-zero1
  python src/benchmark.py serving --requests 100 --times 8 --rounds 1""",
    "recipes": f"""\
examples:
  python src/benchmark.py recipes
  python src/benchmark.py recipes --size demo

sizes: {", ".join(SEARCHES)}""",
    **sweep.EXAMPLES,
    "records": f"""\
examples:
  python src/benchmark.py records --check
  python src/benchmark.py records
  python src/benchmark.py records --only saving plan
  python src/benchmark.py records --only speed --peer nanogpt=/tmp/nanoGPT

names: {", ".join(RECORDS)}""",
}


def main() -> int:
    """Read the flags, run the command, and return its exit code."""
    words = sys.argv[1:]
    what = words[0] if words and words[0] in COMMANDS else ""
    reader = Reader()
    flags = read_words(_parser(what, reader), reader, words, elsewhere={})
    reader.problems.raise_if_any()
    if what in SWEEPS:
        _, act = SWEEPS[what]
        return act(flags, repository=REPOSITORY)
    return _remake(flags) if what == "records" else _measure(SUITES[what], flags)


def _measure(suite: Suite[Any], flags: argparse.Namespace) -> int:
    page: Path = flags.page or (flags.table_from or flags.output).with_suffix(".md")
    if flags.table_from:
        make_page(suite.page, flags.table_from, page, repository=REPOSITORY)
        print(page)
        return EXIT_DONE
    values = {field.name: getattr(flags, field.name) for field in fields(suite.options)}
    return suite.run(suite.options(**values | {"page": page}), repository=REPOSITORY)


def _remake(flags: argparse.Namespace) -> int:
    if flags.check:
        for line in check_lines(REPOSITORY, only=flags.only):
            print(line)
        return EXIT_DONE
    peers = [f"{name}={folder}" for name, folder in speed.read_peers(flags.peer).items()]
    return remake_records(REPOSITORY, only=flags.only, peers=peers)


def _parser(what: str, reader: Reader) -> Parser:
    """The parser of the command ``what``; if that is empty, a parser of the first word only."""
    parser = Parser(
        description=DESCRIPTIONS[what] if what else "\n\n".join(DESCRIPTIONS.values()),
        epilog=EXAMPLES[what] if what else "flags: python src/benchmark.py parity --help, and so on",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", choices=COMMANDS, help="what to measure or compare, or records")
    if what:
        _Flags(parser, reader).add(what)
    return parser


class _Flags:
    """Adds the flags of a command to its parser."""

    def __init__(self, parser: Parser, reader: Reader) -> None:
        self._parser, self._reader = parser, reader
        self._shared = SuiteFlags(parser, reader)

    def add(self, what: str) -> None:
        """Add the flags of the command ``what``."""
        add_own = {
            "parity": self._of_parity,
            "resume": self._of_resume,
            "faults": self._of_faults,
            "saving": self._of_saving,
            "speed": self._of_speed,
            "decoding": self._of_decoding,
            "plan": self._of_plan,
            "inference": self._of_inference,
            "serving": self._of_serving,
            "recipes": self._of_recipes,
            "records": self._of_records,
        }
        if what in SWEEPS:
            add_flags, _ = SWEEPS[what]
            add_flags(self._shared)
            return
        add_own[what]()
        if what in SUITES:
            record = Path("checkpoint") / what / f"{what}.json"
            self._shared.output(record, shown=record.as_posix())
            self._shared.keep()

    def _of_parity(self) -> None:
        self._parser.add_argument(
            "--ranks",
            type=self._reader.whole("--ranks", low=1),
            nargs="+",
            default=(),
            metavar="N",
            help="only these numbers of ranks (default: 1, 2, 4 and 8)",
        )
        self._shared.only("STRATEGY", "strategies")
        self._shared.core("only what `make test` runs: each strategy in a few trainings")
        self._shared.device("cpu, where every machine can run everything, or cuda with a GPU for each rank")

    def _of_resume(self) -> None:
        self._shared.number("--pairs", default=PAIRS, text=f"how many pairs of strategies (default: {PAIRS})")
        self._shared.number(
            "--seed", default=SEED, text=f"seed that draws the pairs (default: {SEED}, as in docs/resume.md)"
        )
        self._shared.core("only what `make test` runs")

    def _of_faults(self) -> None:
        self._shared.number("--kills", default=KILLS, text=f"how many kills (default: {KILLS})")
        drawn = f"seed that draws victims and instants (default: {FAULT_SEED}, as in docs/faults.md)"
        self._shared.number("--seed", default=FAULT_SEED, text=drawn)
        self._shared.core("only what `make test` runs")

    def _of_saving(self) -> None:
        self._shared.number("--rounds", default=5, low=1, text="runs of each save mode (default: 5)")
        self._shared.device("cpu or cuda")

    def _of_speed(self) -> None:
        self._shared.number("--rounds", default=5, low=1, text="turns of every trainer in a row (default: 5)")
        self._shared.peers("checkouts to compare with")
        self._shared.only("KEY", "rows, by the beginnings of their keys")
        self._shared.device("cpu or cuda")

    def _of_decoding(self) -> None:
        self._parser.add_argument(
            "--model_size",
            type=self._reader.choice("--model_size", decoding.SIZES, "small"),
            default="small",
            metavar="SIZE",
            help=f"{', '.join(decoding.SIZES)} (default: small)",
        )
        self._shared.number("--rounds", default=5, low=1, text="turns of every contender in a row (default: 5)")
        self._shared.peers("a checkout to compare with")
        self._shared.only("KEY", "rows, by the beginnings of their keys")
        self._shared.device("cpu or cuda")

    def _of_plan(self) -> None:
        self._shared.number("--rounds", default=2, text="rounds of step times; 0 for memory only (default: 2)")
        self._shared.only("KEY", "cells, by the beginnings of their keys")

    def _of_inference(self) -> None:
        add, read = self._parser.add_argument, self._reader
        slots, engines = ",".join(map(str, inference.CONCURRENCY)), ",".join(inference.DEFAULT_ENGINES)
        add(
            "--checkpoint",
            type=Path,
            default=inference.CHECKPOINT,
            metavar="DIR",
            help=f"run folder, checkpoint or portable folder (default: {inference.CHECKPOINT})",
        )
        add(
            "--concurrency",
            type=read.wholes("--concurrency", low=1),
            default=inference.CONCURRENCY,
            metavar="LIST",
            help=f"requests that an engine works on at once, at most (default: {slots})",
        )
        add(
            "--engines",
            type=read.choices("--engines", ENGINES),
            default=inference.DEFAULT_ENGINES,
            metavar="LIST",
            help=f"some of {', '.join(ENGINES)} (default: {engines})",
        )
        self._shared.number("--repeats", default=3, low=1, text="turns of each engine and concurrency (default: 3)")
        self._shared.number("--requests", default=0, text="only the first N requests of the trace; 0 for all (default)")
        add("--trace", type=Path, default=COMMITTED, metavar="FILE", help="the requests (default: the committed ones)")
        environment = inference.VLLM_ENVIRONMENT
        add(
            "--vllm",
            type=Path,
            default=environment,
            metavar="DIR",
            help=f"the environment with vLLM, which `make vllm` makes (default: {environment})",
        )

    def _of_serving(self) -> None:
        self._parser.add_argument(
            "--checkpoint",
            type=Path,
            default=serving.CHECKPOINT,
            metavar="DIR",
            help=f"what to serve, as for src/serve.py (default: {serving.CHECKPOINT})",
        )
        for flag, default, text in (
            ("--requests", serving.REQUESTS, "requests of a round"),
            ("--times", serving.TIMES, "arrivals per second, in multiples of what the server can answer"),
            ("--rounds", serving.ROUNDS, "rounds on the same server"),
        ):
            self._shared.number(flag, default=default, low=1, text=f"{text} (default: {default})")
        self._shared.device("cpu or cuda")

    def _of_recipes(self) -> None:
        self._parser.add_argument(
            "--size",
            type=self._reader.choice("--size", tuple(SEARCHES), None),
            nargs="+",
            default=(),
            metavar="SIZE",
            help="only these model sizes (default: all)",
        )
        self._shared.device("cpu, one training per core, or cuda, one at a time")

    def _of_records(self) -> None:
        self._parser.add_argument("--check", action="store_true", help="remake nothing; list which records are old")
        self._shared.only("NAME", "records")
        self._shared.peers("checkouts that speed compares with")


if __name__ == "__main__":
    run_script(main)

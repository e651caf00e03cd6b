"""The command lines of ``run`` and ``compare``: their help, their flags, and what they call."""

import argparse
from collections.abc import Callable
from pathlib import Path

from dsgpt.benchmarks.harness.flags import SuiteFlags
from dsgpt.benchmarks.harness.pages import make_page
from dsgpt.benchmarks.sweep.command import (
    DEVICES,
    LIMIT_SEC,
    MODEL_SIZE,
    PAGE,
    REPEATS,
    SEED,
    SEQ_LENGTH,
    STEPS,
    SweepOptions,
    default_output,
    run_sweep,
)
from dsgpt.benchmarks.sweep.suites import SUITES
from dsgpt.common.command_line import Reader
from dsgpt.common.errors import EXIT_DONE, UserError
from dsgpt.common.problems import did_you_mean
from dsgpt.model.config import PRESETS

DESCRIPTIONS = {
    "run": """\
run: train the cells of a suite, each in its own processes under the launcher that users use, again and again in a drawn
order; write what each setting costs. Cells that are compared do the same work, or are refused before anything runs. A
training that runs out of memory, is refused, fails or exceeds its limit is a result. An interrupted sweep is continued
by the same command. Exit code 0: every turn has a result.""",
    "compare": """\
compare: is B slower than A? A and B are two runs, paired by step, or two sweeps, paired by repeat; SWEEP#CELL names one
cell. It prints the difference with its interval. Exit code 0: B is as fast as A within noise, or faster; 1: it is
slower beyond noise.""",
}
EXAMPLES = {
    "run": f"""\
examples:
  .venv/bin/python src/benchmark.py run --suite scaling --devices 1,2 --repeats 3
  .venv/bin/python src/benchmark.py run --suite memory --devices 2 --repeats 1
  .venv/bin/python src/benchmark.py run --suite my-sweep.json --output checkpoint/sweep/mine/sweep.json

suites: {", ".join(SUITES)}""",
    "compare": """\
examples:
  .venv/bin/python src/benchmark.py compare checkpoint/before checkpoint/after
  .venv/bin/python src/benchmark.py compare before/sweep.json after/sweep.json
  .venv/bin/python src/benchmark.py compare "sweep.json#ddp on 2 devices" "sweep.json#zero1 on 2 devices\"""",
}


def add_run_flags(flags: SuiteFlags) -> None:
    """Add the flags of ``run``."""
    parser, reader = flags.parser, flags.reader
    parser.add_argument(
        "--suite",
        type=_suite(reader),
        default=None,
        metavar="SUITE",
        help=f"{', '.join(SUITES)}, or a description, a .json file",
    )
    parser.add_argument(
        "--devices",
        type=_whole_list(reader, "--devices"),
        default=None,
        metavar="N,N",
        help=f"numbers of devices (default: {','.join(map(str, DEVICES))}; all of a description)",
    )
    flags.number("--repeats", default=REPEATS, low=1, text=f"turns of each cell (default: {REPEATS})")
    flags.number("--seed", default=SEED, text=f"seed that draws the order of the turns (default: {SEED})")
    flags.number("--limit", default=LIMIT_SEC, low=1, text=f"seconds of a turn (default: {LIMIT_SEC})")
    parser.add_argument(
        "--model_size",
        type=reader.choice("--model_size", tuple(PRESETS), MODEL_SIZE),
        default=MODEL_SIZE,
        metavar="SIZE",
        help=f"{', '.join(PRESETS)} (default: {MODEL_SIZE})",
    )
    flags.number("--steps", default=STEPS, low=4, text=f"optimizer steps of a training (default: {STEPS})")
    flags.number("--seq_length", default=SEQ_LENGTH, low=1, text=f"tokens per sequence (default: {SEQ_LENGTH})")
    flags.number("--profile_comm", default=0, text="steps of each training that measure communication (default: 0)")
    for flag, text in (
        ("--target_loss", "measure the time until a step has this training loss"),
        ("--price", "price of a device hour, for the cost of a training"),
    ):
        parser.add_argument(flag, type=reader.number(flag), default=None, metavar="X", help=text)
    flags.device("cpu or cuda")
    flags.output(None, shown=default_output("SUITE").as_posix())


def add_compare_flags(flags: SuiteFlags) -> None:
    """Add the flags of ``compare``."""
    for name in ("a", "b"):
        flags.parser.add_argument(
            name, metavar=name.upper(), help="a run folder or its record, or a sweep's record, with #CELL or without"
        )
    flags.parser.add_argument(
        "--allow_unequal", action="store_true", help="compare tokens per second although the work is not the same"
    )


def run(flags: argparse.Namespace, *, repository: Path) -> int:
    """Do what ``run`` was asked for; return its exit code.

    Raises:
        UserError: as ``run_sweep``, or no suite was named.
    """
    if flags.table_from:
        page: Path = flags.page or flags.table_from.with_suffix(".md")
        make_page(PAGE, flags.table_from, page, repository=repository)
        print(page)
        return EXIT_DONE
    if flags.suite is None:
        raise UserError(f"--suite is missing: name {', '.join(SUITES)} or a .json file")
    output: Path = flags.output or default_output(flags.suite)
    options = SweepOptions(
        output=output,
        page=flags.page or output.with_suffix(".md"),
        keep=None,
        suite=flags.suite,
        devices=flags.devices,
        repeats=flags.repeats,
        limit=flags.limit,
        seed=flags.seed,
        device=flags.device,
        model_size=flags.model_size,
        steps=flags.steps,
        seq_length=flags.seq_length,
        target_loss=flags.target_loss,
        price=flags.price,
        profile_comm=flags.profile_comm,
    )
    return run_sweep(options, repository=repository)


def compare(flags: argparse.Namespace, *, repository: Path) -> int:  # noqa: ARG001 - as ``run``
    """Do what ``compare`` was asked for; return its exit code.

    Raises:
        UserError: as ``compare.compare``.
    """
    from dsgpt.benchmarks.sweep.compare import compare as compare_speeds  # noqa: PLC0415 - reads what --help needs not

    return compare_speeds(flags.a, flags.b, allow_unequal=flags.allow_unequal)


def _suite(reader: Reader) -> Callable[[str], str | None]:
    """A reader of the name of a suite, or of the path of a description."""

    def read(word: str) -> str | None:
        """The word, or None after noting the mistake."""
        if word in SUITES or word.endswith(".json"):
            return word
        known = ", ".join(SUITES)
        reader.problems.add(f"--suite must be one of {known}, or a .json file, not {word}{did_you_mean(word, SUITES)}")
        return None

    return read


def _whole_list(reader: Reader, flag: str) -> Callable[[str], tuple[int, ...] | None]:
    """A reader of whole numbers of at least 1 with commas between them."""

    def read(text: str) -> tuple[int, ...] | None:
        """The numbers, or None after noting the mistake."""
        words = text.split(",")
        if not all(word.isdecimal() and int(word) for word in words):
            reader.problems.add(f"{flag} must be whole numbers of at least 1 with commas between them, not {text}")
            return None
        return tuple(map(int, words))

    return read

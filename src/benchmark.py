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
from dataclasses import fields
from pathlib import Path
from typing import Any

from dsgpt.benchmarks import sweep
from dsgpt.benchmarks.decoding import SUITE as DECODING
from dsgpt.benchmarks.faults import SUITE as FAULTS
from dsgpt.benchmarks.frame import Suite, SuiteFlags, make_page
from dsgpt.benchmarks.inference import PEERS
from dsgpt.benchmarks.inference import SUITE as INFERENCE
from dsgpt.benchmarks.parity import SUITE as PARITY
from dsgpt.benchmarks.plan import SUITE as PLAN
from dsgpt.benchmarks.recipes import SUITE as RECIPES
from dsgpt.benchmarks.records import RECORDS, check_lines, remake_records
from dsgpt.benchmarks.resume import SUITE as RESUME
from dsgpt.benchmarks.saving import SUITE as SAVING
from dsgpt.benchmarks.serving import SUITE as SERVING
from dsgpt.benchmarks.speed import SUITE as SPEED
from dsgpt.benchmarks.speed import read_peers
from dsgpt.common.command_line import Parser, Reader, read_words, run_script
from dsgpt.common.errors import EXIT_DONE

SUITES: dict[str, Suite[Any]] = {
    "parity": PARITY,
    "resume": RESUME,
    "faults": FAULTS,
    "saving": SAVING,
    "speed": SPEED,
    "decoding": DECODING,
    "inference": INFERENCE,
    "serving": SERVING,
    "plan": PLAN,
    "recipes": RECIPES,
}
SWEEPS: dict[str, tuple[Callable[[SuiteFlags], None], Callable[..., int]]] = {
    "run": (sweep.add_run_flags, sweep.run),
    "compare": (sweep.add_compare_flags, sweep.compare),
}
COMMANDS = (*SUITES, *SWEEPS, "records")
REPOSITORY = Path(__file__).resolve().parent.parent
DESCRIPTIONS = {
    **{name: suite.description for name, suite in SUITES.items()},
    **sweep.DESCRIPTIONS,
    "records": """\
records: remake each committed record of checkpoint/reference/cpu-2-cores that was not made from the present sources,
and the pages and pictures of all. The committed records are replaced when all are remade. A record that is up to date
is skipped, so an interrupted command continues with the record that it was remaking. It says how long the others will
take, by the committed records. Without --peer, the records of speed and decoding lack rows. Exit code 0: all are up to
date, or --check; 1: a source changed meanwhile; otherwise that of the command that failed.""",
}
EXAMPLES = {
    **{name: suite.examples for name, suite in SUITES.items()},
    **sweep.EXAMPLES,
    "records": f"""\
examples:
  .venv/bin/python src/benchmark.py records --check
  .venv/bin/python src/benchmark.py records
  .venv/bin/python src/benchmark.py records --only saving plan
  .venv/bin/python src/benchmark.py records --only speed --peer nanogpt=/tmp/nanoGPT

names: {", ".join(RECORDS)}""",
}


def main() -> int:
    """Read the flags, run the command, and return its exit code."""
    words = _without_peers(sys.argv[1:])
    what = words[0] if words and words[0] in COMMANDS else ""
    reader = Reader()
    flags = read_words(_parser(what, reader), reader, words, elsewhere={})
    reader.problems.raise_if_any()
    if what in SWEEPS:
        _, act = SWEEPS[what]
        return act(flags, repository=REPOSITORY)
    return _remake(flags) if what == "records" else _measure(SUITES[what], flags)


def _without_peers(words: list[str]) -> list[str]:
    """The words, where ``inference --peers`` is ``decoding``: one request at a time, beside other programs."""
    if words[:1] != ["inference"] or PEERS not in words:
        return words
    return ["decoding", *(word for word in words[1:] if word != PEERS)]


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
    peers = [f"{name}={folder}" for name, folder in read_peers(flags.peer).items()]
    return remake_records(REPOSITORY, only=flags.only, peers=peers)


def _parser(what: str, reader: Reader) -> Parser:
    """The parser of the command ``what``; if that is empty, a parser of the first word only."""
    parser = Parser(
        description=DESCRIPTIONS[what] if what else "\n\n".join(DESCRIPTIONS.values()),
        epilog=EXAMPLES[what] if what else "flags: .venv/bin/python src/benchmark.py parity --help, and so on",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", choices=COMMANDS, help="what to measure or compare, or records")
    if what:
        _add_flags(SuiteFlags(parser, reader), what)
    return parser


def _add_flags(flags: SuiteFlags, what: str) -> None:
    if what in SWEEPS:
        add_flags, _ = SWEEPS[what]
        add_flags(flags)
    elif what in SUITES:
        SUITES[what].add_flags(flags)
        record = Path("checkpoint") / what / f"{what}.json"
        flags.output(record, shown=record.as_posix())
        flags.keep()
    else:
        flags.parser.add_argument("--check", action="store_true", help="remake nothing; list which records are old")
        flags.only("NAME", "records")
        flags.peers("checkouts that speed and decoding compare with")


if __name__ == "__main__":
    run_script(main)

"""Runs one benchmark suite, or remakes the committed records.

Each suite writes a JSON record and a page; ``SUITES`` lists them. ``src/benchmark.py`` calls ``main``.
"""

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.clusters import Clusters
from dsgpt.benchmarks.decoding import Decoding
from dsgpt.benchmarks.faults import Faults
from dsgpt.benchmarks.frame import Suite, SuiteOptions, only_flag, peers_flag, read_peers, run_suite
from dsgpt.benchmarks.inference import PEERS, Inference
from dsgpt.benchmarks.network import Network
from dsgpt.benchmarks.parity import Parity
from dsgpt.benchmarks.plan import Plan
from dsgpt.benchmarks.recipes import Recipes
from dsgpt.benchmarks.records import RECORDS, check_lines, remake_records
from dsgpt.benchmarks.resume import Resume
from dsgpt.benchmarks.saving import Saving
from dsgpt.benchmarks.serving import Serving
from dsgpt.benchmarks.speed import Speed
from dsgpt.benchmarks.sweep import CompareOptions, SweepSuite
from dsgpt.common.command_line import Parser, switch
from dsgpt.common.errors import EXIT_DONE
from dsgpt.common.text import REPOSITORY

SUITES: dict[str, type[Suite[Any, Any]]] = {
    suite.name: suite
    for suite in (
        *(Parity, Resume, Faults, Clusters, Saving, Network, Speed),
        *(Decoding, Inference, Serving, Plan, Recipes),
    )
} | {"run": SweepSuite}
COMMANDS = (*SUITES, "compare", "records")
DESCRIPTIONS = {
    **{name: suite.description for name, suite in SUITES.items()},
    "compare": CompareOptions.description,
    "records": """\
records: remake each committed record of checkpoint/reference/cpu-2-cores that was not made from the present sources,
and the pages and pictures of all. The committed records are replaced when all are remade. A record that is up to date
is skipped, so an interrupted command continues with the record that it was remaking. It says how long the others will
take, by the committed records. Without --peer, the records of speed and decoding lack rows. Exit code 0: all are up to
date, or --check; 1: a source changed meanwhile; otherwise that of the command that failed.""",
}
EXAMPLES = {
    **{name: suite.examples for name, suite in SUITES.items()},
    "compare": CompareOptions.examples,
    "records": f"""\
examples:
  .venv/bin/python src/benchmark.py records --check
  .venv/bin/python src/benchmark.py records
  .venv/bin/python src/benchmark.py records --only saving plan
  .venv/bin/python src/benchmark.py records --only speed --peer nanogpt=/tmp/nanoGPT

names: {", ".join(RECORDS)}""",
}


@dataclass(frozen=True, kw_only=True)
class RecordsOptions:
    """The command line of ``records``."""

    check: bool = switch("remake nothing; list which records are old")
    only: tuple[str, ...] = only_flag("NAME", "records")
    peer: tuple[str, ...] = peers_flag("checkouts that speed and decoding compare with")


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The empty flags of a command line without a command."""


OPTIONS: dict[str, type[Any]] = {
    **{name: suite.flags for name, suite in SUITES.items()},
    "compare": CompareOptions,
    "records": RecordsOptions,
}


def parser_of(what: str) -> Parser:
    """The parser of the command ``what``; if that is empty, of the first word only."""
    parser = Parser(
        description=DESCRIPTIONS[what] if what else "\n\n".join(DESCRIPTIONS.values()),
        epilog=EXAMPLES[what] if what else "flags: .venv/bin/python src/benchmark.py parity --help, and so on",
    )
    parser.add_argument("what", choices=COMMANDS, help="what to measure or compare, or records")
    kind = OPTIONS.get(what, NoOptions)
    shared = {field.name for field in fields(SuiteOptions)}  # these flags come last
    parser.add_flags(kind, names=sorted((field.name for field in fields(kind)), key=shared.__contains__))
    if what in SUITES and what != "run":
        parser.set_defaults(output=Path("checkpoint") / what / f"{what}.json")
    return parser


def main() -> int:
    """Read the flags, run the command, and return its exit code."""
    words = sys.argv[1:]
    if words[:1] == ["inference"] and PEERS in words:  # one request at a time, beside other programs
        words = ["decoding", *(word for word in words[1:] if word != PEERS)]
    what = words[0] if words and words[0] in COMMANDS else ""
    parser = parser_of(what)
    options = parser.read(OPTIONS.get(what, NoOptions), words)
    parser.problems.raise_if_any()
    if what in SUITES:
        return run_suite(SUITES[what], options, repository=REPOSITORY)
    if isinstance(options, RecordsOptions):
        return _remake(options)
    from dsgpt.benchmarks.sweep_page import compare  # noqa: PLC0415 - stands here alone

    return compare(options.a, options.b, allow_unequal=options.allow_unequal)


def _remake(options: RecordsOptions) -> int:
    if options.check:
        for line in check_lines(REPOSITORY, only=options.only):
            print(line)
        return EXIT_DONE
    peers = [f"{name}={folder}" for name, folder in read_peers(options.peer).items()]
    return remake_records(REPOSITORY, only=options.only, peers=peers)

"""Runs one benchmark suite, or remakes the committed records.

Each suite writes a JSON record and a page; ``SUITES`` lists them. Only the one that the command line names is imported.
``src/benchmark.py`` calls ``main``.
"""

import importlib
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.frame import Suite, SuiteOptions, only_flag, peers_flag, read_peers, run_suite
from dsgpt.common.command_line import Parser, help_of, switch
from dsgpt.common.errors import EXIT_DONE
from dsgpt.common.text import REPOSITORY

_CLASSES = (
    *("Parity", "Resume", "Faults", "Clusters", "Saving", "Loading", "Network"),
    *("Speed", "Decoding", "Inference", "Serving", "Plan", "Exam", "Recipes", "Gpu", "Tokens"),
    *("Museum", "Crashes", "Exact", "Mutants", "Oracles", "Band"),
)
SUITES = {name.lower(): f"{name.lower()}.{name}" for name in _CLASSES} | {"run": "sweep.SweepSuite"}
"""Name -> module of this package, and its class."""
COMMANDS = (*SUITES, "compare", "records")


@dataclass(frozen=True, kw_only=True)
class RecordsOptions:
    """The command line of ``records``.

    records: remake each committed record of checkpoint/reference/cpu-2-cores that was not made from the present
    sources, and the pages and pictures of all. The committed records are replaced when all are remade. A record that is
    up to date is skipped, so an interrupted command continues with the record that it was remaking. It says how long
    the others will take, by the committed records. Without --peer, the records of speed, decoding and oracles lack
    rows. Exit code 0: all are up to date, or --check; 1: a source changed meanwhile; otherwise that of the command that
    failed.

    Examples:
      .venv/bin/python src/benchmark.py records --check
      .venv/bin/python src/benchmark.py records
      .venv/bin/python src/benchmark.py records --only saving plan
      .venv/bin/python src/benchmark.py records --only speed --peer nanogpt=/tmp/nanoGPT
    """

    check: bool = switch("remake nothing; list which records are old")
    only: tuple[str, ...] = only_flag("NAME", "records")
    peer: tuple[str, ...] = peers_flag("checkouts that speed, decoding and oracles compare with")


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The empty flags of a command line without a command."""


def suite_of(name: str) -> type[Suite[Any, Any]]:
    """The suite ``name``, a key of ``SUITES``."""
    module, kind = SUITES[name].split(".")
    suite: type[Suite[Any, Any]] = getattr(importlib.import_module(f"dsgpt.benchmarks.{module}"), kind)
    return suite


def described(what: str) -> tuple[type[Any], dict[str, Any]]:
    """The flags of the command ``what``, and the texts of its help; if that is empty, of all commands."""
    if what in SUITES:
        suite = suite_of(what)
        texts = help_of(suite)
        return suite.flags, texts | {"epilog": "\n\n".join(filter(None, [texts["epilog"], suite.names]))}
    if what == "compare":
        from dsgpt.benchmarks.sweep import CompareOptions  # noqa: PLC0415 - for this command alone

        return CompareOptions, help_of(CompareOptions)
    if what == "records":
        from dsgpt.benchmarks.records import RECORDS  # noqa: PLC0415

        texts = help_of(RecordsOptions)
        return RecordsOptions, texts | {"epilog": f"{texts['epilog']}\n\nnames: {', '.join(RECORDS)}"}
    every = "\n\n".join(described(command)[1]["description"] for command in COMMANDS)
    examples = "flags: .venv/bin/python src/benchmark.py parity --help, and so on"
    return NoOptions, {"description": every, "epilog": examples}


def parser_of(what: str) -> Parser:
    """The parser of the command ``what``; if that is empty, of the first word only."""
    kind, texts = described(what)
    parser = Parser(**texts)
    parser.add_argument("what", choices=COMMANDS, help="what to measure or compare, or records")
    shared = {field.name for field in fields(SuiteOptions)}  # these flags come last
    parser.add_flags(kind, names=sorted((field.name for field in fields(kind)), key=shared.__contains__))
    if what in SUITES and what not in {"run", "gpu"}:  # whose records stand beside their work
        parser.set_defaults(output=Path("checkpoint") / what / f"{what}.json")
    return parser


def main() -> int:
    """Read the flags, run the command, and return its exit code."""
    words = sys.argv[1:]
    if words[:1] == ["inference"] and "--peers" in words:  # one request at a time, beside other programs
        words = ["decoding", *(word for word in words[1:] if word != "--peers")]
    what = words[0] if words and words[0] in COMMANDS else ""
    parser = parser_of(what)
    options = parser.read(described(what)[0], words)
    parser.problems.raise_if_any()
    if what == "band" and options.run:
        from dsgpt.benchmarks.band import judge_run  # noqa: PLC0415 - for this command alone

        return judge_run(options)
    if what in SUITES:
        return run_suite(suite_of(what), options, repository=REPOSITORY)
    if isinstance(options, RecordsOptions):
        from dsgpt.benchmarks.records import check_lines, remake_records  # noqa: PLC0415 - they import several suites

        if options.check:
            for line in check_lines(REPOSITORY, only=options.only):
                print(line)
            return EXIT_DONE
        peers = [f"{name}={folder}" for name, folder in read_peers(options.peer).items()]
        return remake_records(REPOSITORY, only=options.only, peers=peers)
    from dsgpt.benchmarks.sweep_page import compare  # noqa: PLC0415 - stands here alone

    return compare(options.a, options.b, allow_unequal=options.allow_unequal)

"""The command line of ``charts/generate_charts.py``."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsgpt.common.command_line import Parser, Reader, read_words
from dsgpt.common.errors import UserError
from dsgpt.common.files import PRINTABLE, write_atomic
from dsgpt.common.problems import Problems
from dsgpt.reports.comparison import comparison_markdown, console_summary
from dsgpt.reports.runs import RECORD_NAME, Run, read_run
from dsgpt.telemetry.sources import PARAGRAPH, by_folder, changed_files, hash_files, made_from

DESCRIPTION = """\
Compare training runs in pictures and in one table (comparison.md).

Runs are compared only as far as they did the same work: same data, model, global batch, steps, tokens and recipe.
Every picture states what differs and what a record does not contain. The first run is the baseline.
"""
EXAMPLES = """\
examples:
  # one device against DeepSpeed
  python charts/generate_charts.py --baseline-json checkpoint/baseline/training_metrics.json \\
      --optimized-json checkpoint/zero1/training_metrics.json

  # any number of runs, by folder, into a folder of their own
  python charts/generate_charts.py --run baseline=checkpoint/baseline --run zero1=checkpoint/zero1 \\
      --run zero3=checkpoint/zero3 --output-dir charts/zero

writes: training_time, throughput, inference_latency, inference_throughput, loss_vs_step, loss_vs_time, peak_memory and
overview (.png), and comparison.md. Exit code 0: done; 2: a mistake in the command line or an unreadable file;
130: interrupted.
"""

REPOSITORY = Path(__file__).resolve().parents[3]
"""Holds the sources that a ``SOURCES.json`` names."""


@dataclass(frozen=True)
class Request:
    """The checked command line: the runs in order, by name, and the folder for the charts."""

    paths: dict[str, Path]
    output: Path


def main(argv: Sequence[str] | None = None) -> None:
    """Draw what ``argv`` asks for.

    Raises:
        UserError: every mistake in the command line and in the runs' files, one line each.
    """
    request, problems = parse(argv)
    runs, unreadable = read_all(request.paths)
    problems.add(*unreadable)
    problems.raise_if_any()
    write_charts(runs, output=request.output, sources=_sources_paragraph(request.paths))
    print(console_summary(runs, output=request.output))


def build_parser() -> Parser:
    """The parser of the command line."""
    parser = Parser(prog="generate_charts.py", description=DESCRIPTION, epilog=EXAMPLES)
    add = parser.add_argument
    record = "a training_metrics.json, or the run's folder"
    add("--baseline-json", action="append", default=[], metavar="PATH", help=f"{record}; drawn first as 'baseline'")
    add("--optimized-json", action="append", default=[], metavar="PATH", help=f"{record}; drawn as 'optimized'")
    add("--run", action="append", default=[], metavar="NAME=PATH", help=f"one more run ({record}); repeat for more")
    add("--output-dir", default="charts", metavar="FOLDER", help="where the charts go (default: %(default)s)")
    return parser


def parse(argv: Sequence[str] | None = None) -> tuple[Request, Problems]:
    """The request, as far as it is valid, and every mistake in the command line."""
    reader = Reader()
    problems = reader.problems
    arguments = read_words(build_parser(), reader, argv)
    named = _named_runs(arguments, problems)
    paths: dict[str, Path] = {}
    for name, path in named:
        if name in paths:
            problems.add(f"two runs are called {name!r}; give each its own name in --run NAME=PATH")
        paths[name] = Path(path).expanduser()
    if not named and not problems:
        problems.add("no run given; give --baseline-json and --optimized-json, or --run NAME=PATH (see --help)")
    output = Path(arguments.output_dir).expanduser()
    problems.add(*_output_problems(output))
    return Request(paths=paths, output=output), problems


def _named_runs(arguments: argparse.Namespace, problems: Problems) -> list[tuple[str, str]]:
    """Name and path of each run that is given correctly, in the order in which the runs are drawn."""
    for flag, given in (("--baseline-json", arguments.baseline_json), ("--optimized-json", arguments.optimized_json)):
        if len(given) > 1:
            problems.add(f"{flag} is given {len(given)} times; give it once, and further runs as --run NAME=PATH")
    named = [("baseline", path) for path in arguments.baseline_json[:1]]
    named += [("optimized", path) for path in arguments.optimized_json[:1]]
    for text in arguments.run:
        name, _, path = (part.strip() for part in text.partition("="))
        if name and path and name.isprintable():
            named.append((name, path))
        else:
            problems.add(f"--run {text!r}: expected NAME=PATH, as in --run zero1=checkpoint/zero1")
    return named


def read_all(paths: dict[str, Path]) -> tuple[list[Run], list[str]]:
    """Every run that can be read, and the mistakes of those that cannot, one line each."""
    runs: list[Run] = []
    problems: list[str] = []
    for name, path in paths.items():
        try:
            runs.append(read_run(path, name=name))
        except UserError as error:
            problems += error.problems
    return runs, problems


def write_charts(runs: Sequence[Run], *, output: Path, sources: str = "") -> None:
    """Write all pictures and comparison.md into ``output``; each file is written whole or not at all.

    Args:
        runs: the first is the baseline.
        output: the folder.
        sources: what comparison.md says about the sources of the records.

    Raises:
        UserError: the folder cannot be written.
    """
    from dsgpt.reports.plots import draw_all  # noqa: PLC0415 - matplotlib takes seconds to load; --help and mistakes need none of it

    pictures = draw_all(runs)
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            write_atomic(output / name, picture)
        write_atomic(output / "comparison.md", comparison_markdown(runs, sources=sources).encode(errors=PRINTABLE))
    except OSError as error:
        raise UserError(f"--output-dir {output}: cannot be written ({error.strerror})") from error


def _sources_paragraph(paths: Mapping[str, Path]) -> str:
    """What comparison.md says about the sources of the records that a ``SOURCES.json`` names; empty if it names none.

    Raises:
        UserError: a ``SOURCES.json`` cannot be read.
    """
    records = {name: path / RECORD_NAME if path.is_dir() else path for name, path in paths.items()}
    entries = {name: entry for name, record in records.items() if (entry := made_from(record)) is not None}
    if not entries:
        return ""
    then = {file: digest for entry in entries.values() for file, digest in entry.sources.items()}
    now = hash_files(REPOSITORY, (path for file in then if (path := REPOSITORY / file).is_file()))
    changed = changed_files(then, now)
    had = f"{len(changed)} of them had changed: {by_folder(changed)}" if changed else "none of them had changed"
    names = f"{', '.join(entries)} {'was' if len(entries) == 1 else 'were'}"
    return (
        f"{PARAGRAPH}`SOURCES.json` names the {len(then)} files from which {names} made, with their "
        f"sha256. When this page was made, {had}."
    )


def _output_problems(output: Path) -> list[str]:
    """A mistake if the folder or one of its parents is a file."""
    existing = next(path for path in (output, *output.absolute().parents) if path.exists())
    return [] if existing.is_dir() else [f"--output-dir {output}: {existing} is a file, not a folder"]

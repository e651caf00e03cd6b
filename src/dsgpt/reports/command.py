"""The command line of ``charts/generate_charts.py``."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from dsgpt.common.errors import UserError
from dsgpt.common.files import PRINTABLE, write_atomic
from dsgpt.common.script import exit_code_of
from dsgpt.reports.comparison import comparison_markdown, console_summary
from dsgpt.reports.runs import Run, read_run

DESCRIPTION = """\
Compare training runs in pictures and in one table (comparison.md).

Runs are compared only as far as they did the same work: same data, model, global batch, steps, tokens and recipe.
Where they differ, every picture says so; where a record does not tell, that is said too. The first run is the baseline.
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
VALUE_FLAGS = ("--baseline-json", "--optimized-json", "--run", "--output-dir")


@dataclass(frozen=True)
class Request:
    """What the command line asks for: runs by name in their order, and where the charts go."""

    paths: dict[str, Path]
    output: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what ``argv`` asks for; returns the exit code. The user's mistakes are printed, one line each."""
    return exit_code_of(lambda: _compare(sys.argv[1:] if argv is None else argv))


def _compare(argv: Sequence[str]) -> None:
    request, mistakes = parse(argv)
    runs, unreadable = read_all(request.paths)
    if mistakes or unreadable:
        raise UserError(*mistakes, *unreadable)
    write_charts(runs, output=request.output)
    print(console_summary(runs, output=request.output))


class _Parser(argparse.ArgumentParser):
    """Leaves the printing of mistakes to ``main``."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def build_parser() -> argparse.ArgumentParser:
    """The flags, with help that teaches."""
    parser = _Parser(
        prog="generate_charts.py",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    record = "a training_metrics.json, or the run's folder"
    add("--baseline-json", action="append", default=[], metavar="PATH", help=f"{record}; drawn first as 'baseline'")
    add("--optimized-json", action="append", default=[], metavar="PATH", help=f"{record}; drawn as 'optimized'")
    add("--run", action="append", default=[], metavar="NAME=PATH", help=f"one more run ({record}); repeat for more")
    add("--output-dir", default="charts", metavar="FOLDER", help="where the charts go (default: %(default)s)")
    return parser


def parse(argv: Sequence[str]) -> tuple[Request, list[str]]:
    """The request as far as it can be understood, and every mistake in the command line, one line each."""
    complete, problems = _drop_flags_without_value(argv)
    arguments, unknown = build_parser().parse_known_args(complete)
    problems += [_unknown_argument(token) for token in unknown]
    for flag, given in (("--baseline-json", arguments.baseline_json), ("--optimized-json", arguments.optimized_json)):
        if len(given) > 1:
            problems.append(f"{flag} is given {len(given)} times; give it once, and further runs as --run NAME=PATH")
    named = [("baseline", path) for path in arguments.baseline_json[:1]]
    named += [("optimized", path) for path in arguments.optimized_json[:1]]
    for text in arguments.run:
        name, _, path = (part.strip() for part in text.partition("="))
        if name and path and name.isprintable():
            named.append((name, path))
        else:
            problems.append(f"--run {text!r}: expected NAME=PATH, as in --run zero1=checkpoint/zero1")
    paths: dict[str, Path] = {}
    for name, path in named:
        if name in paths:
            problems.append(f"two runs are called {name!r}; give each its own name in --run NAME=PATH")
        paths[name] = Path(path).expanduser()
    if not named and not problems:
        problems.append("no run given; give --baseline-json and --optimized-json, or --run NAME=PATH (see --help)")
    output = Path(arguments.output_dir).expanduser()
    return Request(paths=paths, output=output), problems + _output_problems(output)


def read_all(paths: dict[str, Path]) -> tuple[list[Run], list[str]]:
    """Every run that can be read, and one line for each that cannot."""
    runs, problems = [], []
    for name, path in paths.items():
        try:
            runs.append(read_run(path, name=name))
        except UserError as error:
            problems += error.problems
    return runs, problems


def write_charts(runs: Sequence[Run], *, output: Path) -> None:
    """Write every picture and comparison.md into ``output``, each complete or not at all. Raises ``UserError``."""
    from dsgpt.reports.plots import draw_all  # noqa: PLC0415 - matplotlib takes seconds to load; --help and mistakes need none of it

    pictures = draw_all(runs)
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            write_atomic(output / name, picture)
        write_atomic(output / "comparison.md", comparison_markdown(runs).encode(errors=PRINTABLE))
    except OSError as error:
        raise UserError(f"--output-dir {output}: cannot be written ({error.strerror})") from error


def _drop_flags_without_value(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take out the flags whose value is missing, so that the rest can be parsed and judged too."""
    kept, problems = [], []
    for token, following in pairwise([*argv, "--"]):
        if token in VALUE_FLAGS and following.startswith("-") and following != "-":
            problems.append(f"{token} needs a value (see --help)")
        else:
            kept.append(token)
    return kept, problems


def _unknown_argument(token: str) -> str:
    close = difflib.get_close_matches(token.split("=", maxsplit=1)[0], VALUE_FLAGS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the flags are {', '.join(VALUE_FLAGS)}"
    return f"unknown argument {token!r}; {hint}"


def _output_problems(output: Path) -> list[str]:
    """A file in the place of the folder or of one of its parents."""
    existing = next(path for path in (output, *output.absolute().parents) if path.exists())
    return [] if existing.is_dir() else [f"--output-dir {output}: {existing} is a file, not a folder"]

"""The command line of ``charts/generate_charts.py``, and what it reads."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from dsgpt.charts.comparison import comparison_markdown, console_summary
from dsgpt.charts.options import BOTH, FORMATS, LIGHT, THEMES, Style, read_only, themes_of
from dsgpt.common.command_line import NUMBER, choice, choices, flag, read_options
from dsgpt.common.errors import Problems, UserError
from dsgpt.common.files import PRINTABLE, write_atomic
from dsgpt.common.text import REPOSITORY, next_line, script_words
from dsgpt.record.provenance import changes_since, training_sources
from dsgpt.record.runs import Run, read_run
from dsgpt.record.suites import Concurrency, Predictions, Sweep, read_concurrency, read_predictions, read_sweep

# Reads what ``charts/generate_charts.py`` draws: runs, sweeps, and the records of the planner and of many requests.

Read = TypeVar("Read")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The records that could be read."""

    runs: list[Run]
    """The first is the baseline."""
    sweeps: dict[str, Sweep]
    """By the name with which their charts begin."""
    predictions: Predictions | None
    """The record of ``benchmark.py plan``."""
    concurrency: Concurrency | None
    """The record of ``benchmark.py inference``."""


def read_inputs(
    paths: Mapping[str, Path],
    *,
    sweeps: Sequence[tuple[str | None, Path]],
    plan: Path | None,
    inference: Path | None,
) -> tuple[Inputs, list[str]]:
    """Everything that can be read, and the mistakes of the rest, one line each.

    Args:
        paths: of runs, by name.
        sweeps: name and path of each; without a name, that of the suite.
        plan: the record of ``benchmark.py plan``.
        inference: the record of ``benchmark.py inference``.
    """
    problems: list[str] = []
    runs = [_read(partial(read_run, name=name), path, problems) for name, path in paths.items()]
    inputs = Inputs(
        runs=[run for run in runs if run is not None],
        sweeps=_read_sweeps(sweeps, problems),
        predictions=_read(read_predictions, plan, problems),
        concurrency=_read(read_concurrency, inference, problems),
    )
    return inputs, problems


def _read(reader: Callable[[Path], Read], path: Path | None, problems: list[str]) -> Read | None:
    """What ``reader`` reads from ``path``; None if there is no path, or if the file has mistakes."""
    if path is None:
        return None
    try:
        return reader(path)
    except UserError as error:
        problems += error.problems
        return None


def _read_sweeps(given: Sequence[tuple[str | None, Path]], problems: list[str]) -> dict[str, Sweep]:
    """Every sweep that can be read, by name."""
    sweeps: dict[str, Sweep] = {}
    for wanted, path in given:
        sweep = _read(read_sweep, path, problems)
        if sweep is None:
            continue
        name = wanted or re.sub(r"[^\w.-]+", "-", sweep.suite)
        if name in sweeps:
            problems.append(f"two sweeps are called {name!r}; give each its own name in --sweep NAME=PATH")
        sweeps[name] = sweep
    return sweeps


DESCRIPTION = """\
Draw charts of training runs and of sweeps, and compare runs in one table (comparison.md).

Runs are compared only as far as they did the same work: same data, model, global batch, steps, tokens and recipe.
Every picture states what differs and what a record does not contain. The first run is the baseline. A chart whose
data no record has is not drawn, and a line says why.
"""
EXAMPLES = """\
examples:
  # one device against DeepSpeed
  .venv/bin/python charts/generate_charts.py --baseline-json checkpoint/baseline/training_metrics.json \\
      --optimized-json checkpoint/zero1/training_metrics.json

  # any number of runs, by folder, into a folder of their own
  .venv/bin/python charts/generate_charts.py --run baseline=checkpoint/baseline --run zero1=checkpoint/zero1 \\
      --run zero3=checkpoint/zero3 --output-dir charts/zero

  # a sweep of src/benchmark.py, for a page with dark and light readers
  .venv/bin/python charts/generate_charts.py --sweep checkpoint/sweep/scaling --format svg --theme both

docs/charts.md says what each chart shows. Exit code 0: done; 2: a mistake in the command line or an unreadable file;
130: interrupted.
"""

COMMITTED = REPOSITORY / "checkpoint" / "reference"
"""The records of the pages."""
IN_FILE_NAMES = re.compile(r"[\w.-]+")


RECORD = "a training_metrics.json, or the run's folder"


@dataclass(frozen=True, kw_only=True)
class ChartsOptions:
    """The command line."""

    baseline: tuple[str, ...] = flag(
        str, "PATH", f"{RECORD}; drawn first as 'baseline'", default=(), name="--baseline-json", action="append"
    )
    optimized: tuple[str, ...] = flag(
        str, "PATH", f"{RECORD}; drawn as 'optimized'", default=(), name="--optimized-json", action="append"
    )
    run: tuple[str, ...] = flag(
        str, "NAME=PATH", f"one more run ({RECORD}); repeat for more", default=(), action="append"
    )
    sweep: tuple[str, ...] = flag(
        str,
        "[NAME=]PATH",
        "a sweep.json or its folder; its charts begin with NAME (default: that of its suite); repeat for more",
        default=(),
        action="append",
    )
    plan: Path | None = flag(
        Path, "PATH", "the record of src/benchmark.py plan: draws its predicted memory beside the measured"
    )
    inference: Path | None = flag(
        Path,
        "PATH",
        "the record of src/benchmark.py inference: draws the latency of its engines against their throughput",
    )
    output: str = flag(
        str, "FOLDER", "where the charts go (default: %(default)s)", default="charts", name="--output-dir"
    )
    only: str | None = flag(str, "LIST", "names of the charts to draw, separated by commas (default: all)")
    formats: tuple[str, ...] = flag(
        choices(FORMATS), "LIST", "png, svg or png,svg (default: png,svg)", default=FORMATS, name="--format"
    )
    theme: str = flag(choice((*THEMES, BOTH)), "NAME", "light, dark or both (default: %(default)s)", default=LIGHT.name)
    price: float | None = flag(NUMBER, "X", "of a device hour, in any currency: draws the losses of runs against money")


def main(argv: Sequence[str] | None = None) -> None:
    """Draw what ``argv`` asks for.

    Raises:
        UserError: every mistake in the command line and in the files, one line each.
    """
    options, problems = read_options(
        ChartsOptions, argv, prog="generate_charts.py", description=DESCRIPTION, epilog=EXAMPLES
    )
    paths: dict[str, Path] = {}
    for name, path in _named_runs(options, problems):
        if name in paths:
            problems.add(f"two runs are called {name!r}; give each its own name in --run NAME=PATH")
        paths[name] = Path(path).expanduser()
    sweeps = _named_sweeps(options.sweep, problems)
    if not (paths or sweeps or options.plan or options.inference or problems):
        problems.add(
            "no run given; give --baseline-json and --optimized-json, --run NAME=PATH or --sweep PATH (see --help)"
        )
    output = Path(options.output).expanduser()
    existing = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not existing.is_dir():
        problems.add(f"--output-dir {output}: {existing} is a file, not a folder")
    style = Style(options.formats, themes_of(options.theme), read_only(options.only, problems))
    inputs, unreadable = read_inputs(paths, sweeps=sweeps, plan=options.plan, inference=options.inference)
    problems.add(*unreadable)
    problems.raise_if_any()
    sources = _sources_paragraph(inputs.runs, paths)
    absent = write_charts(inputs, paths, output=output, style=style, price=options.price or None, sources=sources)
    if inputs.runs:
        print(console_summary(inputs.runs))
    for chart, why in absent.items():
        print(f"not drawn: {chart}: {why}")
    print(f"charts: {output}")
    print(next_line(script_words("charts/dashboard.py")))


def _named_runs(options: ChartsOptions, problems: Problems) -> list[tuple[str, str]]:
    """Name and path of each run that is given correctly, in the order in which the runs are drawn."""
    named = []
    for name, given in (("baseline", options.baseline), ("optimized", options.optimized)):
        named += [(name, path) for path in given[:1]]
        if len(given) > 1:
            problems.add(
                f"--{name}-json is given {len(given)} times; give it once, and further runs as --run NAME=PATH"
            )
    for text in options.run:
        name, _, path = (part.strip() for part in text.partition("="))
        if name and path and name.isprintable():
            named.append((name, path))
        else:
            problems.add(f"--run {text!r}: expected NAME=PATH, as in --run zero1=checkpoint/zero1")
    return named


def _named_sweeps(given: Sequence[str], problems: Problems) -> list[tuple[str | None, Path]]:
    """Name and path of each sweep; a text that is a path as a whole has no name."""
    found: list[tuple[str | None, Path]] = []
    for text in given:
        name, equals, path = (part.strip() for part in text.partition("="))
        if not equals or Path(text).expanduser().exists():
            found.append((None, Path(text).expanduser()))
        elif path and IN_FILE_NAMES.fullmatch(name):
            found.append((name, Path(path).expanduser()))
        else:
            problems.add(f"--sweep {text!r}: expected NAME=PATH, with a NAME of letters, digits, '-', '_' and '.'")
    return found


def write_charts(
    inputs: Inputs, paths: Mapping[str, Path], *, output: Path, style: Style, price: float | None, sources: str
) -> dict[str, str]:
    """Write all charts, and comparison.md of runs; each file is written whole or not at all.

    Charts that are not drawn leave no files of earlier calls either.

    Args:
        inputs: what is drawn.
        paths: of the runs, by name.
        output: where the charts go.
        style: how they look.
        price: of a device hour.
        sources: what comparison.md says about the sources of the records.

    Returns:
        The charts that are not drawn, and why.

    Raises:
        UserError: the folder cannot be written.
    """
    from dsgpt.charts.plots import charts_of  # noqa: PLC0415 - matplotlib takes seconds to load
    from dsgpt.charts.style import draw, file_name  # noqa: PLC0415

    folders = {name: path if path.is_dir() else path.parent for name, path in paths.items()}
    charts = charts_of(inputs, folders=folders, price=price)
    drawn = draw(style.chosen(charts), themes=style.themes, formats=style.formats)
    stale = [
        file_name(name, theme, form)
        for name, theme, form in itertools.product(drawn.absent, style.themes, style.formats)
    ]
    files = dict(drawn.files)
    if inputs.runs:
        files["comparison.md"] = comparison_markdown(inputs.runs, sources=sources).encode(errors=PRINTABLE)
    _write(output, files, stale=stale)
    return drawn.absent | style.missing(charts)


def _write(folder: Path, files: Mapping[str, bytes], *, stale: Sequence[str]) -> None:
    """Write ``files`` to ``folder``, and remove ``stale`` ones of earlier calls."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomic(folder / name, content)
        for name in stale:
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"--output-dir {folder}: cannot be written ({error.strerror})") from error


def _sources_paragraph(runs: Sequence[Run], paths: Mapping[str, Path]) -> str:
    """What comparison.md says about the sources of committed records; empty without one."""
    committed = [run for run in runs if paths[run.name].resolve().is_relative_to(COMMITTED)]
    commits = dict.fromkeys(segment.setup.get("code") for run in committed for segment in run.segments)
    sources = [*training_sources(), "src/demo.py"]
    return "\n\n".join(changes_since(commit, sources, repository=REPOSITORY).paragraph() for commit in commits)

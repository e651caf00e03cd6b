"""The command line of ``charts/generate_charts.py``: what it reads, and which charts it writes."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsgpt.charts.comparison import comparison_markdown, console_summary
from dsgpt.charts.themes import LIGHT, THEMES
from dsgpt.common.command_line import NUMBER, choice, choices, flag, read_options
from dsgpt.common.errors import Problems, UserError, did_you_mean
from dsgpt.common.files import PRINTABLE, write_atomic
from dsgpt.common.json_files import read_or_refuse
from dsgpt.common.text import IN_CHECKOUT, REPOSITORY, next_line
from dsgpt.record import suites
from dsgpt.record.provenance import changes_since, training_sources
from dsgpt.record.runs import Run, read_run

if TYPE_CHECKING:
    from dsgpt.charts.style import Frame


RUN_CHARTS = (
    *("training_time", "throughput", "inference_latency", "inference_throughput", "peak_memory"),
    *("loss_vs_step", "loss_vs_time", "loss_vs_tokens", "loss_vs_money"),
    *("memory", "communication", "step_times", "latency_vs_throughput", "utilisation", "overview"),
)
SWEEP_CHARTS = ("throughput", "scaling", "efficiency", "memory", "communication", "step_times", "money")
"""Their files begin with the name of the sweep and ``_``."""
RECORD_CHARTS = {"plan": "plan_memory", "inference": "latency_by_concurrency", "exam": "exam"}
"""Charts of the records of ``benchmark.py``, by the flag that names the record."""
FORMATS = ("png", "svg")
BOTH = "both"
COMMITTED = REPOSITORY / "checkpoint" / "reference"
"""The records of the pages."""
IN_FILE_NAMES = re.compile(r"[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class Exam:
    """What the chart needs of the record of ``benchmark.py exam``."""

    timestamp_utc: str
    rows: list[dict[str, Any]]


READERS: dict[str, Callable[[Path], Any]] = {
    "plan": suites.read_predictions,
    "inference": suites.read_concurrency,
    "exam": partial(read_or_refuse, kind=Exam, what="a record of benchmark.py exam", unknown_keys=True),
}


def _names(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


@dataclass(frozen=True, kw_only=True)
class ChartsOptions:
    r"""The command line.

    Draw charts of training runs and of sweeps, and compare runs in one table (comparison.md).

    Runs are compared only as far as they did the same work: same data, model, global batch, steps, tokens and recipe.
    Every picture states what differs and what a record does not contain. The first run is the baseline. A chart whose
    data no record has is not drawn, and a line says why.

    Examples:
      # one device against DeepSpeed
      .venv/bin/python charts/generate_charts.py --baseline-json checkpoint/baseline/training_metrics.json \
          --optimized-json checkpoint/zero1/training_metrics.json

      # any number of runs, by folder, into a folder of their own
      .venv/bin/python charts/generate_charts.py --run baseline=checkpoint/baseline --run zero1=checkpoint/zero1 \
          --run zero3=checkpoint/zero3 --output-dir charts/zero

      # a sweep of src/benchmark.py, for a page with dark and light readers
      .venv/bin/python charts/generate_charts.py --sweep checkpoint/sweep/scaling --format svg --theme both

    docs/charts.md says what each chart shows. Exit code 0: done; 2: a mistake in the command line or an unreadable file;
    130: interrupted.
    """  # noqa: E501

    baseline: tuple[str, ...] = flag(str, "PATH", default=(), name="--baseline-json", action="append")
    """a training_metrics.json, or the run's folder; drawn first as 'baseline'"""
    optimized: tuple[str, ...] = flag(str, "PATH", default=(), name="--optimized-json", action="append")
    """a training_metrics.json, or the run's folder; drawn as 'optimized'"""
    run: tuple[str, ...] = flag(str, "NAME=PATH", default=(), action="append")
    """one more run (a training_metrics.json, or the run's folder); repeat for more"""
    sweep: tuple[str, ...] = flag(str, "[NAME=]PATH", default=(), action="append")
    """a sweep.json or its folder; its charts begin with NAME (default: that of its suite); repeat for more"""
    plan: Path | None = flag(Path, "PATH")
    """the record of src/benchmark.py plan: draws its predicted memory beside the measured"""
    inference: Path | None = flag(Path, "PATH")
    """the record of src/benchmark.py inference: draws the latency of its engines against their throughput"""
    exam: Path | None = flag(Path, "PATH")
    """the record of src/benchmark.py exam: draws predicted steps beside those that others measured"""
    output: str = flag(str, "FOLDER", default="charts", name="--output-dir")  # a path, and of any bytes
    """where the charts go (default: %(default)s)"""
    only: tuple[str, ...] | None = flag(_names, "LIST")
    """names of the charts to draw, separated by commas (default: all)"""
    formats: tuple[str, ...] = flag(choices(FORMATS), "LIST", default=FORMATS, name="--format")
    """png, svg or png,svg (default: png,svg)"""
    theme: str = flag(choice((*THEMES, BOTH)), "NAME", "light, dark or both (default: %(default)s)", default=LIGHT.name)
    price: float | None = flag(NUMBER, "X", "of a device hour, in any currency: draws the losses of runs against money")


def main(argv: Sequence[str] | None = None) -> None:
    """Draw what ``argv`` asks for.

    Raises:
        UserError: every mistake in the command line and in the files, one line each.
    """
    options, problems = read_options(ChartsOptions, argv, prog="generate_charts.py")
    paths = _paths_of_runs(options, problems)
    sweeps = _paths_of_sweeps(options.sweep, problems)
    if not (paths or sweeps or problems or any(getattr(options, flag) for flag in RECORD_CHARTS)):
        ways = "--baseline-json and --optimized-json, --run NAME=PATH or --sweep PATH"
        problems.add(f"no run given; give {ways} (see --help)")
    output = Path(options.output).expanduser()
    existing = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not existing.is_dir():
        problems.add(f"--output-dir {output}: {existing} is a file, not a folder")
    alone = (*RUN_CHARTS, *RECORD_CHARTS.values())
    for name in dict.fromkeys(options.only or ()):
        if name not in alone and not any(name.endswith(f"_{chart}") for chart in SWEEP_CHARTS):
            allowed = f"{', '.join(alone)}, and of a sweep NAME_{', NAME_'.join(SWEEP_CHARTS)}"
            problems.add(f"--only {name}: is not a chart{did_you_mean(name, RUN_CHARTS)}; known are {allowed}")
    if options.only is not None and not options.only:
        problems.add("--only names no chart")
    runs, named, records = _read(paths, sweeps, options, problems)
    problems.raise_if_any()
    absent = _write(runs, named, records, paths, output=output, options=options)
    if runs:
        print(console_summary(runs))
    for chart, why in absent.items():
        print(f"not drawn: {chart}: {why}")
    print(f"charts: {output}")
    print(next_line(["make", "dashboard"] if IN_CHECKOUT else ["dsgpt", "dashboard"]))


def _paths_of_runs(options: ChartsOptions, problems: Problems) -> dict[str, Path]:
    """The path of each run that is given correctly, by name, in the order in which the runs are drawn."""
    named = []
    for name, given in (("baseline", options.baseline), ("optimized", options.optimized)):
        named += [(name, path) for path in given[:1]]
        if len(given) > 1:
            times = f"--{name}-json is given {len(given)} times"
            problems.add(f"{times}; give it once, and further runs as --run NAME=PATH")
    for text in options.run:
        name, _, path = (part.strip() for part in text.partition("="))
        if name and path and name.isprintable():
            named.append((name, path))
        else:
            problems.add(f"--run {text!r}: expected NAME=PATH, as in --run zero1=checkpoint/zero1")
    paths: dict[str, Path] = {}
    for name, path in named:
        if name in paths:
            problems.add(f"two runs are called {name!r}; give each its own name in --run NAME=PATH")
        paths[name] = Path(path).expanduser()
    return paths


def _paths_of_sweeps(given: Sequence[str], problems: Problems) -> list[tuple[str | None, Path]]:
    """Name and path of each sweep; a text that is a path as a whole has no name."""
    sweeps: list[tuple[str | None, Path]] = []
    for text in given:
        name, equals, path = (part.strip() for part in text.partition("="))
        if not equals or Path(text).expanduser().exists():
            sweeps.append((None, Path(text).expanduser()))
        elif path and IN_FILE_NAMES.fullmatch(name):
            sweeps.append((name, Path(path).expanduser()))
        else:
            problems.add(f"--sweep {text!r}: expected NAME=PATH, with a NAME of letters, digits, '-', '_' and '.'")
    return sweeps


def _read(
    paths: Mapping[str, Path], sweeps: Sequence[tuple[str | None, Path]], options: ChartsOptions, problems: Problems
) -> tuple[list[Run], dict[str, suites.Sweep], dict[str, Any]]:
    """Runs, sweeps by name and records by flag, as far as they can be read; the other mistakes go to ``problems``."""

    def read(reader: Callable[[Path], Any], path: Path | None) -> Any:
        with problems.collect():
            return None if path is None else reader(path)
        return None

    runs = [run for name, path in paths.items() if (run := read(partial(read_run, name=name), path))]
    named: dict[str, suites.Sweep] = {}
    for wanted, path in sweeps:
        if sweep := read(suites.read_sweep, path):
            name = wanted or re.sub(r"[^\w.-]+", "-", sweep.suite)
            if name in named:
                problems.add(f"two sweeps are called {name!r}; give each its own name in --sweep NAME=PATH")
            named[name] = sweep
    return runs, named, {flag: read(reader, getattr(options, flag)) for flag, reader in READERS.items()}


def _write(
    runs: list[Run],
    sweeps: Mapping[str, suites.Sweep],
    records: Mapping[str, Any],
    paths: Mapping[str, Path],
    *,
    output: Path,
    options: ChartsOptions,
) -> dict[str, str]:
    """Write the charts, and comparison.md of runs; each file is written whole or not at all.

    Charts that are not drawn leave no files of earlier calls either. Equal records give equal bytes on one machine.

    Args:
        runs: to compare; the first is the baseline.
        sweeps: by the name with which their charts begin.
        records: what ``READERS`` read, by flag; None where none was given.
        paths: of the runs, by name.
        output: the folder.
        options: of the command line.

    Returns:
        The charts that are not drawn, and why.

    Raises:
        UserError: the folder cannot be written.
    """
    from dsgpt.charts.memory import memory_chart  # noqa: PLC0415 - matplotlib takes seconds to load
    from dsgpt.charts.runs import charts_of_runs  # noqa: PLC0415
    from dsgpt.charts.style import Texts, file_bytes, quiet_style  # noqa: PLC0415
    from dsgpt.charts.sweeps import charts_of_sweep, concurrency_chart, exam_chart  # noqa: PLC0415

    folders = {name: path if path.is_dir() else path.parent for name, path in paths.items()}
    charts = charts_of_runs(runs, folders=folders, price=options.price or None) if runs else {}
    for name, sweep in sweeps.items():
        charts |= charts_of_sweep(sweep, name=name)
    draw: dict[str, Callable[[Any], Frame | str]] = {
        "plan": lambda record: memory_chart(record.rows, Texts(footer=record.footer)),
        "inference": concurrency_chart,
        "exam": lambda record: exam_chart(record.rows, date=record.timestamp_utc[:10]),
    }
    charts |= {RECORD_CHARTS[flag]: partial(draw[flag], record) for flag, record in records.items() if record}
    files, absent = dict[str, bytes | None](), dict[str, str]()  # None: the file of an earlier call is removed
    for theme in (theme for name, theme in THEMES.items() if options.theme in {name, BOTH}):
        with quiet_style(theme):
            for name, chart in charts.items():
                if options.only is not None and name not in options.only:
                    continue
                picture = chart()
                if isinstance(picture, str):
                    absent[name] = picture
                for form in options.formats:
                    file = f"{name}{'' if theme is LIGHT else f'-{theme.name}'}.{form}"
                    files[file] = None if isinstance(picture, str) else file_bytes(picture.figure, form)
    if runs:
        committed = [run for run in runs if paths[run.name].resolve().is_relative_to(COMMITTED)]
        commits = dict.fromkeys(segment.setup.get("code") for run in committed for segment in run.segments)
        sources = [*training_sources(measured=("demo.py",)), "src/demo.py"]
        changes = [changes_since(commit, sources, repository=REPOSITORY).paragraph() for commit in commits]
        files["comparison.md"] = comparison_markdown(runs, sources="\n\n".join(changes)).encode(errors=PRINTABLE)
    try:
        output.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            if content is None:
                (output / file).unlink(missing_ok=True)
            else:
                write_atomic(output / file, content)
    except OSError as error:
        raise UserError(f"--output-dir {output}: cannot be written ({error.strerror})") from error
    whys = dict.fromkeys(RUN_CHARTS, "no run was given")
    whys |= {chart: f"no --{flag} was given" for flag, chart in RECORD_CHARTS.items()}
    missing = [name for name in options.only or () if name not in charts]
    return absent | {name: whys.get(name, "no sweep of this name was given") for name in missing}

"""The committed records: which command makes each, and which of them must be remade.

Remakes the committed records that were not made from the present sources. First all old records are remade below
``checkpoint/records``, which git ignores, so that each of them names a clean commit. Then they replace the committed
ones, and their pages are made again. After an interruption, records that were remade are kept, and a suite that was
interrupted starts again.
"""

import itertools
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgpt.benchmarks import frame
from dsgpt.benchmarks.inference import with_engines
from dsgpt.benchmarks.inference_worker import ENGINES
from dsgpt.common.errors import EXIT_DONE, Problems, UserError, did_you_mean, is_number
from dsgpt.common.files import write_json_atomic
from dsgpt.common.json_files import JsonError, read_object
from dsgpt.common.text import duration
from dsgpt.record.provenance import DIRTY, git_commit

# The committed records: which command makes each of them, and which shows it.

TEXT = Path("data/python-transformers/val.bin")
"""Text that that run was validated on."""
REFERENCE = Path("checkpoint/reference/cpu-2-cores")
"""Folder of the committed records, relative to the repository."""
WORK = Path("checkpoint/records/work")
"""Folder that the commands write to."""
READY = Path("checkpoint/records/ready")
"""Holds remade records until all are remade. It has the layout of ``REFERENCE``."""
RUNS = ("demo-baseline", "demo-zero1")
CHARTS = (
    "overview,memory,scaling_scaling,scaling_efficiency,strategies_throughput,plan_memory,latency_by_concurrency,exam"
)
"""The charts of the pages, as in the Makefile."""
SWEEPS = "sweep-*.json"
"""Committed sweeps, below ``REFERENCE``."""
PLAN, INFERENCE, EXAM = "plan.json", "inference.json", "exam.json"
WITH_PEERS = ("speed", "decoding", "oracles")
"""Suites that other implementations take part in."""
RUN_FILES = ("training_metrics.json", "metrics.jsonl")


@dataclass(frozen=True, kw_only=True)
class CommittedRecord:
    """One or more records that one command makes."""

    name: str
    suite: str
    """Name in ``record_sources``."""
    records: tuple[str, ...]
    """Members of ``files`` that name the commit that they were made at."""
    files: Mapping[str, str]
    """Maps paths below ``WORK`` to the paths of the same files below ``READY`` and ``REFERENCE``."""
    make: tuple[str, ...]
    """The command that makes them below ``WORK``, without the interpreter."""
    show: tuple[str, ...]
    """The command that makes pages or pictures from them."""


def _suite(
    name: str, *flags: str, command: str = "", suite: str = "", made: str = "", page: str = ""
) -> CommittedRecord:
    """The record ``NAME.json``, which ``benchmark.py COMMAND`` makes as ``made`` below ``WORK``."""
    record, words = f"{name}.json", ("src/benchmark.py", command or name)
    made = made or record
    return CommittedRecord(
        name=name,
        suite=suite or name,
        records=(record,),
        files={made: record},
        make=(*words, *flags, "--output", f"{WORK}/{made}"),
        show=(*words, "--table-from", f"{REFERENCE}/{record}", "--page", f"docs/{page or name}.md"),
    )


def _sweep(suite: str, devices: str, steps: int) -> CommittedRecord:
    flags = ("--suite", suite, "--devices", devices, "--repeats", "3", "--steps", str(steps), "--profile_comm", "3")
    name = f"sweep-{suite}"
    return _suite(name, *flags, command="run", suite=frame.SWEEP, made=f"{name}/sweep.json")


def _demo() -> CommittedRecord:
    runs = [word for run in RUNS for word in ("--run", f"{run.removeprefix('demo-')}={REFERENCE}/{run}")]
    return CommittedRecord(
        name=frame.DEMO,
        suite=frame.DEMO,
        records=tuple(f"{run}/{RUN_FILES[0]}" for run in RUNS),
        files={f"demo/checkpoint/{run}/{file}": f"{run}/{file}" for run in RUNS for file in RUN_FILES},
        make=("src/demo.py", "--into", f"{WORK}/demo"),
        show=(
            *("charts/generate_charts.py", "--output-dir", "docs/images"),
            *("--only", CHARTS, "--format", "svg", "--theme", "both", *runs),
        ),
    )


_WHOLE = ("--minutes", "1440")
_OTHERWISE = {
    "clusters": _suite("clusters", *_WHOLE, page="clusters-campaign"),
    "faults": _suite("faults", *_WHOLE),
    "museum": _suite("museum", *_WHOLE),
    "mutants": _suite("mutants", *_WHOLE),
    "plan": _suite("plan", page="planner"),
    "speed": _suite("speed", "--rounds", "3"),
    "recipes": _suite("recipes", page="recipe-search"),
    "decoding": _suite("decoding", "--checkpoint", frame.TRAINED.as_posix(), "--data", TEXT.as_posix()),
    "inference": _suite(
        "inference", "--checkpoint", frame.TRAINED.as_posix(), "--engines", ",".join(ENGINES), page="concurrency"
    ),
    "serving": _suite("serving", "--checkpoint", frame.TRAINED.as_posix(), page="serving-load"),
}
"""Suites whose page has another name, or whose record is made with flags."""
_SWEEPS = (_sweep("strategies", "2", 24), _sweep("scaling", "1,2", 16))
_MADE = (_demo(), *(_OTHERWISE.get(name) or _suite(name) for name in frame.SUITES), *_SWEEPS)
RECORDS = {record.name: record for record in _MADE}
"""Records by name, in the order in which they are remade."""


EXIT_OLD = 1
"""A source changed while its record was remade."""
WITH_ENGINES = (frame.DEMO, "inference")
"""Records that together have what the committed run says about engines."""

Runner = Callable[[Sequence[str]], int]
"""Runs a command in the repository and returns its exit code."""


def check_lines(repository: Path, *, only: Sequence[str] = ()) -> Iterator[str]:
    """A line for each record: up to date, or why not.

    Raises:
        UserError: ``only`` names no record.
    """
    for record in _selected(only):
        yield f"{record.name}: {_why_old(record, repository, REFERENCE) or 'up to date'}"


def remake_records(
    repository: Path, *, only: Sequence[str] = (), peers: Sequence[str] = (), run: Runner | None = None
) -> int:
    """Remake the records that are not up to date, and the pages of all; return the first exit code that is not 0.

    Args:
        repository: holds records, sources and scripts.
        only: names of records; empty for all.
        peers: ``NAME=FOLDER`` for the ``--peer`` of ``WITH_PEERS``.
        run: runs the commands.

    Raises:
        UserError: ``only`` names no record, or sources of a record to remake are not committed.
    """
    run = run or (lambda words: subprocess.run([sys.executable, *words], cwd=repository, check=False).returncode)
    records, started = _selected(only), time.perf_counter()
    old = [record for record in records if all(_why_old(record, repository, folder) for folder in (REFERENCE, READY))]
    for record in old:
        commit = git_commit(repository, mark=DIRTY if record.name == frame.DEMO else "")  # a run marks it for any file
        if frame.record_changes({"git_commit": commit}, record.suite, repository=repository).line():
            raise UserError(f"{record.name}: a record names its commit: commit all changed and new files first, in git")
    if old:
        print(f"to remake: {', '.join(record.name for record in old)}; {_expected(old, repository)}", flush=True)
    for number, record in enumerate(records, start=1):
        count, why = f"[{number}/{len(records)}] {record.name}", _why_old(record, repository, REFERENCE)
        if not why:
            print(f"{count}: made from the present sources, skipped", flush=True)
        elif not _why_old(record, repository, READY):
            print(f"{count}: remade before, skipped", flush=True)
        else:
            print(f"{count}: remaking it, because {why}; {_expected([record], repository)}", flush=True)
            work, trained = repository / WORK, frame.TRAINED.as_posix()
            shutil.rmtree(work / record.name, ignore_errors=True)  # earlier runs, which would be resumed
            if _why_old(record, repository, WORK):  # a record that grows in blocks would be continued
                for made in record.files:
                    (work / made).unlink(missing_ok=True)
            others = ("--peer", *peers) if peers and record.name in WITH_PEERS else ()
            demo_first = [("src/demo.py",)] if trained in record.make and not (repository / trained).exists() else []
            for command in (*demo_first, (*record.make, *others)):
                if code := run(command):
                    print(f"{count}: failed with exit code {code}; the committed records stay as they were", flush=True)
                    return code
            _copy(record.files, work, repository / READY)
            old.remove(record)
            left = f"; {_expected(old, repository)} for the others" if old else ""
            print(f"{count}: remade, {duration(time.perf_counter() - started)} since the start{left}", flush=True)
    return _publish(records, repository, run)


def _expected(records: Sequence[CommittedRecord], repository: Path) -> str:
    """Words for the time that remaking takes, by the committed records: ``about 14 min 02 s``."""
    contents = [made for record in records for made in _contents(record, repository / REFERENCE) or [{}]]
    seconds = [made.get("summary", {}).get("total_wall_time_sec", made.get("seconds")) for made in contents]
    if not all(is_number(each) for each in seconds):
        return "nothing says how long it takes"
    return f"about {duration(sum(seconds))}"


def _publish(records: Sequence[CommittedRecord], repository: Path, run: Runner) -> int:
    """Replace the old committed records with the remade ones, then make the pages of all: charts are of several."""
    for record in records:
        if _why_old(record, repository, REFERENCE):
            if why := _why_old(record, repository, READY):
                print(f"{record.name}: not replaced, because {why}: run it again", flush=True)
                return EXIT_OLD
            _copy({file: file for file in record.files.values()}, repository / READY, repository / REFERENCE)
    if any(record.name in WITH_ENGINES for record in records):
        _add_engines(repository)
    demo = RECORDS[frame.DEMO]
    drawn = any(record.suite in {"plan", "inference", "exam", frame.SWEEP} for record in records)
    there = all((repository / REFERENCE / file).is_file() for file in demo.records)
    charts = [demo] if drawn and there and demo not in records else []
    for record in (*records, *charts):
        # Also for records that were not old: an interruption may have come before this.
        if code := run(show_words(record, repository)):
            print(f"{record.name}: its pages failed with exit code {code}", flush=True)
            return code
    print(f"all of {', '.join(record.name for record in records)} are made from the present sources", flush=True)
    return EXIT_DONE


def show_words(record: CommittedRecord, repository: Path) -> tuple[str, ...]:
    """The command that makes its pages; the charts are of the committed sweeps, too."""
    if record.name != frame.DEMO:
        return record.show
    shown = [("--sweep", sweep.name) for sweep in sorted((repository / REFERENCE).glob(SWEEPS))]
    shown += [("--plan", PLAN), ("--inference", INFERENCE), ("--exam", EXAM)]
    there = [(name, f"{REFERENCE}/{file}") for name, file in shown if (repository / REFERENCE / file).is_file()]
    return (*record.show, *itertools.chain.from_iterable(there))


def _copy(files: Mapping[str, str], source: Path, target: Path) -> None:
    """Copy files; the keys are their paths below ``source``, the values those below ``target``."""
    for file, copy in files.items():
        (target / copy).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / file, target / copy)


def _add_engines(repository: Path) -> None:
    """Add what engines took for many requests to the committed run, if that is the same training as the measured run.

    Of the same training, the losses of both runs are equal to the last bit.
    """
    folder = repository / REFERENCE
    committed, record = folder / frame.TRAINED.name / RUN_FILES[0], folder / INFERENCE
    try:
        files = (repository / frame.TRAINED / RUN_FILES[0], committed, record)
        measured, run, many = (read_object(file, max_bytes=frame.MAX_BYTES) for file in files)
    except JsonError as error:
        print(f"{committed.parent.name}: gets no figures of engines: {error}", flush=True)
        return
    summaries = [one.get("summary") or {} for one in (measured, run)]
    one, other = ([each.get(f"final_{part}_loss") for part in ("train", "val")] for each in summaries)
    if many["checkpoint"] != frame.TRAINED.as_posix() or one != other:
        print(f"{committed.parent.name}: gets no figures of engines: they answered with another training", flush=True)
        return
    write_json_atomic(committed, with_engines(run, many))


def _selected(only: Sequence[str]) -> list[CommittedRecord]:
    problems = Problems()
    for name in only:
        if name not in RECORDS:
            problems.add(f"--only {name}: is not a record{did_you_mean(name, RECORDS)}; known are {', '.join(RECORDS)}")
    problems.raise_if_any()
    return [record for name, record in RECORDS.items() if not only or name in only]


def _why_old(record: CommittedRecord, repository: Path, folder: Path) -> str:
    """Why the record's files in ``folder`` are not up to date, in one line; empty if they are."""
    contents = _contents(record, repository / folder)
    lines = [frame.record_changes(made, record.suite, repository=repository).line() for made in contents]
    return next(filter(None, lines), "") if lines else "there is no readable record"


def _contents(record: CommittedRecord, folder: Path) -> list[dict[str, Any]]:
    """Contents of its files; empty if one is missing or cannot be read."""
    try:
        return [read_object(folder / file, max_bytes=frame.MAX_BYTES) for file in record.records]
    except JsonError:
        return []

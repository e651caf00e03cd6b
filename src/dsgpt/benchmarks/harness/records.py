"""Remakes the committed records that were not made from the present sources.

First all old records are remade below ``checkpoint/records``, which git ignores, so that each of them names a clean
commit. Then they replace the committed ones, and their pages are made again. After an interruption, records that were
remade are kept, and a suite that was interrupted starts again.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.harness.committed import (
    INFERENCE,
    PLAN,
    READY,
    RECORDS,
    REFERENCE,
    RUN_FILES,
    SWEEPS,
    TRAINED,
    WITH_PEERS,
    WORK,
    CommittedRecord,
)
from dsgpt.benchmarks.harness.engine_figures import KEY, by_concurrency
from dsgpt.benchmarks.harness.sources import DEMO, source_hashes, why_old
from dsgpt.common.errors import EXIT_DONE
from dsgpt.common.files import write_json_atomic
from dsgpt.common.json_files import JsonError, read_object
from dsgpt.common.problems import Problems, did_you_mean, is_number
from dsgpt.telemetry.console import duration
from dsgpt.telemetry.sources import made_from, note_sources, unchanged

EXIT_OLD = 1
"""A source changed while its record was remade."""
WITH_ENGINES = (DEMO, "inference")
"""Records that together have what the committed run says about engines."""
_MAX_BYTES = 256 << 20

Runner = Callable[[Sequence[str]], int]
"""Runs a command in the repository and returns its exit code."""


def check_lines(repository: Path, *, only: Sequence[str] = ()) -> Iterator[str]:
    """A line for each record: up to date, or why not.

    Raises:
        UserError: ``only`` names no record, or a ``SOURCES.json`` cannot be read.
    """
    for record in _selected(only):
        yield f"{record.name}: {_why_old(record, repository, REFERENCE) or 'made from the present sources'}"


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
        UserError: ``only`` names no record, or a ``SOURCES.json`` cannot be read.
    """
    run, records, started = run or _in(repository), _selected(only), time.perf_counter()
    old = [record for record in records if _has_to_be_made(record, repository)]
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
            if code := _remake(record, repository, run, peers=peers):
                print(f"{count}: failed with exit code {code}; the committed records stay as they were", flush=True)
                return code
            old.remove(record)
            left = f"; {_expected(old, repository)} for the others" if old else ""
            print(f"{count}: remade, {duration(time.perf_counter() - started)} since the start{left}", flush=True)
    return _publish(records, repository, run)


def _has_to_be_made(record: CommittedRecord, repository: Path) -> bool:
    return all(_why_old(record, repository, folder) for folder in (REFERENCE, READY))


def _expected(records: Sequence[CommittedRecord], repository: Path) -> str:
    """How long it takes to make them, by the committed ones: ``about 14 min 02 s``."""
    known = [seconds for record in records if (seconds := _seconds(record, repository / REFERENCE)) is not None]
    if not known:
        return "nothing says how long it takes"
    more = "" if len(known) == len(records) else f", and {len(records) - len(known)} that nothing says it of"
    return f"about {duration(sum(known))}{more}"


def _seconds(record: CommittedRecord, folder: Path) -> float | None:
    """What its making took; None if it does not say so, or cannot be read."""
    found = list[float]()
    for file in record.records:
        try:
            made = read_object(folder / file, max_bytes=_MAX_BYTES)
        except JsonError:
            return None
        summary = made.get("summary")  # of a run
        seconds = summary.get("total_wall_time_sec") if isinstance(summary, dict) else made.get("seconds")
        if not is_number(seconds):
            return None
        found.append(seconds)
    return sum(found)


def _publish(records: Sequence[CommittedRecord], repository: Path, run: Runner) -> int:
    """Replace the old committed records with the remade ones, then make the pages of all: charts are of several."""
    for record in records:
        if _why_old(record, repository, REFERENCE):
            if why := _why_old(record, repository, READY):
                print(f"{record.name}: not replaced, because {why}: run it again", flush=True)
                return EXIT_OLD
            _replace(record, repository / READY, repository / REFERENCE)
    if any(record.name in WITH_ENGINES for record in records):
        _add_engines(repository)
    for record in records:
        # Also for records that were not old: an interruption may have come before this.
        if code := run(show_words(record, repository)):
            print(f"{record.name}: its pages failed with exit code {code}", flush=True)
            return code
    print(f"all of {', '.join(record.name for record in records)} are made from the present sources", flush=True)
    return EXIT_DONE


def show_words(record: CommittedRecord, repository: Path) -> tuple[str, ...]:
    """The command that makes its pages; the charts are of the committed sweeps, too."""
    if record.name != DEMO:
        return record.show
    sweeps = sorted((repository / REFERENCE).glob(SWEEPS))
    words = [word for sweep in sweeps for word in ("--sweep", f"{REFERENCE}/{sweep.name}")]
    if (repository / REFERENCE / PLAN).is_file():
        words += ["--plan", f"{REFERENCE}/{PLAN}"]
    if (repository / REFERENCE / INFERENCE).is_file():
        words += ["--inference", f"{REFERENCE}/{INFERENCE}"]
    return (*record.show, *words)


def _replace(record: CommittedRecord, ready: Path, reference: Path) -> None:
    for file in record.files.values():
        (reference / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ready / file, reference / file)
    for file in record.records:
        if entry := made_from(ready / file):
            note_sources(reference, reference / file, git_commit=entry.git_commit, sources=entry.sources)


def _add_engines(repository: Path) -> None:
    """Add what engines took for many requests to the committed run, if that is the same training as the measured run.

    Of the same training, the losses of both runs are equal to the last bit.
    """
    folder = repository / REFERENCE
    committed, record = folder / TRAINED.name / RUN_FILES[0], folder / INFERENCE
    try:
        measured, run, many = (
            read_object(file, max_bytes=_MAX_BYTES) for file in (repository / TRAINED / RUN_FILES[0], committed, record)
        )
    except JsonError as error:
        print(f"{committed.parent.name}: gets no figures of engines: {error}", flush=True)
        return
    entry, block = made_from(committed), run.get("inference") or {}
    if entry is None or many["checkpoint"] != TRAINED.as_posix() or _losses(measured) != _losses(run):
        print(f"{committed.parent.name}: gets no figures of engines: they answered with another training", flush=True)
        return
    write_json_atomic(committed, run | {"inference": block | {KEY: by_concurrency(many)}})
    note_sources(folder, committed, git_commit=entry.git_commit, sources=entry.sources, complete=entry.complete)


def _losses(run: dict[str, Any]) -> list[Any]:
    summary = run.get("summary") or {}
    return [summary.get(name) for name in ("final_train_loss", "final_val_loss")]


def _selected(only: Sequence[str]) -> list[CommittedRecord]:
    problems = Problems()
    for name in only:
        if name not in RECORDS:
            problems.add(f"--only {name}: is not a record{did_you_mean(name, RECORDS)}; known are {', '.join(RECORDS)}")
    problems.raise_if_any()
    return [record for name, record in RECORDS.items() if not only or name in only]


def _why_old(record: CommittedRecord, repository: Path, folder: Path) -> str:
    """Why the record's files in ``folder`` were not made from the present sources; empty if they were."""
    files = (repository / folder / file for file in record.records)
    return next((why for file in files if (why := why_old(file, name=record.suite, repository=repository))), "")


def _in(repository: Path) -> Runner:
    """A runner that executes scripts with this Python in the repository."""

    def run(words: Sequence[str]) -> int:
        return subprocess.run([sys.executable, *words], cwd=repository, check=False).returncode

    return run


def _remake(record: CommittedRecord, repository: Path, run: Runner, *, peers: Sequence[str]) -> int:
    """Make the record again below ``READY``; return the exit code of the command."""
    from dsgpt.telemetry.environment import git_commit  # noqa: PLC0415 - torch takes seconds

    ready, work = repository / READY, repository / WORK
    shutil.rmtree(work / record.name, ignore_errors=True)  # earlier runs, which would be resumed
    if TRAINED.as_posix() in record.make and not (repository / TRAINED).exists() and (code := run(("src/demo.py",))):
        return code
    before, commit = source_hashes(repository, record.suite), git_commit()
    if code := run((*record.make, *(["--peer", *peers] if peers and record.name in WITH_PEERS else []))):
        return code
    sources = unchanged(before, source_hashes(repository, record.suite))
    for made, committed in record.files.items():
        (ready / committed).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(work / made, ready / committed)
    for file in record.records:
        note_sources(ready, ready / file, git_commit=commit, sources=sources)
    return EXIT_DONE

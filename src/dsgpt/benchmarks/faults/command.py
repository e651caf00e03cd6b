"""``python src/benchmark.py faults``: run the campaign, show its progress, keep its record."""

import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsgpt.benchmarks.faults.page import faults_page, summary_lines
from dsgpt.benchmarks.faults.plan import DROPOUT, RUNS, SAVE_EVERY, STEPS
from dsgpt.benchmarks.harness.record_page import one_line_if_none, read_record, write_page
from dsgpt.benchmarks.parity.command import EXIT_FAILED, work_folder
from dsgpt.common.files import write_json_atomic
from dsgpt.telemetry.console import Console, Progress

if TYPE_CHECKING:
    from dsgpt.benchmarks.faults.outcome import Outcome

SCHEMA_VERSION = "1.0"


@dataclass(frozen=True, kw_only=True)
class FaultOptions:
    """What the command line asked for."""

    kills: int
    seed: int
    """Of the instants and victims."""
    core: bool
    """Only what ``make test`` runs."""
    output: Path
    """The record to write."""
    page: Path
    """The page to write."""
    keep: Path | None
    """Where to leave every run; None to remove them."""


def make_page(record_file: Path, page: Path) -> None:
    """Write ``page`` from a record.

    Raises:
        UserError: there is no such record.
    """
    record = read_record(record_file, of="the campaign")
    with one_line_if_none(record_file, of="the campaign"):
        _write_page(page, record, record_file)


def _write_page(page: Path, record: dict[str, Any], record_file: Path) -> None:
    write_page(page, faults_page(record, source=record_file.as_posix()))


def run_faults(options: FaultOptions, *, repository: Path) -> int:
    """Run the campaign; 0 where every run recovered.

    Raises:
        UserError: the text could not be prepared.
    """
    from dsgpt.benchmarks.faults.runs import Runs  # noqa: PLC0415 - torch takes seconds
    from dsgpt.benchmarks.faults.suite import all_faults, core_faults, try_faults  # noqa: PLC0415

    console = Console(speaks=True)
    faults = core_faults() if options.core else all_faults(kills=options.kills, seed=options.seed)
    started, outcomes = time.perf_counter(), []
    with ExitStack() as held:
        runs = Runs(work_folder(options.keep, held, prefix="dsgpt-faults-"), repository=repository)
        console.say(f"{len(faults)} faults; the first of each strategy trains it undisturbed too")
        progress = console.progress(total=len(faults), what="faults", unit="fault")
        held.callback(progress.close)
        for outcome in try_faults(runs, faults):
            outcomes.append(outcome)
            progress.advance()
            console.say(_line(outcome, done=len(outcomes), total=len(faults), progress=progress))
        record = _record(outcomes, seconds=time.perf_counter() - started, seed=options.seed)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(options.output, record)
    _write_page(options.page, record, options.output)
    for line in ["", *summary_lines(record), f"record {options.output}, page {options.page}"]:
        console.say(line)
    return EXIT_FAILED if any(outcome.status == "failed" for outcome in outcomes) else 0


def _line(outcome: "Outcome", *, done: int, total: int, progress: Progress) -> str:
    said = {"passed": "recovered", "failed": "FAILED", "not run": "not run"}[outcome.status]
    left = f"; {progress.time_left()} left" if done < total else ""
    reasons = (outcome.wrong or outcome.not_run).splitlines()
    because = f": {reasons[0]}" if reasons else ""
    return f"[{done:>2}/{total}] {outcome.name}: {said} ({outcome.seconds:.1f} s{left}){because}"


def _record(outcomes: list["Outcome"], *, seconds: float, seed: int) -> dict[str, Any]:
    from dsgpt.benchmarks.harness.work import GLOBAL_BATCH, SEQUENCE, shape  # noqa: PLC0415
    from dsgpt.benchmarks.resume.matrix import by  # noqa: PLC0415
    from dsgpt.runtime.device import describe_hardware  # noqa: PLC0415
    from dsgpt.telemetry.environment import git_commit, software_versions  # noqa: PLC0415
    from dsgpt.telemetry.record import finite  # noqa: PLC0415

    work = {
        "steps": STEPS,
        "save_every": SAVE_EVERY,
        "dropout": DROPOUT,
        "global_batch_size": GLOBAL_BATCH,
        "seq_len": SEQUENCE,
        "model": shape("cpu"),
        "runs": {name: {"executed_by": by(cell), "accumulation": cell.accumulation} for name, cell in RUNS.items()},
    }
    return finite(
        {
            "schema_version": SCHEMA_VERSION,
            "timestamp_utc": datetime.now(UTC).isoformat(timespec="seconds"),
            "git_commit": git_commit(),
            "env": software_versions(),
            "hardware": describe_hardware("cpu"),
            "work": work,
            "seed": seed,
            "seconds": round(seconds, 1),
            "faults": [_outcome(outcome) for outcome in outcomes],
        }
    )


def _outcome(outcome: "Outcome") -> dict[str, Any]:
    return asdict(outcome) | {"status": outcome.status, "seconds": round(outcome.seconds, 2)}

"""``python src/benchmark.py resume``: run the suite, show its progress, keep its record."""

import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsgpt.benchmarks.harness.record_page import one_line_if_none, read_record, write_page
from dsgpt.benchmarks.parity.command import EXIT_FAILED, work_folder
from dsgpt.benchmarks.resume.matrix import Pair, by, core_pairs, core_rewritten, rewritten, seeded_pairs
from dsgpt.benchmarks.resume.page import resume_page, summary_lines
from dsgpt.common.files import write_json_atomic
from dsgpt.telemetry.console import Console, Progress

if TYPE_CHECKING:
    from dsgpt.benchmarks.resume.suite import AnyToAny, Result

SCHEMA_VERSION = "1.1"


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """What the command line asked for."""

    pairs: int
    seed: int
    """Of the choice of pairs."""
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
    record = read_record(record_file, of="the suite")
    with one_line_if_none(record_file, of="the suite"):
        _write_page(page, record, record_file)


def _write_page(page: Path, record: dict[str, Any], record_file: Path) -> None:
    write_page(page, resume_page(record, source=record_file.as_posix()))


def run_resume(options: ResumeOptions, *, repository: Path) -> int:
    """Run the suite; 0 where everything is as it should be.

    Raises:
        UserError: the text could not be prepared.
    """
    from dsgpt.benchmarks.resume.suite import AnyToAny  # noqa: PLC0415 - torch takes seconds

    console = Console(speaks=True)
    cells = core_rewritten() if options.core else rewritten()
    pairs = core_pairs() if options.core else seeded_pairs(options.pairs, seed=options.seed)
    started, results = time.perf_counter(), []
    with ExitStack() as held:
        suite = AnyToAny(work_folder(options.keep, held, prefix="dsgpt-resume-"), repository=repository)
        total = len(cells) + len(pairs)
        console.say(f"{len(pairs)} pairs and {len(cells)} rewritings; the text and the sources come first")
        progress = console.progress(total=total, what="resume", unit="result")
        held.callback(progress.close)
        for result in suite.run(cells, pairs, started=lambda launch: console.say(f"starting {_ranks(launch.ranks)}")):
            results.append(result)
            progress.advance()
            console.say(_line(result, done=len(results), total=total, progress=progress))
        record = _record(suite, results, seconds=time.perf_counter() - started, seed=options.seed)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(options.output, record)
    _write_page(options.page, record, options.output)
    for line in ["", *summary_lines(record), "", f"record {options.output}, page {options.page}"]:
        console.say(line)
    return EXIT_FAILED if any(result.status in {"failed", "error"} for result in results) else 0


def _ranks(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"


def _line(result: "Result", *, done: int, total: int, progress: Progress) -> str:
    said = {"passed": "passed", "failed": "FAILED", "refused": "refused", "error": "ERROR"}[result.status]
    off = f", loss off by {result.measured['loss']:.1e}" if "loss" in result.measured else ""
    left = f"; {progress.time_left()} left" if done < total else ""
    because = f": {result.message.splitlines()[0]}" if result.message else ""
    return f"[{done:>3}/{total}] {result.name}: {said}{off} ({result.seconds:.1f} s{left}){because}"


def _record(suite: "AnyToAny", results: list["Result"], *, seconds: float, seed: int) -> dict[str, Any]:
    from dsgpt.benchmarks.harness.work import GLOBAL_BATCH, SEQUENCE, STEPS, VALIDATION_WINDOWS, shape  # noqa: PLC0415
    from dsgpt.benchmarks.resume.suite import BOUND, REWRITTEN_BOUNDS, SAVED, VALIDATED  # noqa: PLC0415
    from dsgpt.runtime.device import describe_hardware  # noqa: PLC0415
    from dsgpt.telemetry.environment import git_commit, software_versions  # noqa: PLC0415
    from dsgpt.telemetry.record import finite  # noqa: PLC0415

    work = {
        "steps": STEPS,
        "saved": SAVED,
        "global_batch_size": GLOBAL_BATCH,
        "seq_len": SEQUENCE,
        "validation_windows": VALIDATION_WINDOWS,
        "validated_every": VALIDATED,
        "model": shape("cpu"),
    }
    return finite(
        {
            "schema_version": SCHEMA_VERSION,
            "timestamp_utc": datetime.now(UTC).isoformat(timespec="seconds"),
            "git_commit": git_commit(),
            "env": software_versions(),
            "hardware": describe_hardware("cpu"),
            "work": work,
            "bound": BOUND,
            "rewritten_bounds": REWRITTEN_BOUNDS,
            "seed": seed,
            "seconds": round(seconds, 1),
            "reference": suite.reference(),
            "launches": [asdict(launch) for launch in suite.launches],
            "pairs": [_pair(result) for result in results if isinstance(result.subject, Pair)],
            "rewritten": [_rewriting(result) for result in results if not isinstance(result.subject, Pair)],
        }
    )


def _pair(result: "Result") -> dict[str, Any]:
    pair = result.subject
    return {
        "source": by(pair.source),
        "source_accumulation": pair.source.accumulation,
        "target": by(pair.target),
        "target_accumulation": pair.target.accumulation,
        **_outcome(result),
    }


def _rewriting(result: "Result") -> dict[str, Any]:
    cell = result.subject
    return {"strategy": cell.strategy, "ranks": cell.ranks, "precision": cell.precision, **_outcome(result)}


def _outcome(result: "Result") -> dict[str, Any]:
    return {
        "name": result.name,
        "status": result.status,
        "seconds": round(result.seconds, 2),
        "measured": result.measured,
        "message": result.message or None,
    }

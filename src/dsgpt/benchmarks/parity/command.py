"""``python src/benchmark.py parity``: run the suite, show its progress, keep its record."""

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.harness.record_page import one_line_if_none, read_record, write_page
from dsgpt.benchmarks.parity.matrix import Cell, core, select, whole_matrix
from dsgpt.benchmarks.parity.page import failure_words, parity_page, summary_lines
from dsgpt.common.errors import UserError
from dsgpt.common.problems import Problems
from dsgpt.telemetry.console import Console, Progress

EXIT_FAILED = 1
"""A training was not the reference's, or a planted bug passed."""


@dataclass(frozen=True, kw_only=True)
class ParityOptions:
    """What the command line asked for."""

    ranks: Sequence[int]
    """Numbers of processes; empty for all."""
    only: Sequence[str]
    """Strategies; empty for all."""
    core: bool
    """Only what ``make test`` runs."""
    output: Path
    """The record to write."""
    page: Path
    """The page to write."""
    keep: Path | None
    """Where to leave recipes, logs and measurements of every cell; None to remove them."""
    device: str
    """``cpu`` or ``cuda``."""


def make_page(record_file: Path, page: Path) -> None:
    """Write ``page`` from a record.

    Raises:
        UserError: there is no such record.
    """
    record = read_record(record_file, of="the suite")
    with one_line_if_none(record_file, of="the suite"):
        _write_page(page, record, record_file)


def _write_page(page: Path, record: dict[str, Any], record_file: Path) -> None:
    write_page(page, parity_page(record, source=record_file.as_posix()))


def run_parity(options: ParityOptions, *, repository: Path) -> int:
    """Run the suite; 0 where everything is as it should be.

    Raises:
        UserError: nothing to run, or the text could not be prepared.
    """
    from dsgpt.benchmarks.parity.record import suite_record, write_record  # noqa: PLC0415 - torch takes seconds
    from dsgpt.benchmarks.parity.suite import Suite  # noqa: PLC0415

    console = Console(speaks=True)
    cells = _choose(options, console)
    started, results = time.perf_counter(), []
    with ExitStack() as held:
        folder = work_folder(options.keep, held, prefix="dsgpt-parity-")
        suite = Suite(folder, repository=repository, device=options.device)
        console.say(f"{len(cells)} trainings; the text and the references come first")
        progress = console.progress(total=len(cells), what="parity", unit="training")
        held.callback(progress.close)
        for result in suite.run(cells, started=lambda launch: console.say(_announce(launch))):
            results.append(result)
            progress.advance()
            console.say(_line(result, done=len(results), total=len(cells), progress=progress))
        record = suite_record(suite, results, seconds=time.perf_counter() - started, device=options.device)
    write_record(options.output, record)
    _write_page(options.page, record, options.output)
    for line in ["", *summary_lines(record), "", f"record {options.output}, page {options.page}"]:
        console.say(line)
    bad = [result.cell.name for result in results if not result.as_expected]
    for name in bad:
        console.say(f"not as it should be: {name}")
    return EXIT_FAILED if bad else 0


def _choose(options: ParityOptions, console: Console) -> list[Cell]:
    from dsgpt.benchmarks.parity.planted import planted_cells  # noqa: PLC0415
    from dsgpt.runtime.device import cuda_devices  # noqa: PLC0415

    problems = Problems()
    everything = [*(core() if options.core else whole_matrix()), *planted_cells(options.device)]
    cells = select(everything, ranks=options.ranks, only=options.only, problems=problems)
    if options.device == "cuda" and (gpus := cuda_devices()) < max((cell.ranks for cell in cells), default=0):
        console.say(f"this machine has {gpus} GPUs: what takes more ranks is left out")
        cells = [cell for cell in cells if cell.ranks <= gpus]
        if not cells:
            problems.add(f"--device cuda: no training is left for {gpus} GPUs; take --device cpu")
    problems.raise_if_any()
    return cells


def work_folder(keep: Path | None, held: ExitStack, *, prefix: str) -> Path:
    """The new folder ``keep``; without, one with that prefix that ``held`` removes.

    Raises:
        UserError: ``keep`` exists.
    """
    if keep is None:
        return Path(held.enter_context(tempfile.TemporaryDirectory(prefix=prefix)))
    try:
        keep.mkdir(parents=True)
    except FileExistsError as error:
        raise UserError(f"--keep {keep}: exists already: give a new folder") from error
    return keep.resolve()


def _announce(launch: Any) -> str:
    ranks = f"{launch.ranks} rank{'s' * (launch.ranks > 1)}"
    return f"{launch.launcher} starts {ranks} for {launch.cells} training{'s' * (launch.cells > 1)}"


def _line(result: Any, *, done: int, total: int, progress: Progress) -> str:
    said = {"passed": "passed", "failed": "FAILED", "refused": "refused", "error": "ERROR"}[result.status]
    if result.status == "refused" and not result.refusal_expected:
        said = "REFUSED, though it should train"
    if result.refusal_expected and result.status != "refused":
        said = f"NOT REFUSED ({result.status})"
    if result.cell.bug:
        said = "caught" if result.status == "failed" else f"NOT CAUGHT ({result.status})"
    reasons = [failure_words(failure) for failure in result.failures] or result.message.splitlines()
    because = f": {reasons[0]}" if reasons else ""
    left = f"; {progress.time_left()} left" if done < total else ""
    return f"[{done:>3}/{total}] {result.cell.name}: {said} ({result.seconds:.1f} s{left}){because}"

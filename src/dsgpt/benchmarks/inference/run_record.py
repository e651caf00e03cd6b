"""Adds what was measured to the record of the run that trained the model."""

from pathlib import Path
from typing import Any

from dsgpt.benchmarks.harness.engine_figures import KEY, by_concurrency
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.common.json_files import JsonError, read_object
from dsgpt.telemetry.record import RECORD_FILE
from dsgpt.training.run_lock import RunLock


def run_record_of(checkpoint: Path) -> Path | None:
    """The record of the run that ``checkpoint``, a run folder or a checkpoint in one, is of; None if there is none."""
    records = (folder / RECORD_FILE for folder in (checkpoint, checkpoint.absolute().parent))
    return next((record for record in records if record.is_file()), None)


def write_by_concurrency(file: Path, record: dict[str, Any]) -> None:
    """Put the engines' figures into the ``inference`` block of the run's record ``file``; its other keys stay.

    Raises:
        UserError: another process trains in the folder, or the file cannot be read.
    """
    with RunLock(file.parent) as lock:
        lock.take()
        try:
            run = read_object(file)
        except JsonError as error:
            raise UserError(f"{file}: cannot be read as the record of a run: {error}") from error
        block = (run.get("inference") or {}) | {KEY: by_concurrency(record)}
        write_json_atomic(file, run | {"inference": block})

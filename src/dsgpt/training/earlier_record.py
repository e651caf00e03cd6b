"""What an earlier process left in a run folder besides checkpoints: its record, its step lines, the file ``latest``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsgpt.checkpointing import store
from dsgpt.common.errors import UserError
from dsgpt.common.json_files import Count, Finite, JsonError, Seconds, clipped_text, read_as
from dsgpt.telemetry.record import RECORD_FILE, STEPS_FILE

MAX_RECORD_BYTES = 64 << 20
"""The record has an entry for every save, so the record of a very long run may be large."""


@dataclass(frozen=True, kw_only=True)
class Save:
    """An entry of the record's ``saves``."""

    step: Count
    mode: str
    save_stall_sec: Seconds
    save_total_sec: Seconds
    bytes: Count


@dataclass(frozen=True, kw_only=True)
class EarlierSummary:
    """The keys of the record's ``summary`` that a resume needs."""

    failed_saves: Count | None = None
    optimizer_steps: Count | None = None
    total_wall_time_sec: Seconds | None = None


@dataclass(frozen=True, kw_only=True)
class EarlierPlan:
    """The key of the record's ``plan`` that a resume needs."""

    spent_usd: Finite | None = None


@dataclass(frozen=True, kw_only=True)
class EarlierRecord:
    """The keys of ``training_metrics.json`` that a resume needs; all others are computed again."""

    schema_version: Any = None
    saves: list[Save] | None = None
    """None in records of older versions, which lack the key."""
    summary: EarlierSummary = field(default_factory=EarlierSummary)
    plan: EarlierPlan | None = None


def read_earlier_record(run_dir: Path) -> EarlierRecord | None:
    """The record in the folder; None where there is none.

    Raises:
        JsonError: the file is not a record.
    """
    path = run_dir / RECORD_FILE
    if not path.exists():
        return None
    return read_as(path, EarlierRecord, unknown_keys=True, max_bytes=MAX_RECORD_BYTES)


def why_nothing_was_saved(run_dir: Path) -> str:
    """The message for a folder that may be started fresh, because its run was killed before the first save.

    Raises:
        UserError: there were checkpoints, or the record cannot show that there were none, because it is damaged, old,
            or missing next to step lines. The checkpoints may have been moved, or their disk is not mounted; a fresh
            start would remove the rest of the run.
    """
    for name in (store.LATEST, store.BEST):
        if named := named_by(run_dir / name):
            raise UserError(_lost(run_dir, f"{name} names {named}, which does not exist"))
    try:
        record = read_earlier_record(run_dir)
    except JsonError as error:
        raise UserError(_lost(run_dir, f"its {RECORD_FILE} is damaged ({error})")) from error
    if record is None:
        lines = run_dir / STEPS_FILE
        if lines.is_file() and lines.stat().st_size:
            raise UserError(_lost(run_dir, f"it has {STEPS_FILE} but no {RECORD_FILE} that lists what was saved"))
    elif record.saves is None:
        raise UserError(_lost(run_dir, f"its {RECORD_FILE} does not list what was saved"))
    elif record.saves:
        steps = ", ".join(store.folder_name(save.step) for save in record.saves[-3:])
        raise UserError(_lost(run_dir, f"its {RECORD_FILE} says that {steps} {_was(record.saves)} saved"))
    return f"{run_dir} holds no checkpoint yet"


def _was(saves: list[Save]) -> str:
    return "was" if len(saves) == 1 else "were"


def missing_newest(run_dir: Path) -> str:
    """The checkpoint that ``latest`` names if it does not exist; else empty."""
    name = named_by(run_dir / store.LATEST)
    return "" if store.STEP_FOLDER.fullmatch(name) and (run_dir / name).is_dir() else name


def named_by(path: Path) -> str:
    """The first line of the file ``latest`` or ``best``; empty where there is no such file."""
    try:
        with path.open("rb") as file:
            return clipped_text(file.read(200).decode("utf-8", errors="replace")) or "(nothing)"
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"(unreadable: {error.strerror})"


def _lost(run_dir: Path, why: str) -> str:
    return (
        f"--resume: {run_dir} holds a run but none of its checkpoints: {why}: bring them back (were they moved, or is "
        "their disk not mounted?), or start again with --overwrite"
    )

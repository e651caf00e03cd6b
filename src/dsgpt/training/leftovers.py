"""What an earlier process left in a run folder besides checkpoints: its record, its lines, what ``latest`` names."""

from dataclasses import dataclass, field
from pathlib import Path

from dsgpt.checkpointing import store
from dsgpt.errors import UserError
from dsgpt.json_files import Count, JsonError, Seconds, read_as
from dsgpt.telemetry.record import RECORD_FILE, STEPS_FILE

MAX_RECORD_BYTES = 64 << 20
"""A line of it for every save: of very long runs it may be large."""


@dataclass(frozen=True, kw_only=True)
class Save:
    """What one checkpoint cost, as the record's ``saves`` have it."""

    step: Count
    mode: str
    save_stall_sec: Seconds
    save_total_sec: Seconds
    bytes: Count


@dataclass(frozen=True, kw_only=True)
class EarlierSummary:
    """What a resume needs of the record's ``summary``."""

    failed_saves: Count | None = None
    optimizer_steps: Count | None = None


@dataclass(frozen=True, kw_only=True)
class EarlierRecord:
    """What a resume needs of ``training_metrics.json``; everything else is computed again."""

    saves: list[Save] | None = None
    """None in records of before they were kept."""
    summary: EarlierSummary = field(default_factory=EarlierSummary)


def read_earlier_record(run_dir: Path) -> EarlierRecord | None:
    """The record that is there; None where there is none.

    Raises:
        JsonError: it is no record.
    """
    path = run_dir / RECORD_FILE
    if not path.exists():
        return None
    return read_as(path, EarlierRecord, unknown_keys=True, max_bytes=MAX_RECORD_BYTES)


def why_nothing_was_saved(run_dir: Path) -> str:
    """Why a folder without checkpoints may be started in afresh, in words.

    A run that was killed before its first checkpoint, or while ``--overwrite`` removed it, has nothing to go on with.

    Raises:
        UserError: checkpoints were there, or nothing says that there were none: they may have been moved, or their
            disk is not mounted, and a fresh start would remove the rest of the run.
    """
    was_overwritten = any(run_dir.glob(f".partial-step-*{store.REMOVED}"))
    for name in (store.LATEST, store.BEST):
        _require_no_name(run_dir / name, was_overwritten=was_overwritten)
    try:
        record = read_earlier_record(run_dir)
    except JsonError as error:
        raise UserError(_lost(run_dir, f"its {RECORD_FILE} is damaged ({error})")) from error
    lines = run_dir / STEPS_FILE
    if record is None:
        if not was_overwritten and lines.is_file() and lines.stat().st_size:
            raise UserError(_lost(run_dir, f"it has {STEPS_FILE}, and no {RECORD_FILE} says whether any was saved"))
        return f"{run_dir} holds no checkpoint yet"
    if not was_overwritten and record.saves is None:
        raise UserError(_lost(run_dir, f"its {RECORD_FILE} does not say whether any was saved"))
    if not was_overwritten and record.saves:
        steps = ", ".join(store.folder_name(save.step) for save in record.saves[-3:])
        raise UserError(_lost(run_dir, f"its {RECORD_FILE} says that {steps} {_was(record.saves)} saved"))
    return f"{run_dir} holds no checkpoint yet"


def _was(saves: list[Save]) -> str:
    return "was" if len(saves) == 1 else "were"


def _require_no_name(path: Path, *, was_overwritten: bool) -> None:
    """Check that ``latest`` or ``best`` names nothing that is gone, unless ``--overwrite`` removed it."""
    name = named_by(path)
    if not name or (path.parent / name).exists():
        return
    if was_overwritten and (path.parent / f".partial-{name}{store.REMOVED}").exists():
        return
    raise UserError(_lost(path.parent, f"{path.name} names {name}, which is not there"))


def named_by(path: Path) -> str:
    """The checkpoint that the file ``latest`` or ``best`` names; empty where there is no such file."""
    try:
        with path.open("rb") as file:
            return file.read(200).decode("utf-8", errors="replace").strip().replace("\0", "?")
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"what cannot be read ({error.strerror})"


def _lost(run_dir: Path, why: str) -> str:
    return (
        f"--resume: {run_dir} holds a run but none of its checkpoints: {why}: bring them back (were they moved, or is "
        "their disk not mounted?), or start anew with --overwrite"
    )

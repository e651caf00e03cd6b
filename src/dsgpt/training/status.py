"""What became of a run: its record's word, and whether a process still trains. Imports no torch.

The record of a run that was killed says ``running`` forever. So a record is believed only while something lives: the
process that holds the run's lock, or, for a run on another machine, files that still change.
"""

import os
import socket
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from dsgpt.common.locks import holder_of
from dsgpt.telemetry.record import RECORD_FILE, STEPS_FILE
from dsgpt.training.run_lock import LOCK_FILE

SILENT_SEC = 600
"""Seconds after which a run on another machine counts as abandoned if none of its files has changed."""


class Status(StrEnum):
    """What became of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """Somebody stopped it."""
    FAILED = "failed"
    """An error ended it."""
    ABANDONED = "abandoned"
    """Its record says that it is running, and no process trains: it was killed, or its machine went down."""
    UNKNOWN = "unknown"
    """The record says nothing about it: those of the older generation."""


_RECORDED = {"completed": Status.FINISHED, "interrupted": Status.INTERRUPTED, "failed": Status.FAILED}


@dataclass(frozen=True)
class Signs:
    """Signs of life in a run folder. Look for them before the record is read: a run that ends in between has ended."""

    process: int | None
    """The process on this machine that holds the lock."""
    locks_known: bool
    """Whether this machine lists its locks."""
    silent_sec: float | None
    """Since a file of the run last changed; None if it has none."""


def signs_of_life(run_dir: Path) -> Signs:
    """The signs of life in ``run_dir`` now. The lock itself is not touched."""
    process, known = None, True
    try:
        process = holder_of(run_dir / LOCK_FILE)
    except FileNotFoundError:
        known = Path("/proc/locks").exists()
    except OSError:
        known = False
    changed = [_changed(run_dir / name) for name in (RECORD_FILE, STEPS_FILE, LOCK_FILE)]
    return Signs(process, known, max(0.0, time.time() - max(changed)) if any(changed) else None)


def _changed(path: Path) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0


def status_of(recorded: str | None, *, host: str | None, signs: Signs) -> tuple[Status, str]:
    """What became of a run, and why this is believed, in one line.

    Args:
        recorded: the ``status`` of its record; ``running`` for a run that has no record yet.
        host: of its record; None if it has none.
        signs: from before the record was read.
    """
    if recorded in _RECORDED:
        return _RECORDED[recorded], f"its record says {recorded}"
    if recorded != "running":
        return Status.UNKNOWN, "its record does not say what became of it"
    if signs.process is not None:
        return Status.RUNNING, f"process {signs.process} holds its lock"
    if signs.locks_known and host in {None, socket.gethostname()}:
        return Status.ABANDONED, "no process holds its lock: it was killed, or the machine went down"
    where = f"on {host}" if host else "on a machine that it does not name"
    if signs.silent_sec is not None and signs.silent_sec < SILENT_SEC:
        return Status.RUNNING, f"{where}; it wrote {signs.silent_sec:.0f} s ago"
    return Status.ABANDONED, f"{where}; it has written nothing for {SILENT_SEC / 60:.0f} minutes or more"

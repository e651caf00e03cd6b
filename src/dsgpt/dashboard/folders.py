"""What lies in the folder of runs, and the only way from a name to a path. Imports no Streamlit."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from dsgpt.common.errors import UserError
from dsgpt.common.files import is_regular_file, is_utf8, link_between, printable
from dsgpt.dashboard.command import parse
from dsgpt.reports.sweeps import SWEEP_FILE
from dsgpt.telemetry.record import RECORD_FILE, STEPS_FILE
from dsgpt.training.run_lock import LOCK_FILE

DEEPEST = 6
"""Folders below the folder of runs; deeper ones are not searched."""
_OF_RUNS = (RECORD_FILE, STEPS_FILE, LOCK_FILE)
"""A folder with one of them holds a run. A run that has just started has only its lock."""
_RECORDS = {"inference.json": "concurrency"}


@dataclass(frozen=True)
class Contents:
    """Names below the folder of runs, with ``/``, sorted. Links are not followed."""

    runs: tuple[str, ...] = ()
    """Folders."""
    sweeps: tuple[str, ...] = ()
    """Records of sweeps: files."""
    concurrency: tuple[str, ...] = ()
    """Records of many requests at once: files."""
    unnamed: tuple[str, ...] = ()
    """Runs and records that a browser cannot name, because their path is not UTF-8: as they are printed."""


@dataclass
class _Found:
    runs: list[str] = field(default_factory=list)
    sweeps: list[str] = field(default_factory=list)
    concurrency: list[str] = field(default_factory=list)


def is_reference(name: str) -> bool:
    """Whether a run is one that the repository brings, measured on another machine."""
    return name.startswith("reference/")


def current_folder() -> Path:
    """The folder of runs that the command line names.

    Raises:
        UserError: the command line has mistakes.
    """
    folder: Path = parse().runs
    return folder


def contents(folder: Path) -> Contents:
    """What lies in ``folder``; nothing if it does not exist."""
    found = _Found()
    for place, files in _folders(folder):
        name = place.relative_to(folder).as_posix()
        if place != folder and any(file in files for file in _OF_RUNS):
            found.runs.append(name)
        for file in sorted(files):
            if file == SWEEP_FILE or (file.startswith("sweep-") and file.endswith(".json")):
                found.sweeps.append((place / file).relative_to(folder).as_posix())
            elif file in _RECORDS:
                found.concurrency.append((place / file).relative_to(folder).as_posix())
    kinds = (found.runs, found.sweeps, found.concurrency)
    unnamed = sorted(printable(name) for names in kinds for name in names if not is_utf8(name))
    runs, sweeps, concurrency = (tuple(sorted(filter(is_utf8, names))) for names in kinds)
    return Contents(runs, sweeps, concurrency, tuple(unnamed))


def _folders(folder: Path) -> Iterator[tuple[Path, set[str]]]:
    """Each folder and the names in it. Checkpoints, hidden folders and links are left out."""
    for place, inside, files in os.walk(folder):
        here = Path(place)
        depth = len(here.relative_to(folder).parts)
        runs_here = depth > 0 and any(file in files for file in _OF_RUNS)
        inside[:] = [] if runs_here or depth >= DEEPEST else [name for name in inside if not name.startswith(".")]
        yield here, set(files)


def inside(folder: Path, name: str) -> Path:
    """The path of ``name``, which ``contents`` returned, or which an address of a page holds.

    Raises:
        UserError: it leads out of ``folder``, there is no such file or folder, or a link is on the way.
    """
    relative = PurePosixPath(name)
    if not name or "\0" in name or relative.is_absolute() or ".." in relative.parts:
        raise UserError(f"{name!r} is not in the folder of runs")
    path = folder / relative
    if (link := link_between(folder, path)) is not None:
        raise UserError(f"{link} is a link, and links in the folder of runs are not followed")
    if not path.exists():
        raise UserError(f"{name}: there is no such run or record any more")
    return path


def own_file(folder: Path, name: str) -> Path | None:
    """The file ``name`` of a run's ``folder``; None if it is missing.

    Raises:
        UserError: it is a link, or no regular file.
    """
    path = folder / name
    if not os.path.lexists(path):
        return None
    if not is_regular_file(path):
        raise UserError(f"{path} is a link or no regular file, and is not read")
    return path

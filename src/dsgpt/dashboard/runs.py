"""The folder of runs: what lies in it, what is kept of it in memory, and what is refused."""

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Generic, TypeVar

from dsgpt.common.errors import UserError
from dsgpt.common.files import is_regular_file, is_utf8, link_between, printable
from dsgpt.common.text import REPOSITORY
from dsgpt.dashboard.command import parse
from dsgpt.dashboard.formats import plain
from dsgpt.record.schema import RECORD_FILE, STEPS_FILE
from dsgpt.record.sweeps import SWEEP_FILE
from dsgpt.training.status import LOCK_FILE

# Refusals of the package, as a page shows them.


def refusal(error: UserError) -> str:
    """Every mistake, a paragraph each, in Markdown; shipped files are named as they are in the repository."""
    return "\n\n".join(plain(line.replace(f"{REPOSITORY}/", "")) for line in error.problems)


T = TypeVar("T")


# Large things in memory, shared by all sessions: a few of them, the ones used last.


@dataclass
class _Place(Generic[T]):
    lock: Lock = field(default_factory=Lock)
    found: T | None = None


class Kept(Generic[T]):
    """What ``get`` has made, by key. Two sessions that ask for one key at once make it once.

    Args:
        most: how many are kept. One that a session still uses stays in memory until that session lets go of it.
    """

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, Lock()
        self._places: OrderedDict[Hashable, _Place[T]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What belongs to ``key``, made by ``make`` if it is not kept; what ``make`` raises is not kept."""
        with self._lock:
            place = self._places.setdefault(key, _Place())
        with place.lock:
            if place.found is None:
                try:
                    place.found = make()
                except BaseException:
                    self._forget(key)
                    raise
            found = place.found
        with self._lock:
            self._places[key] = place
            self._places.move_to_end(key)
            while len(self._places) > self._most:
                self._places.popitem(last=False)
        return found

    def _forget(self, key: Hashable) -> None:
        with self._lock:
            self._places.pop(key, None)

    def __len__(self) -> int:
        return len(self._places)


# What lies in the folder of runs, and the only way from a name to a path.

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

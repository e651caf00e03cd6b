"""Records and steps, read once for all sessions: each result is kept by the identity of the file that it came from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamlit as st

from dsgpt.common.errors import UserError
from dsgpt.dashboard.folders import Contents, contents, inside, own_file
from dsgpt.dashboard.steps import StepReader, Steps, last_entries
from dsgpt.dashboard.summaries import Recorded, Summary, read_recorded, summarise
from dsgpt.reports.runs import Run
from dsgpt.telemetry.record import RECORD_FILE, STEPS_FILE
from dsgpt.training.status import Status, signs_of_life, status_of


@dataclass(frozen=True)
class Identity:
    """A version of a file: another one has another identity."""

    path: str
    device: int
    inode: int
    modified_ns: int
    size: int


def identity(path: Path) -> Identity:
    """The identity of a file.

    Raises:
        OSError: there is none.
    """
    found = path.stat()
    return Identity(str(path), found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


@st.cache_resource(ttl=1.0, max_entries=8, show_spinner=False)
def contents_of(folder: Path) -> Contents:
    """What lies in ``folder``, at most a second old."""
    return contents(folder)


@st.cache_resource(max_entries=512, show_spinner=False)
def _recorded(version: Identity, name: str) -> Recorded:
    return read_recorded(Path(version.path).parent, name=name)


@st.cache_resource(max_entries=512, show_spinner=False)
def _last_entries(version: Identity) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    return last_entries(Path(version.path))


@st.cache_resource(max_entries=96, show_spinner=False)
def _step_reader(path: Path, device: int, inode: int) -> StepReader:  # noqa: ARG001 - another file, another reader
    return StepReader(path)


def recorded_of(folder: Path, name: str) -> Recorded:
    """What the record of the run ``name`` below ``folder`` says now."""
    try:
        run_dir = inside(folder, name)
        path = own_file(run_dir, RECORD_FILE)
        return Recorded() if path is None else _recorded(identity(path), name)
    except (UserError, OSError) as error:
        return Recorded(problem=str(error), status=None)


def steps_of(folder: Path, name: str) -> Steps | None:
    """The steps of the run ``name`` up to now; None before the first.

    Raises:
        UserError: they cannot be read.
    """
    path = own_file(inside(folder, name), STEPS_FILE)
    if path is None:
        return None
    try:
        version = identity(path)
        return _step_reader(path, version.device, version.inode).read()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def summary_of(folder: Path, name: str) -> Summary:
    """The run ``name`` as it is now. Only the end of its steps is read, and only if it has not finished."""
    signs = signs_of_life(folder / name)
    recorded = recorded_of(folder, name)
    last: tuple[dict[str, Any] | None, dict[str, Any] | None] = (None, None)
    problem = ""
    if status_of(recorded.status, host=recorded.host, signs=signs)[0] != Status.FINISHED:
        try:
            path = own_file(inside(folder, name), STEPS_FILE)
            last = last if path is None else _last_entries(identity(path))
        except (UserError, OSError) as error:
            problem = str(error)
    return summarise(name, recorded=recorded, signs=signs, last=last, problem=problem)


def summaries_of(folder: Path) -> list[Summary]:
    """Every run below ``folder``."""
    return [summary_of(folder, name) for name in contents_of(folder).runs]


def runs_with_records(summaries: list[Summary]) -> list[Run]:
    """Those whose record can be read, without the losses of steps."""
    return [each.recorded.run for each in summaries if each.recorded.run is not None]

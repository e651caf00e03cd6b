"""Reads a folder of runs for the pages: its contents, each run in a few figures, and the steps of a run.

Everything is read once for all sessions; of what grows, only what was appended.
"""

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import streamlit as st
from numpy.typing import NDArray
from pyarrow import compute as pc
from pyarrow import json as arrow_json

from dsgpt.common.errors import UserError, is_number
from dsgpt.common.files import is_regular_file, is_utf8, link_between, printable
from dsgpt.common.text import dollars, duration
from dsgpt.dashboard.server import parse
from dsgpt.dashboard.ui import Values
from dsgpt.model.config import PRESETS
from dsgpt.record.equal_work import judge
from dsgpt.record.runs import Curve, Run, first, read_record, run_of
from dsgpt.record.schema import CAUSES, LARGEST, RECORD_FILE, STEPS_FILE, Fields, is_figure, step_entry
from dsgpt.record.suites import SWEEP_FILE
from dsgpt.training.status import LOCK_FILE, Signs, Status, signs_of_life, status_of

# What lies in the folder of runs, and the only way from a name to a path.

DEEPEST = 6
"""Folders below the folder of runs; deeper ones are not searched."""
_OF_RUNS = (RECORD_FILE, STEPS_FILE, LOCK_FILE)
"""A folder with one of them holds a run. A run that has just started has only its lock."""


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


def is_reference(name: str) -> bool:
    """Whether a run is one that the repository brings, measured on another machine."""
    return name.startswith("reference/")


def labels(names: Sequence[str]) -> dict[str, str]:
    """Short names: without the folders, unless two runs would have the same. Those of another machine say so."""
    short = [name.rpartition("/")[2] + (" (another machine)" if is_reference(name) else "") for name in names]
    return {name: own if short.count(own) == 1 else name for name, own in zip(names, short, strict=True)}


def current_folder() -> Path:
    """The folder of runs that the command line names.

    Raises:
        UserError: the command line has mistakes.
    """
    return parse().runs


@st.cache_resource(ttl=1.0, max_entries=8, show_spinner=False)
def contents(folder: Path) -> Contents:
    """Contents of ``folder``, at most a second old; empty if it does not exist.

    Checkpoints, hidden folders and links are left out.
    """
    kinds = runs, sweeps, concurrency = list[str](), list[str](), list[str]()
    for place, inner, files in os.walk(folder):
        here = Path(place).relative_to(folder)
        is_run = bool(here.parts) and not set(_OF_RUNS).isdisjoint(files)
        inner[:] = [] if is_run or len(here.parts) >= DEEPEST else [name for name in inner if not name.startswith(".")]
        if is_run:
            runs.append(here.as_posix())
        for file in files:
            if file == SWEEP_FILE or (file.startswith("sweep-") and file.endswith(".json")):
                sweeps.append((here / file).as_posix())
            elif file == "inference.json":
                concurrency.append((here / file).as_posix())
    unnamed = sorted(printable(name) for names in kinds for name in names if not is_utf8(name))
    named = [tuple(sorted(filter(is_utf8, names))) for names in kinds]
    return Contents(named[0], named[1], named[2], tuple(unnamed))


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


# The lines of a ``metrics.jsonl`` as columns.

TRAIN = ("step", "loss", "lr", "grad_norm", "tokens", "tokens_per_sec", "train_time_sec", "wall_time_sec")
"""Keys of the line of a step that become columns; ``docs/records.md`` says what they are."""
VALIDATION = ("step", "val_loss", "tokens", "train_time_sec")
"""Keys of the line of a validation. It has no ``tokens``: they are those of the step before it."""
_KINDS = {"loss": TRAIN, "val_loss": VALIDATION}
"""Keys of each kind of line, by the one that tells the kind."""
_COUNTED = ("loss", "val_loss", "tokens", "skipped", "warm_up")
"""Keys that mean something else when they are missing than when they are null."""
_SCHEMA = pa.schema(
    dict.fromkeys((*TRAIN, *VALIDATION, "val_tokens", "step_time_sec", "dataload_time_sec"), pa.float64())
    | {"step": pa.int64(), "skipped": pa.bool_(), "warm_up": pa.bool_()}
)
_PART_BYTES, _LEAST_BYTES = 1 << 23, 1 << 16
"""Read at once; and from which on lines are parsed together."""
_TAIL_BYTES = 1 << 16
_LONGEST_LINE = 1 << 16
_SEAM_BYTES = 256
"""A step's line has its wall time, so these differ between two runs."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps read so far. A value that a line lacks is NaN; later lines do not change these columns."""

    train: dict[str, Values]
    """Columns by the names of ``TRAIN``, steps ascending."""
    validation: dict[str, Values]
    damaged: int
    """Lines that are left out."""


class StepReader:
    """Reads a ``metrics.jsonl`` once, and later only what was appended. Threads may share it.

    A file that was replaced or cut is read anew: the bytes before the place where the last read ended are compared.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._offset, self._rest, self._seam, self._damaged, self._tokens = 0, b"", b"", 0, np.nan
        self._rows = {kind: np.empty((len(names), 0)) for kind, names in _KINDS.items()}
        self._now: Steps | None = None

    def read(self) -> Steps:
        """Everything up to the last whole line.

        Raises:
            OSError: the file cannot be read.
        """
        with self._lock, self._path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if self._now is not None and size == self._offset:
                return self._now
            file.seek(max(0, self._offset - len(self._seam)))
            if size < self._offset or file.read(len(self._seam)) != self._seam:
                self._begin()
                file.seek(0)
            while part := file.read(_PART_BYTES):
                self._seam = (self._seam + part)[-_SEAM_BYTES:]
                self._take(part)
            self._offset = file.tell()
            rows = {kind: _ascending(self._rows[kind]) for kind in _KINDS}
            train, validation = (dict(zip(names, rows[kind], strict=True)) for kind, names in _KINDS.items())
            self._now = Steps(train=train, validation=validation, damaged=self._damaged)
            return self._now

    def _take(self, part: bytes) -> None:
        whole, newline, rest = (self._rest + part).rpartition(b"\n")
        self._rest = rest[:_LONGEST_LINE]
        read = _parsed(whole + newline) if len(whole) >= _LEAST_BYTES else None
        if read is None:
            lines = [line for line in whole.split(b"\n") if line.strip()]
            entries = [entry for line in lines if len(line) < _LONGEST_LINE and (entry := _entry(line))]
            self._damaged += len(lines) - len(entries)
            read = _columns(entries)
        columns, trains, validations = read
        own, tokens = columns["tokens"], np.append(columns["tokens"][trains], self._tokens)
        before = tokens[np.searchsorted(trains, np.arange(len(own)), side="right") - 1]
        columns["tokens"], self._tokens = np.where(np.isnan(own), before, own), tokens[len(trains) - 1]
        for (kind, names), places in zip(_KINDS.items(), (trains, validations), strict=True):
            rows = np.stack([columns[name][places] for name in names])
            self._rows[kind] = np.concatenate([self._rows[kind], rows], axis=1)


def _ascending(rows: Values) -> Values:
    """The rows, shape (names, rows), with ascending steps; of a step that was written twice, the last row."""
    if (np.diff(rows[0]) > 0).all():
        return rows
    _, backwards = np.unique(rows[0][::-1], return_index=True)
    return rows[:, rows.shape[1] - 1 - backwards]


def _entry(line: bytes) -> dict[str, Any] | None:
    """The values of a line; None if it is damaged, or if a number in it is no figure of a run."""
    entry = step_entry(line)
    whole = entry is not None and all(is_figure(value) for value in entry.values() if is_number(value))
    return entry if whole else None


_Read = tuple[dict[str, Values], NDArray[np.intp], NDArray[np.intp]]
"""Columns of lines, the rows of steps, and those of validations."""


def _columns(entries: Sequence[dict[str, Any]]) -> _Read:
    """Columns and rows of lines whose numbers ``step_entry`` has checked."""
    columns = {name: np.array([entry.get(name) for entry in entries], float) for name in {*TRAIN, *VALIDATION}}
    trains, validations = (np.flatnonzero([kind in entry for entry in entries]) for kind in _KINDS)
    return columns, trains, validations


def _parsed(lines: bytes) -> _Read | None:
    """Parse whole lines with Arrow, about 20 times as fast as ``_entry``.

    Returns None if the result could differ; the caller then parses line by line. Arrow checks neither text nor line
    breaks, takes null for a missing key, and bounds nothing. It refuses a key that stands twice, and a value of another
    type than its column's.
    """
    letters = np.frombuffer(lines, np.uint8)
    ends = np.flatnonzero(letters == ord("\n"))
    begins = np.append(0, ends[:-1] + 1)
    objects = (letters[begins] == ord("{")).all() and (letters[ends - 1] == ord("}")).all()
    short = (ends - begins).max() < _LONGEST_LINE
    if not (objects and short and lines.isascii()) or b"\\u" in lines or b"NaN" in lines:
        return None
    try:
        table = arrow_json.read_json(pa.BufferReader(lines), parse_options=arrow_json.ParseOptions(_SCHEMA))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    steps = table["step"]
    if table.num_rows != len(ends) or steps.null_count or pc.min(steps).as_py() < 0:
        return None
    if any(lines.count(b'"%s":' % name.encode()) != len(ends) - table[name].null_count for name in _COUNTED):
        return None
    flat = table.flatten()
    sizes = (np.abs(column.to_numpy()) for column in flat.columns if pa.types.is_floating(column.type))
    fits = not any(((size > LARGEST) | ((size > 0) & (size < 1 / LARGEST))).any() for size in sizes)
    if not fits or any(pa.types.is_nested(each.type) for each in flat.schema):
        return None
    columns = {name: table[name].cast(pa.float64(), safe=False).to_numpy() for name in {*TRAIN, *VALIDATION}}
    trains, validations = (np.flatnonzero(~np.isnan(columns[kind])) for kind in _KINDS)
    return columns, trains, validations


def end_of(path: Path, most: int) -> bytes:
    """The last bytes of a file, at most ``most``.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return file.read(most)


# What the pages say about a run in a few figures: its state, its progress, its loss.

RECENT_STEPS = 200
"""Number of steps from which the remaining time of a run is estimated."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The record of a run, or the reason why it cannot be read."""

    run: Run | None = None
    """The run without the losses of steps."""
    problem: str = ""
    """Why there is no ``run``, or why its figures are in doubt; one line."""
    status: str | None = "running"
    """Status in the record."""
    host: str | None = None
    model: str | None = None
    """The name of its size or its shape, and how many parameters it has."""
    total_steps: float | None = None
    plan: str = ""
    """``18% slower than planned, $4.20 spent, $21.00 expected instead of $17.69``; empty without plan and price."""
    goodput: float | None = None
    """The share of the wall time that went into steps which were kept."""
    goodput_in_words: str = ""
    """The same with the seconds of every loss, and how far ``--save_to`` is behind; empty where nothing is known."""
    started: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run now. None means unknown."""

    name: str
    status: Status
    reason: str
    """Why ``status`` is believed."""
    problem: str
    """Damage or doubt in the run's files; empty if there is none."""
    recorded: Recorded
    signs: Signs
    step: float | None
    """Optimizer steps done."""
    train_loss: float | None
    val_loss: float | None
    tokens_per_sec: float | None

    @property
    def progress(self) -> float | None:
        """The share of the steps that is done, from 0 to 1."""
        total = self.recorded.total_steps
        return None if self.step is None or not total else min(1.0, self.step / total)


_SHAPE = ("n_layer", "n_head", "n_embd", "block_size")
"""Fields of the shape without the vocabulary, which the data decide, and the dropout, which belongs to training."""


def model_name(config: Fields) -> str | None:
    """``small (124M)``, ``2 x 128 (0.452M)`` (layers and width) or, of a published model, ``distilgpt2 (81.9M)``.

    A record calls a model by its ``--model_size``, also if other flags changed its shape: the name of a size is used
    only for its shape. What the record does not say is left out; None if it says nothing.

    Args:
        config: the ``training_config`` of a record.
    """
    name, parameters, model = config.text("model_size"), config.number("parameters"), config.section("model")
    preset, shape = PRESETS.get(name or ""), {field: model.whole(field) for field in _SHAPE}
    layers, width = shape["n_layer"], shape["n_embd"]
    is_preset = preset and all(value in {None, getattr(preset, field)} for field, value in shape.items())
    if layers is not None and width is not None and not is_preset and (preset or not name):
        name = f"{layers} x {width}"
    if parameters is None:
        return name
    count = f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"
    return f"{name} ({count})" if name else count


def _moment(text: str | None) -> datetime | None:
    """A time in UTC; None for one outside of the years in which runs begin: arithmetic with the first fails."""
    try:
        moment = datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
    return moment.replace(tzinfo=moment.tzinfo or UTC) if moment and 1970 < moment.year < 9999 else None


def with_steps(run: Run, steps: Steps) -> Run:
    """``run`` with the losses of its steps, as the charts' judgement of equal losses takes them."""
    curves: dict[str, Any] = {}
    for curve, losses, at in (("train_curve", "loss", steps.train), ("val_curve", "val_loss", steps.validation)):
        has_loss = ~np.isnan(at[losses])
        if has_loss.any():
            by_step = dict(zip(at["step"][has_loss].tolist(), at[losses][has_loss].tolist(), strict=True))
            curves[curve] = Curve(by_step=by_step)
    return replace(run, **curves)


def seconds_left(steps: Steps, total_steps: float | None) -> float | None:
    """Seconds until the last step at the pace of the recent ones, validation and saving among them."""
    done, wall = steps.train["step"], steps.train["wall_time_sec"]
    if total_steps is None or len(done) < 2:
        return None
    first = max(0, len(done) - 1 - RECENT_STEPS)
    taken, elapsed = done[-1] - done[first], wall[-1] - wall[first]
    if not elapsed > 0:  # also for NaN
        return None
    return float(elapsed / taken * max(0.0, total_steps - done[-1]))


def in_order(summaries: Sequence[Summary]) -> list[Summary]:
    """Summaries of this machine first; of these, running first, then the newest."""

    def place(each: Summary) -> tuple[bool, bool, float, str]:
        started = each.recorded.started
        newest_first = -started.timestamp() if started else 0.0
        return is_reference(each.name), each.status != Status.RUNNING, newest_first, each.name

    return sorted(summaries, key=place)


def own(summaries: Sequence[Summary]) -> list[Summary]:
    """Summaries of this machine, in order; all if none is."""
    ordered = in_order(summaries)
    return [each for each in ordered if not is_reference(each.name)] or ordered


# Records and steps, read once for all sessions: each result is in the cache by the version of its file.


Version = tuple[int, int, int, int]
"""Device, inode, time of the last change and size of a file: another version of it has others."""


def version_of(path: Path) -> Version:
    """The version of a file.

    Raises:
        OSError: there is none.
    """
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size


@st.cache_resource(max_entries=512, show_spinner=False)
def _recorded(path: Path, version: Version, name: str) -> Recorded:  # noqa: ARG001 - part of the key
    notes: list[str] = []
    try:
        record = read_record(path, name=name, notes=notes)
    except UserError as error:
        return Recorded(problem=str(error), status=None)
    config, plan = record.section("training_config"), record.section("plan")
    run = run_of(record, name=name, log=None, notes=notes)
    goodput, lost = record.section("goodput").number("share"), record.section("goodput").section("lost_sec")
    causes = ", ".join(f"{cause} {duration(value)}" for cause in CAUSES if (value := lost.number(cause)))
    kept = f"Goodput {goodput:.1%} of the wall time, in steps that are kept. Lost: {causes}." if goodput else ""
    behind = record.section("second_copy").number("behind_steps")
    copied = "" if behind is None else f"The second copy is {behind:,.0f} steps behind."
    ratio, spent, usd = (plan.number(key) for key in ("step_vs_plan", "spent_usd", "usd"))
    pace = f"{abs(ratio - 1):.0%} {'slower' if ratio > 1 else 'faster'} than planned" if ratio else ""
    paid = f"{dollars(spent)} spent" if spent is not None else ""
    expected = f"{dollars(usd)} expected instead of {dollars(plan.number('planned_usd'))}" if usd else ""
    return Recorded(
        run=run,
        problem=run.later_schema and f"{path}: {run.later_schema}",
        status=record.text("status"),
        host=record.text("host"),
        model=model_name(config),
        total_steps=config.number("total_steps"),
        plan=", ".join(filter(None, (pace, paid, expected))),
        goodput=goodput,
        goodput_in_words=" ".join(filter(None, (kept, copied))),
        started=_moment(record.text("timestamp_utc")),
    )


@st.cache_resource(max_entries=512, show_spinner=False)
def last_entries(path: Path, version: Version) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: ARG001
    """The last line of a step and the last line of a validation near the end of a ``metrics.jsonl``; empty without one.

    Raises:
        OSError: the file cannot be read.
    """
    step, validation = dict[str, Any](), dict[str, Any]()
    for line in reversed(end_of(path, _TAIL_BYTES).split(b"\n")[:-1]):
        entry = _entry(line) or {}
        step = step or (entry if "loss" in entry else {})
        validation = validation or (entry if "val_loss" in entry else {})
        if step and validation:
            break
    return step, validation


@st.cache_resource(max_entries=96, show_spinner=False)
def _step_reader(path: Path, device: int, inode: int) -> StepReader:  # noqa: ARG001 - another file, another reader
    return StepReader(path)


def recorded_of(folder: Path, name: str) -> Recorded:
    """The present record of the run ``name`` below ``folder``."""
    try:
        path = own_file(inside(folder, name), RECORD_FILE)
        return Recorded() if path is None else _recorded(path, version_of(path), name)
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
        device, inode, *_ = version_of(path)
        return _step_reader(path, device, inode).read()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def summary_of(folder: Path, name: str) -> Summary:
    """The run ``name`` as it is now. Only the end of its steps is read, and only if it has not finished."""
    signs = signs_of_life(folder / name)
    recorded = recorded_of(folder, name)  # after the signs
    run, problem = recorded.run, recorded.problem
    status, reason = status_of(recorded.status, host=recorded.host, signs=signs)
    if recorded.problem and recorded.status is None:
        status, reason = Status.UNKNOWN, "its record is damaged"
        if signs.process:
            status, reason = Status.RUNNING, "a process holds its lock"
    step, validation = dict[str, Any](), dict[str, Any]()
    if status != Status.FINISHED:
        try:
            if path := own_file(inside(folder, name), STEPS_FILE):
                step, validation = last_entries(path, version_of(path))
        except (UserError, OSError) as error:
            problem = problem or str(error)
    return Summary(
        name=name,
        status=status,
        reason=reason,
        problem=problem,
        recorded=recorded,
        signs=signs,
        step=first(step.get("step"), run.work["optimizer steps"] if run else None),
        train_loss=first(step.get("loss"), run.final_train_loss if run else None),
        val_loss=first(validation.get("val_loss"), run.final_val_loss if run else None),
        tokens_per_sec=first(run.tokens_per_sec if run else None, step.get("tokens_per_sec")),
    )


def summaries_of(folder: Path) -> list[Summary]:
    """Every run below ``folder``."""
    return [summary_of(folder, name) for name in contents(folder).runs]


# The first answer of the dashboard: which of the runs that did the same work was fastest.


@dataclass(frozen=True)
class Answer:
    """Finished runs that did the same work."""

    baseline: Run
    """The run on the fewest devices; of several, the slowest."""
    runs: tuple[Run, ...]
    """All runs of equal work, the fastest first."""

    @property
    def cheapest(self) -> Run | None:
        """The run with the least device time; None if it is unknown for all."""
        timed = [run for run in self.runs if device_seconds(run) is not None]
        return min(timed, key=lambda run: device_seconds(run) or 0.0, default=None)


def grouped(runs: Iterable[Run], belongs: Callable[[list[Run], Run], bool]) -> list[list[Run]]:
    """The runs in their order, each in the first group that it ``belongs`` to, or else in one of its own."""
    groups: list[list[Run]] = []
    for run in runs:
        group = next((group for group in groups if belongs(group, run)), list[Run]())
        if not group:
            groups.append(group)
        group.append(run)
    return groups


def own_answers(summaries: Sequence[Summary]) -> list[Answer]:
    """An answer for each work that at least two finished runs of this machine did; of all runs if it has none.

    That with the run that began last is the first.
    """
    runs, answered = [run for each in own(summaries) if (run := each.recorded.run) is not None], []
    finished = (run for run in runs if run.train_time and run.status in {None, "completed"})
    for group in grouped(finished, lambda group, run: judge([group[0], run]).answer == "yes"):
        ordered = sorted(group, key=lambda run: run.train_time or 0.0)
        baseline = min(ordered, key=lambda run: (run.device_count or float("inf"), -(run.train_time or 0.0)))
        if len(group) > 1:
            answered.append(Answer(baseline, tuple(ordered)))
    return sorted(answered, key=lambda each: max(run.date or "" for run in each.runs), reverse=True)


def device_seconds(run: Run) -> float | None:
    """The training time of all devices, in seconds."""
    return None if run.train_time is None or run.device_count is None else run.train_time * run.device_count


def cost(run: Run, price: float | None) -> float | None:
    """Cost of the training time of all devices, at ``price`` for a device hour."""
    seconds = device_seconds(run)
    return None if seconds is None or price is None else seconds / 3600 * price

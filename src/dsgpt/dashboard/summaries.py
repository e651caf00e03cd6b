"""What the pages say about a run in a few figures, and which of equal runs was fastest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import streamlit as st

from dsgpt.charts.comparison import speed_up
from dsgpt.common.errors import UserError
from dsgpt.dashboard.formats import model_name, money
from dsgpt.dashboard.runs import Contents, contents, inside, is_reference, own_file
from dsgpt.dashboard.steps import StepReader, Steps, Values, last_entries
from dsgpt.record.equal_work import judge
from dsgpt.record.fields import Fields
from dsgpt.record.runs import Curve, Run, read_record, run_of
from dsgpt.record.schema import RECORD_FILE, STEPS_FILE
from dsgpt.training.status import Signs, Status, signs_of_life, status_of

# What the pages say about a run in a few figures: its state, its progress, its loss.

RECENT_STEPS = 200
"""From which the time that a run still needs is estimated."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What the record of a run says, or why it cannot be read."""

    run: Run | None = None
    """Without the losses of steps."""
    problem: str = ""
    """Why there is no ``run``, or why its figures are in doubt; one line."""
    status: str | None = "running"
    """As recorded."""
    host: str | None = None
    model: str | None = None
    """The name of its size or its shape, and how many parameters it has."""
    total_steps: float | None = None
    plan: str = ""
    """How the run compares with its plan, and what it has cost; empty without plan and price."""
    started: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run now. None means unknown."""

    name: str
    status: Status
    reason: str
    """Why ``status`` is believed."""
    problem: str
    """What is damaged or in doubt; empty if nothing is."""
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


def read_recorded(folder: Path, *, name: str) -> Recorded:
    """What the record in a run's ``folder`` says; a damaged record is a ``problem``."""
    notes: list[str] = []
    try:
        path = own_file(folder, RECORD_FILE)
        if path is None:
            return Recorded()
        record = read_record(path, name=name, notes=notes)
    except UserError as error:
        return Recorded(problem=str(error), status=None)
    config = record.section("training_config")
    run = run_of(record, name=name, log=None, notes=notes)
    return Recorded(
        run=run,
        problem=run.later_schema and f"{path}: {run.later_schema}",
        status=record.text("status"),
        host=record.text("host"),
        model=model_name(config),
        total_steps=config.number("total_steps"),
        plan=_plan_in_words(record.section("plan")),
        started=_moment(record.text("timestamp_utc")),
    )


def _plan_in_words(plan: Fields) -> str:
    """``18% slower than planned, $4.20 spent, $21.00 expected instead of $17.69``."""
    ratio, spent, usd = (plan.number(key) for key in ("step_vs_plan", "spent_usd", "usd"))
    pace = f"{abs(ratio - 1):.0%} {'slower' if ratio > 1 else 'faster'} than planned" if ratio else ""
    paid = f"{money(spent)} spent" if spent is not None else ""
    expected = f"{money(usd)} expected instead of {money(plan.number('planned_usd'))}" if usd else ""
    return ", ".join(filter(None, (pace, paid, expected)))


def _moment(text: str | None) -> datetime | None:
    """A time in UTC; None for one outside of the years in which runs begin: arithmetic with the first fails."""
    try:
        found = datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
    return found.replace(tzinfo=found.tzinfo or UTC) if found and 1970 < found.year < 9999 else None


def summarise(
    name: str,
    *,
    recorded: Recorded,
    signs: Signs,
    last: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None],
    problem: str = "",
) -> Summary:
    """A run as it is now.

    Args:
        name: of the run.
        recorded: read after ``signs``.
        signs: of life.
        last: the last lines of a step and of a validation, of a run that has not finished.
        problem: with its steps.
    """
    run = recorded.run
    step, validation = ((line or {}) for line in last)
    if recorded.problem and recorded.status is None:
        status, reason = (
            (Status.RUNNING, "a process holds its lock") if signs.process else (Status.UNKNOWN, "its record is damaged")
        )
    else:
        status, reason = status_of(recorded.status, host=recorded.host, signs=signs)
    return Summary(
        name=name,
        status=status,
        reason=reason,
        problem=recorded.problem or problem,
        recorded=recorded,
        signs=signs,
        step=_first(step.get("step"), run.work["optimizer steps"] if run else None),
        train_loss=_first(step.get("loss"), run.final_train_loss if run else None),
        val_loss=_first(validation.get("val_loss"), run.final_val_loss if run else None),
        tokens_per_sec=_first(run.tokens_per_sec if run else None, step.get("tokens_per_sec")),
    )


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def with_steps(run: Run, steps: Steps) -> Run:
    """``run`` with the losses of its steps, as the charts' judgement of equal losses takes them."""
    train, validation = steps.train, steps.validation
    return replace(
        run,
        train_curve=_curve(train, train["loss"]) or run.train_curve,
        val_curve=_curve(validation, validation["val_loss"]) or run.val_curve,
    )


@dataclass(frozen=True)
class _StepLosses(Curve):
    """Losses by step alone: a ``Point`` for each of 100,000 steps would take half a second."""

    losses: dict[float, float] = field(default_factory=dict)

    def at_steps(self) -> dict[float, float]:
        return self.losses


def _curve(columns: Mapping[str, Values], losses: Values) -> Curve | None:
    known = ~np.isnan(losses)
    found = dict(zip(columns["step"][known].tolist(), losses[known].tolist(), strict=True))
    return _StepLosses(losses=found) if found else None


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
    """Those of this machine first; of these, running first, then the newest."""
    return sorted(
        summaries,
        key=lambda each: (is_reference(each.name), each.status != Status.RUNNING, -_when(each), each.name),
    )


def own(summaries: Sequence[Summary]) -> list[Summary]:
    """Those of this machine, in order; all if none is."""
    ordered = in_order(summaries)
    return [each for each in ordered if not is_reference(each.name)] or ordered


def _when(summary: Summary) -> float:
    started = summary.recorded.started
    return 0.0 if started is None else started.timestamp()


# Records and steps, read once for all sessions: each result is kept by the identity of the file that it came from.


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


# The first answer of the dashboard: which of the runs that did the same work was fastest.


@dataclass(frozen=True)
class Answer:
    """Finished runs that did the same work."""

    fastest: Run
    baseline: Run
    """The run on the fewest devices; of several, the slowest."""
    runs: tuple[Run, ...]
    """All of them, the fastest first."""

    @property
    def speed_up(self) -> float | None:
        """Of the fastest, over the baseline."""
        return speed_up(self.baseline, self.fastest)

    @property
    def cheapest(self) -> Run | None:
        """The run with the least device time; None if it is unknown for all."""
        known = [run for run in self.runs if device_seconds(run) is not None]
        return min(known, key=lambda run: device_seconds(run) or 0.0, default=None)


def answers(runs: Sequence[Run]) -> list[Answer]:
    """An answer for each work that at least two finished runs did, in the order of the first run of each."""
    groups: list[list[Run]] = []
    for run in runs:
        if not run.train_time or run.status not in {None, "completed"}:
            continue
        own = next((group for group in groups if judge([group[0], run]).answer == "yes"), None)
        if own is None:
            groups.append([run])
        else:
            own.append(run)
    return [_answer(group) for group in groups if len(group) > 1]


def newest(found: Sequence[Answer]) -> Answer:
    """The answer with the run that began last."""
    return max(found, key=lambda each: max(run.date or "" for run in each.runs))


def _answer(group: Sequence[Run]) -> Answer:
    ordered = sorted(group, key=lambda run: run.train_time or 0.0)
    baseline = min(ordered, key=lambda run: (run.device_count or float("inf"), -(run.train_time or 0.0)))
    return Answer(ordered[0], baseline, tuple(ordered))


def device_seconds(run: Run) -> float | None:
    """The training time of all devices, in seconds."""
    return None if run.train_time is None or run.device_count is None else run.train_time * run.device_count


def cost(run: Run, price: float | None) -> float | None:
    """Of the training time of all devices, at ``price`` for a device hour."""
    seconds = device_seconds(run)
    return None if seconds is None or price is None else seconds / 3600 * price

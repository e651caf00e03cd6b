"""The events that sinks receive from a run, and how it handles their write errors."""

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest
from run_folders import LONG, record
from small_run import command_line

from dsgpt.record.schema import RunRecord
from dsgpt.training import run, sinks
from dsgpt.training.command import train
from dsgpt.training.sinks import Line, Sink, Sinks, place


class Tracker(Sink):
    """A sink that remembers all that it receives."""

    def __init__(self) -> None:
        self.taken, self.syncs, self.closed = 0, 0, False
        self.lines: list[Line] = []
        self.validations: list[Line] = []
        self.measured: list[dict[str, Any]] = []
        self.statuses: list[str] = []

    def step_taken(self) -> None:
        self.taken += 1

    def steps(self, lines: list[Line], *, due: bool) -> None:
        self.lines += lines

    def validation(self, line: Line, *, seconds: float) -> None:
        self.validations.append(line)

    def traffic(self, measured: dict[str, Any]) -> None:
        self.measured.append(measured)

    def record(self, record: RunRecord) -> None:
        self.statuses.append(record.status)

    def sync(self) -> None:
        self.syncs += 1

    def close(self) -> None:
        self.closed = True


def test_a_tracker_is_one_more_sink(finished_run, tmp_path, monkeypatch):
    tracker = Tracker()
    monkeypatch.setattr(
        run, "open_sinks", lambda *args, **named: with_tracker(sinks.open_sinks(*args, **named), tracker)
    )
    assert train(command_line(finished_run, **LONG, checkpoint_path=tmp_path / "run")) == 0
    assert tracker.taken == 12
    assert [line["step"] for line in tracker.lines] == list(range(1, 13))
    assert [line["step"] for line in tracker.validations] == [4, 5, 8, 10, 12]
    assert [measured["measured_step"] for measured in tracker.measured] == [3]
    assert tracker.statuses[-1] == "completed"
    assert set(tracker.statuses[:-1]) == {"running"}
    assert (tracker.syncs, tracker.closed) == (4, True)
    assert record(tmp_path / "run")["summary"]["optimizer_steps"] == 12


def with_tracker(usual: Sinks, tracker: Tracker) -> Sinks:
    return Sinks([*usual._sinks, tracker])


class Refusing(Sink):
    """A sink whose disk is full while ``full``."""

    full = True

    def steps(self, lines: list[Line], *, due: bool) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "lines")


def steps(sink: Sink) -> None:
    sink.steps([], due=False)


def test_a_write_error_is_reported_once_until_the_file_can_be_written(caplog, snapshot):
    sink = Refusing()
    several = Sinks([sink], stops=False)

    def send(what: str, event: Callable[[Sink], None]) -> int:
        caplog.clear()
        several.try_to_send(what, event)
        return len(caplog.messages)

    assert send("lines", steps) == 1
    assert send("record", lambda one: one.record(RunRecord(description={}))) == 0  # succeeds, and is another file
    assert send("lines", steps) == 0
    sink.full = False
    assert send("lines", steps) == 0
    sink.full = True
    assert send("lines", steps) == 1
    assert caplog.messages == snapshot


def test_a_write_error_stops_the_run_unless_it_may_continue():
    with pytest.raises(OSError, match="No space left"):
        Sinks([Refusing()], stops=True).try_to_send("lines", steps)
    with pytest.raises(OSError, match="No space left"):
        Sinks([Refusing()], stops=False).send(steps)
    tracker = Tracker()
    Sinks([Refusing(), tracker]).send_if_possible(lambda sink: sink.steps([{"step": 1}], due=False))
    assert tracker.lines == [{"step": 1}]


def test_places_line_up():
    assert (place(6, 12), place(100_000, 200_000)) == ("step      6/12", "step 100000/200000")

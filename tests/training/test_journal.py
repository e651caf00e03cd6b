"""The record of a run, its lines, and the sinks that write them."""

import errno
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from run_folders import LONG, Killed, record
from small_run import command_line

from dsgpt.common.errors import UserError
from dsgpt.planner.memory import PARTS
from dsgpt.record.schema import RunRecord
from dsgpt.training import journal, run
from dsgpt.training import saving as checkpoint_module
from dsgpt.training import trainer as completion
from dsgpt.training.command import train as train_here
from dsgpt.training.journal import Journal, Line, Sink, Sinks, place
from dsgpt.training.saving import Saver
from dsgpt.training.trainer import Trainer

# The record of a run while it trains, and after it ended early.


@pytest.mark.parametrize("where", ["train_step", "save_checkpoint"])
def test_a_killed_run_leaves_its_record(finished_run, tmp_path, monkeypatch, where):
    if where == "train_step":
        monkeypatch.setattr(Trainer, "fit", Killed.now)
    else:
        monkeypatch.setattr(checkpoint_module, "try_to_write", Killed.now)
    monkeypatch.setattr(Journal, "end_early", lambda self, status: None)  # as after a kill
    with pytest.raises(Killed):
        train_here(command_line(finished_run, **LONG, checkpoint_path=tmp_path / "run"))
    found = record(tmp_path / "run")
    assert found["status"] == "running"
    assert found["summary"]["optimizer_steps"] == (0 if where == "train_step" else 3)


def test_a_validation_is_in_the_record_at_once(finished_run, tmp_path, monkeypatch):
    seen = []
    original = Journal.validated

    def validated(self: Journal, **values: Any) -> None:
        original(self, **values)
        seen.append((values["step"], record(tmp_path / "run")["summary"]["final_val_loss"] == values["val_loss"]))

    monkeypatch.setattr(Journal, "validated", validated)
    assert train_here(command_line(finished_run, **LONG, checkpoint_path=tmp_path / "run")) == 0
    assert seen == [(4, True), (5, True), (8, True), (10, True), (12, True)]


def test_an_interrupt_keeps_the_steps(finished_run, tmp_path, monkeypatch):
    original = Journal.step_done

    def step_done(self: Journal, *args: Any, step: int, **values: Any) -> None:
        original(self, *args, step=step, **values)
        if step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "step_done", step_done)
    flags = LONG | {"save_every": 0, "eval_every": 0}
    assert train_here(command_line(finished_run, **flags, checkpoint_path=tmp_path / "run")) == 130
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert (record(tmp_path / "run")["status"], record(tmp_path / "run")["summary"]["optimizer_steps"]) == (
        "interrupted",
        3,
    )


def test_peak_memory_is_of_training(finished_run, tmp_path, monkeypatch):
    """A stand-in for the memory counter: a save and a generation need more than training."""
    peak = [1000]
    monkeypatch.setattr("dsgpt.telemetry.memory.peak_rss_bytes", lambda: peak[0])
    monkeypatch.setattr(Saver, "_write", lambda *args: peak.__setitem__(0, 9000))
    flags = {"checkpoint_path": tmp_path / "run", "max_train_steps": 2}
    assert train_here(command_line(finished_run, **flags)) == 0
    assert record(tmp_path / "run")["summary"]["peak_rss_bytes_rank0"] == 1000


def test_the_record_has_the_predicted_peak(finished_run):
    predicted = record(finished_run / "run")["summary"]["predicted_peak_memory"]
    assert predicted["worst"] == {"rank": 0, **predicted["rank0"]}
    parts, state = predicted["rank0"]["parts"], record(finished_run / "run")["cost"]["model_state_bytes_per_rank"]
    assert tuple(parts) == PARTS
    assert sum(parts.values()) == predicted["rank0"]["total"]
    assert (parts["weights"], parts["optimizer"]) == (state["parameters"], state["optimizer"])
    assert parts["activations"] > 0


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (torch.OutOfMemoryError(), "the GPU has no memory left for a second copy of the model"),
        (RuntimeError("bf16 path needs avx512bw\nand more"), "bf16 path needs avx512bw; the trained model is saved"),
        (OSError(12, "Cannot allocate memory"), "[Errno 12] Cannot allocate memory; the trained model is saved"),
        (MemoryError(), "MemoryError; the trained model is saved"),
        (UserError("the model's logits are NaN"), "the model's logits are NaN; the trained model is saved"),
    ],
)
def test_a_training_does_not_fail_over_its_inference_figure(finished_run, tmp_path, monkeypatch, capsys, error, line):
    def failing(*args: Any) -> None:
        raise error

    monkeypatch.setattr(completion, "measure_latency", failing)
    assert train_here(command_line(finished_run, checkpoint_path=tmp_path / "run")) == 0
    assert f"inference   not measured: {line}\n" in capsys.readouterr().out
    assert (record(tmp_path / "run")["status"], record(tmp_path / "run")["inference"]) == ("completed", None)
    assert (tmp_path / "run" / "RUN_COMPLETE.txt").is_file()


def test_the_log_is_durable_before_the_checkpoint_is_published(finished_run, tmp_path, monkeypatch):
    order: list[str] = []
    noted(monkeypatch, journal.StepLog, "sync", order)
    noted(monkeypatch, checkpoint_module.store, "publish", order)
    assert train_here(command_line(finished_run, checkpoint_path=tmp_path / "run")) == 0
    assert order == ["sync", "publish"]


def noted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, order: list[str]) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **values: Any) -> Any:
        order.append(name)
        return original(*args, **values)

    monkeypatch.setattr(owner, name, call)


# The events that sinks receive from a run, and how it handles their write errors.


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
        run, "open_sinks", lambda *args, **named: with_tracker(journal.open_sinks(*args, **named), tracker)
    )
    assert train_here(command_line(finished_run, **LONG, checkpoint_path=tmp_path / "run")) == 0
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

"""A sweep runs, is interrupted, continues, and records what failed."""

import json
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_run import REPOSITORY, TOKENS, command_line, random_ids, write_data, write_recipe, write_tokens
from training_runs import read_record

from dsgpt.benchmarks import sweep as command
from dsgpt.benchmarks.frame import run_suite
from dsgpt.benchmarks.sweep import Ending, SweepOptions, SweepSuite, cell_of, compared, ended_with, train
from dsgpt.benchmarks.sweep_cells import Cell as PlannedCell
from dsgpt.benchmarks.sweep_cells import ComparisonPlan
from dsgpt.common.command_line import Terminated
from dsgpt.common.errors import UserError
from dsgpt.config.options import TRAINING_FACTS, WORK_FACTS
from dsgpt.record.schema import STEPS_FILE, read_steps
from dsgpt.record.suites import Compared, State, Turn, read_sweep

# Descriptions of sweeps of a small model, and turns with made-up figures.

STEPS = 6
WORK: dict[str, Any] = dict.fromkeys((*WORK_FACTS, *TRAINING_FACTS), "as the others")
WORK |= {"global batch": 8.0, "tokens": 768.0, "precision": "fp32"}


def write_description(folder: Path, cells: Sequence[Mapping[str, Any]], **more: Any) -> Path:
    """Write data, a recipe and a description of ``cells`` on them."""
    write_recipe(write_data(folder) / "recipe.json")
    flags = command_line(folder, run_type=None, checkpoint_path=None, max_train_steps=None, device=None)
    file = folder / "mine.json"
    file.write_text(json.dumps({"schema_version": "1.0", "flags": flags, "cells": list(cells), **more}))
    return file


def cell(name: str, *flags: str, run_type: str = "baseline", **more: Any) -> dict[str, Any]:
    return {"name": name, "flags": ["--run_type", run_type, *flags], **more}


def options(folder: Path, suite: Path | str, **changes: Any) -> SweepOptions:
    """Options of a sweep of a few steps, with its record in ``folder/out``."""
    shorter = {"output": folder / "out" / "sweep.json", "repeats": 2, "steps": STEPS, "seq_length": 16}
    return SweepOptions(suite=str(suite), **shorter | changes)


def made_up(name: str, repeat: int, *, speed: float | None, place: int = 1, **more: Any) -> Turn:
    """A turn that is done, with this speed."""
    values: dict[str, Any] = {"state": State.DONE, "message": None, "seconds": 5.0, "work": WORK, "final_loss": 5.0}
    values |= {"tokens_per_sec": speed, "train_time_sec": None if speed is None else 768 / speed}
    return Turn(cell=name, repeat=repeat, place=place, **values | more)


# Sweeps.

TORCHRUN = """\
error: global batch 8 is not divisible by 3 ranks: take --global_batch_size 6 or 9, or 2 or 4 ranks
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
[1]:
  exitcode  : -15 (pid: 21192)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  exitcode  : 2 (pid: 21190)
"""
GROUPS = ["bash", "-c", "setsid sleep 60 & echo $!; wait"]
"""A launcher whose worker has a session of its own, as those of ``torchrun``."""


@pytest.mark.long
def test_a_real_sweep_from_description_to_page(tmp_path, capsys):
    """Two cells, one of them under ``torchrun``. The second sweep finds the turns of the first, and adds a target."""
    file = write_description(tmp_path, [cell("one"), cell("two", run_type="ddp", devices=2)])
    chosen = options(tmp_path, file, repeats=1, profile_comm=1)
    assert run_suite(SweepSuite, chosen, repository=REPOSITORY) == 0
    first = [cell.turns[0] for cell in read_sweep(tmp_path / "out").cells]
    assert run_suite(SweepSuite, replace(chosen, target_loss=9.0, price=3600.0), repository=REPOSITORY) == 0
    assert "2 of 2 turns have results from before; 0 left" in capsys.readouterr().out
    sweep = read_sweep(tmp_path / "out")
    one, two = sweep.cells
    assert [replace(cell.turns[0], time_to_target_sec=None) for cell in (one, two)] == first
    assert {turn.state for cell in sweep.cells for turn in cell.turns} == {State.DONE}
    assert sorted(turn.place for cell in sweep.cells for turn in cell.turns) == [1, 2]
    assert one.sent_bytes_per_step == 0 < two.sent_bytes_per_step
    assert one.communication_share.values == [0.0]
    assert 0 < two.communication_share.median < 1
    assert (len(two.model_state_bytes_by_rank), one.joules) == (2, None)
    assert one.cost.median == pytest.approx(one.turns[0].train_time_sec)  # a device second costs 1
    assert two.cost.median == pytest.approx(2 * two.turns[0].train_time_sec)
    assert 0 < one.time_to_target_sec.median < one.turns[0].train_time_sec
    (beside,) = sweep.comparisons[0].cells
    assert beside.same_work == "same work: yes"
    assert beside.speed_up.median == pytest.approx(two.turns[0].tokens_per_sec / one.turns[0].tokens_per_sec)
    assert beside.efficiency == pytest.approx(beside.speed_up.median / 2)
    runs = (tmp_path / f"out/work/turns/1/{name}/run/{STEPS_FILE}" for name in ("one", "two"))
    losses = [[line["loss"] for line in read_steps(file) if "loss" in line] for file in runs]
    assert read_record(tmp_path / "out/work/turns/1/two/run")["hardware"]["launcher"] == "torchrun"
    distances = [abs(ours - theirs) for ours, theirs in zip(*losses, strict=True)]
    assert len(distances) == STEPS
    assert abs(beside.loss_difference) <= beside.largest_loss_difference == max(distances) < 2e-4
    page = (tmp_path / "out" / "sweep.md").read_text()
    assert f"| {one.final_loss:.4f} |" in page
    assert "| communication share |" in page
    assert "None: every turn trained to its end." in page
    assert not list(tmp_path.glob("out/work/turns/*/*/run/step-*"))


@pytest.fixture
def three(tmp_path: Path) -> Path:
    return write_description(tmp_path, [cell("a"), cell("b"), cell("c")])


LATE, INDIVISIBLE = "did not end within 3 s; its last line: step 2 | loss", "global batch 8 is not divisible by 3 ranks"
ENDINGS = {
    "a": Ending(state=State.OUT_OF_MEMORY, message="exit code 1: MemoryError", seconds=1.0),
    "b": Ending(state=State.TIMED_OUT, message=LATE, seconds=1.0),
    "c": Ending(state=State.REFUSED, message=INDIVISIBLE, seconds=1.0),
}


class Trainings:
    """Stands for the launched trainings, which end as ``ENDINGS`` says, and for an interruption before the n-th."""

    def __init__(self, *, interrupt_at: int | None = None) -> None:
        self._interrupt_at, self.begun = interrupt_at, list[str]()

    def __call__(self, words, *, log: Path, **more):
        self.begun.append(log.parent.name)
        if len(self.begun) == self._interrupt_at:
            raise KeyboardInterrupt
        return ENDINGS[log.parent.name]


def test_an_interrupted_sweep_repeats_only_the_turn_that_was_interrupted(three, tmp_path, monkeypatch):
    whole, cut, rest = Trainings(), Trainings(interrupt_at=5), Trainings()
    monkeypatch.setattr(command, "train", whole)
    assert run_suite(SweepSuite, options(tmp_path / "whole", three), repository=REPOSITORY) == 0
    monkeypatch.setattr(command, "train", cut)
    with pytest.raises(KeyboardInterrupt):
        run_suite(SweepSuite, options(tmp_path, three), repository=REPOSITORY)
    assert not (tmp_path / "out" / "sweep.json").exists()
    monkeypatch.setattr(command, "train", rest)
    assert run_suite(SweepSuite, options(tmp_path, three), repository=REPOSITORY) == 0
    assert cut.begun[:4] + rest.begun == whole.begun
    assert read_sweep(tmp_path / "out").cells == read_sweep(tmp_path / "whole" / "out").cells
    assert run_suite(SweepSuite, options(tmp_path, three, repeats=3), repository=REPOSITORY) == 0
    assert sorted(rest.begun[2:]) == ["a", "b", "c"]


def test_turns_with_other_settings_recipes_data_or_sources_are_refused(three, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "train", Trainings())
    assert run_suite(SweepSuite, options(tmp_path, three), repository=REPOSITORY) == 0

    def refused(what: str, **changes: Any) -> None:
        why = rf"with other {what}, which .* give another --output, or remove the folder"
        with pytest.raises(UserError, match=why):
            run_suite(SweepSuite, options(tmp_path, three, **changes), repository=REPOSITORY)

    refused("settings", steps=7)
    recipe = tmp_path / "recipe.json"
    before = recipe.read_text()
    recipe.write_text(before.replace('"stage": 1', '"stage": 2'))
    refused("recipes")
    recipe.write_text(before)
    monkeypatch.setattr(command, "PACKAGE", three.parent)
    refused("sources")
    monkeypatch.undo()
    write_tokens(tmp_path / "train.bin", random_ids(TOKENS, seed=9))
    refused("data")


def test_failures_are_results_with_the_reason_on_the_page(three, tmp_path, monkeypatch, snapshot, capsys):
    monkeypatch.setattr(command, "train", Trainings())
    assert run_suite(SweepSuite, options(tmp_path, three, repeats=1), repository=REPOSITORY) == 0
    page = (tmp_path / "out" / "sweep.md").read_text()
    assert page.split("## Cells")[1] == snapshot
    assert "a: out of memory" in capsys.readouterr().out


def test_a_training_beyond_its_limit_is_ended_with_all_its_processes(tmp_path):
    log = tmp_path / "log.txt"
    ending = train(GROUPS, log=log, limit_sec=3, cwd=tmp_path, device="cpu")
    child = int(log.read_text())
    assert ending.state == State.TIMED_OUT
    assert ending.message == f"did not end within 3 s; its last line: {child}"
    assert has_ended(child)


@pytest.mark.long
def test_a_sweep_that_is_terminated_ends_its_training_first(tmp_path, signals_of_a_script):
    log, stop = tmp_path / "log.txt", threading.Timer(3, os.kill, (os.getpid(), signal.SIGTERM))
    stop.start()
    try:
        with pytest.raises(Terminated):
            train(GROUPS, log=log, limit_sec=60, cwd=tmp_path, device="cpu")
    finally:  # also if the test is skipped where no process may start
        stop.cancel()
    assert has_ended(int(log.read_text()))


def has_ended(process: int) -> bool:
    return not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("code", "text", "state", "message"),
    [
        (2, "error: --steps must be whole\n", State.REFUSED, "--steps must be whole"),
        (1, TORCHRUN, State.REFUSED, TORCHRUN.splitlines()[0].removeprefix("error: ")),
        (3, "error: the loss is nan at step 3\n", State.FAILED, "the loss is nan at step 3"),
        (1, "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried\n[rank0]: more\n", State.OUT_OF_MEMORY, None),
        (1, "step 1\nTraceback\nMemoryError\n", State.OUT_OF_MEMORY, "exit code 1: MemoryError"),
        (1, "Traceback\nKeyError: 'x'\nsome warning\n", State.FAILED, "exit code 1: KeyError: 'x'"),
        (-9, "step 3\n", State.FAILED, "was killed with SIGKILL, as the system does when memory runs out"),
        (1, "", State.FAILED, "exit code 1: it printed nothing"),
    ],
)
def test_the_state_and_the_reason_come_from_exit_code_and_output(code, text, state, message):
    assert ended_with(code, text) == (state, message or f"exit code 1: {text.splitlines()[0]}")


def planned(name: str, devices: int = 1) -> PlannedCell:
    return PlannedCell(name=name, devices=devices, launcher="torchrun", flags=())


def judged(*turns: Turn, kind: str = "same training", losses: Any = {}) -> Compared:  # noqa: B006 - only read
    """A cell of two devices beside a baseline of one, whose two repeats have speeds of 100 and 50."""
    base = [made_up("one", 1, speed=100), made_up("one", 2, speed=50)]
    cells = (cell_of(planned("one"), base, price=None), cell_of(planned("two", 2), turns, price=None))
    return compared(ComparisonPlan(name="p", kind=kind, baseline="one", cells=("two",)), *cells, losses=losses)


def test_figures_of_a_comparison_are_paired_by_repeat_and_those_of_other_work_are_unknown():
    second, other = made_up("two", 2, speed=100), made_up("two", 1, speed=150, work=WORK | {"global batch": 16.0})
    beside = judged(made_up("two", 1, speed=150), second)
    assert (beside.speed_up.values, beside.speed_up.median, beside.efficiency) == ([1.5, 2.0], 1.75, 0.875)
    assert judged(made_up("two", 1, speed=None, state=State.FAILED, message="x"), second).speed_up.values == [2.0]
    beside = judged(other)
    assert (beside.comparable, beside.speed_up, beside.loss_difference) == (False, None, None)
    assert "global batch" in beside.same_work
    weak = judged(other, kind="weak scaling")
    assert (weak.comparable, weak.speed_up.median, weak.loss_difference) == (True, 1.5, None)


def test_the_largest_difference_is_over_all_steps_and_repeats_and_unknown_without_the_same_steps():
    """Wrong if only the last step counts, where strategies may meet again."""
    turns = [made_up("two", repeat, speed=1) for repeat in (1, 2)]
    losses = {("one", n): {1: 9.0, 2: 8.0} for n in (1, 2)}
    losses |= {("two", 1): {1: 9.25, 2: 8.0}, ("two", 2): {1: 9, 2: 7.5}}
    for changed, largest in (({}, 0.5), ({("two", 2): {1: 9.0, 2: 8.0}}, 0.25), ({("two", 2): {1: 9.0}}, None)):
        assert judged(*turns, losses=losses | changed).largest_loss_difference == largest
    assert judged(*turns, losses=losses, kind="weak scaling").largest_loss_difference is None


def test_a_target_that_one_turn_missed_has_no_time():
    turns = [made_up("one", repeat, speed=100, time_to_target_sec=time) for repeat, time in ((1, 3.0), (2, None))]
    assert cell_of(planned("one"), turns[:1], price=None).time_to_target_sec.median == 3.0
    assert cell_of(planned("one"), turns, price=None).time_to_target_sec is None

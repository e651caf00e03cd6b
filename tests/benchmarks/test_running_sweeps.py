"""A sweep runs, is interrupted, continues, and records what failed."""

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from small_run import REPOSITORY, TOKENS, command_line, random_ids, write_data, write_recipe, write_tokens
from suite_commands import benchmark

from dsgpt.benchmarks import sweep as command
from dsgpt.benchmarks.frame import run_suite
from dsgpt.benchmarks.sweep import Ending, SweepOptions, SweepSuite, cell_of, compared, ended_with, train
from dsgpt.benchmarks.sweep_cells import Cell as SweepedCell
from dsgpt.benchmarks.sweep_cells import ComparisonPlan
from dsgpt.common.command_line import Terminated
from dsgpt.common.errors import UserError
from dsgpt.config.options import TRAINING_FACTS, WORK_FACTS
from dsgpt.record.suites import SCHEMA_VERSION, State, SweepCell, Turn, read_sweep

# Descriptions of sweeps of a small model, and turns with made-up figures.

STEPS = 6
WORK = dict.fromkeys((*WORK_FACTS, *TRAINING_FACTS), "as the others") | {
    "global batch": 8.0,
    "tokens": 768.0,
    "precision": "fp32",
}


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
    shorter = SweepOptions(
        output=folder / "out" / "sweep.json", suite=str(suite), repeats=2, steps=STEPS, seq_length=16
    )
    return replace(shorter, **changes)


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
ALL = range(1, STEPS + 1)
GROUPS = ["bash", "-c", "setsid sleep 60 & echo $!; wait"]
"""A launcher whose worker has a session of its own, as those of ``torchrun``."""


def test_a_real_sweep_from_command_to_page_and_a_repeat_more(tmp_path, monkeypatch, capsys):
    """Two cells, one of them under ``torchrun``. The second sweep has a repeat more, and finds the earlier turns."""
    file = write_description(tmp_path, [cell("one"), cell("two", run_type="ddp", devices=2)])
    words = ["run", "--suite", file.name, "--steps", "6", "--seq_length", "16", "--output", "out/sweep.json"]
    words += ["--profile_comm", "1"]
    assert benchmark(*words, "--repeats", "1", cwd=tmp_path).returncode == 0
    first = read_sweep(tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    chosen = options(Path(), file.name, target_loss=9.0, price=3600.0, profile_comm=1)
    assert run_suite(SweepSuite, chosen, repository=REPOSITORY) == 0
    assert "2 of 4 turns have results from before; 2 left" in capsys.readouterr().out
    sweep = read_sweep(tmp_path / "out")
    one, two = sweep.cells
    assert [replace(cell.turns[0], time_to_target_sec=None) for cell in (one, two)] == [
        cell.turns[0] for cell in first.cells
    ]
    assert {turn.state for cell in sweep.cells for turn in cell.turns} == {State.DONE}
    assert sorted(turn.place for cell in sweep.cells for turn in cell.turns) == [1, 2, 3, 4]
    assert one.sent_bytes_per_step == 0 < two.sent_bytes_per_step
    assert one.communication_share.values == [0.0, 0.0]
    assert all(0 < share < 1 for share in two.communication_share.values)
    require_costs(one, two)
    (beside,) = sweep.comparisons[0].cells
    assert beside.same_work == "same work: yes"
    ratios = [ours.tokens_per_sec / theirs.tokens_per_sec for ours, theirs in zip(two.turns, one.turns, strict=True)]
    assert beside.speed_up.values == pytest.approx(ratios)
    assert beside.efficiency == pytest.approx(beside.speed_up.median / 2)
    assert abs(beside.loss_difference) < 2e-4
    distances = [
        abs(losses(tmp_path, "one", n)[step] - losses(tmp_path, "two", n)[step]) for n in (1, 2) for step in ALL
    ]
    assert beside.largest_loss_difference == max(distances) < 2e-4
    page = (tmp_path / "out" / "sweep.md").read_text()
    assert f"| {one.final_loss:.4f} |" in page
    assert "| communication share |" in page
    assert f"| {beside.largest_loss_difference:.2g} |" in page
    assert "None: every turn trained to its end." in page
    assert not list(tmp_path.glob("out/work/turns/*/*/run/step-*"))
    assert benchmark("run", "--table-from", "out/sweep.json", "--page", "again.md", cwd=tmp_path).returncode == 0
    assert (tmp_path / "again.md").read_text() == page


def require_costs(one: SweepCell, two: SweepCell) -> None:
    """A device second costs 1: a price of 3,600 an hour; the second cell has two devices."""
    assert len(two.model_state_bytes_by_rank) == 2
    assert one.joules is None
    assert one.cost.values == pytest.approx([turn.train_time_sec for turn in one.turns])
    assert two.cost.values == pytest.approx([2 * turn.train_time_sec for turn in two.turns])
    reached = zip(one.time_to_target_sec.values, one.turns, strict=True)
    assert all(0 < seconds < turn.train_time_sec for seconds, turn in reached)


def losses(folder: Path, name: str, repeat: int) -> dict[int, float]:
    """The loss of every step of a turn, as its training wrote it."""
    text = (folder / f"out/work/turns/{repeat}/{name}/run/metrics.jsonl").read_text()
    return {line["step"]: line["loss"] for line in map(json.loads, text.splitlines()) if "loss" in line}


class Trainings:
    """Stands for the launched trainings: endings by cell, and an interruption before the n-th."""

    def __init__(self, endings: dict[str, Ending], *, interrupt_at: int | None = None) -> None:
        self._endings, self._interrupt_at = endings, interrupt_at
        self.begun: list[str] = []

    def __call__(self, words, *, log: Path, **more):
        self.begun.append(log.parent.name)
        if len(self.begun) == self._interrupt_at:
            raise KeyboardInterrupt
        return self._endings[log.parent.name]


def failed(state: State, message: str) -> Ending:
    return Ending(state=state, message=message, seconds=1.0)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    return write_description(tmp_path, [cell("a"), cell("b"), cell("c")])


ENDINGS = {
    "a": failed(State.OUT_OF_MEMORY, "exit code 1: MemoryError"),
    "b": failed(State.TIMED_OUT, "did not end within 3 s; its last line: step 2 | loss"),
    "c": failed(State.REFUSED, "global batch 8 is not divisible by 3 ranks"),
}


def test_an_interrupted_sweep_repeats_only_the_turn_that_was_interrupted(three, tmp_path, monkeypatch):
    whole, cut, rest = Trainings(ENDINGS), Trainings(ENDINGS, interrupt_at=5), Trainings(ENDINGS)
    monkeypatch.setattr(command, "train", whole)
    assert run_suite(SweepSuite, options(tmp_path / "whole", three), repository=REPOSITORY) == 0
    monkeypatch.setattr(command, "train", cut)
    with pytest.raises(KeyboardInterrupt):
        run_suite(SweepSuite, options(tmp_path, three), repository=REPOSITORY)
    assert not (tmp_path / "out" / "sweep.json").exists()
    monkeypatch.setattr(command, "train", rest)
    assert run_suite(SweepSuite, options(tmp_path, three), repository=REPOSITORY) == 0
    assert cut.begun[:4] + rest.begun == whole.begun
    assert [read_sweep(folder / "out").cells for folder in (tmp_path, tmp_path / "whole")] == [
        read_sweep(tmp_path / "out").cells
    ] * 2


def test_turns_with_other_settings_recipes_data_or_sources_are_refused(three, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "train", Trainings(ENDINGS))
    run_suite(SweepSuite, options(tmp_path, three), repository=REPOSITORY)
    with pytest.raises(UserError, match=r"holds turns of a sweep with other settings, which cannot be compared"):
        run_suite(SweepSuite, options(tmp_path, three, steps=7), repository=REPOSITORY)
    recipe = tmp_path / "recipe.json"
    before = recipe.read_text()
    recipe.write_text(before.replace('"stage": 1', '"stage": 2'))
    with pytest.raises(UserError, match=r"with other recipes, which"):
        run_suite(SweepSuite, options(tmp_path, three), repository=REPOSITORY)
    recipe.write_text(before)
    train_data = (tmp_path / "train.bin").read_bytes()
    write_tokens(tmp_path / "train.bin", random_ids(TOKENS, seed=9))
    with pytest.raises(UserError, match=r"with other data, which"):
        run_suite(SweepSuite, options(tmp_path, three), repository=REPOSITORY)
    write_tokens(tmp_path / "train.bin", np.frombuffer(train_data, dtype="<u2"))
    assert run_suite(SweepSuite, options(tmp_path, three), repository=REPOSITORY) == 0
    (tmp_path / "edited.py").write_text("pass")
    monkeypatch.setattr(command, "PACKAGE", tmp_path)
    with pytest.raises(UserError, match=r"with other sources, .* give another --output, or remove the folder"):
        run_suite(SweepSuite, options(tmp_path, three), repository=REPOSITORY)


def test_failures_are_results_with_the_reason_on_the_page(three, tmp_path, monkeypatch, snapshot, capsys):
    monkeypatch.setattr(command, "train", Trainings(ENDINGS))
    assert run_suite(SweepSuite, options(tmp_path, three, repeats=1), repository=REPOSITORY) == 0
    sweep = read_sweep(tmp_path / "out")
    assert {cell.name: (cell.turns[0].state, cell.tokens_per_sec) for cell in sweep.cells} == {
        "a": (State.OUT_OF_MEMORY, None),
        "b": (State.TIMED_OUT, None),
        "c": (State.REFUSED, None),
    }
    page = (tmp_path / "out" / "sweep.md").read_text()
    assert page.split("## Cells")[1] == snapshot
    assert "a: out of memory" in capsys.readouterr().out


def test_a_training_without_memory_says_so(tmp_path):
    code = "print('step 1'); bytearray(1 << 60)"
    ending = train([sys.executable, "-c", code], log=tmp_path / "log.txt", limit_sec=60, cwd=tmp_path, device="cpu")
    assert (ending.state, ending.message) == (State.OUT_OF_MEMORY, "exit code 1: MemoryError")


def test_a_training_beyond_its_limit_is_ended_with_all_its_processes(tmp_path):
    log = tmp_path / "log.txt"
    ending = train(GROUPS, log=log, limit_sec=3, cwd=tmp_path, device="cpu")
    child = int(log.read_text())
    assert ending.state == State.TIMED_OUT
    assert ending.message == f"did not end within 3 s; its last line: {child}"
    assert has_ended(child)


def test_a_sweep_that_is_terminated_ends_its_training_first(tmp_path, signals_of_a_script):
    log, over = tmp_path / "log.txt", threading.Event()

    def terminate_when_it_runs() -> None:
        while not over.wait(0.05):
            if log.exists() and log.read_text().endswith("\n"):
                os.kill(os.getpid(), signal.SIGTERM)
                return

    stop = threading.Thread(target=terminate_when_it_runs)
    stop.start()
    try:
        with pytest.raises(Terminated):
            train(GROUPS, log=log, limit_sec=60, cwd=tmp_path, device="cpu")
    finally:  # also if the test is skipped where no process may start
        over.set()
        stop.join()
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
        (1, "Traceback\nKeyError: 'x'\nsome warning\n", State.FAILED, "exit code 1: KeyError: 'x'"),
        (-9, "step 3\n", State.FAILED, "was killed with SIGKILL, as the system does when memory runs out"),
        (1, "", State.FAILED, "exit code 1: it printed nothing"),
    ],
)
def test_the_state_and_the_reason_come_from_exit_code_and_output(code, text, state, message):
    assert ended_with(code, text) == (
        state,
        message or "exit code 1: [rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried",
    )


def planned(name: str, devices: int) -> SweepedCell:
    return SweepedCell(name=name, devices=devices, launcher="torchrun", flags=())


def test_figures_of_a_comparison_are_paired_by_repeat_and_unknown_stays_unknown():
    base = cell_of(planned("one", 1), [made_up("one", 1, speed=100), made_up("one", 2, speed=50)], price=None)
    turns = [made_up("two", 1, speed=150), made_up("two", 2, speed=100, final_loss=None)]
    other = cell_of(planned("two", 2), turns, price=None)
    assert (other.cost, other.joules, other.peak_memory_bytes_rank0) == (None, None, None)
    plan = ComparisonPlan(name="strong", kind="same training", baseline="one", cells=("two",))
    beside = compared(plan, base, other, losses={})
    assert beside.speed_up.values == [1.5, 2.0]
    assert (beside.speed_up.median, beside.efficiency) == (1.75, 0.875)


def test_the_largest_difference_is_over_all_steps_and_repeats_and_unknown_without_the_same_steps():
    """Wrong if only the last step counts, where strategies may meet again."""
    cells = [cell_of(planned(name, 1), [made_up(name, n, speed=1) for n in (1, 2)], price=None) for name in ("a", "b")]
    plan = ComparisonPlan(name="strong", kind="same training", baseline="a", cells=("b",))
    losses = {("a", n): {1: 9.0, 2: 8.0} for n in (1, 2)} | {("b", 1): {1: 9.25, 2: 8.0}, ("b", 2): {1: 9.0, 2: 7.5}}
    for changed, largest in (({}, 0.5), ({("b", 2): {1: 9.0, 2: 8.0}}, 0.25), ({("b", 2): {1: 9.0}}, None)):
        beside = compared(plan, *cells, losses=losses | changed)
        assert beside.largest_loss_difference == largest
    weak = compared(replace(plan, kind="weak scaling"), *cells, losses=losses)
    assert weak.largest_loss_difference is None


def test_a_repeat_in_which_one_failed_has_no_speed_up():
    base = cell_of(planned("one", 1), [made_up("one", 1, speed=100), made_up("one", 2, speed=50)], price=None)
    broken = made_up("two", 1, speed=None, state=State.FAILED, message="exit code 1: KeyError")
    other = cell_of(planned("two", 2), [broken, made_up("two", 2, speed=100)], price=None)
    plan = ComparisonPlan(name="strong", kind="same training", baseline="one", cells=("two",))
    beside = compared(plan, base, other, losses={})
    assert beside.speed_up.values == [2.0]


def test_a_target_that_one_turn_missed_has_no_time():
    reached, missed = (
        made_up("one", repeat, speed=100, time_to_target_sec=time) for repeat, time in ((1, 3.0), (2, None))
    )
    assert cell_of(planned("one", 1), [reached], price=None).time_to_target_sec.median == 3.0
    assert cell_of(planned("one", 1), [reached, missed], price=None).time_to_target_sec is None


def test_cells_whose_records_show_other_work_have_no_speed_up():
    base = cell_of(planned("one", 1), [made_up("one", 1, speed=100)], price=None)
    other = cell_of(planned("two", 2), [made_up("two", 1, speed=150, work=WORK | {"global batch": 16.0})], price=None)
    plan = ComparisonPlan(name="strong", kind="same training", baseline="one", cells=("two",))
    beside = compared(plan, base, other, losses={})
    assert (beside.comparable, beside.speed_up, beside.loss_difference) == (False, None, None)
    assert "global batch" in beside.same_work
    weak = compared(replace(plan, kind="weak scaling"), base, other, losses={})
    assert (weak.comparable, weak.speed_up.median, weak.loss_difference) == (True, 1.5, None)


def test_a_record_of_another_schema_is_refused(three, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "train", Trainings(ENDINGS))
    run_suite(SweepSuite, options(tmp_path, three, repeats=1), repository=REPOSITORY)
    file = tmp_path / "out" / "sweep.json"
    sweep = read_sweep(file)
    file.write_text(json.dumps(asdict(replace(sweep, schema_version="2.0"))))
    with pytest.raises(UserError, match=rf"has schema 2.0, and this program knows {SCHEMA_VERSION}"):
        read_sweep(file)
    file.write_text(json.dumps(asdict(sweep) | {"seed": "x"}))
    with pytest.raises(UserError, match=r"cannot be read as the record of a sweep: seed"):
        read_sweep(file)

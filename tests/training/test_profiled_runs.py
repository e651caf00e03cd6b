"""Runs whose steps are profiled: communication is measured, every rank writes a trace, and the training is the same."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from run_folders import record
from small_run import command_line
from training_runs import finished, read_lines, read_record, train, write_recipe

from dsgpt.training import measurements
from dsgpt.training.command import train as train_here

RANGES = {"data", "train_step", "forward", "backward", "optimizer"}
STEPS = ("--max_train_steps", "10", "--steps_per_print", "3", "--max_val_steps", "1", "--no_inference")


def named_ranges(run: Path, rank: int) -> dict[str, list[dict[str, Any]]]:
    """The ranges of the program in a trace, by name; the file is JSON in gzip."""
    with gzip.open(run / "profile" / f"rank{rank}.json.gz") as file:
        events = json.load(file)["traceEvents"]
    found = [event for event in events if event.get("cat") == "user_annotation" and event["name"] in RANGES]
    return {name: [event for event in found if event["name"] == name] for name in RANGES}


def inside(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a range lies in another; times are in microseconds."""
    return other["ts"] <= one["ts"] and one["ts"] + one["dur"] <= other["ts"] + other["dur"]


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """A run of ZeRO-1 on two ranks, profiled, and the same run without."""
    folder = tmp_path_factory.mktemp("profiled")
    recipe = write_recipe(folder / "recipe.json")
    flags = (*STEPS, "--grad_accum_steps", "2")
    plain, profiled = folder / "plain", folder / "profiled"
    finished(train(plain, corpus, recipe, *flags, ranks=2))
    finished(train(profiled, corpus, recipe, *flags, "--profile_comm", "2", "--profile", "2", ranks=2))
    return plain, profiled


def test_profiling_does_not_change_the_training(runs):
    plain, profiled = ([(line["loss"], line["grad_norm"]) for line in read_lines(run)] for run in runs)
    assert plain == profiled
    assert len(plain) == 10


def test_profiled_steps_are_left_out_of_speed(runs):
    """Three of warm-up, two for communication, two of the profiler's own warm-up and two traced."""
    plain, profiled = ([line["step"] for line in read_lines(run) if not line["warm_up"]] for run in runs)
    assert plain == [4, 5, 6, 7, 8, 9, 10]
    assert profiled == [10]


def test_what_communication_costs(runs):
    plain, profiled = runs
    assert not (plain / "communication.json").exists()
    assert read_record(plain)["summary"]["communication_share"] is None
    measured = json.loads((profiled / "communication.json").read_text(encoding="utf-8"))
    assert (measured["first_step"], measured["steps"], measured["backend"]) == (4, 2, "gloo")
    assert read_record(profiled)["summary"]["communication_share"] == measured["exposed_share"]
    cost = read_record(profiled)["cost"]["communication_per_step"]
    calls = {row["op"]: row["calls"] for row in cost["by_op"]}
    for rank, figures in enumerate(measured["ranks"]):
        assert figures["rank"] == rank
        assert {row["op"]: row["calls"] for row in figures["by_op"]} == calls
        assert sum(row["ring_bytes"] for row in figures["by_op"]) == cost["ring_bytes_by_rank"][rank]
        for row in figures["by_op"]:
            assert row["bus_bytes_per_sec"] == pytest.approx(row["ring_bytes"] / row["time_sec"])
        assert 0 < figures["communication_sec"] < figures["step_time_sec"]
        assert figures["communication_sec"] <= sum(row["time_sec"] for row in figures["by_op"]) + 1e-9
        assert figures["exposed_sec"] + figures["hidden_sec"] == pytest.approx(figures["communication_sec"])
    log = (profiled / "train.log").read_text(encoding="utf-8")
    assert "communication of steps 4 to 5: exposed" in log
    assert "profile of steps 8 to 9 on rank 0" in log


@pytest.mark.parametrize("rank", [0, 1])
def test_the_traces_of_several_ranks(runs, rank):
    found = named_ranges(runs[1], rank)
    assert {name: len(ranges) for name, ranges in found.items()} == {
        "train_step": 2,
        "data": 4,
        "forward": 4,
        "backward": 4,
        "optimizer": 4,
    }
    steps = found.pop("train_step")
    assert all(any(inside(one, step) for step in steps) for ranges in found.values() for one in ranges)


def test_a_baseline(finished_run, tmp_path):
    """It waits for nobody. A run that is too short for the trace says so and does no harm."""
    run = tmp_path / "run"
    flags = {"checkpoint_path": run, "max_train_steps": 4, "profile_comm": 1, "profile": 2}
    assert train_here(command_line(finished_run, **flags)) == 0
    assert record(run)["summary"]["communication_share"] == 0
    assert "--profile: the run ended before" in (run / "train.log").read_text()
    flags |= {"max_train_steps": 5, "profile_comm": 0, "overwrite": True}
    assert train_here(command_line(finished_run, **flags)) == 0
    assert "--profile: too few steps were left" in (run / "train.log").read_text()
    flags |= {"max_train_steps": 7, "profile_comm": 0, "overwrite": True}
    assert train_here(command_line(finished_run, **flags)) == 0
    assert not (run / "communication.json").exists()
    assert {name: len(ranges) for name, ranges in named_ranges(run, 0).items()} == dict.fromkeys(RANGES, 2)
    assert train_here(command_line(finished_run, checkpoint_path=run, overwrite=True)) == 0
    assert not (run / "profile").exists()


def test_a_trace_that_cannot_be_written_does_not_end_the_run(finished_run, tmp_path, monkeypatch):
    run = tmp_path / "run"
    monkeypatch.setattr(measurements, "trace_file", lambda rank: "x" * 300)
    assert train_here(command_line(finished_run, checkpoint_path=run, max_train_steps=7, profile=3)) == 0
    assert "--profile: rank 0 wrote no trace: File name too long" in (run / "train.log").read_text()


def test_too_many_steps_are_refused(finished_run, tmp_path, capsys):
    flags = {"checkpoint_path": tmp_path / "run", "profile_comm": 21, "profile": 1000}
    assert train_here(command_line(finished_run, **flags)) == 2
    errors = capsys.readouterr().err
    for flag in ("--profile_comm must be at most 20, not 21", "--profile must be at most 20, not 1000"):
        assert flag in errors

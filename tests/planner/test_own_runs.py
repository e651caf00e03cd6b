"""Runs that were held against a plan correct the next plan of their machine."""

import json
import os
from dataclasses import replace

import pytest

from dsgpt.planner.hardware import find_gpu
from dsgpt.planner.own_runs import OwnRun, corrected, own_runs
from dsgpt.planner.rates import datasheet_machine

MACHINE = datasheet_machine(find_gpu("h100-80gb"))
HARDWARE = {"device": "cuda", "gpu_name": "NVIDIA H100 80GB HBM3", "gpu_memory_bytes": 85_000_000_000}
PLAN = {"machine": MACHINE.name, "corrected_by": 1.0, "planned_tokens_per_sec": 1000.0, "tokens_per_sec": 800.0}


@pytest.fixture
def write(tmp_path):
    """Writes the record of a run, each newer than the last."""
    times = iter(range(1, 10))

    def record(name, *, hardware=None, **plan):
        path = tmp_path / name / "training_metrics.json"
        path.parent.mkdir()
        path.write_text(json.dumps({"hardware": HARDWARE | (hardware or {}), "plan": PLAN | plan}))
        os.utime(path, (age := next(times), age))
        return path

    return record


def test_the_newest_runs_of_the_machine_count(tmp_path, write):
    for number, measured in enumerate([100.0, 700.0, 800.0, 900.0]):
        write(f"run {number}", tokens_per_sec=measured)
    write("on another GPU", hardware={"gpu_name": "NVIDIA A100-SXM4-80GB"})
    write("on the CPU", hardware={"device": "cpu"})
    write("planned for another", machine="a100-80gb")
    write("too short", tokens_per_sec=None)
    write("torn").write_text("{")
    assert [run.measured for run in own_runs(tmp_path, MACHINE)] == [900.0, 800.0, 700.0]
    assert own_runs(tmp_path / "nowhere", MACHINE) == []


def test_they_make_everything_as_much_slower(tmp_path, write):
    """A plan that was corrected already is compared without its correction."""
    write("first", tokens_per_sec=800.0)
    write("second", tokens_per_sec=800.0, planned_tokens_per_sec=800.0, corrected_by=1.25)
    runs = own_runs(tmp_path, MACHINE)
    assert runs == [OwnRun(planned=1000.0, measured=800.0)] * 2
    slower = corrected(MACHINE, runs)
    assert slower.corrected_by == 1.25
    for name in ("rates", "slowest", "fastest"):
        assert getattr(slower, name) == getattr(MACHINE, name).scaled(compute=1.25, communication=1.25)
    assert slower.basis.endswith("corrected by your last 2 runs here: planned 1,000, measured 800 tokens/s")
    assert corrected(MACHINE, []) == MACHINE


def test_the_median_of_the_runs_counts():
    runs = [OwnRun(planned=1000.0, measured=measured) for measured in (500.0, 800.0, 820.0)]
    faster = corrected(replace(MACHINE, basis="x"), runs)
    assert faster.corrected_by == 1.25
    assert faster.basis == "x; corrected by your last 3 runs here: planned 1,000, measured 500 to 820 tokens/s"

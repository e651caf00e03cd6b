"""Runs that were held against a plan correct the next plan of their machine."""

import json
import os
from dataclasses import replace

import pytest

from dsgpt.model.config import PRESETS
from dsgpt.planner.hardware import find_gpu
from dsgpt.planner.own_runs import MOST, OwnRun, corrected, own_runs
from dsgpt.planner.rates import datasheet_machine
from dsgpt.planner.step_time import likely_sec

MACHINE = datasheet_machine(find_gpu("h100-80gb"))
HARDWARE = {"device": "cuda", "gpu_name": "NVIDIA H100 80GB HBM3", "gpu_memory_bytes": 85_000_000_000}
PLAN = {"fingerprint": MACHINE.fingerprint, "planned_tokens_per_sec": 1000.0, "tokens_per_sec": 800.0}


@pytest.fixture
def write(tmp_path):
    """Writes the record of a run, each newer than the last."""
    times = iter(range(1, 20))

    def record(name, *, hardware=None, others=0.0, **plan):
        path = tmp_path / name / "training_metrics.json"
        path.parent.mkdir()
        segments = [{"cpu_share_of_others": 0.0}, {"cpu_share_of_others": others}]
        values = {"hardware": HARDWARE | (hardware or {}), "plan": PLAN | plan, "segments": segments}
        path.write_text(json.dumps(values))
        os.utime(path, (age := next(times), age))
        return path

    return record


def test_the_newest_runs_of_the_machine_count(tmp_path, write):
    for number, measured in enumerate([100.0, 700.0, 800.0, 900.0]):
        write(f"run {number}", tokens_per_sec=measured)
    write("on another GPU", hardware={"gpu_name": "NVIDIA A100-SXM4-80GB"})
    write("on the CPU", hardware={"device": "cpu"})
    write("planned with other rates", fingerprint="0" * 12)
    write("with other settings", planned_tokens_per_sec=None)
    write("beside other programs", others=0.5)
    write("too short", tokens_per_sec=None)
    write("torn").write_text("{")
    assert [run.measured for run in own_runs(tmp_path, MACHINE)] == [900.0, 800.0, 700.0]
    assert own_runs(tmp_path / "nowhere", MACHINE) == []


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("zero1", {"run_type": "fsdp", "world_size": 8}),
        ("zero3_offload", {"run_type": "optimized", "world_size": 8}),
        ("tensor", {"run_type": "optimized", "world_size": 2}),
    ],
)
@pytest.mark.parametrize("truth", [1.5, 0.6])
def test_a_correction_settles_at_the_speed_of_the_runs(setup, recipe, changes, truth):
    """Each run is compared with the plan before corrections, so that they do not grow from run to run."""
    planned = setup(recipe, model=PRESETS["xl"], seq_length=1024, micro_batch_size=16, **changes)
    true_sec, machine = truth * likely_sec(planned, MACHINE), MACHINE
    for _ in range(4):
        run = OwnRun(planned=1 / likely_sec(planned, machine.uncorrected or machine), measured=1 / true_sec)
        machine = corrected(MACHINE, [run] * 3)
        assert machine.fingerprint == MACHINE.fingerprint
    assert likely_sec(planned, machine) == pytest.approx(true_sec, rel=0.05)  # Python between layers is no rate


def test_the_median_of_the_runs_counts_within_bounds():
    runs = [OwnRun(planned=1000.0, measured=measured) for measured in (500.0, 800.0, 820.0)]
    slower = corrected(replace(MACHINE, basis="x"), runs)
    assert slower.rates.memory == MACHINE.rates.memory / 1.25
    assert slower.basis == "x; corrected by your last 3 runs here: planned 1,000, measured 500 to 820 tokens/s"
    far = corrected(MACHINE, [OwnRun(planned=1000.0, measured=1.0)])
    assert far.rates.memory == MACHINE.rates.memory / MOST
    assert corrected(MACHINE, []) == MACHINE

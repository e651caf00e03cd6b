"""``--measured``: records of sweeps and of ``benchmark.py plan`` are read as setups and fitted to."""

import json

import pytest
from calibration_record import RECORD
from small_run import REPOSITORY

from dsgpt.common.errors import UserError
from dsgpt.planner.fitting import fit
from dsgpt.planner.rates import Calibration, Ceilings, calibrated_machine
from dsgpt.planner.request import read_measured
from dsgpt.planner.step_time import predict_step

MODEL = {"n_layer": 4, "n_head": 4, "n_embd": 256, "vocab_size": 8192}


def result(run_type: str, ranks: int, seconds: float, *, fit: bool = True) -> dict:
    """A result of ``benchmark.py plan``."""
    work = {"model": {"name": "4 x 256"} | MODEL, "seq_length": 256, "micro_batch_size": 4, "run_type": run_type}
    work |= {"gradient_accumulation_steps": 1, "precision": "fp32", "activation_checkpointing": False}
    work |= {"recipe": "zero1.json", "changes": {"zero_optimization": {"reduce_bucket_size": 5_000_000}}}
    return {"fit": fit, "work": work, "ranks": ranks, "step_seconds": {"measured": seconds}}


def cell(name: str, run_type: str, devices: int, tokens_per_sec: float) -> dict:
    """A cell of a sweep."""
    work = {f"model {field}": float(size) for field, size in MODEL.items()}
    work |= {"model block_size": 256.0, "global batch": 8.0, "sequence length": 256.0, "precision": "fp32"}
    turn = {"cell": name, "repeat": 1, "place": 1, "state": "done", "message": None, "seconds": 9.0, "work": work}
    speed = {
        "median": tokens_per_sec,
        "smallest": tokens_per_sec,
        "largest": tokens_per_sec,
        "values": [tokens_per_sec],
    }
    flags = ["--run_type", run_type, "--deepspeed_config", "ds_configs/zero1.json", "--micro_batch_size_per_gpu", "4"]
    known = {"name": name, "devices": devices, "launcher": "python", "flags": flags}
    return known | {"turns": [turn], "tokens_per_sec": speed}


def sweep(*cells: dict) -> dict:
    head = {"schema_version": "1.0", "timestamp_utc": "2026-11-22T18:00:00+00:00", "git_commit": None, "suite": "s"}
    head |= {"env": {}, "hardware": {}, "seed": 1, "repeats": 1, "limit_sec": 9.0, "target_loss": None}
    return head | {"price_per_device_hour": None, "seconds": 9.0, "cells": list(cells), "comparisons": []}


@pytest.fixture
def calibration(tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(RECORD))
    return path


def measured(path, record):
    path.write_text(json.dumps(record))
    ceilings = [Ceilings(**each) for each in RECORD["ceilings"]]
    calibration = Calibration(**RECORD | {"ceilings": ceilings})
    return read_measured(
        (path,), lambda devices: calibrated_machine(calibration, devices=devices), repository=REPOSITORY
    )


def test_cells_of_a_plan_suite_and_of_a_sweep_are_the_setups_that_ran(tmp_path):
    alone, ddp = measured(tmp_path / "plan.json", {"cells": [result("baseline", 1, 0.5), result("ddp", 2, 0.7)]})
    assert (alone.setup.world_size, ddp.setup.world_size) == (1, 2)
    assert ddp.setup.model.n_embd == 256
    assert ddp.setup.recipe.zero_optimization.reduce_bucket_size == 5_000_000
    assert (alone.machine.rates.bus, ddp.seconds) == ({2: 1e9}, 0.7)
    record = sweep(cell("baseline", "baseline", 1, 4096.0), cell("ddp", "ddp", 2, 8192.0))
    alone, ddp = measured(tmp_path / "sweep.json", record)
    assert (alone.seconds, ddp.seconds) == (8 * 256 / 4096, 8 * 256 / 8192)
    assert (alone.setup.gradient_accumulation_steps, ddp.setup.gradient_accumulation_steps) == (2, 1)


def test_cells_that_only_test_are_not_fitted(tmp_path):
    record = {"cells": [result("baseline", 1, 0.5), result("ddp", 2, 0.7, fit=False)]}
    assert len(measured(tmp_path / "plan.json", record)) == 1
    with pytest.raises(UserError, match=r"has no measured step of a setup that the planner knows"):
        measured(tmp_path / "plan.json", {"cells": [result("ddp", 2, 0.7, fit=False)]})


def test_a_plan_uses_the_fitted_rates(plan, tmp_path, calibration):
    path = tmp_path / "plan.json"
    step = measured(path, {"cells": [result("baseline", 1, 1.0)]})[0]
    factors = fit([step])
    assert predict_step(step.setup, factors.applied(step.machine)).seconds == pytest.approx(step.seconds)
    line = f"--machine {calibration} --gpus 1 --run_type baseline --model_size demo --tokens 1e6 --json"
    plain, fitted = (json.loads(plan(f"{line} {more}")) for more in ("", f"--measured {path}"))
    for part in ("forward", "backward", "head and loss"):
        assert fitted["step"]["parts"][part] == pytest.approx(
            factors.compute["fp32"] * plain["step"]["parts"][part], rel=0.01
        )
    assert "fitted to measured steps (1)" in fitted["machine"]["rates"]


def test_the_committed_sweep_is_read(plan, calibration):
    sweep = REPOSITORY / "checkpoint" / "reference" / "cpu-2-cores" / "sweep-scaling.json"
    line = f"--machine {calibration} --gpus 2 --model_size demo --tokens 1e6 --measured {sweep} --json"
    assert "fitted to measured steps (7)" in json.loads(plan(line))["machine"]["rates"]


def test_steps_in_a_precision_without_rates_are_not_fitted(tmp_path):
    bf16 = result("ddp", 2, 0.7)
    bf16["work"]["precision"] = "bf16"
    assert len(measured(tmp_path / "plan.json", {"cells": [result("baseline", 1, 0.5), bf16]})) == 1


@pytest.mark.parametrize("cells", [[{"fit": True, "step_seconds": {"measured": 1.0}}], [3], {"fit": True}])
def test_damaged_records_are_refused_in_a_line(tmp_path, cells):
    with pytest.raises(UserError, match=r"plan.json: a cell is not as this program writes it \(\w+: [^\n]+\)$"):
        measured(tmp_path / "plan.json", {"cells": cells})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"matrix_flops_per_sec": {"fp32": {"256": {"1024": 0.0}}}}, "fp32.256.1024 must be above 0, not 0"),
        ({"matrix_flops_per_sec": {"fp32": {"wide": {"1024": 1e11}}}}, "fp32: has the key 'wide'"),
        ({"matrix_flops_per_sec": {"fp32": {}}}, "fp32: has no rate"),
        ({"bus_bytes_per_sec": {"all_gather": {"fp32": 1e9}}}, "bus_bytes_per_sec: has no all_reduce of fp32"),
        ({"operation_sec": -1.0}, "operation_sec must be above 0, not -1"),
        ({"logits_per_sec": {}}, "logits_per_sec: has other precisions than matrix_flops_per_sec"),
    ],
)
def test_a_calibration_with_impossible_rates_is_refused(refused, tmp_path_factory, changes, why):
    """A negative time of an operation would be a plan with negative steps; a rate of 0 ended in a traceback."""
    path = tmp_path_factory.mktemp("machine") / "calibration.json"
    alone, together = RECORD["ceilings"]
    path.write_text(json.dumps(RECORD | {"ceilings": [alone, together | changes]}))
    (line,) = refused(f"--machine {path} --gpus 2 --model_size tiny --tokens 1e6")
    assert why in line


def test_more_devices_than_were_measured_are_refused(refused, tmp_path_factory):
    path = tmp_path_factory.mktemp("machine") / "calibration.json"
    path.write_text(json.dumps(RECORD))
    (line,) = refused(f"--machine {path} --gpus 4 --model_size tiny --tokens 1e6")
    assert line.startswith("--gpus 4: the calibration measured 2 devices:")

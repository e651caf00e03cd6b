"""A short calibration of this machine, and machines made from calibrations."""

import json
import shlex

import pytest
from calibration_record import RECORD
from small_run import REPOSITORY

from dsgpt.charts.plan import draw_plan
from dsgpt.common.errors import UserError
from dsgpt.planner.command import act
from dsgpt.planner.options import read_plan_options
from dsgpt.planner.rates import ALLOWANCE, Calibration, calibrated_machine, read_calibration

OLD = {
    "schema_version": "1.0",
    "ceilings": [
        each | {"matrix_flops_per_sec": {"fp32": {"128": 1e11}}, "bus_bytes_per_sec": 1e9}
        for each in RECORD["ceilings"]
    ],
}
"""Without rows, and with one collective operation."""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(RECORD))
    return path


def test_a_machine_has_the_rates_of_as_many_devices_as_work(path):
    calibration = read_calibration(path)
    alone, together = calibrated_machine(calibration, devices=1), calibrated_machine(calibration, devices=2)
    assert [each.rates.matrix_at("fp32", width=768, rows=256) for each in (alone, together)] == [2e11, 1e11]
    assert together.rates.matrix_at("fp32", width=768, rows=1024) == 4e11
    assert alone.rates.attention_at("fp32", head_size=64, length=256) == pytest.approx(2e10**0.5 * 1e10**0.5)
    assert together.rates.bus == {2: 1e9}
    asked = [
        ("all_reduce", "bf16"),
        ("reduce", "bf16"),
        ("all_gather", "bf16"),
        ("all_gather", "fp32"),
        ("send", "fp32"),
    ]
    assert [together.rates.slowness_of(*each) for each in asked] == [2, 2, 1 / 4, 1 / 4, 1]
    assert calibrated_machine(calibration, devices=8) == together == calibrated_machine(calibration)
    assert not together.assumed
    assert together.slowest.memory == pytest.approx(together.rates.memory / ALLOWANCE)
    assert together.fastest.bus[2] == pytest.approx(together.rates.bus[2] * ALLOWANCE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": "3.0"}, "has schema 3.0, but this program reads 2.0"),
        (OLD, "has schema 1.0, but this program reads 2.0: write it again with --calibrate"),
        ({"ceilings": []}, "write one with --calibrate"),
        ({"disk_bytes_per_sec": None}, "disk_bytes_per_sec: Input should be a valid number"),
    ],
)
def test_other_files_are_refused(path, changes, message):
    path.write_text(json.dumps(RECORD | changes))
    with pytest.raises(UserError, match=r"--machine .*calibration\.json: ") as refusal:
        read_calibration(path)
    assert message in str(refusal.value)


def test_this_machine_is_measured_and_planned_for(tmp_path, monkeypatch, capsys):
    """Only that figures are there: how fast the machine is, is not a test's business."""
    monkeypatch.chdir(tmp_path)
    assert (
        act(*read_plan_options(["--calibrate", "--seconds", "1", "--gpus", "2"]), repository=REPOSITORY, draw=draw_plan)
        == 0
    )
    written, following = capsys.readouterr().out.splitlines()
    assert written == "checkpoint/calibration.json"
    words = shlex.split(following.removeprefix("next: "))
    assert act(*read_plan_options(words[2:]), repository=REPOSITORY, draw=draw_plan) == 0
    assert "13M parameters" in capsys.readouterr().out
    assert [each.name for each in (tmp_path / "checkpoint").iterdir()] == ["calibration.json"]
    calibration: Calibration = read_calibration(tmp_path / "checkpoint" / "calibration.json")
    assert [each.devices for each in calibration.ceilings] == [1, 2]
    for each in calibration.ceilings:
        figures = list(_numbers({name: value for name, value in vars(each).items() if value is not None}))
        assert all(figure > 0 for figure in figures)
        assert len(figures) == (1 + 18 + 12 + 2 + 2 + 3) + 8 * (each.devices > 1)
    assert calibration.disk_bytes_per_sec > 0
    assert "2 devices of 1 core" in calibration.machine
    words = "--model_size tiny --seq_length 256 --gpus 2 --tokens 1e6 --json"
    assert act(*read_plan_options(words.split()), repository=REPOSITORY, draw=draw_plan) == 0
    step = json.loads(capsys.readouterr().out)["step"]
    assert not step["assumed"]
    assert step["parts"]["communication"] > 0


def _numbers(value):
    if isinstance(value, dict):
        for inner in value.values():
            yield from _numbers(inner)
    else:
        yield value

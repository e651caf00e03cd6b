"""The share of this machine's measured peak that a run on a CPU reaches."""

import json

import pytest
from calibration_record import RECORD
from run_folders import LONG, record
from small_run import command_line
from training_runs import read_lines

from dsgpt.machine.device import describe_hardware
from dsgpt.planner.rates import CALIBRATION
from dsgpt.training.command import train


@pytest.mark.parametrize("damaged", [False, True])
def test_a_run_beside_a_calibration_has_its_share(finished_run, tmp_path, monkeypatch, capsys, damaged):
    monkeypatch.chdir(tmp_path)
    here = RECORD | {"hardware": describe_hardware("cpu")}
    CALIBRATION.parent.mkdir()
    CALIBRATION.write_text(json.dumps(here)[: -5 if damaged else None])
    flags = LONG | {"checkpoint_path": tmp_path / "run", "threads_per_device": 1, "device": "cpu"}
    assert train(command_line(finished_run, **flags | {"max_train_steps": 6})) == 0
    summary = record(tmp_path / "run")["summary"]
    shares = [line["interval"]["mfu"] for line in read_lines(tmp_path / "run") if "interval" in line]
    if damaged:
        assert summary["mfu"] is None and not any(shares)
        assert f"MFU is unknown: {CALIBRATION} cannot be used" in capsys.readouterr().out
    else:
        expected = summary["mean_tokens_per_sec_per_device"] * summary["flops_per_token"] / 4e11
        assert summary["mfu"] == pytest.approx(expected)
        assert shares[0] is None and all(shares[1:])  # the first interval is the warm-up

"""Runs whose GPUs are sampled, with a stand-in for the GPUs and their driver."""

import json
import sys
from pathlib import Path

import pytest
from run_folders import LONG, record, resume
from small_run import command_line
from stand_in_nvml import StandInNvml

from dsgpt.machine.gpus import open_gpus
from dsgpt.telemetry.monitor import Monitor
from dsgpt.training import run
from dsgpt.training.command import train
from dsgpt.training.trainer import Trainer


@pytest.fixture
def nvml(monkeypatch):
    """One GPU, which the run is said to train on."""
    module = StandInNvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)

    def open_monitor(config, device):
        assert config.options.monitor_every == 0.2
        return Monitor(open_gpus(["GPU-0"]), path=config.run_dir / "hardware.jsonl", every=0.2)

    monkeypatch.setattr(run, "open_monitor", open_monitor)
    return module


def lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "hardware.jsonl").read_text().splitlines()]


def test_the_record_has_energy_per_token(finished_run, tmp_path, nvml):
    folder = tmp_path / "run"
    flags = LONG | {"monitor_every": 0.2, "checkpoint_path": folder}
    assert train(command_line(finished_run, **flags | {"max_train_steps": 7})) == 0
    first, use = lines(folder), record(folder)["summary"]["gpu_use"]
    assert use["gpus"][0]["samples"] == len(first) == nvml.samples >= 1
    assert use["joules_per_token"] == use["energy_joules"] / record(folder)["summary"]["tokens_processed_global"]
    assert nvml.open == 0
    assert resume(folder, finished_run, monitor_every=0.2, allow_changed="recipe") == 0
    later, use = lines(folder)[len(first) :], record(folder)["summary"]["gpu_use"]
    assert use["gpus"][0]["samples"] == len(later) >= 1
    assert use["joules_per_token"] == pytest.approx(use["energy_joules"] / (5 * 8 * 16))
    assert train(command_line(finished_run, **flags, overwrite=True)) == 0
    assert len(lines(folder)) == record(folder)["summary"]["gpu_use"]["gpus"][0]["samples"]


def test_an_error_ends_the_monitor(finished_run, tmp_path, nvml, monkeypatch):
    def broken(self: Trainer, batches: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_take_steps", broken)
    assert train(command_line(finished_run, monitor_every=0.2, checkpoint_path=tmp_path / "run")) == 130
    assert (nvml.open, nvml.samples) == (0, 1)
    assert record(tmp_path / "run")["summary"]["gpu_use"] is None


def test_a_run_without_gpus_has_no_samples(finished_run, tmp_path):
    assert train(command_line(finished_run, checkpoint_path=tmp_path / "run")) == 0
    assert not (tmp_path / "run" / "hardware.jsonl").exists()
    assert record(tmp_path / "run")["summary"]["gpu_use"] is None

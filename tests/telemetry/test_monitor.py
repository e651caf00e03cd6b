"""Samples of GPUs, with a stand-in for the driver, and what the record says of them."""

import json
import sys
import threading
import time

import pytest
from stand_in_nvml import StandInNvml

from dsgpt.machine.gpus import GpuSample, open_gpus
from dsgpt.telemetry.monitor import Monitor, _Device, gpu_use
from dsgpt.training.measurements import gpus_to_sample


@pytest.fixture
def nvml(monkeypatch):
    module = StandInNvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_the_stand_in_has_the_names_of_the_real_module():
    real = pytest.importorskip("pynvml")
    names = [name for name in dir(StandInNvml) if name.startswith("nvml")] + [*vars(StandInNvml()).keys()]
    missing = {name for name in names if not hasattr(real, name)}
    assert missing == {"driver", "unsupported", "open", "samples", "reasons"}


def test_a_sample_has_the_units_of_its_names(nvml):
    nvml.reasons = 0x1 | 0x4 | 0x40
    gpus = open_gpus(["GPU-1"])
    assert gpus.sample("GPU-1") == GpuSample(
        utilisation=0.51,
        memory_used_bytes=10_001,
        power_watts=300.0,
        temperature_celsius=61,
        sm_clock_mhz=1500,
        memory_clock_mhz=2600,
        throttled=["power cap", "temperature, by the hardware"],
    )
    assert gpus.energy_joules("GPU-1") == 1003


def test_what_a_gpu_does_not_report_is_unknown(nvml):
    nvml.unsupported = ("utilisation", "memory", "power", "temperature", "clock", "reasons", "energy")
    gpus = open_gpus(["GPU-0"])
    assert set(vars(gpus.sample("GPU-0")).values()) == {None}
    assert gpus.energy_joules("GPU-0") is None


def test_without_a_driver_or_the_gpus_nothing_is_sampled(nvml, monkeypatch, tmp_path):
    assert open_gpus(["GPU-of-another-machine"]) is None
    assert nvml.open == 0
    nvml.driver = False
    assert open_gpus(["GPU-0"]) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as where it is not installed
    assert open_gpus(["GPU-0"]) is None
    with Monitor(None, path=tmp_path / "hardware.jsonl") as monitor:
        pass
    assert (monitor.figures, list(tmp_path.iterdir())) == ([], [])
    assert gpu_use([], expected=1, tokens=10) is None


def wait_for(nvml: StandInNvml, samples: int) -> None:
    deadline = time.monotonic() + 60
    while nvml.samples < samples:
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Crash(BaseException):
    pass


@pytest.mark.parametrize("error", [None, Crash, KeyboardInterrupt])
def test_a_monitor_samples_until_its_context_ends(nvml, tmp_path, error):
    monitor = Monitor(open_gpus(["GPU-0", "GPU-1"]), path=tmp_path / "hardware.jsonl", every=0.01)
    try:
        with monitor:
            wait_for(nvml, 6)
            if error:
                raise error
    except (Crash, KeyboardInterrupt):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "GPU monitor"]
    assert nvml.open == 0
    lines = [json.loads(line) for line in (tmp_path / "hardware.jsonl").read_text().splitlines()]
    assert len(lines) == monitor.figures[0]["samples"] == nvml.samples / 2 >= 3
    assert [gpu["uuid"] for gpu in lines[0]["gpus"]] == ["GPU-0", "GPU-1"]
    assert lines[0]["gpus"][1].keys() == {"uuid", *GpuSample.__dataclass_fields__}
    assert abs(lines[-1]["time"] - time.time()) < 60
    for device in monitor.figures:
        assert device["energy_joules"] == 3 * nvml.samples
    assert [device["temperature_celsius_max"] for device in monitor.figures] == [60, 61]


def test_a_file_that_cannot_be_written_stops_nothing(nvml, tmp_path):
    with Monitor(open_gpus(["GPU-0"]), path=tmp_path / "missing" / "hardware.jsonl", every=0.01) as monitor:
        wait_for(nvml, 2)
    assert monitor.figures[0]["samples"] == nvml.samples


def sample(**values):
    names = GpuSample.__dataclass_fields__
    return GpuSample(**{**dict.fromkeys(names), **values})


def test_figures_are_of_known_values_only():
    device = _Device(energy_joules=None)
    device.add(sample(power_watts=100.0, sm_clock_mhz=1000, throttled=["power cap"]), seconds=2)
    device.add(sample(power_watts=300.0, sm_clock_mhz=1500, utilisation=0.5, throttled=[]), seconds=1)
    assert device.figures(None) == {
        "samples": 2,
        "energy_joules": 500,
        "power_watts_mean": 200,
        "power_watts_max": 300,
        "utilisation_mean": 0.5,
        "memory_used_bytes_max": None,
        "temperature_celsius_max": None,
        "sm_clock_mhz_mean": 1250,
        "sm_clock_mhz_min": 1000,
        "throttled_share": {"power cap": 0.5},
    }
    device.add(sample(), seconds=1)
    assert device.figures(None)["energy_joules"] is None


def test_energy_per_token_needs_every_gpu():
    devices = [{"energy_joules": 100.0}, {"energy_joules": 300.0}]
    assert gpu_use(devices, expected=2, tokens=800) == {"energy_joules": 400, "joules_per_token": 0.5, "gpus": devices}
    for partly in (devices[:1], [*devices[:1], {"energy_joules": None}]):
        use = gpu_use(partly, expected=2, tokens=800)
        assert (use["energy_joules"], use["joules_per_token"]) == (None, None)
    assert gpu_use(devices, expected=2, tokens=0)["joules_per_token"] is None


def test_the_first_rank_of_each_machine_samples_its_gpus():
    ranks = [("a", 0, "GPU-0"), ("a", 1, "GPU-1"), ("b", 0, "GPU-2"), ("b", 1, "GPU-3")]
    assert [gpus_to_sample(ranks, rank=rank) for rank in range(4)] == [
        (["GPU-0", "GPU-1"], 0),
        ([], 0),
        (["GPU-2", "GPU-3"], 1),
        ([], 0),
    ]

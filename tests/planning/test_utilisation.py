"""The share of the peak is computed from dense peaks, and unknown without one."""

import json

import pytest
from calibration_record import RECORD

from dsgpt.common.json_files import parse_as
from dsgpt.model.config import PRESETS
from dsgpt.planner.rates import Calibration, utilisation

H200 = {"gpu_name": "NVIDIA H200", "gpu_memory_bytes": 150_754_820_096, "world_size": 4}
SMALL = PRESETS["small"]
PEAK = 989.4e12 / (6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024)
"""Tokens per second at which one H200 would reach its dense bf16 peak."""


def test_four_gpus_at_half_their_dense_peak():
    found = utilisation(SMALL, H200, seq_length=1024, precision="bf16")
    assert found.mfu(4 * PEAK / 2) == pytest.approx(0.5)
    assert found.per_device(4000.0) == 1000
    in_fp32 = utilisation(SMALL, H200, seq_length=1024, precision="fp32")
    assert in_fp32.mfu(4 * PEAK / 2) == pytest.approx(0.5 * 989.4 / 66.9)


@pytest.mark.parametrize(
    "hardware",
    [
        {},
        {"gpu_name": None, "gpu_memory_bytes": None, "world_size": 2},
        H200 | {"gpu_name": "NVIDIA H300"},
        H200 | {"gpu_memory_bytes": 75_000_000_000},
        H200 | {"gpu_name": "Tesla T4", "gpu_memory_bytes": 15_828_320_256},
        H200 | {"world_size": None},
    ],
    ids=["nothing", "cpu", "unknown GPU", "slice", "no bf16", "other ranks"],
)
def test_without_a_peak_the_share_is_unknown(hardware):
    found = utilisation(SMALL, hardware, seq_length=1024, precision="bf16")
    assert found.mfu(1e6) is None
    assert found.per_device(1e6) == (1e6 / hardware["world_size"] if hardware.get("world_size") else None)


def test_without_a_throughput_the_share_is_unknown():
    found = utilisation(SMALL, H200, seq_length=1024, precision="bf16")
    assert (found.mfu(None), found.per_device(None)) == (None, None)


HERE = {"device": "cpu", "cpu_name": "Some Processor", "cpu_count": 2}
ON_CPU = HERE | {"gpu_name": None, "threads_per_device": 1, "local_world_size": 2, "world_size": 2}


def on_cpu(precision: str = "fp32", **hardware: object) -> float | None:
    """The share that a throughput of a million FLOP/s for each of two devices is."""
    calibration = parse_as(json.dumps(RECORD | {"hardware": HERE}).encode(), Calibration)
    found = utilisation(SMALL, ON_CPU | hardware, seq_length=1024, precision=precision, calibration=calibration)
    return found.mfu(2e6 / found.flops_per_token)


def test_on_a_cpu_the_peak_is_the_fastest_product_that_was_measured_there():
    assert on_cpu() == pytest.approx(1e6 / 4e11)


@pytest.mark.parametrize(
    "hardware", [{"cpu_name": "Other"}, {"cpu_count": 4}, {"threads_per_device": 2}, {"local_world_size": None}, {}]
)
def test_a_calibration_of_other_hardware_or_precision_says_nothing(hardware):
    assert on_cpu("fp32" if hardware else "bf16", **hardware) is None

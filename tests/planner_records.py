"""A calibration with made-up rates, and a machine with round ones."""

from dataclasses import replace

from dsgpt.planner.hardware import find_gpu
from dsgpt.planner.rates import Machine, Rates, datasheet_machine

# The record of a calibration of two devices, with made-up rates.


BUS = {"all_reduce": {"fp32": 1e9, "bf16": 5e8}, "all_gather": {"fp32": 4e9}}
RECORD = {
    "schema_version": "2.0",
    "timestamp_utc": "2026-11-22T18:00:00+00:00",
    "machine": "Some Processor, 2 devices of 1 core",
    "hardware": {"device": "cpu"},
    "env": {},
    "threads_per_device": 1,
    **dict.fromkeys(("memory_bytes_per_device", "host_bytes_per_device"), 8_000_000_000),
    "seconds": 60.0,
    "disk_bytes_per_sec": 1e9,
    "ceilings": [
        {
            "devices": devices,
            "matrix_flops_per_sec": {"fp32": {"128": {"256": 1e11}, "768": {"256": 2e11 / devices, "1024": 4e11}}},
            "attention_flops_per_sec": {"fp32": {"64": {"128": 1e10, "512": 2e10}}},
            "elementwise_bytes_per_sec": {"fp32": 5e9},
            "logits_per_sec": {"fp32": 1e9},
            "triad_bytes_per_sec": 1e10,
            "operation_sec": 1e-6,
            "bus_bytes_per_sec": None if devices == 1 else BUS,
            "all_reduce_sec": None if devices == 1 else 1e-4,
            "host_link_bytes_per_sec": 5e9,
        }
        for devices in (1, 2)
    ],
}


def gpu_record(**changes: object) -> dict:
    """The record of a calibration of two H100, with made-up rates and messages of three sizes, but for ``changes``.

    An all-reduce takes 50 microseconds and a nanosecond for each byte, an all-gather an eighth of that for a byte.
    """
    gpu = {"device": "cuda", "gpu_name": "NVIDIA H100 80GB HBM3", "gpu_memory_bytes": 85_000_000_000}
    per_byte = {"all_reduce": 1e-9, "all_gather": 1.25e-10}
    ceilings = [
        each
        | {"matrix_flops_per_sec": {"bf16": {"768": {"256": 1e13, "4096": 4e14}}}}
        | {"attention_flops_per_sec": {"bf16": {"64": {"1024": 1e14}, "128": {"1024": 2e14}}}}
        | {"elementwise_bytes_per_sec": {"bf16": 2e12}, "logits_per_sec": {"bf16": 1e11}, "kernel_sec": 1.5e-6}
        | {"operation_sec": 7e-6, "triad_bytes_per_sec": 3e12, "host_link_bytes_per_sec": 4e10}
        | changes
        for each in RECORD["ceilings"]
    ]
    sizes = (1 << 16, 1 << 20, 1 << 24)
    ceilings[1].setdefault(
        "message_sec", {name: {size: 5e-5 + size * slope for size in sizes} for name, slope in per_byte.items()}
    )
    memory = {"memory_bytes_per_device": 85_000_000_000}
    return RECORD | memory | {"hardware": gpu, "machine": "NVIDIA H100 80GB HBM3 x 2", "ceilings": ceilings}


# A machine whose rates are round numbers, so that a test can work out times by hand.


RATES = Rates(
    matrix={"fp32": {1: {1: 1e9}}, "bf16": {1: {1: 4e9}}},
    attention={"fp32": {1: {1: 1e8}}, "bf16": {1: {1: 1e8}}},
    elementwise={"fp32": 1e7, "bf16": 1e7},
    logits={"fp32": 1e6, "bf16": 1e6},
    memory=1e12,
    kernel_sec=0.0,
    bus={1: 1e6},
    collective_sec={1: 0.0},
    **{"network": 1e5, "host_link": 1e4, "host_memory": 1e3, "disk": 1e6},
)


def machine(kind: str = "cpu", *, devices: int = 8, **changes: object) -> Machine:
    """The machine, with other rates where ``changes`` names them."""
    rates = replace(RATES, **changes)
    return replace(
        datasheet_machine(find_gpu("l4"), devices=devices),
        kind=kind,
        rates=rates,
        slowest=rates.scaled(compute=2, communication=2),
        fastest=rates.scaled(compute=0.5, communication=0.5),
    )

"""Measures this machine and writes ``calibration.json``."""

import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dsgpt.calibration.ranks import measure_ceilings, operations_of
from dsgpt.common.files import remove, write_json_atomic
from dsgpt.planning.calibrations import SCHEMA_VERSION
from dsgpt.runtime.device import cuda_devices, default_precision, describe_hardware
from dsgpt.telemetry.environment import software_versions

_DISK_BYTES = 256 << 20
_START_SEC = 5.0
"""Seconds to start the processes, not spent on measuring."""
_LEAST_SEC = 0.01


def calibrate(path: Path, *, seconds: float, devices: int | None = None) -> dict[str, Any]:
    """Measure this machine alone and with all devices at work, and write the calibration.

    Args:
        path: of the file.
        seconds: about how long to measure.
        devices: how many devices a machine has; None for all GPUs, or without one all CPU cores.

    Returns:
        What was written.
    """
    started = time.perf_counter()
    kind = "cuda" if cuda_devices() else "cpu"
    hardware = describe_hardware(kind)
    most = devices or (cuda_devices() if kind == "cuda" else int(str(hardware["cpu_count"])))
    precisions = _precisions(kind)
    threads = 1 if kind == "cpu" else None
    counts = sorted({1, most})
    steps = [operations_of(precisions, kind, devices=count) for count in counts]
    each = max(_LEAST_SEC, (seconds - _START_SEC * len(counts)) / sum(map(len, steps)) / 1.6)  # warm-up and data
    path.parent.mkdir(parents=True, exist_ok=True)
    with tqdm(total=sum(map(len, steps)) + 1, desc="calibrating", disable=not sys.stderr.isatty()) as bar:

        def report(name: str) -> None:
            if name:
                bar.set_postfix_str(name.removesuffix("_per_sec").replace("_", " "))
                bar.update()

        disk = disk_bytes_per_sec(path.parent)
        report("disk")
        ceilings = [
            measure_ceilings(kind, devices=count, precisions=precisions, threads=threads, seconds=each, report=report)
            for count in counts
        ]
    record = {
        **_description(kind, hardware, devices=most),
        "threads_per_device": threads,
        "seconds": round(time.perf_counter() - started, 1),
        "disk_bytes_per_sec": disk,
        "ceilings": ceilings,
    }
    write_json_atomic(path, record)
    return record


def _description(kind: str, hardware: dict[str, object], *, devices: int) -> dict[str, Any]:
    """When and on what the machine is measured."""
    host = int(str(hardware["memory_bytes"])) // devices
    return {
        "schema_version": SCHEMA_VERSION,
        "timestamp_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_name(hardware, devices=devices),
        "hardware": hardware,
        "env": software_versions(),
        "memory_bytes_per_device": int(str(hardware["gpu_memory_bytes"])) if kind == "cuda" else host,
        "host_bytes_per_device": host,
    }


def machine_name(hardware: dict[str, object], *, devices: int) -> str:
    """``NVIDIA H200 x 8``, or the processor and ``1 thread each``."""
    if hardware["gpu_name"]:
        return f"{hardware['gpu_name']} x {devices}"
    return f"{hardware['cpu_name']}, {devices} device{'s' * (devices != 1)} of 1 core"


def disk_bytes_per_sec(folder: Path) -> float:
    """A file of 256 MiB in ``folder``, written and made durable."""
    path, block = folder / f".calibration.{os.getpid()}.tmp", os.urandom(1 << 20)
    try:
        begun = time.perf_counter()
        with path.open("xb") as file:
            for _ in range(_DISK_BYTES >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return _DISK_BYTES / (time.perf_counter() - begun)
    finally:
        remove(path)


def _precisions(kind: str) -> tuple[str, ...]:
    if kind == "cpu":
        return ("fp32", "bf16")
    low = default_precision(kind)
    return tuple(dict.fromkeys(("fp32", low, "fp16"))) if torch.cuda.is_available() else ("fp32",)

"""Measures this machine and writes ``calibration.json``."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import start_processes
from tqdm import tqdm

from dsgpt.common.files import remove, write_json_atomic
from dsgpt.common.text import counted
from dsgpt.machine.device import bring_up, cuda_devices, default_precision, describe_hardware, software_versions
from dsgpt.machine.launcher import exit_rank
from dsgpt.machine.process_group import gather_objects, joined
from dsgpt.machine.topology import Topology, free_port
from dsgpt.planner import operations
from dsgpt.planner.operations import HEAD_SIZES, LENGTHS, ROWS, WIDTHS, Clock
from dsgpt.planner.rates import SCHEMA_VERSION

# Processes that measure at the same time, one for each device, as the ranks of a training would work.

Report = Callable[[str], None]
"""Gets the name of each operation when it was timed."""
_POLL_SEC = 0.1


def operations_of(precisions: tuple[str, ...], kind: str, *, devices: int) -> list[tuple[str, str]]:
    """Every operation that is timed, and its variant: the keys under which its figure is stored; or nothing."""
    found = [
        ("matrix_flops_per_sec", f"{each} {width} {rows}")
        for each in precisions
        for width in WIDTHS[kind]
        for rows in ROWS[kind]
    ]
    shapes = [f"{size} {length}" for size in HEAD_SIZES[kind] for length in LENGTHS[kind]]
    found += [("attention_flops_per_sec", f"{each} {shape}") for each in precisions for shape in shapes]
    for name in ("elementwise_bytes_per_sec", "logits_per_sec"):
        found += [(name, precision) for precision in precisions]
    found += [("triad_bytes_per_sec", ""), ("operation_sec", ""), ("host_link_bytes_per_sec", "")]
    if devices == 1:
        return found
    sums = [("bus_bytes_per_sec", f"{name} {each}") for name in ("all_reduce", "reduce_scatter") for each in precisions]
    moves = [("bus_bytes_per_sec", f"{name} fp32") for name in ("all_gather", "all_to_all", "send")]
    return [*found, *sums, *moves, ("all_reduce_sec", "")]


def measure_ceilings(
    kind: str, *, devices: int, precisions: tuple[str, ...], threads: int | None, seconds: float, report: Report
) -> dict[str, Any]:
    """The fields of ``dsgpt.planner.rates.Ceilings``, of ``devices`` processes that measure together.

    Args:
        kind: ``cpu`` or ``cuda``.
        devices: how many.
        precisions: to measure.
        threads: CPU threads of a process; None on GPUs.
        seconds: to spend on each operation.
        report: called in this process after each operation.
    """
    queue: Any = mp.get_context("spawn").SimpleQueue()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    asked = _Asked(kind=kind, devices=devices, precisions=precisions, threads=threads, seconds=seconds)
    running: Any = start_processes(  # type: ignore[no-untyped-call]  # torch's has no types
        _measure_rank, args=(asked, queue), nprocs=devices, join=False, start_method="spawn"
    )
    found: dict[str, Any] = {}
    ended = False
    while not ended:
        ended = running.join(timeout=_POLL_SEC)
        for name, result in _waiting(queue):
            report(name)
            found = result or found
    return found


def _waiting(queue: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    while not queue.empty():
        yield queue.get()


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The arguments of ``measure_ceilings``, for its processes."""

    kind: str
    devices: int
    precisions: tuple[str, ...]
    threads: int | None
    seconds: float


def _measure_rank(rank: int, asked: _Asked, queue: Any) -> NoReturn:
    """The process of a rank: time every operation; rank 0 reports, and at the end sends the slowest rank's figures."""
    devices = asked.devices
    topology = Topology(
        rank=rank, local_rank=rank, world_size=devices, local_world_size=devices, launcher="calibration"
    )
    device = bring_up(asked.kind, local_rank=rank, threads=asked.threads)
    with joined(topology, device):
        clock = Clock(device, seconds=asked.seconds)
        found: dict[str, Any] = {"devices": devices}
        for name, variant in operations_of(asked.precisions, asked.kind, devices=devices):
            dist.barrier()
            figures = gather_objects(_time(clock, name, variant))
            _put(found, name, variant, max(figures) if name.endswith("_sec") and "per" not in name else min(figures))
            if rank == 0:
                queue.put((name, {}))
        if rank == 0:
            queue.put(("", {"bus_bytes_per_sec": None, "all_reduce_sec": None} | found))
    exit_rank(0)


def _time(clock: Clock, name: str, variant: str) -> float:
    words = variant.split()
    with torch.enable_grad():
        found: float = getattr(operations, name)(clock, *(int(word) if word.isdecimal() else word for word in words))
    return found


def _put(found: dict[str, Any], name: str, variant: str, value: float) -> None:
    """Store a figure where ``Ceilings`` has it."""
    *outer, last = [name, *variant.split()]
    place = found
    for key in outer:
        place = place.setdefault(key, {})
    place[last] = value


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
    return f"{hardware['cpu_name']}, {counted(devices, 'device')} of 1 core"


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

"""Processes that measure at the same time, one for each device, as the ranks of a training would work."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import start_processes

from dsgpt.calibration import operations
from dsgpt.calibration.operations import HEAD_SIZES, LENGTHS, ROWS, WIDTHS, Clock
from dsgpt.runtime.device import bring_up
from dsgpt.runtime.leaving import leave
from dsgpt.runtime.process_group import gather_objects, joined
from dsgpt.runtime.topology import Topology, free_port

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
    """The fields of ``dsgpt.planning.calibrations.Ceilings``, of ``devices`` processes that measure together.

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
    leave(0)


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

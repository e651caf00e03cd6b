"""What the collectives of some steps cost (``--profile_comm``): calls, bytes, time, and the share of a step that waits.

``communication.json`` holds the result, beside the record. How the times are measured: ``collective_times``.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dsgpt.machine.process_group import gather_objects
from dsgpt.telemetry.collective_times import (
    SEND_RECV,
    STEP_RANGE,
    CommunicationTimes,
    events_of,
    times_on_cpu,
    times_on_gpu,
)
from dsgpt.telemetry.communication import Traffic
from dsgpt.telemetry.meter import ThreadClock
from dsgpt.telemetry.trace import new_profiler

COMMUNICATION_FILE = "communication.json"
SCHEMA_VERSION = "1.0"
_SERVED_BY_SEND_RECV = {"send", "recv", "all_to_all", "gather", "scatter"}


class CommunicationProfile:
    """Profiles the next steps of this process on every rank.

    Args:
        device: of this rank.
        steps: how many to profile.
        data_wait: returns the seconds that this thread slept so far because data were not ready.
        traffic: of this rank in a step, with its bytes; None where it is unknown.
        report: called on every rank with the contents of ``communication.json``.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        steps: int,
        data_wait: Callable[[], float],
        traffic: Sequence[Traffic] | None,
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        self._on_gpu = device.type == "cuda"
        self._steps = steps
        self._data_wait, self._traffic, self._report = data_wait, traffic, report
        self._thread = ThreadClock()
        self._sleeping_sec: list[float] = []
        self._taken: list[int] = []
        self._profiler = new_profiler(device)
        self._profiler.start()

    @property
    def complete(self) -> bool:
        """Whether all steps were profiled."""
        return len(self._taken) == self._steps

    @contextlib.contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """A context for an optimizer step; on a GPU the host waits for it at both ends."""
        self._wait_for_gpu()
        with torch.profiler.record_function(STEP_RANGE):
            began, computed, waited = time.perf_counter(), self._thread.seconds(), self._data_wait()
            yield
            self._wait_for_gpu()
            slept = (time.perf_counter() - began) - (self._thread.seconds() - computed)
            self._sleeping_sec.append(max(0.0, slept - (self._data_wait() - waited)))
        self._taken.append(step)

    def _wait_for_gpu(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def finish(self) -> None:
        """Report what was measured; collective."""
        self._profiler.stop()
        self._thread.close()
        events = events_of(self._profiler)
        times = times_on_gpu(events) if self._on_gpu else times_on_cpu(events, sleeping_sec=self._sleeping_sec)
        ranks: list[dict[str, Any]] = gather_objects(rank_figures(times, self._traffic))
        self._report(
            {
                "schema_version": SCHEMA_VERSION,
                "first_step": self._taken[0],
                "steps": len(self._taken),
                "backend": dist.get_backend() if dist.is_initialized() else None,
                "exposed_share": _mean([rank["exposed_share"] for rank in ranks]),
                "hidden_share": _mean([rank["hidden_share"] for rank in ranks]),
                "ranks": [{"rank": number, **rank} for number, rank in enumerate(ranks)],
            }
        )


def rank_figures(times: CommunicationTimes, traffic: Sequence[Traffic] | None) -> dict[str, Any]:
    """The figures of one rank, of one step on average.

    Args:
        times: of its profiled steps.
        traffic: of one step; None leaves bytes and bandwidths unknown.
    """
    steps, hidden = times.steps, times.communication_sec - times.exposed_sec
    rows = []
    for operation, calls in times.operations.items():
        sent = None if traffic is None else [entry for entry in traffic if _serves(operation, entry.operation)]
        ring = None if sent is None else sum(entry.ring_bytes for entry in sent)
        seconds = calls.seconds / steps
        rows.append(
            {
                "op": operation,
                "calls": calls.calls / steps,
                "payload_bytes": None if sent is None else sum(entry.payload_bytes for entry in sent),
                "ring_bytes": ring,
                "time_sec": seconds,
                "bus_bytes_per_sec": None if not ring or not seconds else ring / seconds,
            }
        )
    return {
        "step_time_sec": times.step_sec / steps,
        "communication_sec": times.communication_sec / steps,
        "exposed_sec": times.exposed_sec / steps,
        "hidden_sec": hidden / steps,
        "exposed_share": times.exposed_sec / times.step_sec,
        "hidden_share": hidden / times.step_sec,
        "by_op": sorted(rows, key=lambda row: -row["time_sec"]),
    }


def _serves(operation: str, counted: str) -> bool:
    """Whether collectives that were ``counted`` under a name show in the profile as ``operation``."""
    return counted == operation or (operation == SEND_RECV and counted in _SERVED_BY_SEND_RECV)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def communication_table(measured: dict[str, Any]) -> list[str]:
    """``communication.json`` in lines for people, with the operations of the rank that waits longest."""
    ranks = measured["ranks"]
    rank = max(ranks, key=lambda rank: rank["exposed_sec"])
    first, last = measured["first_step"], measured["first_step"] + measured["steps"] - 1
    lines = [
        f"communication of steps {first} to {last}: exposed {measured['exposed_share']:.1%} of the step, "
        f"hidden {measured['hidden_share']:.1%}; mean of {len(ranks)} ranks"
    ]
    if rank["by_op"]:
        lines.append(f"of rank {rank['rank']}, which waits longest ({rank['exposed_share']:.1%}), in a step:")
        lines.append(f"{'operation':>16}  {'calls':>7}  {'sent (MB)':>10}  {'time (ms)':>10}  {'bus (GB/s)':>10}")
    for row in rank["by_op"]:
        sent = _number(row["ring_bytes"], 1e6)
        bus = _number(row["bus_bytes_per_sec"], 1e9)
        lines.append(f"{row['op']:>16}  {row['calls']:>7g}  {sent:>10}  {row['time_sec'] * 1000:>10.2f}  {bus:>10}")
    return lines


def _number(value: float | None, unit: float) -> str:
    return "unknown" if value is None else f"{value / unit:.3f}"

"""Steps under PyTorch's profiler: what their collectives cost (``--profile_comm``), and their traces (``--profile``).

``communication.json`` beside the record holds calls, bytes and time of the collectives, and the share of a step that
waits for them. The times are from the events of the profiler. On a CPU, gloo's threads communicate while the training
thread computes or sleeps. A collective lasts from the call of its ``c10d::`` operator until gloo has ended the last
part of it (``gloo:`` events), waiting for the other ranks included. Its communication is exposed while the training
thread sleeps, which ``meter.ThreadClock`` measures.

On a GPU, a collective is one or more NCCL kernels. They are exposed while no other kernel and no copy runs beside
them.
"""

import contextlib
import logging
import math
import os
import re
import statistics
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from dsgpt.common.files import remove
from dsgpt.common.text import grouped
from dsgpt.machine.device import gather_objects, named_range, ranges_shown
from dsgpt.telemetry.cost import Report, Traffic, operation_of
from dsgpt.telemetry.meter import ThreadClock

logger = logging.getLogger(__name__)


class StepsProfile(ABC):
    """Profiles the next steps of this process on every rank, from its creation until it is complete.

    Args:
        device: of this rank.
        steps: how many to profile.
        warm_up: steps before these, of which nothing is kept; None for none, and without a schedule.
    """

    def __init__(self, device: torch.device, *, steps: int, warm_up: int | None = None) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints when it starts and stops
        self._on_gpu = device.type == "cuda"
        self._most = steps + (warm_up or 0)
        self._taken: list[int] = []
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])],
            schedule=None if warm_up is None else schedule(wait=0, warmup=warm_up, active=steps, repeat=1),
        )
        self._profiler.start()

    @property
    def complete(self) -> bool:
        """Whether all steps were profiled."""
        return len(self._taken) == self._most

    @abstractmethod
    def watch(self, step: int) -> contextlib.AbstractContextManager[None]:
        """A context for an optimizer step."""

    @abstractmethod
    def finish(self) -> None:
        """Report what was measured; collective."""


# Spans of time: how long at least one of them lasts, and how long two sets of them overlap.


class Span(NamedTuple):
    """The interval from ``start`` to ``end``, in any unit."""

    start: float
    end: float


def length(spans: Iterable[Span]) -> float:
    """Length of the union of the spans."""
    total, end = 0.0, -math.inf
    for span in sorted(spans):
        total += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return total


def overlap(one: Sequence[Span], other: Sequence[Span]) -> float:
    """How long a span of each lasts at the same time."""
    return length(one) + length(other) - length([*one, *other])


STEP_RANGE, GLOO = "dsgpt profiled step", "gloo:"
SEND_RECV = "send_recv"
"""The operation of NCCL's kernels that serve sends, receives, all-to-alls, gathers and scatters."""
OTHER = "other"
"""The operation of NCCL's other kernels."""
_KERNEL = re.compile(r"nccl\w*?Kernel_?(AllReduce|AllGather|ReduceScatter|Broadcast|Reduce|SendRecv)(?![a-z])")
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}


class Event(NamedTuple):
    """An operation in the profiler's trace."""

    name: str
    span: Span
    """Start and end, in seconds of the profiler's clock."""
    on_gpu: bool = False


@dataclass(frozen=True, kw_only=True)
class CommunicationTimes:
    """Times of one rank, summed over its profiled steps; in seconds."""

    steps: int
    step_sec: float
    communication_sec: float
    """Seconds in which at least one collective was on its way."""
    exposed_sec: float
    """The part of it for which the computation waited."""
    operations: dict[str, list[float]]
    """The seconds of each collective, by operation; collectives may overlap."""


def times_on_cpu(events: Iterable[Event], *, sleeping_sec: Sequence[float]) -> CommunicationTimes:
    """The times of a rank whose ranks communicate over gloo.

    Args:
        events: of the profiled steps; what happens between them is left out.
        sleeping_sec: of each step, the seconds in which the training thread slept and did not wait for data.
    """
    ours = [event for event in events if event.name.startswith((STEP_RANGE, "c10d::", GLOO))]
    ours.sort(key=lambda event: event.span)
    steps = [event.span for event in ours if event.name == STEP_RANGE]
    calls = _calls([event for event in ours if _is_in(steps, event)])
    lasting = [overlap([call for _, call in calls], [step]) for step in steps]
    exposed = sum(min(pair) for pair in zip(sleeping_sec, lasting, strict=True))
    return _times(steps, calls, communication_sec=sum(lasting), exposed_sec=exposed)


def _calls(events: Sequence[Event]) -> list[tuple[str, Span]]:
    """The operation and the span of every collective; the events are sorted.

    A thread of gloo takes up a collective when earlier ones let it, often after the operator has returned. So the
    events of gloo belong to the operators of their kind in order; those that remain are further parts of the last one.
    """
    operators: list[tuple[Event, str]] = []
    ends: list[float] = []
    waiting: defaultdict[str, deque[int]] = defaultdict(deque)
    for event in events:
        if name := operation_of(event.name):
            waiting[_kind(name)].append(len(operators))
            operators.append((event, name))
            ends.append(event.span.end)
        elif event.name.startswith(GLOO) and operators:
            queue = waiting[_kind(event.name.removeprefix(GLOO))]
            own = queue.popleft() if queue else -1
            if own >= 0 or event.span.start <= ends[-1]:
                ends[own] = max(ends[own], event.span.end)
    return [(name, Span(event.span.start, end)) for (event, name), end in zip(operators, ends, strict=True)]


def _kind(operation: str) -> str:
    """Common name of an operator and of the events of gloo that execute it: sums are scattered by an all-reduce."""
    return operation.replace("reduce_scatter", "all_reduce")


def times_on_gpu(events: Iterable[Event]) -> CommunicationTimes:
    """The times of a rank whose GPU communicates over NCCL; the host waits for the GPU at both ends of a step."""
    events = list(events)
    steps = [event.span for event in events if event.name == STEP_RANGE and not event.on_gpu]
    inside = [event for event in events if event.on_gpu and _is_in(steps, event)]
    calls = [(name, event.span) for event in inside if (name := kernel_operation(event.name))]
    computing = [event.span for event in inside if kernel_operation(event.name) is None]
    lasting = [span for _, span in calls]
    communication_sec = length(lasting)
    exposed_sec = communication_sec - overlap(lasting, computing)
    return _times(steps, calls, communication_sec=communication_sec, exposed_sec=exposed_sec)


def kernel_operation(name: str) -> str | None:
    """The operation of an NCCL kernel such as ``ncclDevKernel_AllReduce_Sum_f32_RING_LL``; None for other kernels."""
    if kernel := _KERNEL.search(name):
        return re.sub(r"\B(?=[A-Z])", "_", kernel[1]).lower()
    return OTHER if "ncclKernel" in name or "ncclDevKernel" in name else None


def _times(steps: Sequence[Span], calls: Iterable[tuple[str, Span]], **seconds: float) -> CommunicationTimes:
    operations = grouped((operation, span.end - span.start) for operation, span in calls)
    return CommunicationTimes(steps=len(steps), step_sec=length(steps), operations=operations, **seconds)


def _is_in(steps: Sequence[Span], event: Event) -> bool:
    return any(step.start <= event.span.start <= step.end for step in steps)


COMMUNICATION_FILE = "communication.json"
SCHEMA_VERSION = "1.0"
_SERVED_BY_SEND_RECV = {"send", "recv", "all_to_all", "gather", "scatter"}


class CommunicationProfile(StepsProfile):
    """Measures what the collectives of the next steps cost.

    Args:
        device: of this rank.
        steps: how many to profile.
        waited: returns the seconds that this thread slept so far because data were not ready.
        traffic: of this rank in a step, with its bytes; None where it is unknown.
        report: called on every rank with the contents of ``communication.json``.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        steps: int,
        waited: Callable[[], float],
        traffic: list[Traffic] | None,
        report: Report,
    ) -> None:
        self._waited, self._traffic, self._report = waited, traffic, report
        self._thread = ThreadClock()
        self._sleeping_sec: list[float] = []
        super().__init__(device, steps=steps)

    @contextlib.contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """A context for an optimizer step; on a GPU the host waits for it at both ends."""
        self._wait_for_gpu()
        with torch.profiler.record_function(STEP_RANGE):
            began, computed, waited = time.perf_counter(), self._thread.seconds(), self._waited()
            yield
            self._wait_for_gpu()
            slept = (time.perf_counter() - began) - (self._thread.seconds() - computed)
            self._sleeping_sec.append(max(0.0, slept - (self._waited() - waited)))
        self._taken.append(step)

    def _wait_for_gpu(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def finish(self) -> None:
        """Report what was measured; collective."""
        self._profiler.stop()
        self._thread.close()
        events = []
        for event in self._profiler.profiler.kineto_results.events():  # type: ignore[union-attr]  # it was started
            on_gpu = event.device_type().name == "CUDA"
            if not on_gpu or event.activity_type() in _ON_GPU:  # ranges of ours are left out on the GPU's side
                events.append(Event(event.name(), Span(event.start_ns() / 1e9, event.end_ns() / 1e9), on_gpu))
        times = times_on_gpu(events) if self._on_gpu else times_on_cpu(events, sleeping_sec=self._sleeping_sec)
        ranks: list[dict[str, Any]] = gather_objects(rank_figures(times, self._traffic))
        shares = ("exposed_share", "hidden_share")
        self._report(
            {
                "schema_version": SCHEMA_VERSION,
                "first_step": self._taken[0],
                "steps": len(self._taken),
                "backend": dist.get_backend() if dist.is_initialized() else None,
                **{share: statistics.fmean(rank[share] for rank in ranks) for share in shares},
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
    for operation, durations in times.operations.items():
        counted_as = {operation, *(_SERVED_BY_SEND_RECV if operation == SEND_RECV else ())}
        sent = None if traffic is None else [entry for entry in traffic if entry.operation in counted_as]
        ring = None if sent is None else sum(entry.ring_bytes for entry in sent)
        seconds = sum(durations) / steps
        rows.append(
            {
                "op": operation,
                "calls": len(durations) / steps,
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


# Traces of some steps by PyTorch's profiler (``--profile``), a file for each rank that Perfetto opens.

PROFILE_FOLDER = "profile"
WARM_UP_STEPS = 2
"""Steps in which the profiler runs and keeps nothing: its first ones are slow."""
ROWS = 10
_FILE = re.compile(r"(partial-)?rank\d+\.json\.gz")
_RANGES = re.compile(r"ProfilerStep.*|data|train_step|forward|backward|optimizer")


def trace_file(rank: int) -> str:
    """The name of a rank's file in the folder ``profile``."""
    return f"rank{rank}.json.gz"


def is_profile_folder(path: Path) -> bool:
    """Whether ``path`` is a folder with traces and nothing else; False for a link."""
    if path.is_symlink() or not path.is_dir():
        return False
    return all(_FILE.fullmatch(inside.name) and not inside.is_dir() for inside in path.iterdir())


class Trace(StepsProfile):
    """Traces the next steps, after ``WARM_UP_STEPS`` more.

    Args:
        device: of this rank.
        steps: how many to trace.
        path: the file of this rank.
    """

    def __init__(self, device: torch.device, *, steps: int, path: Path) -> None:
        self._device, self._path = device, path
        super().__init__(device, steps=steps, warm_up=WARM_UP_STEPS)

    @contextlib.contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """A context for an optimizer step."""
        with ranges_shown(self._device), named_range("train_step"):
            yield
        self._taken.append(step)
        if not self.complete:
            self._profiler.step()

    def finish(self) -> None:
        """Write the trace; log the table, and why a trace is missing; collective."""
        self._profiler.stop()
        if not (traced := self._taken[WARM_UP_STEPS:]):
            logger.warning("--profile: too few steps were left: there is no trace")
            return
        partial, failure = self._path.with_name(f"partial-{self._path.name}"), ""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            remove(partial)
            self._profiler.export_chrome_trace(str(partial))
            partial.replace(self._path)
        except OSError as error:
            failure = error.strerror or str(error)
        failures: list[str] = gather_objects(failure)
        table = top_table(self._profiler.key_averages(), steps=traced, on_gpu=self._on_gpu)
        for line in (*table, f"traces: {self._path.parent}; https://ui.perfetto.dev opens them") if table else ():
            logger.info(line)
        for rank, why in enumerate(failures):
            if why:
                logger.warning(f"--profile: rank {rank} wrote no trace: {why}")


def top_table(averages: Any, *, steps: list[int], on_gpu: bool) -> list[str]:
    """The operators of rank 0 that take most time of their own, in lines for people.

    Args:
        averages: a ``torch.autograd.profiler_util.EventList`` by operator.
        steps: the traced steps.
        on_gpu: whether time is that of the GPU.
    """
    own = [
        (entry.self_device_time_total if on_gpu else entry.self_cpu_time_total, entry.count, entry.key)
        for entry in averages
        if not _RANGES.fullmatch(entry.key)
    ]
    if not (total := sum(microseconds for microseconds, _, _ in own)):
        return []
    where = "GPU" if on_gpu else "CPU"
    lines = [f"profile of steps {steps[0]} to {steps[-1]} on rank 0: what takes most time of the {where}"]
    lines.append(f"{'ms a step':>10}  {'share':>6}  {'calls a step':>12}  operator")
    for microseconds, count, name in sorted(own, reverse=True)[:ROWS]:
        milliseconds, share = microseconds / 1000 / len(steps), microseconds / total
        lines.append(f"{milliseconds:>10.2f}  {share:>6.1%}  {count / len(steps):>12g}  {name[:80]}")
    return lines

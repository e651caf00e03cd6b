"""How long collectives take, and how much of that the steps wait.

How long the collectives of a rank take and how much of that its steps wait, from the events of PyTorch's profiler. On
a CPU, gloo's threads communicate while the training thread computes or sleeps. A collective lasts from the call of its
``c10d::`` operator until gloo has ended the last part of it (``gloo:`` events), waiting for the other ranks included.
Its communication is exposed while the training thread sleeps, which ``meter.ThreadClock`` measures.

On a GPU, a collective is one or more NCCL kernels. They are exposed while no other kernel and no copy runs beside
them.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dsgpt.telemetry.communication import operation_of

# Spans of time: how long at least one of them lasts, and how long two sets of them overlap.


class Span(NamedTuple):
    """From ``start`` to ``end``, in any unit."""

    start: float
    end: float


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not touch, in order."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.start <= found[-1].end:
            found[-1] = Span(found[-1].start, max(found[-1].end, span.end))
        elif span.end > span.start:
            found.append(span)
    return found


def length(spans: Iterable[Span]) -> float:
    """How long at least one of them lasts."""
    return sum(span.end - span.start for span in merged(spans))


def common(one: Iterable[Span], other: Iterable[Span]) -> list[Span]:
    """The time in which a span of each lasts, as spans that do not touch."""
    first, second, found = merged(one), merged(other), []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i].start, second[j].start), min(first[i].end, second[j].end)
        if start < end:
            found.append(Span(start, end))
        if first[i].end < second[j].end:
            i += 1
        else:
            j += 1
    return found


STEP_RANGE = "dsgpt profiled step"
SEND_RECV = "send_recv"
"""The operation of NCCL's kernels that serve sends, receives, all-to-alls, gathers and scatters."""
OTHER = "other"
"""The operation of NCCL's other kernels."""
_KERNELS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "SendRecv": SEND_RECV,
}
_KERNEL = re.compile(rf"nccl\w*?Kernel_?({'|'.join(sorted(_KERNELS, key=len, reverse=True))})(?![a-z])")
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}


class Event(NamedTuple):
    """What the profiler saw."""

    name: str
    span: Span
    """In seconds of the profiler's clock."""
    on_gpu: bool = False


@dataclass
class Calls:
    """The collectives of one operation in the profiled steps."""

    calls: int = 0
    seconds: float = 0.0
    """The sum over them; collectives may overlap."""


@dataclass(frozen=True, kw_only=True)
class CommunicationTimes:
    """Times of one rank, summed over its profiled steps; in seconds."""

    steps: int
    step_sec: float
    communication_sec: float
    """In which at least one collective was on its way."""
    exposed_sec: float
    """The part of it for which the computation waited."""
    operations: dict[str, Calls]


def events_of(profiler: Any) -> Iterator[Event]:
    """The events of a ``torch.profiler.profile`` that has ended; ranges of ours are left out on the GPU's side."""
    for event in profiler.profiler.kineto_results.events():
        on_gpu = event.device_type().name == "CUDA"
        if not on_gpu or event.activity_type() in _ON_GPU:
            yield Event(event.name(), Span(event.start_ns() / 1e9, event.end_ns() / 1e9), on_gpu)


def times_on_cpu(events: Iterable[Event], *, sleeping_sec: Sequence[float]) -> CommunicationTimes:
    """The times of a rank whose ranks communicate over gloo.

    Args:
        events: of the profiled steps; what happens between them is left out.
        sleeping_sec: of each step, the seconds in which the training thread slept and did not wait for data.
    """
    seen = (event for event in events if event.name.startswith((STEP_RANGE, "c10d::", "gloo:")))
    known = sorted(seen, key=lambda event: event.span)
    steps = [event.span for event in known if event.name == STEP_RANGE]
    calls = _calls([event for event in known if _step_of(event.span, steps) is not None])
    lasting = [[*common([call for _, call in calls], [step])] for step in steps]
    exposed = [min(slept, length(spans)) for slept, spans in zip(sleeping_sec, lasting, strict=True)]
    return CommunicationTimes(
        steps=len(steps),
        step_sec=length(steps),
        communication_sec=sum(map(length, lasting)),
        exposed_sec=sum(exposed),
        operations=_by_operation(calls),
    )


def _calls(events: Sequence[Event]) -> list[tuple[str, Span]]:
    """The operation and the span of every collective; the events are sorted."""
    operators = [(event, name) for event in events if (name := operation_of(event.name))]
    starts = [event.span.start for event, _ in operators]
    ends = [event.span.end for event, _ in operators]
    for event in events:
        if event.name.startswith("gloo:"):
            caller = bisect_right(starts, event.span.start) - 1
            if caller >= 0 and event.span.start <= operators[caller][0].span.end:
                ends[caller] = max(ends[caller], event.span.end)
    return [(name, Span(event.span.start, end)) for (event, name), end in zip(operators, ends, strict=True)]


def times_on_gpu(events: Iterable[Event]) -> CommunicationTimes:
    """The times of a rank whose GPU communicates over NCCL; the host waits for the GPU at both ends of a step."""
    known = list(events)
    steps = [event.span for event in known if event.name == STEP_RANGE and not event.on_gpu]
    inside = [event for event in known if event.on_gpu and _step_of(event.span, steps) is not None]
    calls = [(name, event.span) for event in inside if (name := kernel_operation(event.name))]
    computing = [event.span for event in inside if kernel_operation(event.name) is None]
    lasting = [span for _, span in calls]
    return CommunicationTimes(
        steps=len(steps),
        step_sec=length(steps),
        communication_sec=length(lasting),
        exposed_sec=length(lasting) - length(common(lasting, computing)),
        operations=_by_operation(calls),
    )


def kernel_operation(name: str) -> str | None:
    """The operation of an NCCL kernel such as ``ncclDevKernel_AllReduce_Sum_f32_RING_LL``; None for other kernels."""
    found = _KERNEL.search(name)
    if found is None:
        return OTHER if "ncclKernel" in name or "ncclDevKernel" in name else None
    return _KERNELS[found[1]]


def _by_operation(calls: Iterable[tuple[str, Span]]) -> dict[str, Calls]:
    found: dict[str, Calls] = {}
    for operation, span in calls:
        entry = found.setdefault(operation, Calls())
        entry.calls += 1
        entry.seconds += span.end - span.start
    return found


def _step_of(span: Span, steps: Sequence[Span]) -> int | None:
    return next((index for index, step in enumerate(steps) if step.start <= span.start <= step.end), None)

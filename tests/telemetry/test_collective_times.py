"""Times of collectives from the profiler's events: made-up events, with times that can be checked by hand."""

import pytest

from dsgpt.telemetry.collective_times import (
    STEP_RANGE,
    Event,
    Span,
    common,
    kernel_operation,
    length,
    merged,
    times_on_cpu,
    times_on_gpu,
)
from dsgpt.telemetry.communication import Traffic
from dsgpt.telemetry.communication_profile import communication_table, rank_figures


def event(name: str, start: float, end: float, *, on_gpu: bool = False) -> Event:
    return Event(name, Span(start, end), on_gpu)


def test_spans_count_time_once():
    spans = [Span(4, 6), Span(0, 2), Span(1, 3), Span(7, 7)]
    assert merged(spans) == [(0, 3), (4, 6)]
    assert length(spans) == 5
    assert common(spans, [Span(2, 5), Span(5.5, 9)]) == [(2, 3), (4, 5), (5.5, 6)]
    assert common(spans, []) == merged([]) == []


def test_a_collective_lasts_until_gloo_has_ended_it_and_hides_where_the_thread_computes():
    """Two steps; the second one waits longer than its collectives last, for a drive. Between them is a validation."""
    events = [
        event(STEP_RANGE, 0, 10),
        event("c10d::allreduce_", 1, 2),
        event("gloo:all_reduce", 1.5, 6),
        event("c10d::_reduce_scatter_base_", 5, 5.5),
        event("gloo:all_reduce", 5.1, 7),  # as gloo scatters
        event("gloo:all_reduce", 5.2, 8),
        event("c10d::allreduce_", 11, 12),
        event("gloo:all_reduce", 11, 19),
        event(STEP_RANGE, 20, 30),
        event("c10d::allreduce_", 21, 21.5),
        event("gloo:all_reduce", 21, 22),
        event("aten::mm", 23, 24),
    ]
    times = times_on_cpu(reversed(events), sleeping_sec=[3.0, 5.0])
    assert (times.steps, times.step_sec) == (2, 20)
    assert times.communication_sec == 7 + 1
    assert times.exposed_sec == 3 + 1
    found = {name: (calls.calls, calls.seconds) for name, calls in times.operations.items()}
    assert found == {"all_reduce": (2, 5 + 1), "reduce_scatter": (1, 3)}


def test_on_a_gpu_communication_is_exposed_where_nothing_else_runs():
    events = [
        event(STEP_RANGE, 0, 10),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 1, 5, on_gpu=True),
        event("ampere_sgemm_128x64_tn", 0, 3, on_gpu=True),
        event("Memcpy DtoD (Device -> Device)", 4, 4.5, on_gpu=True),
        event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 6, 7, on_gpu=True),
        event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 12, 13, on_gpu=True),
        event("c10d::allreduce_", 0, 1),
    ]
    times = times_on_gpu(events)
    assert (times.steps, times.step_sec, times.communication_sec, times.exposed_sec) == (1, 10, 5, 2.5)
    assert {name: calls.seconds for name, calls in times.operations.items()} == {"all_reduce": 4, "send_recv": 1}


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce"),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "broadcast"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "all_reduce"),
        ("ncclKernel_SendRecv(ncclDevComm*, unsigned long, ncclWork*)", "send_recv"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "other"),
        ("void at::native::reduce_kernel<512, 1>", None),
    ],
)
def test_names_of_kernels(name, operation):
    assert kernel_operation(name) == operation


def test_figures_are_of_one_step():
    """All-to-alls and sends are one operation on a GPU, and a bandwidth needs bytes."""
    events = [
        event(STEP_RANGE, 0, 10),
        event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 1, 3, on_gpu=True),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 4, 5, on_gpu=True),
        event(STEP_RANGE, 10, 20),
        event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 11, 13, on_gpu=True),
    ]
    traffic = [
        Traffic("send", (0, 1), calls=1, payload_bytes=30),
        Traffic("all_to_all", (0, 1), calls=1, payload_bytes=20),
        Traffic("all_reduce", (0, 1, 2, 3), calls=1, payload_bytes=40),
    ]
    figures = rank_figures(times_on_gpu(events), traffic)
    assert figures["by_op"] == [
        {"op": "send_recv", "calls": 1, "payload_bytes": 50, "ring_bytes": 40, "time_sec": 2, "bus_bytes_per_sec": 20},
        {
            "op": "all_reduce",
            "calls": 0.5,
            "payload_bytes": 40,
            "ring_bytes": 60,
            "time_sec": 0.5,
            "bus_bytes_per_sec": 120,
        },
    ]
    assert (figures["step_time_sec"], figures["exposed_sec"], figures["exposed_share"]) == (10, 2.5, 0.25)
    assert (figures["hidden_sec"], figures["hidden_share"]) == (0, 0)
    unknown = rank_figures(times_on_gpu(events), None)["by_op"][0]
    assert (unknown["ring_bytes"], unknown["bus_bytes_per_sec"]) == (None, None)
    ranks = [{"rank": 0, **figures}, {"rank": 1, **figures, "exposed_sec": 9.0, "exposed_share": 0.9}]
    shares = {"exposed_share": 0.575, "hidden_share": 0.0}
    assert communication_table({"first_step": 4, "steps": 2, **shares, "ranks": ranks}) == [
        "communication of steps 4 to 5: exposed 57.5% of the step, hidden 0.0%; mean of 2 ranks",
        "of rank 1, which waits longest (90.0%), in a step:",
        "       operation    calls   sent (MB)   time (ms)  bus (GB/s)",
        "       send_recv        1       0.000     2000.00       0.000",
        "      all_reduce      0.5       0.000      500.00       0.000",
    ]

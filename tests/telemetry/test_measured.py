"""What is measured in a step: intervals, speed, memory, GPUs, and the time of collectives."""

import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from small_run import within
from stand_in_nvml import StandInNvml
from torch.utils.checkpoint import checkpoint

from dsgpt.common.errors import NonFiniteError
from dsgpt.common.text import duration
from dsgpt.machine.topology import Topology
from dsgpt.telemetry.cost import Communication, Traffic
from dsgpt.telemetry.meter import (
    Figures,
    RankShare,
    RankTimes,
    StepMeter,
    StepResult,
    ThreadClock,
    TimedBatches,
    interval_figures,
    require_finite,
)
from dsgpt.telemetry.monitor import GpuSample, Monitor, _Device, gpu_use, open_gpus
from dsgpt.telemetry.profiles import (
    STEP_RANGE,
    Event,
    Span,
    communication_table,
    kernel_operation,
    rank_figures,
    times_on_cpu,
    times_on_gpu,
)
from dsgpt.training import trainer
from dsgpt.training.trainer import gpus_to_sample

# Figures of an interval: which ranks the others waited for.


COUNTED = Figures(steps=5, counted_tokens=400, step_secs=[1.0, 2.0, 3.0, 4.0], dataload_secs=[0.0] * 4)


def test_an_interval_names_the_ranks_that_the_others_wait_for():
    ranks = [RankShare(0.0, 6.0, 2.5), RankShare(2.5, 4.0, 2.0), RankShare(1.0, 9.0, 3.5), RankShare(0.0, 5.0, 1.0)]
    figures = interval_figures(COUNTED, ranks=ranks)
    assert figures == {
        "steps": 5,
        "tokens_per_sec": 40,
        "step_time_p50_sec": 2,
        "step_time_p95_sec": 4,
        "data_wait_share": 0.25,
        "data_wait_rank": 1,
        "slowest_rank": 2,
        "slowest_rank_lag_sec": 1.0,
        "largest_loss": 3.5,
    }


def test_what_is_unknown_is_none():
    unknown = interval_figures(Figures(steps=1), ranks=[RankShare(0.0, 0.0, math.nan)] * 2)
    assert [key for key, value in unknown.items() if value is not None] == ["steps"]
    for ranks in ([RankShare(0.0, math.nan, 1.0)] * 2, [RankShare(0.0, 5.0, 1.0)]):  # on GPUs; one rank
        assert interval_figures(COUNTED, ranks=ranks)["slowest_rank"] is None


def test_the_times_of_intervals_are_added():
    run = RankTimes()
    assert set(run.figures().values()) == {None}
    for computing in ([6.0, 4.0], [1.0, 4.0]):
        run.add(COUNTED, [RankShare(1.0, seconds, 1.0) for seconds in computing])
    assert run.figures() == {
        "data_wait_share": 0.1,
        "data_wait_rank": 0,
        "slowest_rank": 1,
        "slowest_rank_lag_sec": pytest.approx(1 / 8),
    }


def test_a_thread_that_sleeps_does_not_compute():
    """It may wait for a core when it wakes, which counts as computing."""
    clock, began = ThreadClock(), time.perf_counter()
    started = clock.seconds()
    time.sleep(0.2)
    assert time.perf_counter() - began - (clock.seconds() - started) > 0.1


SPIN = "while True: pass"


def test_a_thread_whose_core_is_shared_computes_all_the_time():
    """Without the kernel's second counter, 0.3 s would be missing; what is read between two clocks may take a while."""
    found: list[float] = []

    def compute() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of this thread, and of the process that it starts
        with subprocess.Popen([sys.executable, "-c", SPIN]) as other:
            clock, ran, began = ThreadClock(), time.thread_time(), time.perf_counter()
            computed = clock.seconds()
            while (passed := time.perf_counter() - began) - (time.thread_time() - ran) < 0.3 and passed < 30:
                pass
            found.extend([clock.seconds() - computed, passed])
            other.kill()

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    computed, passed = found
    assert computed == pytest.approx(passed, abs=0.2)


# Lines and figures from the times and losses of steps.


CPU = torch.device("cpu")


def result(loss: float) -> StepResult:
    one = torch.tensor(loss)
    return StepResult(loss=one, own_loss=one + 1, grad_norm=torch.tensor(1.0), lr=0.1, skipped=torch.tensor(False))


def metered(steps: int, *, seconds: float = 0.01) -> tuple[StepMeter, list[dict[str, Any]]]:
    meter = StepMeter(CPU, tokens_per_step=100)
    for step in range(1, steps + 1):
        meter.start()
        time.sleep(seconds)
        meter.stop(step=step, epoch=0, result=result(float(step)), dataload_sec=0.001 * step)
    return meter, meter.flush()


def test_a_line_per_step():
    meter, lines = metered(5)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["tokens"] for line in lines] == [100, 200, 300, 400, 500]
    assert [line["warm_up"] for line in lines] == [True, True, True, False, False]
    for line in lines:
        assert line["step_time_sec"] >= 0.01
        assert line["tokens_per_sec"] == pytest.approx(100 / line["step_time_sec"])
    assert lines[-1]["train_time_sec"] == pytest.approx(sum(line["step_time_sec"] for line in lines))
    assert meter.flush() == []
    assert meter.last_loss == 5.0


def test_throughput_leaves_the_warm_up_out():
    meter, lines = metered(6)
    counted = [line["step_time_sec"] for line in lines[3:]]
    assert meter.run.tokens_per_sec() == pytest.approx(300 / sum(counted))
    assert (meter.run.step_secs, meter.run.dataload_secs) == (counted, [0.004, 0.005, 0.006])
    meter, _ = metered(3)
    assert meter.run.tokens_per_sec() is None


def test_a_resumed_run_counts_its_earlier_steps():
    earlier, lines = metered(5)
    lines.insert(4, {"step": 4, "val_loss": 2.0})
    meter, other_epoch = (StepMeter(CPU, tokens_per_step=100) for _ in range(2))
    meter.resume(lines, done=5, epoch_start=0)
    assert meter.run == meter.epoch == earlier.run
    other_epoch.resume(lines, done=5, epoch_start=5)
    assert (other_epoch.run, other_epoch.epoch) == (earlier.run, Figures())


def test_lost_steps_make_sums_unknown_and_counts_stay():
    _, lines = metered(5)
    meter = StepMeter(CPU, tokens_per_step=100)
    meter.resume(lines[2:], done=5, epoch_start=3)
    meter.earlier_wall_sec = 70.0
    assert (meter.run.steps, meter.run.train_sec, meter.run.loss_mean()) == (5, None, None)
    assert (meter.epoch.steps, meter.epoch.loss_mean()) == (2, 4.5)
    meter.stop(step=6, epoch=0, result=result(1.0), dataload_sec=0.0)
    (line,) = meter.flush()
    assert line["train_time_sec"] is None
    assert line["wall_time_sec"] >= 70


def test_steps_that_the_device_has_not_finished_wait(monkeypatch):
    """A stand-in for a GPU that has finished only step 1."""
    meter = StepMeter(CPU, tokens_per_step=100)
    for step in (1, 2):
        meter.stop(step=step, epoch=0, result=result(1.0), dataload_sec=0.0)
    first = meter._pending[0].ended
    monkeypatch.setattr(meter._clock, "reached", lambda mark: mark == first)
    assert [line["step"] for line in meter.flush(wait=False)] == [1]
    assert [line["step"] for line in meter.flush()] == [2]


def test_waiting_for_data_is_timed_and_counted_once():
    def slow():
        for number in range(3):
            time.sleep(0.02)
            yield number

    batches = TimedBatches(slow())
    assert [next(batches), next(batches)] == [0, 1]
    assert batches.take_seconds() >= 0.04
    assert batches.take_seconds() == 0.0
    assert list(batches) == [2]
    busy = TimedBatches(slow(), idle=lambda: False)
    assert list(busy) == [0, 1, 2]
    assert busy.take_seconds() == 0.0, "the device computed meanwhile"


def test_a_value_that_is_not_finite_stops_the_run():
    good = {"step": 1, "loss": 1.0, "grad_norm": 1.0, "skipped": False}
    require_finite([good, good | {"skipped": True, "grad_norm": float("inf")}])  # fp16 loss scaling skips such steps
    for bad in ({"loss": float("inf")}, {"grad_norm": float("nan")}):
        with pytest.raises(NonFiniteError, match=r"step 7: loss .*: training stopped, and this state is not saved"):
            require_finite([good, good | {"step": 7} | bad])


def test_durations_in_words():
    words = ["9.9 s", "10.0 s", "59 s", "1 min 00 s", "1 h 00 min", "2 h 07 min"]
    assert [duration(seconds) for seconds in (9.94, 9.96, 59.4, 59.6, 3599.7, 7620)] == words


# Bytes that are sent, counted while compiled code runs.


def test_compiled_code_that_recomputes_its_random_numbers_runs_while_bytes_are_counted():
    """PyTorch puts the recomputation into an operator of its own kind, which a mode must say that it accepts."""

    def masked(x):
        return checkpoint(torch.nn.functional.dropout, x, use_reentrant=False)

    x = torch.ones(8, requires_grad=True)
    compiled = torch.compile(masked, backend="aot_eager")
    with Communication() as sent:
        compiled(x).sum().backward()
    assert sent.traffic == []
    assert set(x.grad.tolist()) <= {0.0, 2.0}


# Samples of GPUs, with a stand-in for the driver, and what the record says of them.


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
    nvml.unsupported += ("name", "ecc", "errors", "pages", "pending", "rows")
    known = {name: value for name, value in gpus.health("GPU-0").items() if value}
    assert known == {"driver": "580"}


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


def test_a_monitor_samples_until_its_context_ends(nvml, tmp_path):
    monitor = Monitor(open_gpus(["GPU-0", "GPU-1"]), path=tmp_path / "hardware.jsonl", every=0.01)
    with monitor:
        within(lambda: nvml.samples >= 6)
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
    sampled = [gpus_to_sample(ranks, rank=rank) for rank in range(4)]
    assert sampled == [(["GPU-0", "GPU-1"], 0), ([], 0), (["GPU-2", "GPU-3"], 1), ([], 0)]


def test_a_rank_names_its_place_on_its_machine(monkeypatch):
    sent: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="7"))
    monkeypatch.setattr(trainer, "gather_objects", lambda own: sent.append(own) or [own])
    monkeypatch.setattr(trainer, "gpus_to_sample", lambda _ranks, *, rank: ([], rank))
    place = Topology(rank=5, local_rank=1, world_size=8, local_world_size=4, launcher="x")
    trainer.open_monitor(SimpleNamespace(options=Mock(monitor_every=1), topology=place), torch.device("cuda"))
    assert sent == [(socket.gethostname(), 1, "GPU-7")]


# Times of collectives from the profiler's events: made-up events, with times that can be checked by hand.


def event(name: str, start: float, end: float, *, on_gpu: bool = False) -> Event:
    return Event(name, Span(start, end), on_gpu)


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
    assert times.operations == {"all_reduce": [5, 1], "reduce_scatter": [3]}


def test_collectives_that_wait_for_a_thread_of_gloo_last_until_it_has_ended_them():
    """Two threads take up three sums, the last one long after its operator; the gather is shorter than its operator."""
    events = [
        event(STEP_RANGE, 0, 20),
        event("c10d::allreduce_", 1, 1.1),
        event("c10d::allreduce_", 1.2, 1.3),
        event("c10d::allreduce_", 1.4, 1.5),
        event("gloo:all_reduce", 1.6, 5),
        event("gloo:all_reduce", 1.7, 6),
        event("c10d::_allgather_base_", 5.5, 5.6),
        event("gloo:all_reduce", 5.7, 9),
        event("gloo:all_gather", 6.1, 7),
        event("gloo:barrier", 12, 13),
    ]
    times = times_on_cpu(events, sleeping_sec=[20.0])
    assert times.operations == {"all_reduce": [4, pytest.approx(4.8), pytest.approx(7.6)], "all_gather": [1.5]}
    assert times.exposed_sec == 8
    with pytest.raises(ValueError, match="longer"):  # a step of which nobody knows how long its thread slept
        times_on_cpu(events, sleeping_sec=[])


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
    assert times.operations == {"all_reduce": [4], "send_recv": [1]}


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "all_reduce"),
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
    keys = ("op", "calls", "payload_bytes", "ring_bytes", "time_sec", "bus_bytes_per_sec")
    rows = ("send_recv", 1, 50, 40, 2, 20), ("all_reduce", 0.5, 40, 60, 0.5, 120)
    assert figures["by_op"] == [dict(zip(keys, row, strict=True)) for row in rows]
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

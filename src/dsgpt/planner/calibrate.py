"""Measures this machine and writes ``calibration.json``."""

import itertools
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.spawn import start_processes
from tqdm import tqdm

from dsgpt.common.files import remove, write_json_atomic
from dsgpt.common.text import counted
from dsgpt.formats.tensor_files import DTYPES
from dsgpt.machine import device as local
from dsgpt.machine.launcher import exit_rank
from dsgpt.machine.topology import Topology, free_port, ring_factor
from dsgpt.model.linear_cross_entropy import CACHED
from dsgpt.planner.rates import SCHEMA_VERSION

# The operations that are timed, each at shapes like those of a training step.

WIDTHS = {"cpu": (128, 256, 768), "cuda": (256, 768, 1600, 4096)}
"""Widths of the linear layers; the smallest and few rows take a GPU less time than the host needs to start them."""
TOKENS = {"cpu": 1024, "cuda": 16384}
"""Tokens of a micro batch."""
ROWS = {"cpu": (128, 256, 1024), "cuda": (256, 1024, 4096, 16384)}
"""Tokens of micro batches for which matrix products are timed."""
WEIGHT_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
"""Bytes of the weights that matrix products take turns with: as in a model, a core's own caches do not hold them."""
ELEMENTS = {"cpu": 16 << 20, "cuda": 128 << 20}
"""Elements of an array that fits into no cache."""
SENT_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
"""Payload of a collective operation whose bandwidth is measured in each precision."""
MESSAGES: dict[str, tuple[int, ...]] = {"cpu": (), "cuda": (64 << 10, 1 << 20, 16 << 20)}
"""Smaller payloads for which they are timed. Of gloo, the times of one number and of ``SENT_BYTES`` say all."""
VOCABULARY = 50_257
HEAD_SIZES = {"cpu": (32, 64), "cuda": (64, 128)}
LENGTHS: dict[str, tuple[int, ...]] = {"cpu": (128, 256, 512), "cuda": (256, 1024, 4096)}
_SMALL = 50
_PIECES = 8
"""Parts of the calls of a collective operation, each timed for itself."""
_QUEUED_SEC = 0.002
"""Seconds for which a GPU has calls in its queue before the host waits, as it does not in a training."""
_AHEAD = 8
"""Passes over ``ELEMENTS`` that keep a GPU busy while the host starts ``_SMALL`` operations."""


class Clock:
    """Times operations on one device.

    Args:
        device: of this process.
        seconds: to spend on each operation.
    """

    def __init__(self, device: torch.device, *, seconds: float) -> None:
        self.device = device
        self._seconds = seconds

    def seconds(self, call: Callable[[], object]) -> float:
        """The lower quartile of a call's times, after one for warm-up: other programs may disturb the rest.

        On a GPU each is the mean of calls that follow each other: the slower of the GPU and of the host that starts it.
        """
        call()
        self._wait()
        calls = 1 if self.device.type == "cpu" else max(1, int(_QUEUED_SEC / max(self._mean(call, 1), 1e-6)))
        return self.repeated(lambda: self._mean(call, calls))

    def repeated(self, measure: Callable[[], float]) -> float:
        """The lower quartile of what ``measure`` returns, at least once, and for as long as there is time."""
        found: list[float] = []
        started = time.perf_counter()
        while not found or time.perf_counter() - started < self._seconds:
            found.append(measure())
        return sorted(found)[len(found) // 4]

    def seconds_together(self, call: Callable[[], object]) -> float:
        """Seconds of a collective operation, measured in parts: every rank calls it equally often."""
        call()
        self._wait()
        begun = time.perf_counter()
        call()
        self._wait()
        count = torch.tensor(max(1, int(self._seconds / max(time.perf_counter() - begun, 1e-6))), device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MIN)
        calls = min(int(count), 10_000)
        times = [self._mean(call, max(1, calls // _PIECES)) for _ in range(_PIECES)]
        return sorted(times)[len(times) // 4]

    def _mean(self, call: Callable[[], object], calls: int) -> float:
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        self._wait()
        return (time.perf_counter() - begun) / calls

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def matrix_flops_per_sec(clock: Clock, precision: str, width: int, rows: int) -> float:
    """A linear layer from ``width`` to four times as many outputs: its product and the two of its backward pass."""
    outputs = 4 * width
    x, y = _random(clock, precision, rows, width), _random(clock, precision, rows, outputs)
    layers = -(-WEIGHT_BYTES[clock.device.type] // (x.element_size() * outputs * width))
    weights = itertools.cycle(_random(clock, precision, outputs, width).repeat(layers, 1, 1))

    def products() -> None:
        w = next(weights)
        x @ w.T
        y @ w
        y.T @ x

    return 3 * 2.0 * rows * width * outputs / clock.seconds(products)


def attention_flops_per_sec(clock: Clock, precision: str, head_size: int, length: int) -> float:
    """Causal attention, forward and backward pass: 2MTC and 5MTC FLOPs."""
    sequences, heads = max(1, TOKENS[clock.device.type] // length), 8
    shape = (sequences, heads, length, head_size)
    q, k, v = (_random(clock, precision, *shape).requires_grad_() for _ in range(3))
    gradient = _random(clock, precision, *shape)

    def attend() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)  # type: ignore[no-untyped-call]  # torch's has no types
        q.grad = k.grad = v.grad = None

    return 7.0 * sequences * length * length * heads * head_size / clock.seconds(attend)


def elementwise_bytes_per_sec(clock: Clock, precision: str) -> float:
    """LayerNorm, GELU and a residual sum, forward and backward pass, counted as ``dsgpt.planner.step_time`` does."""
    rows, width = TOKENS[clock.device.type], WIDTHS[clock.device.type][-1]
    x = _random(clock, precision, rows, width).requires_grad_()
    inner = _random(clock, precision, rows, 4 * width).requires_grad_()
    weight, bias = (_random(clock, precision, width).requires_grad_() for _ in range(2))
    of_x, of_inner = torch.ones_like(x), torch.ones_like(inner)

    def block() -> None:
        (x + F.layer_norm(x, (width,), weight, bias)).backward(of_x)  # type: ignore[no-untyped-call]
        F.gelu(inner, approximate="tanh").backward(of_inner)  # type: ignore[no-untyped-call]
        for each in (x, inner, weight, bias):
            each.grad = None

    return (2 + 3 + 8 + 5 + 3 + 12) * (x.element_size() * rows * width) / clock.seconds(block)


def logits_per_sec(clock: Clock, precision: str) -> float:
    """The softmax of logits and its gradient, in the steps of ``dsgpt.model.linear_cross_entropy``."""
    rows = max(1, CACHED // VOCABULARY) if clock.device.type == "cpu" else TOKENS["cuda"] // 4
    logits = _random(clock, precision, rows, VOCABULARY)
    target = torch.zeros(rows, 1, dtype=torch.long, device=clock.device)
    weights = torch.full((rows, 1), 1.0, device=clock.device)

    def loss() -> None:
        values = F.log_softmax(logits, dim=-1, dtype=torch.float32)
        (values.gather(1, target) * weights).sum()
        values.exp_().scatter_add_(1, target, -weights)
        torch.mul(values, weights, out=logits)

    return rows * VOCABULARY / clock.seconds(loss)


def triad_bytes_per_sec(clock: Clock) -> float:
    """``a = b + s * c``: three arrays, each read or written once."""
    a, b, c = (torch.ones(ELEMENTS[clock.device.type], device=clock.device) for _ in range(3))
    return 3 * a.element_size() * a.numel() / clock.seconds(lambda: torch.add(b, c, alpha=0.5, out=a))


def operation_sec(clock: Clock) -> float:
    """Seconds of one of many operations on 16 numbers, over a forward pass and its backward pass.

    On a GPU it is the host that needs them.
    """
    x = torch.ones(4, 4, device=clock.device, requires_grad=True)

    def many() -> None:
        y = x
        for _ in range(_SMALL):
            y = F.gelu(y @ x)
        y.sum().backward()  # type: ignore[no-untyped-call]
        x.grad = None

    return clock.seconds(many) / (_SMALL * 5)  # two of the forward pass, three of the backward pass


def kernel_sec(clock: Clock) -> float:
    """Seconds that a GPU needs for one of many operations on 16 numbers that wait in its queue."""
    x, large = torch.ones(4, 4, device=clock.device), torch.ones(ELEMENTS["cuda"], device=clock.device)
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in "ab")  # type: ignore[no-untyped-call]

    def queued() -> float:
        for _ in range(_AHEAD):
            large.add_(1)
        begun.record()
        for _ in range(_SMALL):
            x.add_(1)
        ended.record()
        ended.synchronize()
        return max(float(begun.elapsed_time(ended)), 1e-6) / 1e3 / _SMALL

    queued()
    return clock.repeated(queued)


def host_link_bytes_per_sec(clock: Clock) -> float:
    """A copy from the device to pinned memory of its host; on a CPU, within memory."""
    source = torch.ones(ELEMENTS[clock.device.type] // 4, device=clock.device)
    target = torch.empty(source.shape, pin_memory=clock.device.type == "cuda")
    return source.element_size() * source.numel() / clock.seconds(lambda: target.copy_(source))


def bus_bytes_per_sec(clock: Clock, operation: str, precision: str) -> float:
    """Bytes that a rank of a ring sends (NCCL's bus bandwidth), by ``dsgpt.machine.topology``."""
    size = SENT_BYTES[clock.device.type]
    return ring_factor(operation, dist.get_world_size()) * size / message_sec(clock, operation, size, precision)


def message_sec(clock: Clock, operation: str, size: int, precision: str = "fp32") -> float:
    """Seconds of a collective operation with a payload of ``size`` bytes."""
    ranks, rank, dtype = dist.get_world_size(), dist.get_rank(), DTYPES[precision]
    share, partner, sender = size // dtype.itemsize // ranks, rank ^ 1, rank % 2 == 0
    whole, other = (torch.zeros(share * ranks, dtype=dtype, device=clock.device) for _ in "ab")
    part = other[:share]

    def send() -> None:
        if partner < ranks:
            dist.send(whole, partner) if sender else dist.recv(other, partner)

    call: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "send": send,
    }
    return clock.seconds_together(call[operation])


def all_reduce_sec(clock: Clock) -> float:
    """An all-reduce of one number."""
    tensor = torch.zeros(1, device=clock.device)
    return clock.seconds_together(lambda: dist.all_reduce(tensor))


def _random(clock: Clock, precision: str, *shape: int) -> Tensor:
    return torch.randn(*shape, device=clock.device).to(DTYPES[precision])


# Processes that measure at the same time, one for each device, as the ranks of a training would work.

THREADS = {"cpu": 1, "cuda": None}
"""CPU threads of a process."""


def operations_of(kind: str, *, devices: int) -> list[tuple[Callable[..., float], tuple[str | int, ...]]]:
    """Every operation that is timed, with its arguments: the keys under which its figure is stored."""
    precisions: tuple[str, ...] = ("fp32", "bf16")
    if kind == "cuda":
        precisions = tuple(dict.fromkeys(("fp32", local.default_precision(kind), "fp16")))
    operations: list[tuple[Callable[..., float], tuple[str | int, ...]]] = [
        *((matrix_flops_per_sec, each) for each in itertools.product(precisions, WIDTHS[kind], ROWS[kind])),
        *((attention_flops_per_sec, each) for each in itertools.product(precisions, HEAD_SIZES[kind], LENGTHS[kind])),
        *((elementwise_bytes_per_sec, (each,)) for each in precisions),
        *((logits_per_sec, (each,)) for each in precisions),
        *((operation, ()) for operation in (triad_bytes_per_sec, operation_sec, host_link_bytes_per_sec)),
        *([(kernel_sec, ())] if kind == "cuda" else []),
    ]
    if devices > 1:
        sums = itertools.product(("all_reduce", "reduce_scatter"), precisions)
        moves = itertools.product(("all_gather", "all_to_all", "send"), ("fp32",))
        messages = itertools.product(("all_reduce", "all_gather", "all_to_all", "send"), MESSAGES[kind])
        operations += [*((bus_bytes_per_sec, each) for each in (*sums, *moves)), (all_reduce_sec, ())]
        operations += [(message_sec, each) for each in messages]
    return operations


def measure_ceilings(kind: str, *, devices: int, seconds: float) -> dict[str, Any]:
    """The fields of ``dsgpt.planner.rates.Ceilings``, of ``devices`` processes that measure together.

    Args:
        kind: ``cpu`` or ``cuda``.
        devices: how many.
        seconds: to spend on each operation.
    """
    queue: Any = mp.get_context("spawn").SimpleQueue()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    start_processes(  # type: ignore[no-untyped-call]  # torch's has no types
        _measure_rank, args=(queue, kind, devices, seconds), nprocs=devices, start_method="spawn"
    )
    ceilings: dict[str, Any] = queue.get()
    return ceilings


def _measure_rank(rank: int, queue: Any, kind: str, devices: int, seconds: float) -> NoReturn:
    """The process of a rank: time every operation. Rank 0 shows how far it is, and sends the slowest rank's figures."""
    here = Topology(rank=rank, local_rank=rank, world_size=devices, local_world_size=devices, launcher="calibration")
    device = local.bring_up(kind, local_rank=rank, threads=THREADS[kind])
    with local.joined(here, device), torch.enable_grad():
        clock = Clock(device, seconds=seconds)
        ceilings: dict[str, Any] = {"devices": devices}
        hidden = rank > 0 or not sys.stderr.isatty()
        bar = tqdm(operations_of(kind, devices=devices), f"calibrating {counted(devices, 'device')}", disable=hidden)
        for operation, arguments in bar:
            dist.barrier()
            bar.set_postfix_str(operation.__name__.removesuffix("_per_sec").replace("_", " "))
            keys = [operation.__name__, *map(str, arguments)]
            figures = local.gather_objects(operation(clock, *arguments))
            place = ceilings
            for key in keys[:-1]:
                place = place.setdefault(key, {})
            place[keys[-1]] = min(figures) if keys[0].endswith("_per_sec") else max(figures)
        if rank == 0:
            queue.put({"bus_bytes_per_sec": None, "all_reduce_sec": None} | ceilings)
    exit_rank(0)


_DISK_BYTES = 256 << 20
_START_SEC = {"cpu": 5.0, "cuda": 10.0}
"""Seconds to start the processes, not spent on measuring; on GPUs assumed, with NCCL and the first calls of kernels."""
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
    kind = "cuda" if local.cuda_devices() else "cpu"
    hardware = local.describe_hardware(kind)
    most = devices or (local.cuda_devices() if kind == "cuda" else int(str(hardware["cpu_count"])))
    counts = sorted({1, most})
    steps = [operations_of(kind, devices=count) for count in counts]
    each = max(_LEAST_SEC, (seconds - _START_SEC[kind] * len(counts)) / sum(map(len, steps)) / 1.6)  # warm-up and data
    path.parent.mkdir(parents=True, exist_ok=True)
    disk = disk_bytes_per_sec(path.parent)
    ceilings = [measure_ceilings(kind, devices=count, seconds=each) for count in counts]
    host = int(str(hardware["memory_bytes"])) // most
    machine = f"{hardware['cpu_name']}, {counted(most, 'device')} of 1 core"
    record = {
        **{"schema_version": SCHEMA_VERSION, "timestamp_utc": datetime.now(UTC).isoformat(timespec="seconds")},
        "machine": f"{hardware['gpu_name']} x {most}" if hardware["gpu_name"] else machine,
        **{"hardware": hardware, "env": local.software_versions()},
        "memory_bytes_per_device": int(str(hardware["gpu_memory_bytes"])) if kind == "cuda" else host,
        **{"host_bytes_per_device": host, "threads_per_device": THREADS[kind]},
        **{"seconds": round(time.perf_counter() - started, 1), "disk_bytes_per_sec": disk, "ceilings": ceilings},
    }
    write_json_atomic(path, record)
    return record


def disk_bytes_per_sec(folder: Path) -> float:
    """A file of 256 MiB in ``folder``, written and made durable."""
    path, block = folder / f".calibration.{os.getpid()}.tmp", os.urandom(1 << 20)
    try:
        begun = time.perf_counter()
        with path.open("xb") as file:
            file.writelines(itertools.repeat(block, _DISK_BYTES >> 20))
            file.flush()
            os.fsync(file.fileno())
        return _DISK_BYTES / (time.perf_counter() - begun)
    finally:
        remove(path)

"""What this machine can do: its matrix products at the shapes of a model, and its memory."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dsgpt.benchmarks.speed.trainers import DTYPES
from dsgpt.benchmarks.speed.workloads import Work

SECONDS = 0.4
"""Time spent on each product."""
COPIED_BYTES = 512 << 20


def measure_ceilings(work: Work) -> dict[str, Any]:
    """FLOP/s of every matrix product of a step, alone, and the seconds that all of a step's products take at that rate.

    A backward pass multiplies twice for each product of the forward pass: for the gradient of the inputs, and for that
    of the weights.
    """
    if work.threads:
        torch.set_num_threads(work.threads)
    dtype, device, rows = DTYPES[work.precision], work.device, work.tokens
    found, total = [], 0.0
    for name, (outputs, inputs, count) in work.shape.products().items():
        x, w = torch.randn(rows, inputs, device=device).to(dtype), torch.randn(outputs, inputs, device=device).to(dtype)
        y = torch.randn(rows, outputs, device=device).to(dtype)
        flops = 2.0 * rows * inputs * outputs
        for purpose, left, right in (("forward", x, w.T), ("inputs", y, w), ("weights", y.T, x)):
            out = left @ right
            seconds = _seconds(partial(torch.mm, left, right, out=out), device)
            total += seconds * count
            found.append({"product": name, "gradient": purpose, "flops_per_sec": flops / seconds, "count": count})
    return {"products": found, "products_sec": total, "copy_bytes_per_sec": _copy_bytes_per_sec(device)}


def _seconds(call: Callable[[], object], device: str) -> float:
    """Seconds of one call, after one for warm-up: the shortest of all that fit into ``SECONDS``."""
    call()
    shortest, started = float("inf"), time.perf_counter()
    while time.perf_counter() - started < SECONDS:
        begun = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        shortest = min(shortest, time.perf_counter() - begun)
    return shortest


def _copy_bytes_per_sec(device: str) -> float:
    """Bytes read and written per second by a copy that fits into no cache."""
    source = torch.ones(COPIED_BYTES // 4, device=device)
    target = torch.ones_like(source)
    return 2 * COPIED_BYTES / _seconds(lambda: target.copy_(source), device)

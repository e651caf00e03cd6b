"""PyTorch's profiler, without the lines that its library prints."""

import os
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule


def new_profiler(device: torch.device, *, warm_up: int = 0, steps: int | None = None) -> Any:
    """A ``torch.profiler.profile`` of this process, to be started: operators, and on a GPU kernels and copies.

    Args:
        device: of this process.
        warm_up: steps of which it keeps nothing.
        steps: of which it keeps the events, after those; None keeps all until it is stopped.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints when it starts and stops
    return profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])],
        schedule=None if steps is None else schedule(wait=0, warmup=warm_up, active=steps, repeat=1),
    )

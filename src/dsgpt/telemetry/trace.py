"""Traces of some steps by PyTorch's profiler."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from dsgpt.common.files import remove
from dsgpt.machine.device import named_range, ranges_shown
from dsgpt.machine.process_group import gather_objects

# PyTorch's profiler, without the lines that its library prints.


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


class Trace:
    """Traces the next steps of this process on every rank, after ``WARM_UP_STEPS`` more.

    Args:
        device: of this rank.
        steps: how many to trace.
        path: the file of this rank.
        report: called on every rank with the table for people, and lines that say why a trace is missing.
    """

    def __init__(
        self, device: torch.device, *, steps: int, path: Path, report: Callable[[list[str], list[str]], None]
    ) -> None:
        self._device, self._steps, self._path, self._report = device, steps, path, report
        self._taken: list[int] = []
        self._profiler = new_profiler(device, warm_up=WARM_UP_STEPS, steps=steps)
        self._profiler.start()

    @property
    def complete(self) -> bool:
        """Whether all steps were traced."""
        return len(self._taken) == WARM_UP_STEPS + self._steps

    @contextlib.contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """A context for an optimizer step."""
        with ranges_shown(self._device), named_range("train_step"):
            yield
        self._taken.append(step)
        if not self.complete:
            self._profiler.step()

    def finish(self) -> None:
        """Write the trace and report the table; collective."""
        self._profiler.stop()
        traced = self._taken[WARM_UP_STEPS:]
        if not traced:
            self._report([], ["too few steps were left: there is no trace"])
            return
        reasons: list[str | None] = gather_objects(self._written())
        table = top_table(self._profiler.key_averages(), steps=traced, on_gpu=self._device.type == "cuda")
        self._report(table, [f"rank {rank} wrote no trace: {why}" for rank, why in enumerate(reasons) if why])

    def _written(self) -> str | None:
        """Write the file; why that failed, or None."""
        partial = self._path.with_name(f"partial-{self._path.name}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            remove(partial)
            self._profiler.export_chrome_trace(str(partial))
            partial.replace(self._path)
        except OSError as error:
            return error.strerror or str(error)
        return None


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
    total = sum(microseconds for microseconds, _, _ in own)
    if not total:
        return []
    where = "GPU" if on_gpu else "CPU"
    lines = [f"profile of steps {steps[0]} to {steps[-1]} on rank 0: what takes most time of the {where}"]
    lines.append(f"{'ms a step':>10}  {'share':>6}  {'calls a step':>12}  operator")
    for microseconds, count, name in sorted(own, reverse=True)[:ROWS]:
        milliseconds, share = microseconds / 1000 / len(steps), microseconds / total
        lines.append(f"{milliseconds:>10.2f}  {share:>6.1%}  {count / len(steps):>12g}  {name[:80]}")
    return lines

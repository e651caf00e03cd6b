"""Clocks: of the device that computes, and of a thread, which computes or sleeps."""

import contextlib
import os
import time

import torch

Mark = float | torch.cuda.Event
"""An instant in the device's own time: seconds on CPU, an event on a GPU, which runs asynchronously."""


class DeviceClock:
    """Marks instants in the device's own time."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def mark(self) -> Mark:
        """This instant."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's has no types
        event.record()
        return event

    def reached(self, mark: Mark) -> bool:
        """Whether the device has passed ``mark``; does not wait."""
        if isinstance(mark, float):
            return True
        passed: bool = mark.query()  # type: ignore[no-untyped-call]  # torch's has no types
        return passed

    def seconds_between(self, first: Mark, second: Mark) -> float:
        """Seconds from one mark to another; waits until the device has passed the second."""
        if isinstance(first, float):
            assert isinstance(second, float)  # a clock makes marks of one kind
            return second - first
        assert not isinstance(second, float)
        second.synchronize()
        milliseconds: float = first.elapsed_time(second)
        return milliseconds / 1000


class ThreadClock:
    """The seconds in which the thread that made it ran, or was ready to run and another process had its core.

    The rest of the time it slept: it waited for other ranks, for a process that reads data, or for a drive. Waiting for
    a core counts as computing, because a rank whose core is shared is slow for the others.

    The kernel counts the time that a thread runs (``CLOCK_THREAD_CPUTIME_ID``) and that it waits for a core
    (``run_delay`` in ``/proc/thread-self/schedstat``). Reading both takes about a microsecond. Without the second, as
    in some containers, waiting for a core counts as sleeping.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        if self._file is not None and len(os.pread(self._file, 80, 0).split()) < 2:
            self.close()

    def seconds(self) -> float:
        """Seconds so far; only differences have a meaning."""
        waited = 0 if self._file is None else int(os.pread(self._file, 80, 0).split()[1])
        return time.thread_time() + waited / 1e9

    def close(self) -> None:
        """Close the file of the kernel."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

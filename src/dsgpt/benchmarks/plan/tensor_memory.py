"""Measures the most memory that the tensors of this process need in a step, as sums of allocations on the CPU."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Self

import torch
import torch.distributed as dist

_STEP = "the measured step"
_ALLOCATION = "[memory]"
RELEASE_SEC = 0.01
"""How long a rank waits after each collective; see ``_released_here``."""


class TensorMemory:
    """Records every allocation and release of this process; a context from before the strategy is built.

    The recording is that of ``torch.profiler``, which sees every tensor that the main thread makes or frees, those of
    C++ too.
    """

    def __init__(self) -> None:
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=False
        )
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._held.enter_context(_released_here())
        self._profiler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._profiler.stop()
        self._held.close()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A context for the step to measure."""
        with torch.profiler.record_function(_STEP):
            yield

    def peak(self) -> int:
        """The most bytes at a time within the step; call it after the context."""
        events: list[Any] = self._profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        first, end = next(
            (event.start_ns(), event.start_ns() + event.duration_ns()) for event in events if event.name() == _STEP
        )
        live = most = 0
        for when, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == _ALLOCATION):
            live += size
            if first <= when <= end:
                most = max(most, live)
        return most


@contextlib.contextmanager
def _released_here() -> Iterator[None]:
    """Wait a moment after every collective, so that gloo's threads are never the last to hold its tensors.

    The profiler does not see what other threads free. Their memory would count for ever, or not, from run to run.
    """
    original = dist.Work.wait

    def wait(work: dist.Work, *arguments: Any) -> bool:
        done = original(work, *arguments)
        time.sleep(RELEASE_SEC)
        return done

    dist.Work.wait = wait  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        dist.Work.wait = original  # type: ignore[method-assign]

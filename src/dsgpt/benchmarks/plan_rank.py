"""One rank of a cell of the plan suite: measures its memory, or its time."""

import contextlib
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist

from dsgpt.benchmarks.launch import config_of, joined_run, write_end
from dsgpt.data.loader import Batch
from dsgpt.machine.device import barrier, ranges_made_by, synchronisations
from dsgpt.strategies.base import Strategy, build_strategy
from dsgpt.telemetry.cost import TrafficMeter
from dsgpt.training.trainer import training_batches

# Measures the most memory that the tensors of this process need in a step: as sums of allocations on the CPU, or by the
# allocator of a GPU.

_STEP = "the measured step"
_ALLOCATION = "[memory]"
RELEASE_SEC = 0.01
"""Seconds that a rank waits after each collective; see ``_released_here``."""


class TensorMemory:
    """Records every allocation and release of this process on the CPU; a context from before the strategy is built.

    The recording is that of ``torch.profiler``, which sees every tensor that the main thread makes or frees, those of
    C++ too.
    """

    def __init__(self) -> None:
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=False
        )
        self._resources = contextlib.ExitStack()
        self.by_part: dict[str, int] = {}
        """Peaks by part of the step: none, because the profiler has no clock that the parts share."""

    def __enter__(self) -> Self:
        self._resources.enter_context(_released_here())
        self._profiler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._profiler.stop()
        self._resources.close()

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


class GpuMemory(contextlib.nullcontext[None]):
    """Reads the peaks of PyTorch's allocator of this process's GPU; it has the interface of ``TensorMemory``."""

    def __init__(self) -> None:
        super().__init__()
        self.by_part: dict[str, int] = {}
        """The most bytes up to the end of the last forward pass of the step, and after it."""

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A context for the step to measure."""
        torch.cuda.reset_peak_memory_stats()
        with ranges_made_by(self._range):
            yield
        self._note("rest")

    @contextlib.contextmanager
    def _range(self, name: str) -> Iterator[None]:
        yield
        if name == "forward":
            self._note(name)

    def _note(self, part: str) -> None:
        self.by_part[part] = max(self.by_part.get(part, 0), torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """The most bytes at a time within the step; call it after the context."""
        return max(self.by_part.values())


def _released_here() -> contextlib.AbstractContextManager[Any]:
    """A context that waits a moment after every collective, so that gloo's threads are never the last with its tensors.

    The profiler does not see what other threads free. Their memory would count for ever, or not, from run to run.
    """
    original = dist.Work.wait

    def wait(work: dist.Work, *arguments: Any) -> bool:
        done = original(work, *arguments)
        time.sleep(RELEASE_SEC)
        return done

    return mock.patch.object(dist.Work, "wait", wait)


WARM_UP_STEPS, TIMED_STEPS = 2, 3
"""Steps that are not measured, and those of a round whose time is taken."""
MEASURED_STEP = WARM_UP_STEPS + 1
ESTIMATED = (2, 3)
"""ZeRO stages that DeepSpeed has an estimator for."""


def measure_memory(flags: list[str], folder: Path) -> None:
    """Measure peak memory, model state and traffic of a step; of one rank on a CPU by PyTorch's MemTracker, too.

    Args:
        flags: of ``src/gpt2.py``.
        folder: of the cell.

    Raises:
        UserError: the product refuses the combination.
    """
    config = config_of(flags)
    kind, model, recipe, ranks = config.device, config.model, config.recipe, config.topology.world_size
    memory = GpuMemory() if kind == "cuda" else TensorMemory()
    with _opened(flags, memory) as (rank, strategy, batches):
        for step in range(1, MEASURED_STEP):
            strategy.train_step(batches, step)
        gc.collect()  # garbage of building is not memory of a step
        with memory.step(), synchronisations(kind) as waits:
            strategy.train_step(batches, MEASURED_STEP)
        memory.__exit__()
        facts: dict[str, Any] = {"waits": len(waits) if kind == "cuda" else None, "mem_tracker_bytes": None}
        after = MEASURED_STEP + 1
        meter = TrafficMeter(
            lambda: strategy.state_tensors()._asdict(), last_step=after, report=lambda cost: facts.update(cost=cost)
        )
        with meter.watch(after):
            strategy.train_step(batches, after)
        if kind == "cpu" and ranks == config.batch.gradient_accumulation_steps == 1:
            facts["mem_tracker_bytes"] = _witnessed(strategy, batches)
        facts |= {"peak_bytes": memory.peak(), "by_part": memory.by_part}
        if config.run_type == "optimized" and recipe.zero_stage in ESTIMATED:
            from dsgpt.strategies.deepspeed.setup import estimated_bytes  # noqa: PLC0415 - imports DeepSpeed

            sizes = {"elements": model.padded_parameter_count(), "largest": model.largest_parameter(), "ranks": ranks}
            offload = recipe.offload_optimizer != "none"
            facts["estimate_bytes"] = estimated_bytes(stage=recipe.zero_stage, offload=offload, **sizes)
        write_end(folder, rank, **facts)


def measure_time(flags: list[str], folder: Path) -> None:
    """Measure the seconds of each of ``TIMED_STEPS`` steps, after those of warm-up.

    Raises:
        UserError: the product refuses the combination.
    """
    with _opened(flags, contextlib.nullcontext()) as (rank, strategy, batches):
        seconds = []
        for step in range(1, WARM_UP_STEPS + TIMED_STEPS + 1):
            started = time.perf_counter()
            float(strategy.train_step(batches, step).loss)
            seconds.append(time.perf_counter() - started)
        write_end(folder, rank, seconds=seconds[WARM_UP_STEPS:])


@contextlib.contextmanager
def _opened(
    flags: list[str], memory: contextlib.AbstractContextManager[Any]
) -> Iterator[tuple[int, Strategy, Iterator[Batch]]]:
    """This rank of a cell: its number, its strategy, which is built inside ``memory``, and its batches."""
    with contextlib.ExitStack() as resources:
        config, device = resources.enter_context(joined_run(flags))
        torch.manual_seed(config.options.seed)
        resources.enter_context(memory)
        strategy = resources.enter_context(contextlib.closing(build_strategy(config, device)))
        batches = resources.enter_context(contextlib.closing(training_batches(config, first_step=0)))
        yield config.topology.rank, strategy, batches
        barrier()


def _witnessed(strategy: Strategy, batches: Iterator[Batch]) -> int:
    """The peak of the step after that, as ``MemTracker`` counts it.

    It finds the parameters of modules itself, and would count them twice if it were told of them.
    """
    from torch.distributed._tools.mem_tracker import MemTracker  # noqa: PLC0415 - takes seconds

    tracker, state = MemTracker(), strategy.state_tensors()
    weights = {tensor.untyped_storage().data_ptr() for tensor in state.parameters}
    others = [*state.optimizer, *state.master]
    tracker.track_external(*[tensor for tensor in others if tensor.untyped_storage().data_ptr() not in weights])
    with tracker:
        strategy.train_step(batches, MEASURED_STEP + 2)
    return max(sizes["Total"] for sizes in tracker.get_tracker_snapshot("peak").values())

"""One rank of one cell of the suite; see ``dsgpt.benchmarks.harness.worker``."""

import contextlib
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dsgpt.benchmarks.harness.rank_files import rank_file
from dsgpt.benchmarks.plan.tensor_memory import TensorMemory
from dsgpt.common.files import write_json_atomic
from dsgpt.config.flags import parse_arguments
from dsgpt.config.run_config import RunConfig, resolve
from dsgpt.data.loader import Batch
from dsgpt.runtime.device import bring_up
from dsgpt.runtime.process_group import barrier, joined
from dsgpt.runtime.topology import read_topology
from dsgpt.strategies.base import Strategy
from dsgpt.strategies.build import build_strategy
from dsgpt.telemetry.step_traffic import TrafficMeter
from dsgpt.training.batches import training_batches

WARM_UP_STEPS = 2
MEASURED_STEP = WARM_UP_STEPS + 1


def measure_memory(flags: list[str], folder: Path, *, witness: bool, estimate: dict[str, Any] | None) -> None:
    """Measure peak memory, model state and traffic of a step.

    Args:
        flags: of ``src/gpt2.py``.
        folder: of the cell.
        witness: whether PyTorch's MemTracker measures a step too.
        estimate: arguments of ``strategies.deepspeed.estimates.estimated_bytes``; None for strategies that it does not
            know.

    Raises:
        UserError: the product refuses the combination.
    """
    config, device = _resolved(flags)
    with _group(config, device), contextlib.ExitStack() as held:
        memory = held.enter_context(TensorMemory())
        strategy = held.enter_context(contextlib.closing(build_strategy(config, device)))
        batches = held.enter_context(contextlib.closing(training_batches(config, first_step=0)))
        for step in range(1, MEASURED_STEP):
            strategy.train_step(batches, step)
        gc.collect()  # garbage of building is not memory of a step
        with memory.step():
            strategy.train_step(batches, MEASURED_STEP)
        memory.__exit__()
        cost = _cost(strategy, batches)
        seen = _witnessed(strategy, batches) if witness else None
        facts = {"peak_bytes": memory.peak(), "cost": cost, "mem_tracker_bytes": seen}
        if estimate is not None:
            from dsgpt.strategies.deepspeed.estimates import estimated_bytes  # noqa: PLC0415 - imports DeepSpeed

            facts["estimate_bytes"] = estimated_bytes(**estimate)
        _done(folder, config, facts)
        barrier()


def measure_time(flags: list[str], folder: Path, *, steps: int) -> None:
    """Measure the seconds of each of ``steps`` steps, after those of warm-up.

    Raises:
        UserError: the product refuses the combination.
    """
    config, device = _resolved(flags)
    with _group(config, device), contextlib.ExitStack() as held:
        strategy = held.enter_context(contextlib.closing(build_strategy(config, device)))
        batches = held.enter_context(contextlib.closing(training_batches(config, first_step=0)))
        seconds = []
        for step in range(1, WARM_UP_STEPS + steps + 1):
            started = time.perf_counter()
            float(strategy.train_step(batches, step).loss)
            seconds.append(time.perf_counter() - started)
        _done(folder, config, {"seconds": seconds[WARM_UP_STEPS:]})
        barrier()


def _resolved(flags: list[str]) -> tuple[RunConfig, torch.device]:
    options, problems = parse_arguments(flags)
    config = resolve(options, topology=read_topology(), problems=problems)
    torch.manual_seed(config.options.seed)
    return config, bring_up(config.device, local_rank=config.topology.local_rank, threads=config.threads_per_device)


def _group(config: RunConfig, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if config.run_type == "baseline" else joined(config.topology, device)


def _cost(strategy: Strategy, batches: Iterator[Batch]) -> dict[str, Any]:
    """The ``cost`` block of a run's record, of the next step."""
    found: list[dict[str, Any]] = []
    step = MEASURED_STEP + 1
    meter = TrafficMeter(lambda: strategy.state_tensors()._asdict(), last_step=step, report=found.append)
    with meter.watch(step):
        strategy.train_step(batches, step)
    return found[0]


def _witnessed(strategy: Strategy, batches: Iterator[Batch]) -> int:
    """The peak of the step after that, as ``MemTracker`` counts it.

    It finds the parameters of modules itself, and would count them twice if it were told of them.
    """
    from torch.distributed._tools.mem_tracker import MemTracker  # noqa: PLC0415 - takes seconds

    tracker, state = MemTracker(), strategy.state_tensors()
    found = {tensor.untyped_storage().data_ptr() for tensor in state.parameters}
    others = [*state.optimizer, *state.master]
    tracker.track_external(*[tensor for tensor in others if tensor.untyped_storage().data_ptr() not in found])
    with tracker:
        strategy.train_step(batches, MEASURED_STEP + 2)
    return max(sizes["Total"] for sizes in tracker.get_tracker_snapshot("peak").values())


def _done(folder: Path, config: RunConfig, facts: dict[str, Any]) -> None:
    write_json_atomic(rank_file(folder, config.topology.rank), {"status": "done", "time": time.time(), **facts})

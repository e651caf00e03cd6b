"""Runs the cells of the plan suite, and one rank of one cell."""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from dsgpt.benchmarks.cells import CellEnd, CellRunner, write_random_tokens
from dsgpt.benchmarks.launch import Assignment, config_of, write_end
from dsgpt.benchmarks.plan import PARTS_OF_STEP, VOCABULARIES, PlanCell
from dsgpt.common.text import counted
from dsgpt.data.loader import Batch
from dsgpt.machine.device import barrier, bring_up, joined, ranges_made_by, synchronisations
from dsgpt.planner.calibrate import calibrate
from dsgpt.planner.formulas import STEP, model_state, peak_memory, sent_bytes
from dsgpt.planner.rates import Calibration, calibrated_machine, read_calibration
from dsgpt.planner.setup import Setup, model_parameters, total
from dsgpt.planner.step_time import Factors, MeasuredStep, StepTime, fit, predict_step
from dsgpt.strategies.base import Strategy, build_strategy
from dsgpt.telemetry.cost import TrafficMeter
from dsgpt.training.trainer import training_batches

# Runs the cells: memory first, then rounds of step times, in which all cells take turns. Their predictions come from a
# calibration, fitted to a part of the cells.

TOKENS = {"cpu": 200_000, "cuda": 4_000_000}
STEPS = 3
"""Timed steps of a cell in a round."""
RANK = "dsgpt.benchmarks.plan_rank"
ESTIMATED = (2, 3)
"""ZeRO stages that DeepSpeed has an estimator for."""

CALIBRATION_SEC, CALIBRATION_SEC_OF_A_CELL = 60.0, 4.0
"""Seconds of the calibration that times are predicted from; a few cells get a shorter one."""

CellResult = dict[str, Any]


class PlanSuite:
    """Measures cells in a folder.

    Args:
        folder: an existing folder.
        repository: holds the recipes.
        rounds: of step times.
        say: prints a line.
        device: ``cpu`` or ``cuda``.
        devices: of the machine; a cell has one rank, or one for each.
    """

    def __init__(
        self,
        folder: Path,
        *,
        repository: Path,
        rounds: int,
        say: Callable[[str], None],
        device: str = "cpu",
        devices: int = 2,
    ) -> None:
        self._folder, self._recipes, self._rounds, self._say = folder, repository / "ds_configs", rounds, say
        self._device, self._devices = device, devices
        self._runner = CellRunner(folder, repository=repository, device=device)
        self._setups: dict[str, Setup] = {}
        self.calibration: Calibration | None = None
        """Calibration of this machine, from which times are predicted; None before it, and without rounds or cells to
        fit to."""
        self.factors: Factors | None = None
        """Factors fitted to measured times; None before that."""
        write_random_tokens(folder / "tokens", vocab_sizes=VOCABULARIES, count=TOKENS[device])

    def run(self, cells: Sequence[PlanCell]) -> Iterator[CellResult]:
        """The result of each cell; all memory is measured before the first time is."""
        memory = {cell.key: end for cell, end in self._pass(cells, "memory")}
        if self._rounds and any(cell.fit for cell in cells):
            seconds, file = min(CALIBRATION_SEC, CALIBRATION_SEC_OF_A_CELL * len(cells)), "calibration.json"
            calibrate(self._folder / file, seconds=seconds, devices=self._devices)
            self.calibration = read_calibration(self._folder / file)
        times: dict[str, list[list[float]]] = {cell.key: [] for cell in cells}
        for number in range(1, self._rounds + 1):
            for cell, end in self._pass(cells, f"time-{number}"):
                if end.status == "done":
                    times[cell.key].append(max((rank["seconds"] for rank in end.ranks), key=sum))
        predicted = self._predicted(cells, times)
        for cell in cells:
            yield self._result(cell, memory[cell.key], times[cell.key], predicted.get(cell.key))

    def _predicted(self, cells: Sequence[PlanCell], times: Mapping[str, list[list[float]]]) -> dict[str, StepTime]:
        """Predicted step times; empty if no cell that may be fitted to was measured."""
        calibration, setups = self.calibration, self._setups
        fitted = [cell.key for cell in cells if cell.fit and times[cell.key]]
        if calibration is None or not fitted:
            return {}
        machines = {ranks: calibrated_machine(calibration, devices=ranks) for ranks in (1, self._devices)}
        self.factors = fit(
            [
                MeasuredStep(setup=setups[key], machine=machines[setups[key].world_size], seconds=_middle(times[key]))
                for key in fitted
            ]
        )
        return {
            key: predict_step(setup, self.factors.applied(machines[setup.world_size])) for key, setup in setups.items()
        }

    def _pass(self, cells: Sequence[PlanCell], name: str) -> Iterator[tuple[PlanCell, CellEnd]]:
        """Run every cell once."""
        return self._runner.run(
            cells,
            place=lambda cell: (cell.ranks, cell.launcher),
            assign=lambda cell: self._assignment(cell, name),
            started=lambda one: self._say(f"starting {counted(one.cells, 'cell')} on {counted(one.ranks, 'rank')}"),
        )

    def _assignment(self, cell: PlanCell, name: str) -> Assignment:
        folder = self._folder / f"{name}-{cell.key}"
        folder.mkdir()
        recipe = cell.write_recipe(folder / "recipe.json", recipes=self._recipes)
        flags = cell.flags(recipe=recipe, tokens=self._folder / "tokens", folder=folder, device=self._device)
        if name != "memory":
            return Assignment(folder=str(folder), flags=flags, call=f"{RANK}:measure_time", arguments={"steps": STEPS})
        setup = self._setups[cell.key] = cell.setup(recipe)
        witness = self._device == "cpu" and cell.ranks == 1 and cell.accumulation == 1
        arguments = {"witness": witness, "estimate": _estimate(setup)}
        return Assignment(folder=str(folder), flags=flags, call=f"{RANK}:measure_memory", arguments=arguments)

    def _result(
        self, cell: PlanCell, end: CellEnd, rounds: Sequence[Sequence[float]], predicted: StepTime | None
    ) -> CellResult:
        head = {"key": cell.key, "title": cell.title, "strategy": cell.strategy, "ranks": cell.ranks}
        head |= {"fit": cell.fit, "work": cell.work, "status": end.status, "message": end.message}
        if end.status != "done":
            return head
        setup, cost = self._setups[cell.key], end.ranks[0]["cost"]
        state, traffic = cost["model_state_bytes_per_rank"], cost["communication_per_step"]
        sent = [sent_bytes(setup, rank=rank) for rank in range(setup.world_size)]
        return head | {
            "peak_memory": [_of_rank(setup, rank, facts, self._device) for rank, facts in enumerate(end.ranks)],
            "waits": end.ranks[0]["waits"],
            "model_state": {"measured": state["total"], "predicted": model_state(setup, rank=state["rank"]).total},
            "ring_bytes": {"measured": traffic and traffic["ring_bytes_by_rank"], "predicted": sent},
            "estimate_bytes": end.ranks[0].get("estimate_bytes"),
            "step_seconds": {
                "rounds": [list(seconds) for seconds in rounds],
                "measured": _middle(rounds) if rounds else None,
                "predicted": predicted and predicted.seconds,
                "predicted_parts": predicted and predicted.parts,
            },
        }


def _middle(rounds: Sequence[Sequence[float]]) -> float:
    """The median of all steps."""
    return statistics.median(second for seconds in rounds for second in seconds)


def _of_rank(setup: Setup, rank: int, facts: dict[str, Any], device: str) -> dict[str, Any]:
    predicted = peak_memory(setup, rank=rank, device=device, among=STEP)
    by_part = {
        name: (measured, peak_memory(setup, rank=rank, device=device, among=PARTS_OF_STEP[name]).total)
        for name, measured in facts["by_part"].items()
        if setup.precision != "fp16"  # whose loss has its peak in the backward pass, which scales it
    }
    return {
        "rank": rank,
        "measured": facts["peak_bytes"],
        "mem_tracker": facts["mem_tracker_bytes"],
        "predicted": predicted.as_dict(),
        "ratio": predicted.total / facts["peak_bytes"],
        "by_part": by_part,
    }


def _estimate(setup: Setup) -> dict[str, Any] | None:
    """Arguments of DeepSpeed's estimator; None where it has none."""
    stage = setup.recipe.zero_stage
    if setup.run_type != "optimized" or stage not in ESTIMATED:
        return None
    sizes = model_parameters(setup.model)
    return {
        "stage": stage,
        "elements": total(sizes),
        "largest": setup.model.largest_parameter(),
        "ranks": setup.world_size,
        "offload": setup.recipe.offload_optimizer != "none",
    }


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


class GpuMemory:
    """Reads the peaks of PyTorch's allocator of this process's GPU; it has the interface of ``TensorMemory``."""

    def __init__(self) -> None:
        self.by_part: dict[str, int] = {}
        """The most bytes up to the end of the last forward pass of the step, and after it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is recorded outside of the step."""

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
    kind = config_of(flags).device
    memory = GpuMemory() if kind == "cuda" else TensorMemory()
    with _opened(flags, memory) as (rank, strategy, batches):
        for step in range(1, MEASURED_STEP):
            strategy.train_step(batches, step)
        gc.collect()  # garbage of building is not memory of a step
        with memory.step(), synchronisations(kind) as waits:
            strategy.train_step(batches, MEASURED_STEP)
        memory.__exit__()
        cost = _cost(strategy, batches)
        seen = _witnessed(strategy, batches) if witness else None
        facts = {"peak_bytes": memory.peak(), "by_part": memory.by_part, "cost": cost, "mem_tracker_bytes": seen}
        facts["waits"] = len(waits) if kind == "cuda" else None
        if estimate is not None:
            from dsgpt.strategies.deepspeed.setup import estimated_bytes  # noqa: PLC0415 - imports DeepSpeed

            facts["estimate_bytes"] = estimated_bytes(**estimate)
        write_end(folder, rank, **facts)


def measure_time(flags: list[str], folder: Path, *, steps: int) -> None:
    """Measure the seconds of each of ``steps`` steps, after those of warm-up.

    Raises:
        UserError: the product refuses the combination.
    """
    with _opened(flags, contextlib.nullcontext()) as (rank, strategy, batches):
        seconds = []
        for step in range(1, WARM_UP_STEPS + steps + 1):
            started = time.perf_counter()
            float(strategy.train_step(batches, step).loss)
            seconds.append(time.perf_counter() - started)
        write_end(folder, rank, seconds=seconds[WARM_UP_STEPS:])


@contextlib.contextmanager
def _opened(
    flags: list[str], memory: contextlib.AbstractContextManager[Any]
) -> Iterator[tuple[int, Strategy, Iterator[Batch]]]:
    """This rank of a cell: its number, its strategy, which is built inside ``memory``, and its batches."""
    config = config_of(flags)
    torch.manual_seed(config.options.seed)
    device = bring_up(config.device, local_rank=config.topology.local_rank, threads=config.threads_per_device)
    with contextlib.ExitStack() as resources:
        if config.run_type != "baseline":
            resources.enter_context(joined(config.topology, device))
        resources.enter_context(memory)
        strategy = resources.enter_context(contextlib.closing(build_strategy(config, device)))
        batches = resources.enter_context(contextlib.closing(training_batches(config, first_step=0)))
        yield config.topology.rank, strategy, batches
        barrier()


def _cost(strategy: Strategy, batches: Iterator[Batch]) -> dict[str, Any]:
    """The ``cost`` block of a run's record, of the next step."""
    costs: list[dict[str, Any]] = []
    step = MEASURED_STEP + 1
    meter = TrafficMeter(lambda: strategy.state_tensors()._asdict(), last_step=step, report=costs.append)
    with meter.watch(step):
        strategy.train_step(batches, step)
    return costs[0]


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

"""Figures of a turn, read from what its training wrote; of a cell, over its turns; and of a comparison."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.sweep.cells import Cell, ComparisonPlan
from dsgpt.benchmarks.sweep.equal import comparable, judge_turns
from dsgpt.benchmarks.sweep.training import Ending
from dsgpt.benchmarks.sweep.turns import PlannedTurn
from dsgpt.common.errors import UserError
from dsgpt.common.json_files import JsonError, read_object
from dsgpt.common.problems import is_number
from dsgpt.reports.curves import read_step_curves
from dsgpt.reports.runs import LOG_NAME, RECORD_NAME, read_run
from dsgpt.reports.sweeps import Compared, Comparison, Spread, State, SweepCell, Turn

SEC_PER_HOUR = 3600

Losses = Mapping[float, float]
"""Training loss by step, nats per token."""


def turn_of(planned: PlannedTurn, ending: Ending, folder: Path) -> Turn:
    """The result of a turn.

    Args:
        planned: what ran.
        ending: how it ended.
        folder: of the run.
    """
    known: dict[str, Any] = {"cell": planned.cell.name, "repeat": planned.repeat, "place": planned.place}
    known |= {"seconds": round(ending.seconds, 3)}
    if ending.state != State.DONE:
        return Turn(**known, state=ending.state, message=ending.message)
    try:
        run, record = read_run(folder, name=planned.cell.name), read_object(folder / RECORD_NAME)
    except (UserError, JsonError) as error:
        return Turn(**known, state=State.FAILED, message=f"its record cannot be read: {error}")
    return Turn(
        **known,
        state=State.DONE,
        message=None,
        train_time_sec=run.train_time,
        tokens_per_sec=run.tokens_per_sec,
        peak_memory_bytes_rank0=run.host_memory if run.gpu_memory is None else run.gpu_memory,
        model_state_bytes_by_rank=_numbers(_at(record, "cost", "model_state_bytes_per_rank", "total_by_rank")),
        sent_bytes_per_step=_number(_at(record, "cost", "communication_per_step", "ring_bytes_per_rank")),
        communication_share=_number(_at(record, "summary", "communication_share")),
        joules=_number(_at(record, "summary", "gpu_use", "energy_joules")),
        final_loss=run.final_train_loss,
        final_val_loss=run.final_val_loss,
        footprint=run.footprint,
        work=dict(run.work),
    )


def time_to_loss(folder: Path, target: float) -> float | None:
    """Seconds of training steps until a step of the run in ``folder`` had this loss or less; None if none had."""
    train, _ = read_step_curves(folder / LOG_NAME, [])
    return next((point.time for point in train.points if point.loss <= target), None)


def losses_of(folder: Path) -> Losses:
    """The losses of the run in ``folder``, from its lines of steps; empty without them."""
    train, _ = read_step_curves(folder / LOG_NAME, [])
    return train.at_steps()


def cell_of(cell: Cell, turns: Sequence[Turn], *, price: float | None) -> SweepCell:
    """A cell with its turns and figures; ``price`` is of a device hour."""
    done = [turn for turn in turns if turn.state == State.DONE]
    first = done[0] if done else None
    return SweepCell(
        name=cell.name,
        devices=cell.devices,
        launcher=cell.launcher,
        flags=list(cell.flags),
        turns=list(turns),
        tokens_per_sec=_over(done, lambda turn: turn.tokens_per_sec),
        tokens_per_sec_per_device=_over(done, lambda turn: _scaled(turn.tokens_per_sec, 1 / cell.devices)),
        peak_memory_bytes_rank0=_over(done, lambda turn: turn.peak_memory_bytes_rank0),
        model_state_bytes_by_rank=first.model_state_bytes_by_rank if first else None,
        sent_bytes_per_step=first.sent_bytes_per_step if first else None,
        communication_share=_over(done, lambda turn: turn.communication_share),
        joules=_over(done, lambda turn: turn.joules),
        final_loss=first.final_loss if first else None,
        time_to_target_sec=_over_all(done, lambda turn: turn.time_to_target_sec),
        cost=_over(done, lambda turn: cost_of(turn, devices=cell.devices, price=price)),
    )


def cost_of(turn: Turn, *, devices: int, price: float | None) -> float | None:
    """What the devices cost while training steps ran; None without a price per device hour."""
    return None if price is None else _scaled(turn.train_time_sec, devices * price / SEC_PER_HOUR)


def comparison_of(
    plan: ComparisonPlan, cells: Sequence[SweepCell], *, losses: Mapping[tuple[str, int], Losses]
) -> Comparison:
    """The cells of a comparison beside its baseline, judged by the records of their turns.

    Args:
        plan: what is compared.
        cells: all cells of the sweep.
        losses: of the turns that are done, by cell and repeat.
    """
    by_name = {cell.name: cell for cell in cells}
    base = by_name[plan.baseline]
    return Comparison(
        name=plan.name,
        kind=plan.kind,
        baseline=plan.baseline,
        cells=[_compared(plan, base, by_name[name], losses) for name in plan.cells if name in by_name],
    )


def _compared(
    plan: ComparisonPlan, base: SweepCell, cell: SweepCell, losses: Mapping[tuple[str, int], Losses]
) -> Compared:
    ours, theirs = cell.done(), base.done()
    if not ours or not theirs:
        missing = cell.name if not ours else base.name
        return Compared(cell=cell.name, same_work=f"same work: unknown ({missing} has no result)", comparable=False)
    verdict = judge_turns((turn.cell, turn) for turn in (*theirs.values(), *ours.values()))
    shared = [repeat for repeat in theirs if repeat in ours]
    if not comparable(verdict, plan.kind):
        return Compared(cell=cell.name, same_work=verdict.line(), comparable=False)
    ratios = [_ratio(ours[repeat].tokens_per_sec, theirs[repeat].tokens_per_sec) for repeat in shared]
    speed_up = spread([ratio for ratio in ratios if ratio is not None])
    pairs = [(losses.get((cell.name, repeat), {}), losses.get((base.name, repeat), {})) for repeat in shared]
    same = plan.kind == "same training"
    return Compared(
        cell=cell.name,
        same_work=verdict.line(),
        comparable=True,
        speed_up=speed_up,
        efficiency=None if speed_up is None else speed_up.median * base.devices / cell.devices,
        loss_difference=_difference(cell.final_loss, base.final_loss) if same else None,
        largest_loss_difference=_largest_difference(pairs) if same else None,
    )


def spread(values: Sequence[float]) -> Spread | None:
    """Median, smallest and largest; None for no value."""
    if not values:
        return None
    return Spread(
        median=statistics.median(values), smallest=min(values), largest=max(values), values=[*map(float, values)]
    )


def _over(turns: Sequence[Turn], figure: Callable[[Turn], float | None]) -> Spread | None:
    return spread([value for turn in turns if (value := figure(turn)) is not None])


def _over_all(turns: Sequence[Turn], figure: Callable[[Turn], float | None]) -> Spread | None:
    """The same, but None if a turn lacks the figure: of a target, the others would be only those that were lucky."""
    return None if any(figure(turn) is None for turn in turns) else _over(turns, figure)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def _difference(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def _largest_difference(pairs: Iterable[tuple[Losses, Losses]]) -> float | None:
    """The largest distance of two losses of a step; None if a pair has no losses, or losses of different steps."""
    distances: list[float] = []
    for ours, theirs in pairs:
        if not ours or ours.keys() != theirs.keys():
            return None
        distances += [abs(ours[step] - theirs[step]) for step in ours]
    return max(distances, default=None)


def _at(record: dict[str, Any], *keys: str) -> Any:
    """The value at a path of keys; None where there is none."""
    value: Any = record
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _numbers(value: Any) -> list[float] | None:
    return [float(item) for item in value] if isinstance(value, list) and all(map(is_number, value)) else None

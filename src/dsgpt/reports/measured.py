"""What runs and the cells of sweeps have in common for charts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsgpt.reports.footprint import Footprint, pooled
from dsgpt.reports.runs import Run
from dsgpt.reports.sweeps import Sweep, SweepCell

NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Measured:
    """A run or a cell."""

    name: str
    footprint: Footprint
    lacking: str = NOT_RECORDED
    """What is said in place of a figure that it does not have."""
    group: int = 0
    """Equal for the cells of one strategy, which look alike."""
    sent_bytes_per_step: float | None = None
    """By the rank that sends most, as rings."""
    communication_share: float | None = None
    """Of a step, in which it waits for communication."""


def of_runs(runs: Sequence[Run]) -> list[Measured]:
    """Of each run."""
    return [
        Measured(
            name=run.name,
            footprint=run.footprint,
            group=index,
            sent_bytes_per_step=run.sent_bytes_per_step,
            communication_share=run.communication_share,
        )
        for index, run in enumerate(runs)
    ]


def of_cells(sweep: Sweep) -> list[Measured]:
    """Of each cell of a sweep."""
    groups = groups_of(sweep)
    return [
        Measured(
            name=cell.name,
            footprint=footprint_of(cell),
            lacking=failure(cell) or NOT_RECORDED,
            group=groups[strategy_of(cell.name)],
            sent_bytes_per_step=cell.sent_bytes_per_step,
            communication_share=cell.communication_share.median if cell.communication_share else None,
        )
        for cell in sweep.cells
    ]


def strategy_of(cell: str) -> str:
    """The name of a cell without its devices, and without the batch that grows with them."""
    return re.sub(r" on \d+ devices?(?:, batch \d+)?", "", cell)


def groups_of(sweep: Sweep) -> dict[str, int]:
    """The place of every strategy of a sweep, which decides its look in all charts."""
    return {name: place for place, name in enumerate(dict.fromkeys(strategy_of(cell.name) for cell in sweep.cells))}


def failure(cell: SweepCell) -> str:
    """How its turns ended if none trained to its end; empty if one did."""
    return "" if cell.done() else " and ".join(dict.fromkeys(turn.state for turn in cell.turns)) or "not run"


def footprint_of(cell: SweepCell) -> Footprint:
    """The memory of the first turn that is done, and the times of the steps of all turns."""
    found = [turn.footprint for turn in cell.done().values() if turn.footprint is not None]
    if not found:
        return Footprint()
    times = [each.step_times_sec for each in found if each.step_times_sec]
    return replace(found[0], step_times_sec=pooled(times) or None)

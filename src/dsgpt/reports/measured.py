"""What runs and the cells of sweeps have in common for charts: a name and a footprint."""

import re
import statistics
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


def of_runs(runs: Sequence[Run]) -> list[Measured]:
    """Of each run."""
    return [Measured(run.name, run.footprint, group=index) for index, run in enumerate(runs)]


def of_cells(sweep: Sweep) -> list[Measured]:
    """Of each cell of a sweep."""
    groups = groups_of(sweep)
    return [
        Measured(cell.name, footprint_of(cell), failure(cell) or NOT_RECORDED, groups[strategy_of(cell.name)])
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
    """Memory and bytes of the first turn that is done, the median share of communication, the times of all turns."""
    found = [turn.footprint for turn in cell.done().values() if turn.footprint is not None]
    if not found:
        return Footprint()
    shares = [each.communication_share for each in found if each.communication_share is not None]
    times = [each.step_times_sec for each in found if each.step_times_sec]
    return replace(
        found[0],
        communication_share=statistics.median(shares) if shares else None,
        step_times_sec=pooled(times) or None,
    )

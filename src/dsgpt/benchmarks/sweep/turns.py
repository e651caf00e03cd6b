"""The order of the turns, and the folder in which a sweep keeps them, so that an interrupted one goes on."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.sweep.cells import Cell
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.common.json_files import JsonError, read_as, read_object
from dsgpt.reports.sweeps import Turn

PLAN_FILE, RESULT_FILE = "plan.json", "result.json"


@dataclass(frozen=True, kw_only=True)
class PlannedTurn:
    """A cell's training in one repeat."""

    cell: Cell
    repeat: int
    """From 1."""
    place: int
    """In the order of all turns, from 1."""

    @property
    def folder(self) -> str:
        """Its path below the sweep's folder."""
        return f"turns/{self.repeat}/{self.cell.folder}"


def ordered_turns(cells: Sequence[Cell], *, repeats: int, seed: int) -> list[PlannedTurn]:
    """Every cell once in each repeat, each repeat in an order of its own that ``seed`` draws.

    Load that comes and goes then meets all cells, and more repeats continue the same order.
    """
    turns: list[PlannedTurn] = []
    for repeat in range(1, repeats + 1):
        shuffled = list(cells)
        random.Random(f"{seed}, repeat {repeat}").shuffle(shuffled)
        first = len(turns) + 1
        turns += [
            PlannedTurn(cell=cell, repeat=repeat, place=place) for place, cell in enumerate(shuffled, start=first)
        ]
    return turns


class TurnStore:
    """The folder of a sweep's turns.

    Args:
        folder: made if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def require(self, plan: Mapping[str, Any]) -> None:
        """Refuse a folder with turns of another sweep; it need not exist.

        Args:
            plan: everything that must be equal for turns of two commands to be compared, as JSON can hold it.

        Raises:
            UserError: the folder holds the turns of another sweep.
        """
        file = self.folder / PLAN_FILE
        if not file.exists():
            return
        try:
            earlier = read_object(file)
        except JsonError as error:
            raise UserError(f"{file}: cannot be read: {error}; remove {self.folder} to start anew") from error
        changed = [key for key in plan if plan[key] != earlier.get(key)]
        if changed:
            raise UserError(
                f"{self.folder}: holds turns of a sweep with other {', '.join(changed)}, which cannot be compared with "
                "new ones: give another --output, or remove the folder to start anew"
            )

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Make the folder, and note what its turns are of."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json_atomic(self.folder / PLAN_FILE, dict(plan))

    def result(self, turn: PlannedTurn) -> Turn | None:
        """The result of a turn that has ended; None if it has not.

        Raises:
            UserError: its file cannot be read.
        """
        file = self.folder / turn.folder / RESULT_FILE
        if not file.exists():
            return None
        try:
            return read_as(file, Turn)
        except JsonError as error:
            raise UserError(f"{file}: cannot be read as a turn: {error}; remove it to repeat the turn") from error

    def keep(self, turn: PlannedTurn, result: Turn) -> None:
        """Write the result of a turn that has ended."""
        write_json_atomic(self.folder / turn.folder / RESULT_FILE, asdict(result))

    def left(self, turns: Sequence[PlannedTurn]) -> Iterator[PlannedTurn]:
        """Those without a result."""
        return (turn for turn in turns if self.result(turn) is None)

"""Runs the cells: memory first, then rounds of step times, in which all cells take turns."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.harness.launch import Assignment, Launch
from dsgpt.benchmarks.harness.random_tokens import write_random_tokens
from dsgpt.benchmarks.harness.runner import CellEnd, CellRunner
from dsgpt.benchmarks.plan.cells import VOCABULARIES, PlanCell
from dsgpt.benchmarks.plan.times import calibration_in, fitted, predicted_times
from dsgpt.planning.calibrations import Calibration
from dsgpt.planning.communication import sent_bytes
from dsgpt.planning.fitting import Factors
from dsgpt.planning.model_state import model_state
from dsgpt.planning.moments import STEP
from dsgpt.planning.parameters import model_parameters, total
from dsgpt.planning.peak_memory import peak_memory
from dsgpt.planning.setup import Setup
from dsgpt.planning.step_time import StepTime

TOKENS = 200_000
STEPS = 3
"""Timed steps of a cell in a round."""
RANK = "dsgpt.benchmarks.plan.rank"
ESTIMATED = (2, 3)
"""ZeRO stages that DeepSpeed has an estimator for."""

CALIBRATION_SEC, CALIBRATION_SEC_OF_A_CELL = 60.0, 4.0
"""Seconds of the calibration that times are predicted from; a few cells get a shorter one."""

Result = dict[str, Any]


class PlanSuite:
    """Measures cells in a folder.

    Args:
        folder: an existing folder.
        repository: holds the recipes.
        rounds: of step times.
        started: called with every launch.
    """

    def __init__(self, folder: Path, *, repository: Path, rounds: int, started: Callable[[Launch], None]) -> None:
        self._folder, self._recipes, self._rounds, self._started = folder, repository / "ds_configs", rounds, started
        self._runner = CellRunner(folder, repository=repository, device="cpu")
        self._setups: dict[str, Setup] = {}
        self.calibration: Calibration | None = None
        """Of this machine, from which times are predicted; None before it, and without rounds."""
        self.factors: Factors | None = None
        """What was fitted to measured times; None before that."""
        write_random_tokens(folder / "tokens", vocab_sizes=VOCABULARIES, count=TOKENS)

    def run(self, cells: Sequence[PlanCell]) -> Iterator[Result]:
        """The result of each cell; all memory is measured before the first time is."""
        memory = {cell.key: end for cell, end in self._pass(cells, "memory")}
        seconds = min(CALIBRATION_SEC, CALIBRATION_SEC_OF_A_CELL * len(cells))
        self.calibration = calibration_in(self._folder, seconds=seconds) if self._rounds else None
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
        measured = [
            (self._setups[cell.key], _middle(times[cell.key])) for cell in cells if cell.fit and times[cell.key]
        ]
        if self.calibration is None or not measured:
            return {}
        self.factors = fitted(self.calibration, measured)
        return predicted_times(self._setups, self.calibration, self.factors)

    def _pass(self, cells: Sequence[PlanCell], name: str) -> Iterator[tuple[PlanCell, CellEnd]]:
        """Run every cell once, those with the same launcher and ranks in one launch."""
        by_launch = sorted(cells, key=_launch)
        for (launcher, ranks), group in groupby(by_launch, key=_launch):
            together = list(group)
            assignments = [self._assignment(cell, name) for cell in together]
            ends = self._runner.run(launcher, ranks, assignments, started=self._started)
            yield from zip(together, ends, strict=True)

    def _assignment(self, cell: PlanCell, name: str) -> Assignment:
        folder = self._folder / f"{name}-{cell.key}"
        folder.mkdir()
        recipe = cell.write_recipe(folder / "recipe.json", recipes=self._recipes)
        flags = cell.flags(recipe=recipe, tokens=self._folder / "tokens", folder=folder)
        if name != "memory":
            return Assignment(folder=str(folder), flags=flags, call=f"{RANK}:measure_time", arguments={"steps": STEPS})
        setup = self._setups[cell.key] = cell.setup(recipe)
        arguments = {"witness": cell.ranks == 1 and cell.accumulation == 1, "estimate": _estimate(setup)}
        return Assignment(folder=str(folder), flags=flags, call=f"{RANK}:measure_memory", arguments=arguments)

    def _result(
        self, cell: PlanCell, end: CellEnd, rounds: Sequence[Sequence[float]], predicted: StepTime | None
    ) -> Result:
        head = {"key": cell.key, "title": cell.title, "strategy": cell.strategy, "ranks": cell.ranks}
        head |= {"fit": cell.fit, "work": cell.work, "status": end.status, "message": end.message}
        if end.status != "done":
            return head
        setup = self._setups[cell.key]
        return head | {
            "peak_memory": [_of_rank(setup, rank, facts) for rank, facts in enumerate(end.ranks)],
            "model_state": _state(setup, end.ranks[0]["cost"]),
            "ring_bytes": _sent(setup, end.ranks[0]["cost"]),
            "estimate_bytes": end.ranks[0].get("estimate_bytes"),
            "step_seconds": {
                "rounds": [list(seconds) for seconds in rounds],
                "measured": _middle(rounds) if rounds else None,
                "predicted": predicted and predicted.seconds,
                "predicted_parts": predicted and predicted.parts,
            },
        }


def _launch(cell: PlanCell) -> tuple[str, int]:
    """Cells that agree in this share a launch."""
    return cell.launcher, cell.ranks


def _middle(rounds: Sequence[Sequence[float]]) -> float:
    """The median of all steps."""
    return statistics.median(second for seconds in rounds for second in seconds)


def _of_rank(setup: Setup, rank: int, facts: dict[str, Any]) -> dict[str, Any]:
    predicted = peak_memory(setup, rank=rank, device="cpu", among=STEP)
    return {
        "rank": rank,
        "measured": facts["peak_bytes"],
        "mem_tracker": facts["mem_tracker_bytes"],
        "predicted": predicted.as_dict(),
        "ratio": predicted.total / facts["peak_bytes"],
    }


def _state(setup: Setup, cost: dict[str, Any]) -> dict[str, Any]:
    """Bytes of model state of the rank that holds most."""
    measured = cost["model_state_bytes_per_rank"]
    return {"measured": measured["total"], "predicted": model_state(setup, rank=measured["rank"]).total}


def _sent(setup: Setup, cost: dict[str, Any]) -> dict[str, Any]:
    """Bytes that every rank sends in a step."""
    traffic = cost["communication_per_step"]
    predicted = [sent_bytes(setup, rank=rank) for rank in range(setup.world_size)]
    return {"measured": None if traffic is None else traffic["ring_bytes_by_rank"], "predicted": predicted}


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

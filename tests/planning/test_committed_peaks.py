"""Predicted peaks of memory against those of the committed record, without a run: every strategy has a cell there."""

import json

import pytest
from small_run import REPOSITORY

from dsgpt.benchmarks.plan import PlanCell, cells
from dsgpt.planner.memory import STEP, peak_memory

RECORD = REPOSITORY / "checkpoint" / "reference" / "cpu-2-cores" / "plan.json"
PEAKS = {
    cell["key"]: [rank["measured"] for rank in cell["peak_memory"]]
    for cell in json.loads(RECORD.read_text(encoding="utf-8"))["cells"]
}


def test_the_record_has_every_cell():
    assert sorted(PEAKS) == sorted(cell.key for cell in cells())
    assert len(PEAKS) == 34


@pytest.mark.parametrize("cell", cells(), ids=lambda cell: cell.key)
def test_predicted_peaks_are_those_that_were_measured(cell: PlanCell, tmp_path):
    """Within 1% on every rank. FSDP or ZeRO-3 without the copies of what they gather would be under."""
    found = cell.setup(cell.write_recipe(tmp_path / "recipe.json", recipes=REPOSITORY / "ds_configs"))
    assert len(PEAKS[cell.key]) == cell.ranks
    for rank, measured in enumerate(PEAKS[cell.key]):
        assert peak_memory(found, rank=rank, device="cpu", among=STEP).total == pytest.approx(measured, rel=0.01)

"""The committed sweeps: their pages are made from them, and every comparison in them is of equal work."""

import json

import pytest
from small_run import REPOSITORY

from dsgpt.benchmarks.records import REFERENCE, SWEEPS
from dsgpt.benchmarks.sweep_page import sweep_page
from dsgpt.record.provenance import without_sources
from dsgpt.record.sweeps import read_sweep

COMMITTED = sorted((REPOSITORY / REFERENCE).glob(SWEEPS))


def test_there_are_two():
    assert [path.name for path in COMMITTED] == ["sweep-scaling.json", "sweep-strategies.json"]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_the_page_is_made_from_the_record(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    page = (REPOSITORY / "docs" / f"{path.stem}.md").read_text(encoding="utf-8")
    made = sweep_page(record, source=str(path.relative_to(REPOSITORY)))
    assert without_sources(page) == without_sources(made)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_every_cell_was_trained_and_compared(path):
    sweep = read_sweep(path)
    assert all(len(cell.done()) == sweep.repeats == 3 for cell in sweep.cells)
    assert sweep.comparisons and all(one.comparable for plan in sweep.comparisons for one in plan.cells)

"""``python src/benchmark.py plan``: cells, measurements, bounds, page."""

import contextlib
import copy
import io
import json

import pytest
from forked_ranks import launches_fork
from messages import without_sources
from small_run import REPOSITORY

from dsgpt.benchmarks.frame import run_suite
from dsgpt.benchmarks.plan import Plan, PlanOptions, cells, choice_table, choices, failed, plan_page
from dsgpt.planner.memory import PARTS

ALONE, TOGETHER = "baseline-4x256-bf16-b1-a2", "zero2-4x256-bf16-b1-a2"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Exit code and output of a run of two cells, one of them on two ranks, and its folder."""
    folder = tmp_path_factory.mktemp("plan")
    options = PlanOptions(only=(ALONE, TOGETHER), rounds=1, output=folder / "plan.json")
    with launches_fork(), contextlib.redirect_stdout(io.StringIO()) as printed:
        code = run_suite(Plan, options, repository=REPOSITORY)
    return code, printed.getvalue(), folder


@pytest.fixture
def record(finished):
    return json.loads((finished[-1] / "plan.json").read_text())


def test_the_cells_vary_what_a_plan_depends_on():
    every = cells()
    assert len(every) >= 24
    assert len({cell.key for cell in every}) == len(every)
    assert len({cell.strategy for cell in every}) >= 12
    for field in ("precision", "shape", "micro", "accumulation", "checkpointing", "fit"):
        assert len({getattr(cell, field) for cell in every}) > 1
    assert sum(cell.fit for cell in every) == len(every) // 2


def test_predictions_are_within_their_bounds(finished, record):
    code, printed, _ = finished
    assert code == 0, printed
    assert "2 of 2 cells are within the goals" in printed
    assert [cell["key"] for cell in record["cells"]] == [ALONE, TOGETHER]
    for cell in record["cells"]:
        assert [rank["rank"] for rank in cell["peak_memory"]] == list(range(cell["ranks"]))
        for rank in cell["peak_memory"]:
            assert tuple(rank["predicted"]["parts"]) == PARTS
            assert rank["ratio"] == rank["predicted"]["total"] / rank["measured"]
        assert len(cell["step_seconds"]["rounds"]) == 1
        assert cell["step_seconds"]["measured"] > 0
    alone, together = record["cells"]
    assert alone["estimate_bytes"] is None
    assert together["estimate_bytes"] < together["peak_memory"][0]["measured"]
    assert together["ring_bytes"]["measured"][0] > 1e7


def test_what_is_outside_the_bounds_is_named(record):
    (cell,) = (cell for cell in record["cells"] if cell["key"] == TOGETHER)
    assert failed(cell) == []
    low, high, sent = (copy.deepcopy(cell) for _ in range(3))
    low["peak_memory"][1]["ratio"], high["peak_memory"][0]["ratio"] = 0.96, 1.11
    sent["ring_bytes"]["measured"][0] += 1000
    assert "peak of rank 1 is -4.0%" in failed(low)[0]
    assert "peak of rank 0 is +11.0%" in failed(high)[0]
    assert "sends" in failed(sent)[0]
    page = plan_page(record | {"cells": [low]}, source="plan.json")
    assert "0 of 1 cells are within the goals" in page
    assert "## Cells that failed" in page


def test_the_page_is_that_of_the_record(finished, record):
    folder = finished[-1]
    page = (folder / "plan.md").read_text()
    assert without_sources(page) == without_sources(plan_page(record, source=(folder / "plan.json").as_posix()))
    assert page.count("| zero2 on 2 ranks, 4 x 256") == 5  # memory, parts, DeepSpeed's estimate, traffic, time
    assert "No cell of this record has a predicted time" in page
    times = copy.deepcopy(record)
    for cell in times["cells"]:
        cell["step_seconds"]["predicted"], cell["fit"] = 1.1 * cell["step_seconds"]["measured"], False
    assert "Of the 2 cells that nothing was fitted to, the median error is 10%" in plan_page(times, source="plan.json")


def timed(title: str, *, measured: float, predicted: float, batch: int = 8) -> dict:
    work = {"model": {"name": "4 x 256"}, "precision": "fp32", "seq_length": 256, "activation_checkpointing": False}
    times = {"measured": measured, "predicted": predicted}
    return {"title": f"{title}, 4 x 256", "work": work | {"global_batch_size": batch}, "step_seconds": times}


def test_the_choice_is_judged_by_measured_times_of_the_same_work():
    cells = [
        timed("ddp", measured=0.40, predicted=0.30),
        timed("fsdp", measured=0.36, predicted=0.32),
        timed("zero1", measured=0.50, predicted=0.50),
        timed("zero2", measured=0.10, predicted=0.10, batch=4),  # less work
    ]
    (choice,) = choices(cells)
    assert (choice.cells, choice.chosen["title"][:3], choice.fastest["title"][:4]) == (3, "ddp", "fsdp")
    assert choice.slower == pytest.approx(0.40 / 0.36 - 1)
    assert "| 4 x 256, fp32, 8 sequences of 256 | 3 | ddp: 0.400 s | fsdp: 0.360 s | **11.1%** |" in choice_table(cells)


def test_a_cell_that_failed_is_a_result(record):
    (first, second) = record["cells"]
    broken = {key: first[key] for key in ("key", "title", "strategy", "ranks", "fit", "work")}
    broken |= {"status": "error", "message": "no memory"}
    page = plan_page(record | {"cells": [broken, second]}, source="plan.json")
    assert f"* {first['title']}: no memory" in page
    assert "1 of 1 cells" in page

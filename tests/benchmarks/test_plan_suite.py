"""``python src/benchmark.py plan``: cells, measurements, bounds, page."""

import contextlib
import copy
import io
import json

import pytest
from forked_ranks import launches_fork
from small_run import REPOSITORY

from dsgpt.benchmarks.frame import run_suite
from dsgpt.benchmarks.plan import Plan, PlanOptions, failed, plan_page
from dsgpt.planner.formulas import PARTS

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


def test_what_failed_or_is_outside_the_bounds_is_named(record):
    (alone, cell) = record["cells"]
    assert failed(cell) == []
    low, high, sent = (copy.deepcopy(cell) for _ in range(3))
    low["peak_memory"][1]["ratio"], high["peak_memory"][0]["ratio"] = 0.96, 1.11
    sent["ring_bytes"]["measured"][0] += 1000
    assert "peak of rank 1 is -4.0%" in failed(low)[0]
    assert "peak of rank 0 is +11.0%" in failed(high)[0]
    assert "sends" in failed(sent)[0]
    broken = {key: alone[key] for key in ("key", "title", "strategy", "ranks", "fit", "work")}
    broken |= {"status": "error", "message": "no memory"}
    page = plan_page(record | {"cells": [broken, low]}, source="plan.json")
    assert "0 of 1 cells are within the goals" in page
    assert f"* {alone['title']}: no memory\n* {low['title']}: peak of rank 1 is -4.0%" in page

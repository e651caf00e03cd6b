"""``python src/benchmark.py network``: training across hosts, and over slow links."""

import contextlib
import io
import json
from dataclasses import replace

import pytest
from forked_ranks import launches_fork
from small_run import REPOSITORY

from dsgpt.benchmarks import network
from dsgpt.benchmarks.frame import run_suite
from dsgpt.benchmarks.network import Network, NetworkOptions, network_page
from dsgpt.benchmarks.plan import cells as plan_cells
from dsgpt.planner import calibrate

PLAN = REPOSITORY / "checkpoint" / "reference" / "cpu-2-cores" / "plan.json"


def run(folder, *only):
    """The record, exit code and output of a part of the suite."""
    options = NetworkOptions(only=only, turns=1, output=folder / "network.json")
    with launches_fork(), contextlib.redirect_stdout(io.StringIO()) as printed:
        code = run_suite(Network, options, repository=REPOSITORY)
    return json.loads(options.output.read_text()), code, printed.getvalue()


@pytest.mark.long
def test_a_step_waits_for_a_slow_link_as_predicted(tmp_path, monkeypatch):
    """The calibration is a committed one; the wait for 40 Mbit/s is the same on any processor.

    The model is a quarter of the suite's, and so is what passes: the relay that delays packets needs a core.
    """
    (cell,) = (
        replace(cell, shape=replace(cell.shape, n_layer=1, n_embd=128), length=16)
        for cell in plan_cells()
        if cell.key == network.OVER_LINKS["link-zero1"]
    )
    monkeypatch.setattr(calibrate, "calibrate", lambda path, **_: path.write_bytes(PLAN.read_bytes()))
    monkeypatch.setattr(network, "LINKS", ((40, 50),))
    monkeypatch.setattr(network, "OVER_LINKS", {"link-zero1": cell.key})
    monkeypatch.setattr(network, "plan_cells", lambda: [cell])
    record, code, printed = run(tmp_path, "link-zero1")
    assert code == 0, printed
    free, slow = record["over_links"]
    assert (free["shaped_by"], slow["shaped_by"]) == ({}, {"mbit": "tc tbf", "delay_ms": "TUN relay"})
    (point,) = record["points"]
    # gradients both ways at once, then half of the weights; each is late, the gradients twice
    passing = 1.5 * 4 * cell.shape.config(16).parameter_count() * 8 / 40e6 + 3 * 0.05
    # ZeRO-1 hides nothing behind what the machine computes; other programs make the wait longer, never shorter
    assert slow["share"] * slow["step_sec"] > 0.8 * passing
    assert point["predicted_share"] * point["predicted_step_sec"] > passing
    assert point["share"]["median"] == slow["share"]
    assert "| zero1 | 40 | 50 | " in network_page(record, source="network.json")


@pytest.mark.long
def test_a_strategy_computes_on_several_hosts_what_one_computes(tmp_path):
    record, code, printed = run(tmp_path, "zero1")
    assert code == 0, printed
    assert [one["hosts"] for one in record["trainings"]] == [2, 4]
    for one in record["trainings"]:
        assert one["differences"].keys() == {"loss", "gradient norm", "weights"}

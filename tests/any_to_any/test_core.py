"""Any strategy goes on from any other: every strategy writes what it read, and pairs of strategies share a run.

``python src/benchmark.py resume`` does it for 30 seeded pairs and all ranks; its record is ``docs/resume.md``.
"""

import pytest
from small_run import REPOSITORY

from dsgpt.any_to_any.matrix import by, cells, core_pairs, core_rewritten, seeded_pairs
from dsgpt.any_to_any.suite import AnyToAny


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """How the core ended, by name: one run for all tests."""
    suite = AnyToAny(tmp_path_factory.mktemp("any-to-any"), repository=REPOSITORY)
    return {result.name: result for result in suite.run(core_rewritten(), core_pairs())}


@pytest.mark.parametrize("cell", core_rewritten(), ids=lambda cell: f"{by(cell)}, {cell.precision}")
def test_writes_what_it_read(results, cell):
    result = results[f"{by(cell)}, {cell.precision}, writes what it read"]
    assert result.status == "passed", result.message
    assert set(result.measured) == {
        "model.safetensors",
        "optimizer.safetensors",
        "training_state.json",
        "weights that a rank computes with",
    }


@pytest.mark.parametrize("pair", core_pairs(), ids=lambda pair: pair.name)
def test_goes_on_as_if_nothing_had_happened(results, pair):
    result = results[pair.name]
    assert result.status == "passed", result.message


def test_the_pairs_are_the_same_for_a_seed_and_hold_every_strategy():
    pairs = seeded_pairs(30, seed=4)
    assert pairs == seeded_pairs(30, seed=4)
    assert pairs != seeded_pairs(30, seed=5)
    assert len({pair.name for pair in pairs}) == 30
    strategies = {cell.strategy for cell in cells()}
    assert {pair.source.strategy for pair in pairs} == {pair.target.strategy for pair in pairs} == strategies

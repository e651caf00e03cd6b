"""What a step costs a rank, measured in every training of the core, is what the formulas say."""

import pytest

from dsgpt.benchmarks.parity.matrix import core

WITHIN = 0.05


@pytest.mark.parametrize("cell", core(), ids=lambda cell: cell.name)
def test_cost_is_what_the_formulas_say(result_of, cell):
    cost = result_of(cell).cost
    assert set(cost) == {"parameters", "gradients", "optimizer", "master", "sent"}
    for name, size in cost.items():
        assert size["measured"] is not None, name
        assert abs(size["measured"] - size["formula"]) <= WITHIN * size["measured"], f"{name}: {size}"

"""Bytes of model state and traffic, measured in every training of the core, are what the formulas say."""

import pytest

from dsgpt.benchmarks.parity import core

WITHIN = 0.05


@pytest.mark.parametrize("cell", core(), ids=lambda cell: cell.name)
def test_bytes_are_what_the_formulas_say(result_of, cell):
    found = result_of(cell).bytes_per_rank
    assert set(found) == {"parameters", "gradients", "optimizer", "master", "sent"}
    for name, size in found.items():
        assert size["measured"] is not None, name
        assert abs(size["measured"] - size["formula"]) <= WITHIN * size["measured"], f"{name}: {size}"

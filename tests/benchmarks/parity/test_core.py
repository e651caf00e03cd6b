"""Every strategy trains the same model as plain PyTorch, on the fewest ranks that split anything.

The whole matrix is ``make parity``; its record is ``docs/parity.md``.
"""

import pytest

from dsgpt.benchmarks.cells import STRATEGIES
from dsgpt.benchmarks.parity import core, whole_matrix
from dsgpt.benchmarks.parity_page import failure_words


@pytest.mark.parametrize("cell", core(), ids=lambda cell: cell.name)
def test_same_training_as_plain_pytorch(result_of, cell):
    result = result_of(cell)
    assert result.status == "passed", result.message or "\n".join(map(failure_words, result.failures))


def test_the_core_contains_every_strategy():
    whole = {strategy.name for strategy in STRATEGIES.values() if strategy.whole}
    unclipped = {strategy.name for strategy in STRATEGIES.values() if strategy.training == "unclipped sgd"}
    assert {cell.strategy for cell in core()} == whole | unclipped
    assert set(core()) <= set(whole_matrix())


def test_the_matrix_has_no_cell_twice():
    assert len(set(whole_matrix())) == len(whole_matrix())

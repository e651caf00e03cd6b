"""The page of published figures says what the planner predicts now."""

import pytest
from small_run import REPOSITORY

from dsgpt.planner.hardware import gpus
from dsgpt.planner.published import Published, predict, published_page, read_published

TABLE = read_published()


def test_the_page_is_that_of_the_code():
    """After a change of the model of time: ``python src/plan.py --published docs/planner-published.md``."""
    page = (REPOSITORY / "docs" / "planner-published.md").read_text(encoding="utf-8")
    assert page == published_page(repository=REPOSITORY)


@pytest.mark.parametrize("row", TABLE.rows, ids=lambda row: f"{row.program} {row.model} {row.gpus} x {row.gpu}")
def test_a_range_contains_the_figure_or_the_row_says_why_not(row: Published):
    found = predict(row, repository=REPOSITORY)
    assert found.low < found.likely < found.high
    assert found.contains(row.tokens_per_sec_per_gpu) == (row.why_outside is None)
    assert found.high < 3 * found.low  # a wider range would say nothing
    assert row.source.startswith("https://")


def test_figures_are_within_what_the_gpu_can_do():
    """A slip of the pen in a figure would be above the peak."""
    for row in TABLE.rows:
        peak = gpus()[row.gpu].peak(row.precision)
        blocks = 12 * row.shape.n_layer * row.shape.n_embd**2
        flops = 6 * (blocks + 50_257 * row.shape.n_embd) * row.tokens_per_sec_per_gpu
        assert 0.1 * peak < flops < 0.7 * peak, row

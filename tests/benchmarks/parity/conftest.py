"""One run of the suite for all tests that need its results: they share launches, and only selected cells run."""

import pytest
from forked_ranks import launches_fork
from small_run import REPOSITORY

from dsgpt.benchmarks.parity_suite import ParitySuite

STEPS = 8
"""Enough for every planted bug: the last of them shows in the validation after half of the steps. The record has 20."""


@pytest.fixture(scope="session")
def result_of(request, tmp_path_factory):
    """A function from a cell to its result. Cells run in the suite's order, up to the one whose result is needed."""
    wanted = {
        item.callspec.params["cell"]
        for item in request.session.items
        if "result_of" in getattr(item, "fixturenames", ()) and "cell" in item.callspec.params
    }
    suite = ParitySuite(tmp_path_factory.mktemp("parity"), repository=REPOSITORY, device="cpu", steps=STEPS)
    coming, known = suite.run(wanted), {}

    def get(cell):
        with launches_fork():
            while cell not in known:
                result = next(coming)
                known[result.cell] = result
        return known[cell]

    yield get
    coming.close()

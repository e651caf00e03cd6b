"""One run of the suite for all tests that need its results: they share launches, and only selected cells run."""

import pytest
from small_run import REPOSITORY

from dsgpt.benchmarks.parity.suite import Suite

STEPS = 5
"""The third step is the first that changes weights, so two updates show in losses, and three in the last validation.

Every planted bug is then out of each bound that must show it by a factor of hundreds. The record has 20 steps.
"""


@pytest.fixture(scope="session")
def result_of(request, tmp_path_factory):
    """A function from a cell to its result. Cells run in the suite's order, up to the one whose result is needed."""
    wanted = {
        item.callspec.params["cell"]
        for item in request.session.items
        if "result_of" in getattr(item, "fixturenames", ()) and "cell" in item.callspec.params
    }
    suite = Suite(tmp_path_factory.mktemp("parity"), repository=REPOSITORY, device="cpu", steps=STEPS)
    coming, known = suite.run(wanted), {}

    def get(cell):
        while cell not in known:
            result = next(coming)
            known[result.cell] = result
        return known[cell]

    yield get
    coming.close()

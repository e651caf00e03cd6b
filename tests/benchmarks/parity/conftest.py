"""One run of the suite for all tests that ask for its results: launches are shared, and only selected cells are run."""

import pytest
from small_run import REPOSITORY

from dsgpt.benchmarks.parity.suite import Suite


@pytest.fixture(scope="session")
def result_of(request, tmp_path_factory):
    """From a cell to its result. The cells run in the suite's own order, as far as the next wanted result."""
    wanted = {
        item.callspec.params["cell"]
        for item in request.session.items
        if "result_of" in getattr(item, "fixturenames", ()) and "cell" in item.callspec.params
    }
    suite = Suite(tmp_path_factory.mktemp("parity"), repository=REPOSITORY, device="cpu")
    coming, known = suite.run(wanted), {}

    def get(cell):
        while cell not in known:
            result = next(coming)
            known[result.cell] = result
        return known[cell]

    yield get
    coming.close()

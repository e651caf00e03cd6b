"""One launch for each number of ranks serves all tests that need what its ranks observed."""

import pytest
from strategy_cells import Asked, Launched


@pytest.fixture(scope="session")
def seen(request, tmp_path_factory, corpus):
    """A function from a cell to what its ranks observed. Runs only cells that selected tests have as parameter."""
    items = (item for item in request.session.items if "seen" in getattr(item, "fixturenames", ()))
    values = (value for item in items if hasattr(item, "callspec") for value in item.callspec.params.values())
    wanted = {value for value in values if isinstance(value, Asked)}
    launches: dict[int, Launched] = {}

    def get(cell: Asked):
        if cell.ranks not in launches:
            names = {name for ranks, name in wanted if ranks == cell.ranks}
            folder = tmp_path_factory.mktemp(f"ranks-{cell.ranks}-")
            launches[cell.ranks] = Launched(cell.ranks, names, folder, corpus)
        return launches[cell.ranks].seen(cell.name)

    yield get
    for launched in launches.values():
        launched.close()

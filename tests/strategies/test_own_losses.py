"""Every rank knows the mean loss of what it read."""

import pytest
from strategy_cells import SPLIT, THREE_D, Asked

CASES = [
    *(Asked(2, f"steps {name}") for name in ("zero3", *SPLIT)),
    *(Asked(4, f"steps {name}") for name in SPLIT),
    Asked(8, f"steps {THREE_D}"),
]


@pytest.mark.parametrize("cell", CASES, ids=str)
def test_the_loss_is_the_mean_over_what_ranks_read(seen, cell):
    """Stages and tensor peers read the same. Ranks with other data or positions have another loss."""
    ranks = seen(cell).ranks
    for step in range(len(ranks[0]["losses"])):
        own = {(facts["place"]["data"], facts["place"]["sequence"]): facts["losses"][step][1] for facts in ranks}
        assert sum(own.values()) / len(own) == pytest.approx(ranks[0]["losses"][step][0], abs=1e-5)
        assert len({round(loss, 4) for loss in own.values()}) == len(own)
        for facts in ranks:
            place = facts["place"]["data"], facts["place"]["sequence"]
            assert facts["losses"][step][1] == pytest.approx(own[place], abs=1e-5)

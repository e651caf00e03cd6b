"""The order of samples: a permutation, a pure function of seed and position, the same at any number of ranks."""

import numpy as np
import pytest

from dsgpt.data.loader import RankShare
from dsgpt.data.order import SampleOrder, window_count
from dsgpt.data.permutation import shuffled

SIZES = sorted(
    {1, 2, 3, 5, 7, 97, 1009, *(2**k for k in range(1, 13)), *(4**k + d for k in range(1, 7) for d in (-1, 1))}
)


def epoch_of(order: SampleOrder, epoch: int) -> np.ndarray:
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    return np.concatenate([order.batch(step) for step in steps])


@pytest.mark.parametrize("size", SIZES)
def test_permutation_of_any_size(size):
    for key in ("a", "b"):
        found = shuffled(np.arange(size), size=size, key=key)
        assert found.dtype == np.int64
        assert sorted(found.tolist()) == list(range(size))


def test_any_position_alone_gives_the_same():
    whole = shuffled(np.arange(1000), size=1000, key="k")
    alone = [int(shuffled(np.array([position]), size=1000, key="k")[0]) for position in range(0, 1000, 37)]
    assert alone == whole[::37].tolist()


def test_positions_of_billions_cost_no_table():
    size = 3_000_000_001
    found = shuffled(np.array([0, 1, size - 1]), size=size, key="k")
    assert len(set(found.tolist())) == 3
    assert found.min() >= 0
    assert found.max() < size


def test_golden_order():
    """A change of the order must fail here: it would make runs incomparable with earlier ones."""
    order = SampleOrder(windows=100, global_batch_size=8, seed=1337)
    assert order.batch(0).tolist() == [70, 1, 31, 38, 33, 87, 43, 47]
    assert order.batch(11).tolist() == [86, 19, 59, 98, 93, 62, 55, 66]
    assert order.batch(12).tolist() == [48, 96, 6, 57, 58, 64, 68, 88]
    assert shuffled(np.arange(10), size=10, key="golden").tolist() == [0, 3, 6, 2, 9, 4, 1, 8, 7, 5]


def test_an_epoch_repeats_no_window_and_drops_the_remainder():
    order = SampleOrder(windows=103, global_batch_size=10, seed=1)
    assert order.steps_per_epoch == 10
    for epoch in range(3):
        seen = epoch_of(order, epoch)
        assert len(set(seen.tolist())) == 100
        assert set(seen.tolist()) <= set(range(103))


def test_all_windows_are_seen_when_the_batch_divides_them():
    order = SampleOrder(windows=96, global_batch_size=8, seed=1)
    assert sorted(epoch_of(order, 0).tolist()) == list(range(96))


def test_dropped_windows_differ_by_epoch():
    order = SampleOrder(windows=103, global_batch_size=10, seed=1)
    dropped = [frozenset(range(103)) - set(epoch_of(order, epoch).tolist()) for epoch in range(5)]
    assert len(set(dropped)) > 1


def test_epochs_and_seeds_have_their_own_order():
    orders = [
        tuple(epoch_of(SampleOrder(windows=64, global_batch_size=8, seed=seed), epoch).tolist())
        for seed in (0, 1, 11)
        for epoch in (0, 1, 10)
    ]
    assert len(set(orders)) == 9
    assert tuple(range(64)) not in orders


def test_many_steps_at_once_are_the_same_and_may_cross_epochs():
    order = SampleOrder(windows=23, global_batch_size=4, seed=1)  # 5 steps an epoch
    epochs = [shuffled(np.arange(20), size=23, key=f"dsgpt order 1 {epoch}").reshape(5, 4) for epoch in range(4)]
    assert order.batches(3, 18).tolist() == np.concatenate(epochs)[3:18].tolist()


def test_neighbours_are_spread():
    """A network that mixes badly would keep neighbouring windows, and so neighbouring text, together."""
    found = shuffled(np.arange(10_000), size=10_000, key="k")
    distances = np.abs(np.diff(found))
    assert distances.mean() == pytest.approx(10_000 / 3, rel=0.05)
    assert np.corrcoef(np.arange(10_000), found)[0, 1] == pytest.approx(0, abs=0.04)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_a_global_batch_is_the_same_at_any_number_of_ranks(ranks, accumulation):
    order = SampleOrder(windows=200, global_batch_size=16, seed=3)
    micro = 16 // ranks // accumulation
    for step in (0, 5, 11, 12, 30):
        shares = [
            RankShare(
                micro_batch_size=micro,
                gradient_accumulation_steps=accumulation,
                data_rank=rank,
                data_parallel_size=ranks,
            ).of(order.batch(step))
            for rank in range(ranks)
        ]
        assert all(share.shape == (accumulation, micro) for share in shares)
        assert np.concatenate([share.ravel() for share in shares]).tolist() == order.batch(step).tolist()


@pytest.mark.parametrize(
    ("tokens", "length", "windows"), [(0, 4, 0), (1, 4, 0), (4, 4, 0), (5, 4, 1), (8, 4, 1), (9, 4, 2), (2, 1, 1)]
)
def test_a_window_needs_its_last_target(tokens, length, windows):
    assert window_count(tokens, length) == windows

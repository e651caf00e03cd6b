"""The order of samples: a pure function of seed and sample, the same at any number of ranks."""

import random
import tracemalloc

import numpy as np
import pytest

from dsgpt.data.loader import training_windows
from dsgpt.data.order import MixtureOrder, RankShare, SampleOrder, shuffled


def epoch_of(order: SampleOrder, epoch: int) -> list[int]:
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    return order.batches(steps.start, steps.stop).flatten().tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 97, 1009, *(4**k + d for k in range(1, 7) for d in (-1, 0, 1))])
def test_permutation_of_any_size(size):
    for key in ("a", "b"):
        found = shuffled(np.arange(size), size=size, key=key)
        assert found.dtype == np.int64
        assert sorted(found.tolist()) == list(range(size))


def test_golden_order():
    """A change of the order must fail here: it would make runs incomparable with earlier ones."""
    order = SampleOrder(windows=100, global_batch_size=8, seed=1337)
    assert order.batches(0, 1).tolist() == [[70, 1, 31, 38, 33, 87, 43, 47]]
    assert order.batches(11, 13).tolist() == [[86, 19, 59, 98, 93, 62, 55, 66], [48, 96, 6, 57, 58, 64, 68, 88]]
    assert shuffled(np.arange(10), size=10, key="golden").tolist() == [0, 3, 6, 2, 9, 4, 1, 8, 7, 5]
    mixed = MixtureOrder(windows=77, global_batch_size=4, seed=1337, sizes=(25, 11, 41), parts=(5, 2, 3))
    assert mixed.batches(0, 2).tolist() == [[15, 65, 7, 25], [19, 73, 14, 30]]
    assert mixed.batches(40, 41).tolist() == [[4, 76, 15, 30]]


@pytest.mark.parametrize(("windows", "batch", "rest"), [(103, 10, 3), (96, 8, 0)])
def test_an_epoch_repeats_no_window_and_drops_the_remainder(windows, batch, rest):
    """The dropped windows differ by epoch; every epoch and every seed has its own order."""
    orders = [SampleOrder(windows=windows, global_batch_size=batch, seed=seed) for seed in (0, 1, 11)]
    seen = [epoch_of(order, epoch) for order in orders for epoch in (0, 1, 10)]
    for epoch in seen:
        assert len(set(epoch)) == len(epoch) == orders[0].steps_per_epoch * batch == windows - rest
        assert set(epoch) <= set(range(windows))
    assert len({tuple(epoch) for epoch in (*seen, range(windows))}) == 10
    assert (len({frozenset(epoch) for epoch in seen}) > 1) == bool(rest)


def test_many_steps_at_once_are_the_same_and_may_cross_epochs():
    order = SampleOrder(windows=23, global_batch_size=4, seed=1)  # 5 steps an epoch
    epochs = [shuffled(np.arange(20), size=23, key=f"dsgpt order 1 {epoch}").reshape(5, 4) for epoch in range(4)]
    assert order.batches(3, 18).tolist() == np.concatenate(epochs)[3:18].tolist()


CASES = [(random.Random(case).randint(1, 400), random.Random(case + 1).randint(1, 40), case) for case in range(40)]


@pytest.mark.parametrize(("windows", "batch", "seed"), [(max(case[:2]), min(case[:2]), case[2]) for case in CASES])
def test_any_order(windows, batch, seed):
    """Each window of an epoch once, a resumed run as one that never stopped, and ranks that share a batch exactly."""
    order, draw = SampleOrder(windows=windows, global_batch_size=batch, seed=seed), random.Random(seed)
    steps = 3 * order.steps_per_epoch
    whole = order.batches(0, steps)
    for epoch in np.split(whole, 3):
        assert len(np.unique(epoch)) == epoch.size == order.steps_per_epoch * batch
        assert 0 <= epoch.min() <= epoch.max() < windows
    first, end = sorted(draw.sample(range(steps + 1), 2))
    assert np.array_equal(order.batches(first, end), whole[first:end])
    samples = np.array([draw.randrange(whole.size) for _ in range(9)])
    assert np.array_equal(order.at(samples), whole.ravel()[samples])
    ranks = draw.choice([ranks for ranks in range(1, batch + 1) if batch % ranks == 0])
    micro = draw.choice([micro for micro in range(1, batch // ranks + 1) if batch // ranks % micro == 0])
    sizes = {"micro_batch_size": micro, "gradient_accumulation_steps": batch // ranks // micro}
    shares = [RankShare(**sizes, data_rank=rank, data_parallel_size=ranks) for rank in range(ranks)]
    read = [list(training_windows(order, share, range(first, end))) for share in shares]
    together = np.array(read).reshape(ranks, end - first, -1).swapaxes(0, 1).reshape(end - first, batch)
    assert np.array_equal(together, whole[first:end])


def test_ten_billion_samples_cost_no_table():
    """A table of the windows would have 80 GB."""
    size = 10**10
    order = SampleOrder(windows=size, global_batch_size=512, seed=1)
    tracemalloc.start()
    step = order.steps_per_epoch - 1
    batches = [order.batches(first, first + 1) for first in (0, step, step + 1)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert len(np.unique(np.concatenate(batches[:2]))) == 2 * 512
    assert max(batch.max() for batch in batches) < size

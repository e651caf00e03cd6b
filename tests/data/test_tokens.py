"""Token files, the order of their windows, and the loader."""

import json
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_run import random_ids, write_tokens

from dsgpt.data import loader
from dsgpt.data.data_set import open_data
from dsgpt.data.loader import Batch, WindowDataset, micro_batches, training_windows, validation_windows
from dsgpt.data.order import MixtureOrder, RankShare, SampleOrder, shuffled
from dsgpt.data.token_file import TokenFileError, TokenFileWriter, open_token_file, sidecar_path

# The token file: what is written, that nanoGPT can read it, and which files are refused.


DOCUMENTS = [[1, 2, 3], [], [65_535, 0], np.array([7])]


def written(path: Path, *documents: object, vocab_size: int = 65_536, eot_id: int = 9) -> Path:
    with TokenFileWriter(path, vocab_size=vocab_size, eot_id=eot_id, tokenizer=None, source="test") as writer:
        for document in documents or DOCUMENTS:
            writer.append(document)
    return path


def test_round_trip(tmp_path):
    """As nanoGPT reads it: ids of two bytes, little-endian on every machine."""
    file = open_token_file(written(tmp_path / "new" / "a.bin"))
    ids = np.memmap(file.path, dtype=np.uint16, mode="r")
    assert file.memmap().tolist() == ids.tolist() == [1, 2, 3, 9, 9, 65_535, 0, 9, 7, 9]
    assert file.path.read_bytes()[:6] == b"\x01\x00\x02\x00\x03\x00"
    assert (file.tokens, file.size_bytes, file.largest_id()) == (10, 20, 65_535)
    sidecar = file.sidecar
    assert (sidecar.dtype, sidecar.documents, sidecar.vocab_size, sidecar.eot_id) == ("uint16", 4, 65_536, 9)
    assert sidecar.sha256 == file.verified_sha256()
    assert file.doubt() == ""
    assert sorted(path.name for path in file.path.parent.iterdir()) == ["a.bin", "a.json"]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(10, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (99_999, "<u4")])
def test_dtype_by_vocabulary(tmp_path, vocab_size, dtype):
    """The loader reads the largest id whole, too."""
    ids = [vocab_size - 1, 1, 2, vocab_size - 1, 5, 9]
    path = written(tmp_path / "a.bin", ids[:-1], vocab_size=vocab_size)
    assert np.memmap(path, dtype=dtype, mode="r").tolist() == open_token_file(path).memmap().tolist() == ids
    batch = WindowDataset(open_data(path, flag="data"), seq_length=4, vocab_size=vocab_size).__getitems__([0])
    assert (batch.inputs.tolist(), batch.targets.tolist()) == ([ids[:4]], [ids[1:5]])


@pytest.mark.parametrize("document", [[101], [3, -1]])
def test_an_id_outside_the_vocabulary_is_refused_and_leaves_the_old_file_alone(tmp_path, document):
    path = written(tmp_path / "a.bin")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(TokenFileError, match=r"a\.bin: document 1 has ids from .* outside the vocabulary of 101"):
        written(path, [100], document, vocab_size=101)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("maker", ["llm.c", "Megatron-LM"])
def test_files_of_others_are_not_read_as_uint16(tmp_path, maker: str):
    """The header of the one, and the int32 of the other, would be ids of the text."""
    path = tmp_path / "a.bin"
    path.write_bytes((20240520).to_bytes(4, "little") + bytes(1022) if maker == "llm.c" else bytes(8))
    if maker == "Megatron-LM":
        path.with_suffix(".idx").touch()
    with pytest.raises(TokenFileError, match=f"is a token file of {maker}; turn it into one of this program"):
        open_token_file(path)


def test_without_a_sidecar_uint16_is_assumed(tmp_path):
    path = written(tmp_path / "a.bin")
    sidecar_path(path).unlink()
    file = open_token_file(path)
    assert (file.tokens, file.sidecar.vocab_size, file.sidecar.sha256) == (10, None, None)
    assert file.largest_id() == 65_535


def test_keys_of_later_versions_are_ignored(tmp_path):
    path = write_tokens(tmp_path / "a.bin", random_ids(5), mixture={"a": 0.5})
    assert "mixture" in json.loads(sidecar_path(path).read_text())
    assert open_token_file(path).tokens == 5


# The order of samples: a pure function of seed and sample, the same at any number of ranks.


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
    epochs = [{*order.batches(first, first + 12).flat} for first in (0, 12)]
    assert epochs[0] != epochs[1], "the windows that an epoch drops are others in the next"
    assert shuffled(np.arange(10), size=10, key="golden").tolist() == [0, 3, 6, 2, 9, 4, 1, 8, 7, 5]
    assert shuffled(np.arange(4), size=4, key="golden").tolist() == [2, 0, 1, 3]
    mixed = MixtureOrder(windows=77, global_batch_size=4, seed=1337, sizes=(25, 11, 41), parts=(5, 2, 3))
    assert mixed.batches(0, 2).tolist() == [[15, 65, 7, 25], [19, 73, 14, 30]]
    assert mixed.batches(40, 41).tolist() == [[4, 76, 15, 30]]


@given(st.data())
def test_any_order(data: st.DataObject):
    """Each window of an epoch once, without a rest that fills no batch; a resumed run as one that never stopped.

    And ranks share a batch exactly.
    """
    ranks, micro, accumulation = (data.draw(st.integers(1, most)) for most in (8, 6, 4))
    batch = ranks * micro * accumulation
    windows, seed = data.draw(st.integers(batch, 5 * batch)), data.draw(st.integers(0, 2**70))
    order = SampleOrder(windows=windows, global_batch_size=batch, seed=seed)
    assert order.steps_per_epoch == windows // batch
    steps = 3 * order.steps_per_epoch
    whole = order.batches(0, steps)
    for epoch in np.split(whole, 3):
        assert len(np.unique(epoch)) == epoch.size == order.steps_per_epoch * batch
        assert 0 <= epoch.min() <= epoch.max() < windows
    first, end = sorted(data.draw(st.tuples(*[st.integers(0, steps)] * 2)))
    assert np.array_equal(order.batches(first, end), whole[first:end])
    samples = np.array(data.draw(st.lists(st.integers(0, whole.size - 1), min_size=1)))
    assert np.array_equal(order.at(samples), whole.ravel()[samples])
    sizes = {"micro_batch_size": micro, "gradient_accumulation_steps": accumulation, "data_parallel_size": ranks}
    read = [
        list(training_windows(order, RankShare(**sizes, data_rank=rank), range(first, end))) for rank in range(ranks)
    ]
    together = np.array(read).reshape(ranks, end - first, batch // ranks).swapaxes(0, 1).reshape(end - first, batch)
    assert np.array_equal(together, whole[first:end])


DRAWS, LEVEL = 3000, 1e-3
"""Permutations that are counted, and the probability below which a count is no chance. Keys are fixed, so the test
always gives the same answer; a fair order fails it for one choice of keys in 125."""


def chance(counts: np.ndarray, *, freedom: int, factor: float = 1.0) -> float:
    """The probability of a chi-square as large as that of ``counts``, whose cells are all equally likely."""
    expected = counts.sum() / counts.size
    statistic = factor * ((counts - expected) ** 2 / expected).sum()
    return float(
        torch.special.gammaincc(*(torch.tensor(value / 2, dtype=torch.float64) for value in (freedom, statistic)))
    )


@pytest.mark.parametrize("size", [13, 17])
def test_every_window_is_as_likely_at_every_place(size):
    """Also beside its neighbour, in the next epoch and under the next seed.

    The counts of places and windows are those of rankings, whose rows and columns have fixed sums (Anderson 1959).
    """
    orders = [SampleOrder(windows=size, global_batch_size=size, seed=seed) for seed in range(DRAWS // 3)]
    epochs = np.stack([order.batches(0, 3) for order in orders])  # (seeds, epochs, windows)
    places = np.stack([(epochs == window).sum(axis=(0, 1)) for window in range(size)])
    found = {"places": chance(places, freedom=(size - 1) ** 2, factor=(size - 1) / size)}
    pairs = {
        "epochs": epochs[:, :2, 0],
        "seeds": epochs[:, 0, 0].reshape(-1, 2),
        "neighbours": epochs[..., :2].reshape(-1, 2),
    }
    for name, (one, other) in ((name, pair.T) for name, pair in pairs.items()):
        counts = np.bincount(one * size + other, minlength=size**2)
        if name == "neighbours":  # never the same window
            counts = counts[np.arange(size**2) % (size + 1) != 0]
        found[name] = chance(counts, freedom=len(counts) - 1)
    assert min(found.values()) > LEVEL, found


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


# Micro batches: the right windows, their shifted targets, and nothing read twice or left out.


LENGTH = 8
WINDOWS = 50
IDS = random_ids(WINDOWS * LENGTH + 5, below=250)
ORDER = SampleOrder(windows=WINDOWS, global_batch_size=8, seed=3)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> WindowDataset:
    path = write_tokens(tmp_path_factory.mktemp("data") / "a.bin", IDS)
    return WindowDataset(open_data(path, flag="data"), seq_length=LENGTH, vocab_size=257)


def share(rank: int = 0, ranks: int = 1, *, micro: int = 4) -> RankShare:
    return RankShare(
        micro_batch_size=micro,
        gradient_accumulation_steps=8 // ranks // micro,
        data_rank=rank,
        data_parallel_size=ranks,
    )


def training(dataset: WindowDataset, first: int, last: int, *, part: RankShare | None = None) -> list[Batch]:
    windows = training_windows(ORDER, part or share(), range(first, last))
    return list(micro_batches(dataset, windows, workers=0, pin_memory=False))


def validation(dataset: WindowDataset, windows: int, *, part: RankShare) -> list[Batch]:
    order = validation_windows([range(windows)], part, global_batch_size=8)
    return list(micro_batches(dataset, order, workers=0, pin_memory=False))


def same(first: list[Batch], second: list[Batch]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets) for a, b in pairs)


def rows(batches: list[list[Batch]], *, steps: int) -> list[torch.Tensor]:
    """The inputs, and the targets, of all ranks in the order of the windows: of a step, and in it of a rank."""
    parts = [[torch.cat(tensors).view(steps, -1, LENGTH) for tensors in zip(*each, strict=True)] for each in batches]
    return [torch.cat(ranks, dim=1).view(-1, LENGTH) for ranks in zip(*parts, strict=True)]


def ids_of(windows: Iterable[int], *, shift: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.stack([IDS[start + shift :][:LENGTH] for start in np.array(windows) * LENGTH]))


@pytest.mark.parametrize(("ranks", "micro"), [(1, 4), (1, 8), (2, 2), (4, 1), (4, 2)])
def test_the_ranks_together_read_the_global_batch_exactly(dataset, ranks, micro):
    """At any number of ranks the same windows with their shifted targets, over the end of the first epoch."""
    batches = [training(dataset, 4, 8, part=share(rank, ranks, micro=micro)) for rank in range(ranks)]
    assert [len(each) for each in batches] == [4 * 8 // ranks // micro] * ranks
    assert {tensor.dtype for batch in batches[0] for tensor in batch} == {torch.int64}
    inputs, targets = rows(batches, steps=4)
    windows = ORDER.batches(4, 8).flatten()
    assert torch.equal(inputs, ids_of(windows)) and torch.equal(targets, ids_of(windows, shift=1))


@pytest.mark.parametrize("at_once", [1, 2, 64])
def test_resuming_at_a_step_gives_exactly_the_rest(dataset, at_once, monkeypatch):
    whole = training(dataset, 0, 14)
    monkeypatch.setattr(loader, "STEPS_AT_ONCE", at_once)
    for done in (1, 6, 13):
        assert same(training(dataset, done, 14), whole[2 * done :])
    assert training(dataset, 14, 14) == []


@pytest.mark.parametrize("windows", [1, 7, 8, 9, 16, 21, WINDOWS])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (1, 1), (2, 2), (4, 2)])
def test_validation_covers_each_window_once_in_file_order(dataset, windows, ranks, micro):
    steps = -(-windows // 8)
    batches = [validation(dataset, windows, part=share(rank, ranks, micro=micro)) for rank in range(ranks)]
    inputs, targets = rows(batches, steps=steps)
    assert torch.equal(inputs[:windows], ids_of(range(windows)))
    assert torch.equal(targets[:windows], ids_of(range(windows), shift=1))
    assert len(targets) == 8 * steps and (targets[windows:] == -100).all()

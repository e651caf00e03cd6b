"""Micro batches: the right windows, their shifted targets, and nothing read twice or left out."""

from pathlib import Path

import numpy as np
import pytest
import torch
from messages import without_paths
from small_run import random_ids, write_tokens
from torch.utils.data import DataLoader

from dsgpt.data import loader
from dsgpt.data.loader import Batch, RankShare, WindowDataset, training_loader, validation_loader
from dsgpt.data.order import SampleOrder
from dsgpt.data.token_file import TokenFileError, open_token_file

LENGTH = 8
WINDOWS = 50
IDS = random_ids(WINDOWS * LENGTH + 5, below=250)
ORDER = SampleOrder(windows=WINDOWS, global_batch_size=8, seed=3)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> WindowDataset:
    path = write_tokens(tmp_path_factory.mktemp("data") / "a.bin", IDS)
    return WindowDataset(open_token_file(path), seq_length=LENGTH, vocab_size=257)


def share(rank: int = 0, ranks: int = 1, *, micro: int = 4) -> RankShare:
    return RankShare(
        micro_batch_size=micro,
        gradient_accumulation_steps=8 // ranks // micro,
        data_rank=rank,
        data_parallel_size=ranks,
    )


def training(dataset: WindowDataset, first: int, last: int, *, workers: int = 0, part: RankShare | None = None):
    return training_loader(
        dataset, ORDER, part or share(), first_step=first, last_step=last, workers=workers, pin_memory=False
    )


def validation(dataset: WindowDataset, windows: int, *, part: RankShare) -> DataLoader:
    return validation_loader(dataset, windows, part, global_batch_size=8, pin_memory=False)


def same(first: list[Batch], second: list[Batch]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets) for a, b in pairs)


def test_windows_and_shifted_targets_are_exact(dataset):
    batches = list(training(dataset, 4, 8))  # over the end of the first epoch
    assert len(batches) == len(training(dataset, 4, 8)) == 8
    windows = np.concatenate([ORDER.batch(step) for step in range(4, 8)])
    inputs = torch.cat([batch.inputs for batch in batches])
    targets = torch.cat([batch.targets for batch in batches])
    assert inputs.dtype == targets.dtype == torch.int64
    for row, window in enumerate(windows):
        start = window * LENGTH
        assert inputs[row].tolist() == IDS[start : start + LENGTH].tolist()
        assert targets[row].tolist() == IDS[start + 1 : start + LENGTH + 1].tolist()


@pytest.mark.parametrize("at_once", [1, 2, 64])
def test_resuming_at_a_step_gives_exactly_the_rest(dataset, at_once, monkeypatch):
    whole = list(training(dataset, 0, 14))
    monkeypatch.setattr(loader, "STEPS_AT_ONCE", at_once)
    for done in (1, 6, 13):
        assert same(list(training(dataset, done, 14)), whole[2 * done :])
    assert list(training(dataset, 14, 14)) == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_together_read_the_global_batch(dataset, ranks):
    alone = torch.cat([batch.inputs for batch in training(dataset, 5, 6)])
    parts = [training(dataset, 5, 6, part=share(rank, ranks, micro=2)) for rank in range(ranks)]
    assert torch.equal(torch.cat([batch.inputs for part in parts for batch in part]), alone)


def test_worker_processes_change_nothing(dataset):
    assert same(list(training(dataset, 0, 7, workers=2)), list(training(dataset, 0, 7)))


@pytest.mark.parametrize("windows", [1, 7, 8, 9, 16, 21, WINDOWS])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (1, 1), (2, 2), (4, 2)])
def test_validation_covers_each_window_once_in_file_order(dataset, windows, ranks, micro):
    per_rank = [list(validation(dataset, windows, part=share(rank, ranks, micro=micro))) for rank in range(ranks)]
    steps = -(-windows // 8)
    accumulation = 8 // ranks // micro
    assert [len(batches) for batches in per_rank] == [steps * accumulation] * ranks
    rows = []
    for step in range(steps):
        for batches in per_rank:
            mine = batches[step * accumulation : (step + 1) * accumulation]
            rows += [
                (i, t) for batch in mine for i, t in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True)
            ]
    for window, (inputs, targets) in enumerate(rows):
        start = window * LENGTH
        if window < windows:
            assert inputs == IDS[start : start + LENGTH].tolist()
            assert targets == IDS[start + 1 : start + LENGTH + 1].tolist()
        else:
            assert targets == [-100] * LENGTH
            assert max(inputs) < 257


def test_an_id_beyond_the_vocabulary_names_file_and_id(tmp_path, snapshot):
    ids = IDS.copy()
    ids[3 * LENGTH + 2] = 256
    path: Path = write_tokens(tmp_path / "bad.bin", ids)
    small = WindowDataset(open_token_file(path), seq_length=LENGTH, vocab_size=256)
    with pytest.raises(TokenFileError) as caught:
        list(validation(small, 8, part=share()))
    assert without_paths(str(caught.value), tmp_path) == snapshot


def test_the_largest_id_of_four_bytes_is_read_whole(tmp_path):
    path = tmp_path / "wide.bin"
    ids = np.array([70_000, 1, 2, 99_999, 5], dtype="<u4")
    write_tokens(path, ids, dtype="uint32", vocab_size=100_000)
    path.write_bytes(ids.tobytes())
    wide = WindowDataset(open_token_file(path), seq_length=4, vocab_size=100_000)
    batch = wide.__getitems__([0])
    assert batch.inputs.tolist() == [[70_000, 1, 2, 99_999]]
    assert batch.targets.tolist() == [[1, 2, 99_999, 5]]

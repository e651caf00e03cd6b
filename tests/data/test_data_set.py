"""Several files as one data set, and mixtures: what is read, what it is called, and what is refused."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import SEQUENCE, command_line, random_ids, without_paths, write_data, write_recipe, write_tokens
from training_runs import errors, read_lines, read_record, resolved

from dsgpt.common.errors import UserError
from dsgpt.data.data_set import DataSet, open_data
from dsgpt.data.loader import WindowDataset
from dsgpt.data.order import MixtureOrder, interleaved
from dsgpt.training.command import train as train_here

SIZES = {"a": 203, "b": 90, "c": 331}
WEIGHTS = {"a": 0.5, "b": 0.2, "c": 0.3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three token files in the folder ``web``, and their bytes in one, ``whole.bin``."""
    ids = [random_ids(size, seed=size) for size in SIZES.values()]
    for name, own in zip(SIZES, ids, strict=True):
        write_tokens(tmp_path / "web" / f"{name}.bin", own)
    write_tokens(tmp_path / "whole.bin", np.concatenate(ids))
    return tmp_path


def write_mix(path: Path, entries: Any) -> Path:
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return path


def mixture(folder: Path, weights: dict[str, float] = WEIGHTS, **more: Any) -> Path:
    entries = [{"path": f"web/{name}.bin", "weight": weight, **more} for name, weight in weights.items()]
    return write_mix(folder / "mix.json", entries)


def rows(data: DataSet, windows: list[int], length: int = 8) -> list[list[int]]:
    batch = WindowDataset(data, seq_length=length, vocab_size=257).__getitems__(windows)
    assert (batch.inputs[:, 1:] == batch.targets[:, :-1]).all()
    return [[*row, int(last)] for row, last in zip(batch.inputs.tolist(), batch.targets[:, -1], strict=True)]


# Several files as one.


@pytest.mark.parametrize("named", ["web", "web/*.bin", "web/?.bin", "list.json"])
def test_several_files_are_read_as_one(folder, named):
    """As the same bytes in one file: windows, targets and order, over the ends of files."""
    write_mix(folder / "list.json", ["web/a.bin", "web/[bc].bin"])
    one, whole = open_data(folder / named, flag="--data"), open_data(folder / "whole.bin", flag="--data")
    assert (one.tokens, one.windows(8), len(one.files)) == (whole.tokens, whole.windows(8), 3)
    assert rows(one, list(range(whole.windows(8)[0]))) == rows(whole, list(range(whole.windows(8)[0])))
    orders = [data.order(8, global_batch_size=4, seed=3) for data in (one, whole)]
    assert orders[0] == orders[1]


def test_files_of_two_widths_are_read_as_one(folder):
    (folder / "web" / "b.bin").write_bytes(random_ids(90, seed=90).astype("<u4").tobytes())
    sidecar = folder / "web" / "b.json"
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"dtype": "uint32"}))
    one, whole = (open_data(folder / name, flag="--data") for name in ("web", "whole.bin"))
    assert rows(one, list(range(70))) == rows(whole, list(range(70)))


def test_the_hash_names_contents_and_shares_alone(folder, tmp_path):
    """Not the paths: machines may mount data elsewhere. The order of files counts, and so does a weight."""

    def named(path: Path, *, mixed: bool = True) -> str | None:
        return open_data(path, flag="--data").sha256(lambda file: file.sidecar.sha256, mixed=mixed)

    whole = json.loads((folder / "whole.json").read_text())["sha256"]
    assert named(folder / "whole.bin") == named(write_mix(folder / "one.json", ["whole.bin"])) == whole
    (tmp_path / "moved").mkdir()
    moved = (folder / "web").rename(tmp_path / "moved" / "web")
    assert named(mixture(moved.parent)) == named(mixture(moved.parent, {name: 10 * w for name, w in WEIGHTS.items()}))
    others = [
        named(moved),
        named(write_mix(moved.parent / "turned.json", ["web/b.bin", "web/a.bin", "web/c.bin"])),
        named(mixture(moved.parent)),
        named(mixture(moved.parent, WEIGHTS | {"a": 0.4})),
        named(mixture(moved.parent), mixed=False),
    ]
    assert len({whole, *others}) == 6


# Mixtures.


@pytest.mark.parametrize("case", range(20))
def test_every_source_has_its_share_to_within_one_sample(case):
    draw = random.Random(case)
    parts = tuple(draw.choice([1, draw.randint(1, 400)]) for _ in range(draw.randint(2, 9)))
    turns = np.array(interleaved(parts))
    after = np.arange(1, sum(parts) + 1)
    for source, part in enumerate(parts):
        had = (turns == source).cumsum()
        assert had[-1] == part
        assert (np.abs(had * sum(parts) - after * part) < sum(parts)).all()


def test_a_mixture_takes_each_source_by_its_share_and_in_its_own_order(folder):
    """After any n samples; each epoch of a source is a new order of all its windows, and no other's."""
    data = open_data(mixture(folder), flag="--data")
    order = data.order(8, global_batch_size=4, seed=3)
    assert isinstance(order, MixtureOrder)
    assert (order.sizes, order.parts) == ((25, 11, 41), (5, 2, 3))
    windows = order.at(np.arange(400))
    ends = np.cumsum(order.sizes)
    for source, (size, part) in enumerate(zip(order.sizes, order.parts, strict=True)):
        own = (windows < ends[source]) & (windows >= ends[source] - size)
        counts = own.cumsum()
        assert (np.abs(counts - np.arange(1, 401) * part / 10) < 1).all()
        assert [order.consumed(n)[source] for n in (0, 1, 7, 10, 399)] == [0, *counts[[0, 6, 9, 398]]]
        epochs = windows[own][: counts[-1] // size * size].reshape(-1, size)
        assert all(sorted(epoch) == list(range(ends[source] - size, ends[source])) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs) > 0
    assert np.array_equal(order.batches(7, 30).ravel(), windows[28:120])
    far = order.at(np.array([10**10, 10**10 + 1]))
    assert far.max() < sum(order.sizes)


@pytest.mark.parametrize(
    "entries",
    [
        "{}",
        "[]",
        "[1]",
        '[{"path": "web/a.bin"}]',
        '[{"path": "web/a.bin", "weight": 0}]',
        '[{"path": "web/a.bin", "weight": 1, "wieght": 2}]',
        ["web/a.bin", "web/none.bin", "none/*.bin", "empty"],
        ["web", "web/a.bin"],
        [{"path": "web/a.bin", "weight": 1}, {"path": "web/a.bin", "weight": 2}],
        [{"path": "web/a.bin", "weight": 0.1234567}, {"path": "web/b.bin", "weight": 0.7}],
    ],
)
def test_a_list_that_is_refused(folder, entries, snapshot):
    (folder / "empty").mkdir()
    with pytest.raises(UserError) as caught:
        open_data(write_mix(folder / "mix.json", entries), flag="--train_data_path")
    assert [without_paths(line, folder) for line in caught.value.problems] == snapshot


@pytest.mark.parametrize(
    "changes",
    [{"train_data_path": "web", "val_data_path": "web/b.bin"}, {"train_data_path": "mix.json", "max_train_steps": 30}],
)
def test_a_run_that_is_refused(folder, changes, snapshot):
    """It would validate on what it trains on, or read a source more often than was allowed."""
    write_recipe(write_data(folder) / "recipe.json")
    mixture(folder, epochs=4)
    paths = {name: folder / value if isinstance(value, str) else value for name, value in changes.items()}
    with pytest.raises(UserError) as caught:
        resolved(command_line(folder, **paths))
    assert [without_paths(line, folder) for line in caught.value.problems] == snapshot


def test_a_run_on_a_mixture(folder, capsys):
    """Counts and losses by source are in the record; another mixture is refused at a resume unless it is allowed."""
    write_recipe(write_data(folder) / "recipe.json")
    write_tokens(folder / "more.bin", random_ids(5 * SEQUENCE + 1, seed=7))
    validated = write_mix(folder / "vals.json", ["val.bin", "more.bin"])
    flags = {"train_data_path": mixture(folder), "val_data_path": validated, "max_train_steps": 5}
    assert train_here(command_line(folder, **flags)) == 0
    assert "mixture     50.00% web/a.bin: 1.67 epochs of 12 windows" in capsys.readouterr().out
    record, (*_, line) = read_record(folder / "run"), read_lines(folder / "run", "val_loss")
    assert record["summary"]["samples_by_source"] == {"web/a.bin": 20, "web/b.bin": 8, "web/c.bin": 12}
    assert [source["share"] for source in record["data"]["train_sources"]] == [0.5, 0.2, 0.3]
    assert [len(source["files"][0]["sha256"]) for source in record["data"]["val_sources"]] == [64, 64]
    losses = line["val_loss_by_source"]
    assert list(losses) == [str(folder / name) for name in ("val.bin", "more.bin")]
    assert line["val_loss"] == pytest.approx((10 * losses[str(folder / "val.bin")] + 5 * [*losses.values()][1]) / 15)
    assert record["summary"]["final_val_loss_by_source"] == losses
    alone = command_line(folder, **flags | {"val_data_path": folder / "more.bin", "checkpoint_path": folder / "alone"})
    assert train_here(alone) == 0
    assert read_record(folder / "alone")["summary"]["final_val_loss"] == pytest.approx([*losses.values()][1], abs=1e-6)

    flags |= {"train_data_path": mixture(folder, WEIGHTS | {"a": 0.6}), "max_train_steps": 6, "resume": True}
    assert train_here(command_line(folder, **flags, allow_changed="recipe")) == 2
    assert "--resume: train data is" in errors(capsys)[0]
    assert train_here(command_line(folder, **flags, allow_changed="data,recipe")) == 0
    assert read_record(folder / "run")["summary"]["samples_by_source"] is None

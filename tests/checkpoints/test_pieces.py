"""Checkpoints that several ranks wrote: pieces in files of their own, an index, and readers of parts."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsgpt.checkpoints import store
from dsgpt.checkpoints.manifest import RunState
from dsgpt.checkpoints.pieces import Box, cut, read_index, why_not_whole
from dsgpt.checkpoints.training_state import Counters, ParamState, Shards, StateReader, complete_state, write_shards
from dsgpt.common.errors import UserError
from dsgpt.strategies.deepspeed.state import SPLIT, is_split, part_boxes, take_part

SHAPES = {"wte.weight": (7, 4), "blocks.0.attn.qkv.weight": (12, 4), "blocks.0.mlp.proj.weight": (4, 8)}
SHAPES |= {"ln_f.bias": (5,)}
KEYS = ("exp_avg", "exp_avg_sq")
Split = Callable[[int, int], Shards]
"""Rank and ranks to what the rank writes."""


def values() -> dict[str, ParamState]:
    torch.manual_seed(2)
    return {name: ParamState(*(torch.randn(shape) for _ in range(3))) for name, shape in SHAPES.items()}


def everything() -> Shards:
    return Shards({name: [Box.whole(shape)] for name, shape in SHAPES.items()}, iter(values().items()))


def alike(rank: int, ranks: int) -> Shards:
    """As under DDP: all hold the same."""
    return everything().share(rank, ranks)


def flat(rank: int, ranks: int) -> Shards:
    """As under ZeRO-3: a flat part of every parameter; the last may be empty."""
    boxes, states = {}, []
    for name, state in values().items():
        length = -(-state.weight.numel() // ranks)
        if own := cut([Box.whole(SHAPES[name])], rank * length, (rank + 1) * length):
            boxes[name] = own
            states.append((name, state.mapped(lambda value: value.flatten()[rank * length : (rank + 1) * length])))  # noqa: B023
    return Shards(boxes, iter(states[::-1]))


def tensor(rank: int, ranks: int) -> Shards:
    """As under tensor parallelism over two of four ranks, with what they hold alike shared."""
    index, data = rank % 2, rank // 2
    boxes = {name: part_boxes(name, shape, rank=index, size=2) for name, shape in SHAPES.items()}

    def part(name: str) -> Callable[[Tensor], Tensor]:
        return lambda value: take_part(name, value, rank=index, size=2)

    own = Shards(boxes, ((name, state.mapped(part(name))) for name, state in values().items()))
    return own.share(data, ranks // 2).share(index, 2, among=lambda name: not is_split(name))


SPLITS = [(alike, 3), (flat, 3), (flat, 9), (tensor, 2), (tensor, 4), (alike, 40)]


def saved(folder: Path, split: Split, ranks: int) -> Path:
    folder.mkdir()
    parts = [write_shards(folder, split(rank, ranks), rank=rank, ranks=ranks) for rank in range(ranks)]
    complete_state(folder, parts, Counters(optimizer_steps=3), shapes=SHAPES)
    return folder


@pytest.mark.parametrize(("split", "ranks"), SPLITS)
def test_what_ranks_wrote_is_read_whole_and_in_parts(tmp_path, split, ranks):
    reader, heard = StateReader(saved(tmp_path / "step", split, ranks)), list[int]()
    reader.heard = lambda: heard.append(1)
    reader.require_shapes(SHAPES)
    reader.check()
    for name, state in values().items():
        assert all(one.equal(two) for one, two in zip(reader.state(name)[:3], state[:3], strict=True))
        boxes = cut([Box.whole(SHAPES[name])], 3, 17)
        assert reader.read(name, "exp_avg", boxes=boxes).equal(state.exp_avg.flatten()[3:17])
        boxes = part_boxes(name, SHAPES[name], rank=1, size=2)
        assert reader.read(name, boxes=boxes).equal(take_part(name, state.weight, rank=1, size=2).flatten())
    assert len(heard) == 2 * len(values())  # of each its weight, twice
    total = sum(path.stat().st_size for path in (tmp_path / "step").glob("model-*.safetensors"))
    elements = sum(state.weight.numel() for state in values().values())
    assert 4 * elements <= total < 4 * elements + 1500 * ranks  # nothing is written twice


def test_ranks_that_hold_the_same_write_equally_much():
    sizes = [sum(box.numel for boxes in alike(rank, 5).boxes.values() for box in boxes) for rank in range(5)]
    assert sum(sizes) == sum(state.weight.numel() for state in values().values())
    assert max(sizes) - min(sizes) <= 1


def test_boxes_of_a_flat_range_are_its_elements():
    drawn = random.Random(5)
    for _ in range(300):
        shape = [drawn.randint(1, 5) for _ in range(drawn.randint(1, 3))]
        value = torch.arange(torch.Size(shape).numel()).view(shape)
        start, stop = sorted(drawn.choices(range(value.numel() + 3), k=2))
        parts = [value[box.slices(Box.whole(shape))].flatten() for box in cut([Box.whole(shape)], start, stop)]
        assert torch.cat([torch.empty(0, dtype=torch.long), *parts]).equal(value.flatten()[start:stop])


def cut_at_random(box: Box, drawn: random.Random) -> list[Box]:
    """``box`` in two along a dimension, and so on."""
    axis = drawn.randrange(len(box.shape))
    if box.shape[axis] == 1 or drawn.random() < 0.2:
        return [box]
    first = drawn.randrange(1, box.shape[axis])
    parts = []
    for start, length in ((0, first), (first, box.shape[axis] - first)):
        ends = [list(each) for each in box]
        ends[0][axis] += start
        ends[1][axis] = length
        parts += cut_at_random(Box(*map(tuple, ends)), drawn)
    return parts


def test_any_boxes_of_any_writers_are_read_as_any_boxes(tmp_path):
    drawn = random.Random(3)
    for number in range(30):
        shape, ranks = tuple(drawn.randint(1, 6) for _ in range(drawn.randint(1, 3))), drawn.randint(2, 9)
        whole, value, folder = Box.whole(shape), torch.randn(shape), tmp_path / f"{number}"

        def flat(boxes: list[Box], value: Tensor = value, whole: Box = whole) -> Tensor:
            return torch.cat([value[box.slices(whole)].flatten() for box in boxes])

        written: list[list[Box]] = [[] for _ in range(ranks)]
        for box in cut_at_random(whole, drawn):
            drawn.choice(written).append(box)
        folder.mkdir()
        shards = [Shards({"a": own}, iter([("a", ParamState(flat(own)))])) for own in written if own]
        shards += [Shards({}, iter(()))] * (ranks - len(shards))
        parts = [write_shards(folder, own, rank=rank, ranks=ranks) for rank, own in enumerate(shards)]
        complete_state(folder, parts, Counters(optimizer_steps=0), shapes={"a": shape})
        wanted = cut_at_random(whole, drawn)
        assert StateReader(folder).read("a", boxes=wanted).equal(flat(wanted))
        assert StateReader(folder).read("a").equal(value)


def test_boxes_that_are_not_the_whole_are_noticed():
    """Beside counts of every element."""
    drawn, found = random.Random(4), set()
    for _ in range(300):
        shape = tuple(drawn.randint(1, 6) for _ in range(drawn.randint(1, 3)))
        counts, boxes = torch.zeros(shape), cut_at_random(Box.whole(shape), drawn)
        boxes += [drawn.choice(boxes)] * drawn.randint(0, 1)
        del boxes[: drawn.randint(0, 1)]
        for box in boxes:
            counts[box.slices(Box.whole(shape))] += 1
        twice, missing = "two pieces have the same elements", "no piece has some of its elements"
        found.add(expected := twice if counts.max() > 1 else missing if counts.min() < 1 else "")
        assert why_not_whole(shape, boxes) == expected
    assert len(found) == 3


@pytest.mark.parametrize("size", [2, 4])
def test_boxes_of_a_tensor_rank_are_its_part(size):
    for name in SPLIT:
        whole = torch.arange(96 * 4).view(96, 4) if name.endswith("weight") else torch.arange(96)
        every = [part_boxes(f"blocks.0.{name}", whole.shape, rank=rank, size=size) for rank in range(size)]
        assert why_not_whole(whole.shape, [box for boxes in every for box in boxes]) == ""
        for rank, boxes in enumerate(every):
            part = take_part(f"blocks.0.{name}", whole, rank=rank, size=size)
            assert torch.cat([whole[box.slices(Box.whole(whole.shape))].flatten() for box in boxes]).equal(
                part.flatten()
            )


def test_a_rank_reads_only_the_files_that_have_its_part(tmp_path):
    folder = saved(tmp_path / "step", flat, 3)
    for path in folder.glob("*-00002.safetensors"):
        path.unlink()
    boxes = cut([Box.whole(SHAPES["wte.weight"])], 0, 18)
    assert StateReader(folder).read("wte.weight", boxes=boxes).equal(values()["wte.weight"].weight.flatten()[:18])
    with pytest.raises(UserError, match=r"model-00002\.safetensors: is not a readable"):
        StateReader(folder).check()


def test_no_copy_is_made_of_what_is_in_host_memory(tmp_path, monkeypatch):
    """The memory of a save is that of the check for NaN: the writer gets the strategy's own memory."""
    seen: list[int] = []
    held = everything()
    kept = dict(held.states)
    monkeypatch.setattr(
        "dsgpt.checkpoints.training_state.SafetensorsWriter.put_part",
        lambda _, name, __, part: seen.append(part.data_ptr()),
    )
    monkeypatch.setattr("dsgpt.checkpoints.training_state.SafetensorsWriter.__exit__", lambda *_: None)
    write_shards(tmp_path, Shards(held.boxes, iter(kept.items())), rank=0, ranks=1)
    assert seen == [value.data_ptr() for state in kept.values() for value in state[:3]]


# Pieces that do not make up the state are neither published nor read.


def moved(shards: Shards) -> Shards:
    """The first piece of a parameter one row later than it is."""
    (start, shape), *others = shards.boxes["wte.weight"]
    return Shards(shards.boxes | {"wte.weight": [Box((start[0] + 1, *start[1:]), shape), *others]}, shards.states)


HARMS = {
    "a wrong offset": (moved, "some of its elements|the same elements|outside"),
    "a rank that writes nothing": (lambda shards: shards.only(lambda _: False), "some of its elements"),
    "a rank that writes all": (lambda _: everything(), "the same elements"),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize(("split", "ranks"), [(alike, 3), (flat, 3), (tensor, 2)])
def test_pieces_that_do_not_make_up_the_state_are_not_saved(tmp_path, split, ranks, harm):
    change, words = HARMS[harm]

    def harmed(rank: int, ranks: int) -> Shards:
        return change(split(rank, ranks)) if rank == 0 else split(rank, ranks)

    with pytest.raises(ValueError, match=rf"is not whole: .*({words})"):
        saved(tmp_path / "step", harmed, ranks)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index: index | {"version": 3}, "is not an index of this version"),
        (lambda index: index["tensors"]["ln_f.bias"]["pieces"].pop() and index, "no piece has some of its elements"),
        (lambda index: index["tensors"]["ln_f.bias"]["pieces"].append([0, [9], [1]]) or index, "outside of it"),
        (lambda index: index["tensors"]["ln_f.bias"]["pieces"].append([0, [0], [1]]) or index, "the same elements"),
        (lambda index: index | {"writers": 1}, "a piece has no writer"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path, change, words):
    path = saved(tmp_path / "step", alike, 3) / "pieces.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(UserError, match=words):
        read_index(path.parent)


@pytest.mark.parametrize("harm", ["other pieces", "other shapes"])
def test_a_file_with_other_pieces_than_the_index_says_is_refused(tmp_path, harm):
    one, two = saved(tmp_path / "one", flat, 3), saved(tmp_path / "two", alike, 3)
    file = one / "model-00001.safetensors"
    if harm == "other pieces":
        file.write_bytes((two / file.name).read_bytes())
    else:
        save_file({key: value.flatten() for key, value in load_file(file).items()}, file)
    with pytest.raises(UserError, match=r"model-00001\.safetensors: its tensors are not those"):
        StateReader(one).check()


@pytest.mark.parametrize("harm", ["shorter", "missing"])
def test_files_that_another_rank_did_not_finish_are_not_published(tmp_path, harm):
    """The main rank sees the files of all; a rank that died, or a folder that is not shared, leaves no checkpoint."""
    folder = store.begin(tmp_path, 5)
    parts = [write_shards(folder, flat(rank, 3), rank=rank, ranks=3) for rank in range(3)]
    facts = complete_state(folder, parts, Counters(optimizer_steps=3), shapes=SHAPES)
    file = folder / "optimizer-00002.safetensors"
    if harm == "shorter":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    state = RunState(step=5, samples_seen=40, best_val_loss=None, epochs=[], segments=[])
    with pytest.raises(OSError, match=r"optimizer-00002\.safetensors"):
        store.publish(tmp_path, folder, state=state, about={}, written=facts)
    assert store.checkpoints(tmp_path) == []

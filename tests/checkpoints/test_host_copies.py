"""What a save copies from a GPU, in blocks. A stand-in executes asynchronous copies at once or when the host waits."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from dsgpt.checkpoints import training_state
from dsgpt.checkpoints.pieces import Box
from dsgpt.checkpoints.training_state import HostCopies, KeptState, ParamState, Shards, write_shards

BLOCK = 10


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU. Asynchronous copies of it wait in ``begun``, or are ``early``."""

    early: ClassVar[bool]
    begun: ClassVar[list[Callable[[], object]]] = []

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            assert kwargs == {"non_blocking": True}
            source = args[1].as_subclass(torch.Tensor).clone()
            cls.begun.append(lambda: args[0].copy_(source))
            return cls.begun.pop()() if cls.early else args[0]
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.fixture(params=[True, False], ids=["early", "late"])
def gpu(request, monkeypatch) -> Iterator[SimpleNamespace]:
    """Streams and pinned memory; counts waits and buffers."""
    seen = SimpleNamespace(waits=0, buffers=[])
    empty = torch.empty

    def made(*shape, pin_memory=False, **more):
        seen.buffers += [shape] if pin_memory else []
        return empty(*shape, **more)

    def recorded():
        begun, OnGpu.begun = OnGpu.begun, []

        def wait():
            seen.waits += 1
            while begun:
                begun.pop(0)()

        return SimpleNamespace(synchronize=wait)

    stream = SimpleNamespace(wait_stream=lambda _: None, record_event=recorded)
    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(training_state, "BLOCK", BLOCK)
    OnGpu.early, OnGpu.begun = request.param, []
    return seen


def states(sizes: dict[str, int], *, on_gpu: bool) -> dict[str, ParamState]:
    torch.manual_seed(0)
    made = {name: ParamState(*torch.randn(3, size)) for name, size in sizes.items()}
    return {
        name: state.mapped(lambda value: value.as_subclass(OnGpu)) if on_gpu else state for name, state in made.items()
    }


@pytest.mark.parametrize("sizes", [(3,), (10,), (10, 20), (1,) * 25, (4, 43, 0, 7), (9, 2, 9, 2, 9)], ids=str)
def test_every_element_is_handed_on_once_with_one_wait_per_block(gpu, sizes):
    copies, handed = HostCopies(), {}
    for number, size in enumerate(sizes):
        place = handed[number] = torch.full((size,), torch.nan)

        def take(start, part, place=place):
            assert place[start : start + len(part)].isnan().all()
            place[start : start + len(part)] = part

        copies.hand_on((torch.arange(size) + 100.0 * number).as_subclass(OnGpu), take)
    copies.finish()
    for number, size in enumerate(sizes):
        assert handed[number].tolist() == [100.0 * number + index for index in range(size)]
    assert gpu.waits == -(-sum(sizes) // BLOCK)
    assert gpu.buffers == [(BLOCK,)] * 2


@pytest.mark.parametrize("tensors", [1, 40])
def test_a_save_waits_no_more_often_for_more_tensors(gpu, tmp_path, tensors):
    """240 numbers of each kind, in one tensor or in 40."""
    sizes = {f"part{number}": 240 // tensors for number in range(tensors)}
    boxes, files = {name: [Box.whole((size,))] for name, size in sizes.items()}, {}
    for on_gpu in (False, True):
        gpu.waits, folder = 0, tmp_path / str(on_gpu)
        folder.mkdir()
        part = write_shards(folder, Shards(boxes, iter(states(sizes, on_gpu=on_gpu).items())), rank=0, ranks=1)
        assert (part.non_finite, gpu.waits) == ([], 3 * 240 // BLOCK if on_gpu else 0)
        files[on_gpu] = [path.read_bytes() for path in sorted(folder.iterdir())]
    assert files[True] == files[False]


def test_a_kept_copy_is_whole_when_training_goes_on(gpu):
    sizes = {"a": 25, "b": 3}
    held, kept = states(sizes, on_gpu=True), KeptState()
    before = states(sizes, on_gpu=False)
    kept.keep(Shards({}, iter(held.items())))
    assert not OnGpu.begun
    for name, state in kept.shards().states:
        assert all(ours.equal(theirs) for ours, theirs in zip(state[:3], before[name][:3], strict=True))
    assert gpu.buffers == [(BLOCK,)] * 2

"""The stand-in GPU sees each thing that it claims to see: one planted error for each."""

import gc
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from dsgpt.benchmarks.stand_in_gpu import BLOCK, Ledger, stand_in_gpu

BYTES = 4 * 1000
"""Bytes of a tensor of 1,000 numbers in fp32."""


@pytest.fixture
def ledger():
    with stand_in_gpu() as ledger:
        yield ledger


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="cuda")


def waits(ledger: Ledger) -> dict[str, int]:
    return {what: times for (what, _, _), times in ledger.waits.items()}


def test_outside_of_it_pytorch_is_unchanged():
    replaced = (torch.Tensor, torch.UntypedStorage, torch.cuda, torch.accelerator, dist, threading.Thread)
    before = [dict(vars(owner)) for owner in replaced]
    with stand_in_gpu():
        assert torch.cuda.is_available()
        assert on_gpu(1).device == torch.device("cuda", 0)
    for owner, values in zip(replaced, before, strict=True):
        assert {name: vars(owner)[name] for name in values} == values
    assert torch.zeros(1).device.type == "cpu"


MIXED = {
    "a sum": lambda: on_gpu(2) + torch.ones(2),
    "a product": lambda: on_gpu(2, 2) @ torch.ones(2, 2),
    "an update in place": lambda: on_gpu(2).add_(torch.ones(2)),
    "a sum of the device added to a number of the host": lambda: torch.zeros(()).add_(on_gpu(2).sum()),
    "indices of the device into the host": lambda: torch.ones(2)[torch.zeros(1, dtype=torch.long, device="cuda")],
    "a module of the host": lambda: nn.Linear(2, 2)(on_gpu(2, 2)),
    "a backward pass": lambda: functional.linear(on_gpu(2, 2).requires_grad_(), on_gpu(2, 2)).backward(
        torch.ones(2, 2)
    ),
}


@pytest.mark.usefixtures("ledger")
@pytest.mark.parametrize("operation", MIXED)
def test_tensors_of_two_devices_are_refused(operation):
    with pytest.raises(RuntimeError, match="at least two devices"):
        MIXED[operation]()


@pytest.mark.usefixtures("ledger")
def test_tensors_of_two_devices_are_refused_in_hooks_and_threads():
    value = on_gpu(2).requires_grad_()
    value.register_hook(lambda gradient: gradient + torch.ones(2))
    with pytest.raises(RuntimeError, match="two devices"):
        value.sum().backward()
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="two devices"):
        pool.submit(lambda: on_gpu(2) + torch.ones(2)).result()


@pytest.mark.usefixtures("ledger")
def test_a_scalar_of_the_host_is_accepted():
    assert ((on_gpu(2) * torch.tensor(3.0)).tolist(), (on_gpu(2) + 1).device.type) == ([3, 3], "cuda")


@pytest.fixture
def two_ranks():
    """Rank 0 of two ranks, of which the other does not exist."""
    with stand_in_gpu(alone=True):
        dist.init_process_group("nccl", rank=0, world_size=2)
        yield
        dist.destroy_process_group()


COLLECTIVES = {
    "all_reduce": dist.all_reduce,
    "broadcast": lambda tensor, group=None: dist.broadcast(tensor, 0, group=group),
    "all_gather": lambda tensor, group=None: dist.all_gather([torch.empty_like(tensor)] * 2, tensor, group=group),
    "reduce_scatter": lambda tensor, group=None: dist.reduce_scatter(tensor[:1], [tensor[:1], tensor[1:]], group=group),
}


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_takes_tensors_of_its_side_only(name):
    collective, host = COLLECTIVES[name], dist.new_group(backend="gloo")
    collective(on_gpu(2))
    collective(torch.ones(2), group=host)
    for tensor, group in ((torch.ones(2), None), (on_gpu(2), host)):
        with pytest.raises(RuntimeError, match="No backend type associated with device type"):
            collective(tensor, group=group)


WAITS = {
    "_local_scalar_dense": lambda one: one.sum().item(),
    "tolist": lambda one: one.tolist(),
    "nonzero": lambda one: one.nonzero(),
    "index": lambda one: one[one > 0],
    "equal": lambda one: torch.equal(one, one),
    "copy to cpu": lambda one: one.cpu(),
    "copy to cuda": lambda _: torch.ones(2).to("cuda"),
    "stream": lambda _: torch.cuda.current_stream().synchronize(),
    "synchronize": lambda _: torch.cuda.synchronize(),
    "event": lambda _: torch.cuda.Event().synchronize(),
    "copy to pageable memory": lambda one: torch.ones(2).copy_(one, non_blocking=True),
}
UNREPORTED = {"synchronize", "event", "copy to pageable memory"}
"""Waits of which the debug mode of PyTorch does not warn."""


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_is_recorded(ledger, what):
    """And the debug mode of PyTorch warns of it as it does with a GPU."""
    one = on_gpu(2)
    assert not ledger.waits
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        WAITS[what](one)
    assert waits(ledger) == {what: 1}
    assert ["synchronizing CUDA operation" in str(one.message) for one in caught] == [True] * (what not in UNREPORTED)


@pytest.mark.usefixtures("ledger")
def test_a_tensor_is_moved_to_another_as_pytorch_does_and_both_names_of_the_stream_are_one():
    one = torch.ones(2)
    moved = on_gpu(2).to(one, False, True)
    assert (moved.device.type, one.to(one) is one, one.to(one, False, True) is one) == ("cpu", True, False)
    assert torch.accelerator.current_stream() is torch.cuda.current_stream()


def test_a_copy_says_how_it_was_made(ledger):
    host = torch.ones(1000)
    pinned = host.pin_memory()
    pinned.to("cuda", non_blocking=True)
    host.to("cuda")
    there = on_gpu(1000)
    there.copy_(host)
    pinned.copy_(there, non_blocking=True)
    made = [(copy.source, copy.target, copy.pinned, copy.asynchronous, times) for copy, times in ledger.copies.items()]
    assert made == [("cpu", "cuda", True, True, 1), ("cpu", "cuda", False, False, 2), ("cuda", "cpu", True, True, 1)]
    assert set(ledger.copied_bytes.values()) == {BYTES, 2 * BYTES}
    assert waits(ledger) == {"copy to cuda": 2}


@pytest.mark.usefixtures("ledger")
def test_numpy_and_pinning_need_tensors_of_the_host():
    with pytest.raises(TypeError, match="numpy"):
        on_gpu(1).numpy()
    with pytest.raises(RuntimeError, match="cannot pin"):
        on_gpu(1).pin_memory()


def test_bytes_are_counted_until_they_are_freed(ledger):
    one = on_gpu(1000)
    view = one[10:]
    with ledger.phase("both"):
        two = torch.ones(1000).to("cuda")
        two = None
    three = one + 1
    assert (ledger.live, ledger.peak, ledger.peaks["both"]) == (2 * BYTES, 2 * BYTES, 2 * BYTES)
    assert torch.cuda.memory_reserved() == BLOCK >= torch.cuda.max_memory_allocated()
    one = None
    assert (ledger.live, three.numel()) == (2 * BYTES, 1000)  # the view holds it
    view = three = None  # noqa: F841 - frees them
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    assert (two, ledger.live, ledger.peak, ledger.resets) == (None, 0, 0, 1)


def test_a_resized_storage_is_counted_anew(ledger):
    one = on_gpu(1000)
    one.untyped_storage().resize_(0)
    assert ledger.live == 0
    one.untyped_storage().resize_(2 * BYTES)
    assert ledger.live == 2 * BYTES


def test_gradients_and_what_kernels_of_c_make_are_on_the_device(ledger):
    query = torch.ones(1, 1, 8, 8, device="cuda", requires_grad=True)
    out = functional.scaled_dot_product_attention(query, query, query, is_causal=True, dropout_p=0.5)
    out.sum().backward()
    assert {out.device.type, query.grad.device.type} == {"cuda"}
    assert ledger.live >= 3 * query.nbytes


def test_memory_runs_out():
    with stand_in_gpu(memory=2 * BYTES) as ledger:
        one = on_gpu(1000)
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            on_gpu(1001)
        assert ledger.live == one.nbytes


@pytest.mark.usefixtures("ledger")
def test_random_numbers_of_the_device_have_a_state_of_their_own():
    torch.manual_seed(7)
    expected = torch.rand(3).tolist()
    torch.manual_seed(7)
    before = torch.cuda.get_rng_state()
    assert torch.rand(3, device="cuda").tolist() == expected
    assert torch.rand(3).tolist() == expected  # the host's were not drawn
    assert torch.rand(3, device="cuda").tolist() != expected
    torch.cuda.set_rng_state(before)
    assert torch.rand(3, device="cuda").tolist() == expected


@pytest.mark.usefixtures("ledger")
def test_events_measure_milliseconds():
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began = time.perf_counter()
    first.record()
    time.sleep(0.02)
    last.record()
    assert 20 <= first.elapsed_time(last) <= 1000 * (time.perf_counter() - began)
    with pytest.raises(ValueError, match="enable_timing"):
        torch.cuda.Event().elapsed_time(last)

"""Named ranges of a step, which profilers show: ``data``, ``train_step``, ``forward``, ``backward``, ``optimizer``.

Outside of ``ranges_shown`` they do nothing.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from torch.profiler import record_function

_NOTHING = contextlib.nullcontext()


def _hidden(_name: str) -> contextlib.AbstractContextManager[None]:
    return _NOTHING


_maker: ContextVar[Callable[[str], contextlib.AbstractContextManager[None]]] = ContextVar("maker", default=_hidden)


def named_range(name: str) -> contextlib.AbstractContextManager[None]:
    """A context that appears under ``name`` in traces."""
    return _maker.get()(name)


@contextlib.contextmanager
def ranges_shown(device: torch.device) -> Iterator[None]:
    """Inside, ranges appear in traces of PyTorch's profiler, and on a GPU as NVTX ranges."""
    token = _maker.set(_with_nvtx if device.type == "cuda" else _recorded)
    try:
        yield
    finally:
        _maker.reset(token)


@contextlib.contextmanager
def _recorded(name: str) -> Iterator[None]:
    with record_function(name):
        yield


@contextlib.contextmanager
def _with_nvtx(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]  # torch's has no types
    try:
        with record_function(name):
            yield
    finally:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]  # torch's has no types

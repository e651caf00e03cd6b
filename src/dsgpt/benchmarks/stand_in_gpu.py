"""A stand-in for NVIDIA GPUs: on a machine without one, everything that ``--device cuda`` executes runs on the CPU.

    .venv/bin/python -m dsgpt.benchmarks.stand_in_gpu src/gpt2.py --device cuda ...
    torchrun --nproc-per-node 2 -m dsgpt.benchmarks.stand_in_gpu --gpus 2 src/gpt2.py --device cuda ...

A tensor of the stand-in is a CPU tensor whose storage is tagged. Python's ways to ask for a tensor's device, to move
it and to pin it answer as on a GPU. A dispatch mode sees every operator of PyTorch, those of C++, of hooks and of
backward passes too. It tags what an operator makes. It refuses what a GPU would refuse: tensors of two devices, or
tensors of the host in a collective of NCCL. ``torch.cuda`` is replaced function by function, and NCCL is gloo.

A ``Ledger`` records what no test on a CPU sees: bytes of the device by phase, and where the host waits for the device.
Of a copy between host and device it says whether it was pinned or asynchronous, and who made it.

Random numbers of the device come from a state of its own, seeded as on a GPU. Then a training in fp32 has the losses of
``--device cpu`` to the last bit.

What it cannot show: kernels and their rounding, streams, PyTorch's allocator, NCCL, CUDA graphs, any time.
``torch.compile`` returns what it is given. Temporary memory is that of CPU kernels, which a few operators need less of.
"""

import argparse
import contextlib
import importlib
import os
import runpy
import sys
import threading
import time
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity
from torch.profiler.profiler import _KinetoProfile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsgpt.common.files import write_json_atomic
from dsgpt.machine.device import ranges_made_by

LEDGER = "DSGPT_STAND_IN_LEDGER"
"""The variable that names a file for the ledger; each rank adds ``-RANK`` to its stem."""
NAME, MEMORY = "stand-in GPU", 80 << 30
BLOCK = 2 << 20
"""Bytes in which memory is reserved."""
_FOLDERS = ("/dsgpt/", "/deepspeed/")
"""Folders whose functions are named as the place of a copy or a wait."""
SECTIONS = {
    **{"_build": "start", "_load_checkpoint": "load", "train_step": "step", "save": "save"},
    **{"_validate": "validation", "measure_inference": "inference"},
}
"""The section of a run that a function of this package executes; a section is a phase."""
ELSEWHERE = "elsewhere"

# Records.


class Copy(NamedTuple):
    """A kind of copy between host and device."""

    source: str
    target: str
    pinned: bool
    """Whether the host's side is page-locked."""
    asynchronous: bool
    place: str
    section: str


class Ledger:
    """What the stand-in saw in this process."""

    def __init__(self, memory: int = MEMORY) -> None:
        self.memory = memory
        """Bytes of the device; more raises ``torch.OutOfMemoryError``."""
        self.live = self.peak = self.reserved = self.reserved_peak = 0
        self.peaks: dict[str, int] = {}
        """Most bytes at a time in each phase."""
        self.copies: Counter[Copy] = Counter()
        """Times that each kind of copy was made."""
        self.copied_bytes: Counter[Copy] = Counter()
        self.waits: Counter[tuple[str, str, str]] = Counter()
        """Times that the host waited for the device, by operation, place and section."""
        self.resets = 0
        """Resets of the peaks."""
        self._open: list[str] = []

    def allocate(self, size: int) -> None:
        """Count ``size`` more bytes of the device; less if it is negative."""
        self.live += size
        if self.live > self.memory:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {self.live:,} of {self.memory:,} bytes ({NAME})")
        self.peak = max(self.peak, self.live)
        self.reserved = max(self.reserved, -(-self.live // BLOCK) * BLOCK)
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        if size > 0:
            name = self._open[-1] if self._open else _place()[1]
            self.peaks[name] = max(self.peaks.get(name, 0), self.live)

    def reset_peaks(self) -> None:
        """Begin new peaks, as ``torch.cuda.reset_peak_memory_stats`` does."""
        self.resets += 1
        self.peak, self.reserved_peak = self.live, self.reserved

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the bytes inside as those of ``name``, but for phases inside of it."""
        self._open.append(name)
        self.peaks[name] = max(self.peaks.get(name, 0), self.live)
        try:
            yield
        finally:
            self._open.remove(name)

    def copy(self, source: str, target: str, *, pinned: bool, asynchronous: bool, size: int) -> None:
        """Record a copy. The host waits for it unless it is asynchronous, and always if it goes to pageable memory."""
        kind = Copy(source, target, pinned, asynchronous, *_place())
        self.copies[kind] += 1
        self.copied_bytes[kind] += size
        if not asynchronous:
            self.wait(f"copy to {target}")
        elif target == "cpu" and not pinned:
            self.wait("copy to pageable memory", reported=False)

    def wait(self, what: str, *, reported: bool = True) -> None:
        """Record that the host waits for the device, and warn where ``torch.cuda.set_sync_debug_mode`` says so.

        Args:
            what: it waits for.
            reported: whether CUDA's debug mode reports such a wait.
        """
        self.waits[what, *_place()] += 1
        if reported and torch.cuda.get_sync_debug_mode():
            warnings.warn("called a synchronizing CUDA operation", stacklevel=3)

    def write(self) -> None:
        """Write the file that ``LEDGER`` names, if it names one."""
        if path := os.environ.get(LEDGER):
            sizes, names = self.copied_bytes, ("what", "place", "section")
            copies = [copy._asdict() | {"bytes": sizes[copy], "times": times} for copy, times in self.copies.items()]
            waits = [dict(zip(names, wait, strict=True)) | {"times": times} for wait, times in self.waits.items()]
            file = Path(path).with_stem(f"{Path(path).stem}-{os.environ.get('RANK', '0')}")
            write_json_atomic(file, {"copies": copies, "waits": waits, "peaks": self.peaks, "resets": self.resets})


def _place() -> tuple[str, str]:
    """What executes: a function of this package or of DeepSpeed, and the section of the run.

    Returns:
        Such as ``dsgpt/strategies/base.py:global_norm`` and ``step``; ``elsewhere`` where there is none.
    """
    frame: FrameType | None = sys._getframe(1)
    place = ELSEWHERE
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        passes_on = file == __file__ or function == "__torch_dispatch__"
        for folder in _FOLDERS if place == ELSEWHERE and not passes_on else ():
            if folder in file:
                place = f"{folder[1:]}{file.rpartition(folder)[2]}:{function}"
        if function in SECTIONS and _FOLDERS[0] in file:
            return place, SECTIONS[function]
        frame = frame.f_back
    return place, ELSEWHERE


# Tags: which storages are on the device, and which are page-locked.

_REAL_DEVICE: Callable[[Tensor], torch.device] = torch._C.TensorBase.device.__get__
_REAL_TO, _REAL_RESIZE = torch.Tensor.to, torch.UntypedStorage.resize_
_CPU = torch.device("cpu")


class Tags:
    """The storages of the device, and the page-locked ones of the host; every other is plain host memory.

    An operator of C++ makes tensors for another one with the options of that tensor, which say ``cpu`` here. Such a
    tensor floats: it is where the first tensor of the device is that it meets.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._sizes: dict[int, int] = {}
        self._pinned: set[int] = set()
        self._floating: set[int] = set()

    def kind(self, tensor: Tensor) -> str:
        """``cuda``, ``cpu``, or another type of device."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        return "cuda" if _key(tensor) in self._sizes else _REAL_DEVICE(tensor).type

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether it is in page-locked memory."""
        return _key(tensor) in self._pinned

    def floats(self, tensor: Tensor) -> bool:
        """Whether it may be on either side."""
        return _key(tensor) in self._floating

    def put(self, made: object, kind: str, *, pinned: bool = False) -> None:
        """Tag the storages of tensors, unless they have a tag: ``cuda``, ``floating``, or ``pinned``."""
        for tensor in tree_leaves(made):
            if not isinstance(tensor, Tensor) or isinstance(tensor, (DTensor, FakeTensor)):
                continue
            key, storage = _key(tensor), tensor.untyped_storage()
            if key is None or key in self._sizes or key in self._pinned or not (pinned or kind in {"cuda", "floating"}):
                continue
            if key not in self._floating:
                weakref.finalize(storage, self._freed, key).atexit = False
            self._floating.discard(key)
            if pinned:
                self._pinned.add(key)
            elif kind == "floating":
                self._floating.add(key)
            else:
                self._sizes[key] = storage.nbytes()
                self._ledger.allocate(storage.nbytes())

    def _freed(self, key: int) -> None:
        self._pinned.discard(key)
        self._floating.discard(key)
        self._ledger.allocate(-self._sizes.pop(key, 0))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count the new size of a storage."""
        key = storage._cdata
        if key in self._sizes:
            before, self._sizes[key] = self._sizes[key], storage.nbytes()
            self._ledger.allocate(storage.nbytes() - before)


def _key(tensor: Tensor) -> int | None:
    """Identifies the storage of a CPU tensor; None for another, as of the device ``meta``."""
    return int(tensor.untyped_storage()._cdata) if _REAL_DEVICE(tensor).type == "cpu" else None


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


# Every operator.

_WAITING = {
    *("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::equal"),
    *("aten::_unique2", "aten::unique_consecutive", "aten::unique_dim"),
}
"""Operators whose result the host waits for."""
_COPYING = {"aten::copy_", "aten::_foreach_copy_", "aten::_to_copy", "aten::set_", "aten::lift_fresh"}
"""Operators that accept tensors of two devices."""
_INDEXING = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}


def _refusal(what: str, name: str) -> RuntimeError:
    return RuntimeError(f"{what} ({name} in {_place()[0]}, {NAME})")


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's has no types
    """Executes each operator on the CPU, and decides on which device its results are."""

    def __init__(self, ledger: Ledger, tags: Tags, groups: "_Groups") -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._ledger, self._tags, self._groups = ledger, tags, groups
        self._thread = threading.local()
        self.random = torch.Generator()
        """Has the state of the device's random numbers."""
        self.random.set_state(torch.get_rng_state())

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Of the base class: PyTorch's compiler is not traced."""
        return True

    @contextlib.contextmanager
    def results_on(self, kind: str) -> Iterator[None]:
        """What is made inside is on ``kind``."""
        before, self._thread.forced = getattr(self._thread, "forced", None), kind
        try:
            yield
        finally:
            self._thread.forced = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute ``func``."""
        if any(kind.__name__ in {"DTensor", "AsyncCollectiveTensor"} for kind in types):
            return NotImplemented  # they call the operators of their parts
        if FakeTensor in types:
            return func(*args, **kwargs or {})
        kwargs, name = dict(kwargs or {}), func._schema.name
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        kinds = ["floating" if self._tags.floats(tensor) else self._tags.kind(tensor) for tensor in tensors]
        if "floating" in kinds and ("cuda" in kinds or self._groups.backend_of(name, args) == "nccl"):
            self._tags.put([one for kind, one in zip(kinds, tensors, strict=True) if kind == "floating"], "cuda")
            kinds = ["cuda" if kind == "floating" else kind for kind in kinds]
        self._refuse(name, args, tensors, kinds)
        result_kind = self._result_kind(kinds, kwargs)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if pinned := bool(kwargs.get("pin_memory")):
            kwargs["pin_memory"] = False
        self._note(name, args, kwargs, tensors, kinds)
        draws = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        with self._random_of_the_device() if draws and result_kind == "cuda" else contextlib.nullcontext():
            made = func(*args, **kwargs)
        self._tags.put(made, result_kind, pinned=pinned)
        return made

    def _result_kind(self, kinds: list[str], kwargs: Mapping[str, Any]) -> str:
        """Where the results of an operator are; Python's functions give every factory ``pin_memory``, C++ none."""
        forced: str | None = getattr(self._thread, "forced", None)
        if forced:
            return forced
        device, from_python = kwargs.get("device"), "pin_memory" in kwargs
        if device is not None and (from_python or device.type != "cpu"):
            return str(device.type)
        usual = kinds[0] if kinds else "floating"
        return next((kind for kind in ("cuda", "floating") if kind in kinds), usual)

    def _refuse(self, name: str, args: Any, tensors: list[Tensor], kinds: list[str]) -> None:
        """Raise what a GPU would raise for tensors of two devices."""
        pairs = list(zip(kinds, tensors, strict=True))
        if backend := self._groups.backend_of(name, args):
            elsewhere = {kind for kind, one in pairs if one.numel()}
            elsewhere -= {"cuda"} if backend == "nccl" else {"cpu", "floating"}
            if elsewhere:
                raise _refusal(f"No backend type associated with device type {', '.join(sorted(elsewhere))}", name)
        elif "cuda" in kinds and name not in _COPYING:
            changed = name.endswith("_")  # in place, for which the host's scalars are no exception
            host = [one for kind, one in pairs if kind == "cpu" and (one.dim() or (changed and one is tensors[0]))]
            if name in _INDEXING and kinds[0] == "cuda":
                for indices in host:
                    self._ledger.copy("cpu", "cuda", pinned=False, asynchronous=False, size=indices.nbytes)
            elif host:
                where = "found at least two devices, cuda:0 and cpu!"
                raise _refusal(f"Expected all tensors to be on the same device, but {where}", name)

    def _note(self, name: str, args: Any, kwargs: Mapping[str, Any], tensors: list[Tensor], kinds: list[str]) -> None:
        """Record the copies and waits of an operator, unless it is known where its results are."""
        if getattr(self._thread, "forced", None):
            return
        if name in {"aten::copy_", "aten::_foreach_copy_"}:
            asynchronous = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
            for target, source in [args[:2]] if name == "aten::copy_" else zip(*args[:2], strict=True):
                first, second = self._tags.kind(source), self._tags.kind(target)
                if {first, second} == {"cpu", "cuda"}:
                    pinned = self._tags.is_pinned(source if first == "cpu" else target)
                    self._ledger.copy(first, second, pinned=pinned, asynchronous=asynchronous, size=source.nbytes)
        elif "cuda" in kinds:
            masked = name in _INDEXING and any(index.dtype in (torch.bool, torch.uint8) for index in tensors[1:])
            if masked or name in _WAITING:
                self._ledger.wait(name.removeprefix("aten::"))

    @contextlib.contextmanager
    def _random_of_the_device(self) -> Iterator[None]:
        host = torch.get_rng_state()
        torch.set_rng_state(self.random.get_state())
        try:
            yield
        finally:
            self.random.set_state(torch.get_rng_state())
            torch.set_rng_state(host)


# torch.cuda.


class Event:
    """An instant of the host: everything has been executed when it is recorded."""

    ledger: Ledger

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._timing, self._at = enable_timing, 0.0

    def record(self, _stream: object = None) -> None:
        """Take this instant."""
        self._at = time.perf_counter()

    def query(self) -> bool:
        """The device has passed it."""
        return True

    def wait(self, _stream: object = None) -> None:
        """Streams have no order here."""

    def synchronize(self) -> None:
        """Wait until the device has passed it, which CUDA's debug mode does not report."""
        self.ledger.wait("event", reported=False)

    def elapsed_time(self, other: "Event") -> float:
        """Milliseconds until ``other``."""
        if not (self._timing and other._timing):
            raise ValueError("Both events should be created with argument 'enable_timing=True'")
        return (other._at - self._at) * 1000


class Stream:
    """A stream: all are the host's order."""

    ledger: Ledger

    def __init__(self, device: object = None, priority: int = 0, **_: Any) -> None:
        self.device, self.priority = device, priority
        self.stream_id = self.cuda_stream = id(self)

    def wait_stream(self, _stream: object) -> None:
        """Everything before has been executed."""

    wait_event = wait_stream

    def synchronize(self) -> None:
        """Wait until everything has been executed."""
        self.ledger.wait("stream")

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event here."""
        recorded = event or type("Event", (Event,), {"ledger": self.ledger})()
        recorded.record(self)
        return recorded

    def query(self) -> bool:
        """Everything has been executed."""
        return True

    def is_capturing(self) -> bool:
        """No graph is captured."""
        return False

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Cuda:
    """Replacements of what Python has for ``gpus`` devices, of which this process uses one.

    They are functions of ``torch.cuda`` and ``torch``, and the methods of tensors that C++ answers without the
    dispatcher.
    """

    def __init__(self, ledger: Ledger, tags: Tags, operators: _Operators, gpus: int) -> None:
        self._ledger, self._tags, self._operators, self._gpus = ledger, tags, operators, gpus
        self.current, self._debug_mode = 0, 0
        kinds: tuple[type, ...] = (Event, Stream)
        self.classes = {kind.__name__: type(kind.__name__, (kind,), {"ledger": ledger}) for kind in kinds}
        self._stream = self.classes["Stream"]()
        self._make, self._from, self._list = torch.tensor, torch.as_tensor, torch.Tensor.tolist
        self._name, self._array = torch.Tensor.type, torch.Tensor.numpy

    def device(self) -> torch.device:
        """The device of this process."""
        return torch.device("cuda", self.current)

    def functions(self) -> dict[str, Any]:
        """By name in ``torch.cuda``."""
        ledger, random, stream = self._ledger, self._operators.random, self._stream
        properties = SimpleNamespace(
            **{"name": NAME, "major": 9, "minor": 0, "total_memory": ledger.memory, "multi_processor_count": 132},
            **{"uuid": "00000000-0000-0000-0000-000000000000", "L2_cache_size": 50 << 20, "warp_size": 32},
        )
        values: dict[str, object] = {
            **{"is_available": True, "device_count": self._gpus, "is_initialized": True, "_lazy_init": None},
            **{"get_device_name": NAME, "get_device_capability": (9, 0), "is_bf16_supported": True},
            **{"get_device_properties": properties, "_is_in_bad_fork": False},
            **{"empty_cache": None, "ipc_collect": None, "current_stream": stream, "default_stream": stream},
            **{"set_stream": None, "is_current_stream_capturing": False, "memory_stats": defaultdict(int)},
            **dict.fromkeys(("stream", "device"), contextlib.nullcontext()),
        }
        return {
            **{name: lambda *_, answer=value, **__: answer for name, value in values.items()},
            **self.classes,
            **{"set_device": self._set_device, "current_device": lambda: self.current},
            "synchronize": lambda _=None: ledger.wait("synchronize", reported=False),
            "memory_allocated": lambda _=None: ledger.live,
            "max_memory_allocated": lambda _=None: ledger.peak,
            **dict.fromkeys(("memory_reserved", "memory_cached"), lambda _=None: ledger.reserved),
            **dict.fromkeys(("max_memory_reserved", "max_memory_cached"), lambda _=None: ledger.reserved_peak),
            **dict.fromkeys(
                ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
                lambda _=None: ledger.reset_peaks(),
            ),
            "mem_get_info": lambda _=None: (ledger.memory - ledger.reserved, ledger.memory),
            **{"get_sync_debug_mode": lambda: self._debug_mode, "set_sync_debug_mode": self._set_debug_mode},
            "get_rng_state": lambda _=None: random.get_state(),
            "set_rng_state": lambda state, _=None: random.set_state(state),
            **dict.fromkeys(("manual_seed", "manual_seed_all"), random.manual_seed),
        }

    def of_accelerator(self) -> dict[str, Any]:
        """By name in ``torch.accelerator``."""
        functions = self.functions()
        return {name: functions[name] for name in ("is_available", "device_count", "current_stream", "synchronize")} | {
            "current_accelerator": lambda check_available=False: torch.device("cuda"),  # noqa: ARG005
            **{"current_device_index": functions["current_device"], "set_device_index": functions["set_device"]},
        }

    def _set_device(self, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if index >= self._gpus:
            raise RuntimeError(f"CUDA error: invalid device ordinal {index} ({NAME})")
        self.current = index

    def _set_debug_mode(self, mode: int | str) -> None:
        self._debug_mode = ("default", "warn", "error").index(mode) if isinstance(mode, str) else mode

    def of_tensors(self) -> dict[str, Any]:
        """By name in ``torch.Tensor``."""
        kind, pinned, to = self._tags.kind, self._tags.is_pinned, self._to
        bound: dict[str, Any] = {"numpy": self._numpy, "type": self._type, "new_tensor": self._new_tensor, "to": to}
        bound |= {"pin_memory": self._pin, "tolist": self._tolist}
        return {
            "device": property(lambda tensor: self.device() if kind(tensor) == "cuda" else torch.device(kind(tensor))),
            "is_cuda": property(lambda tensor: kind(tensor) == "cuda"),
            "is_cpu": property(lambda tensor: kind(tensor) == "cpu"),
            "get_device": lambda tensor: self.current if kind(tensor) == "cuda" else -1,
            "is_pinned": lambda tensor, device=None: pinned(tensor),  # noqa: ARG005 - of the method
            "record_stream": lambda tensor, stream: None,  # noqa: ARG005 - of the method
            "cpu": lambda tensor: to(tensor, _CPU),
            "cuda": lambda tensor, device=None, non_blocking=False: to(
                tensor, self.device() if device is None else device, non_blocking=non_blocking
            ),
            # Python binds a function to the tensor that it is called on, and a bound method to none.
            **{name: lambda *args, own=method, **kwargs: own(*args, **kwargs) for name, method in bound.items()},
        }

    def of_torch(self) -> dict[str, Any]:
        """By name in ``torch``."""
        return {"tensor": self._tensor, "as_tensor": self._as_tensor}

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copies, like = bool(kwargs.pop("copy", False)), kwargs.pop("other", args[0] if args else None)
        if isinstance(like, Tensor):  # behind it ``non_blocking`` and ``copy``, of which torch parses only the first
            copies, args = copies or any(args[2:]), (like.device, like.dtype, *args[1:2])
        device, dtype, asynchronous, layout = torch._C._nn._parse_to(*args, **kwargs)
        more = {"memory_format": layout} if layout is not None else {}
        source, dtype = self._tags.kind(tensor), dtype or tensor.dtype
        target = source if device is None else device.type
        if source == target or {source, target} - {"cpu", "cuda"}:
            real = _CPU if target == "cuda" else torch.device(target)
            with self._operators.results_on(target):
                return _REAL_TO(tensor, real, dtype, asynchronous, copies, **more)
        with self._operators.results_on(target):
            moved = _REAL_TO(tensor, _CPU, dtype, False, True, **more)
        self._tags.put(moved, target)
        # PyTorch allocates the host's side of an asynchronous copy pinned.
        pinned = (asynchronous and target == "cpu") or self._tags.is_pinned(tensor)
        self._ledger.copy(source, target, pinned=pinned, asynchronous=asynchronous, size=moved.nbytes)
        return moved

    def _pin(self, tensor: Tensor, device: Any = None) -> Tensor:  # noqa: ARG002 - of the method
        if self._tags.kind(tensor) != "cpu":
            raise RuntimeError(f"cannot pin a tensor of the device: only dense CPU tensors can be pinned ({NAME})")
        if self._tags.is_pinned(tensor):
            return tensor
        return torch.empty_like(tensor, pin_memory=True).copy_(tensor.detach())

    def _tolist(self, tensor: Tensor) -> Any:
        if self._tags.kind(tensor) == "cuda":
            self._ledger.wait("tolist")
        return self._list(tensor)

    def _numpy(self, tensor: Tensor, **kwargs: Any) -> Any:
        if self._tags.kind(tensor) == "cuda":
            raise TypeError(f"can't convert a cuda tensor to numpy: copy it to the host first ({NAME})")
        return self._array(tensor, **kwargs)

    def _type(self, tensor: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        named = self._name(tensor, dtype, *args, **kwargs)
        on_gpu = dtype is None and self._tags.kind(tensor) == "cuda"
        return str(named).replace("torch.", "torch.cuda.") if on_gpu else named

    def _tensor(self, data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        if not _is_cuda(device):
            return self._make(data, device=device, **kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        return self._to(self._make(data, **kwargs), device).requires_grad_(requires_grad)

    def _as_tensor(self, data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        made = self._from(data, dtype=dtype)
        return made if device is None else self._to(made, device)

    def _new_tensor(self, tensor: Tensor, data: Any, *, device: Any = None, dtype: Any = None, **kwargs: Any) -> Tensor:
        return self._tensor(data, device=device or tensor.device, dtype=dtype or tensor.dtype, **kwargs)


# NCCL.


class _Groups:
    """Process groups: gloo in place of NCCL, or no communication at all for one rank of many that do not exist."""

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._backends: dict[str, str] = {}
        self._init, self._new = dist.init_process_group, dist.new_group
        self._device_of = distributed_c10d._get_object_coll_device

    def functions(self) -> dict[str, Any]:
        """By name in ``torch.distributed``."""

        def gather(values: list[Any], value: object, group: object = None) -> None:  # noqa: ARG001 - of the function
            values[:] = [value] * len(values)

        own: dict[str, Any] = {"init_process_group": self._opened, "new_group": self._made}
        own |= {"get_backend": self._backend, "_get_object_coll_device": self._objects_on}
        own |= {"is_nccl_available": lambda: True}
        alone = {"all_gather_object": gather, "broadcast_object_list": lambda *_, **__: None}
        return own | alone if self._alone else own

    def _opened(self, backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        if self._alone:
            from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 - registers a backend

            kwargs["store"] = FakeStore()
        self._init(self._real(backend), *args, **kwargs)
        self._backends[dist.group.WORLD.group_name] = backend or "nccl"  # type: ignore[union-attr]  # it exists now

    def _made(self, *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        group = self._new(*args, backend=self._real(backend), **kwargs)  # type: ignore[misc]  # backend is by keyword here
        if isinstance(group, dist.ProcessGroup):
            self._backends[group.group_name] = backend or "nccl"
        return group

    def _real(self, backend: str | None) -> str:
        return "fake" if self._alone else "gloo" if backend in (None, "nccl") else str(backend)

    def _backend(self, group: Any = None) -> str:
        return self._backends.get((group or distributed_c10d._get_default_group()).group_name, "nccl")

    def _objects_on(self, group: Any = None) -> str:
        return "cuda" if self._backend(group) == "nccl" else self._device_of(group)

    def backend_of(self, name: str, args: Any) -> str | None:
        """The backend of the group in which the operator ``name`` communicates; None if it does not, or none moves."""
        if not name.startswith(("c10d::", "_c10d_functional::")) or "barrier" in name:
            return None
        for value in args:
            if isinstance(value, str) and value in self._backends:  # functional collectives have names of groups
                return self._backends[value]
            with contextlib.suppress(TypeError, RuntimeError):  # unbox raises if it is no group
                return self._backend(dist.ProcessGroup.unbox(value))
        return None


# Everything together.


@contextlib.contextmanager
def stand_in_gpu(*, gpus: int = 1, alone: bool = False, memory: int = MEMORY) -> Iterator[Ledger]:
    """Stand-in GPUs inside the context.

    Args:
        gpus: how many this machine seems to have.
        alone: whether this process is one rank of many that do not exist. Its collectives send nothing.
        memory: bytes of each.

    Returns:
        The ledger of this process.
    """
    ledger = Ledger(memory)
    tags, groups = Tags(ledger), _Groups(alone=alone)
    operators = _Operators(ledger, tags, groups)
    cuda = _Cuda(ledger, tags, operators, gpus)
    run, group_tensors = threading.Thread.run, torch._C._group_tensors_by_device_and_dtype
    wait_for, begin_profile = dist.Work.wait, _KinetoProfile.__init__

    def run_with_operators(thread: threading.Thread) -> None:
        with operators:
            run(thread)

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        resized = _REAL_RESIZE(storage, size)
        tags.resized(storage)
        return resized

    def wait(work: dist.Work, *args: Any) -> Any:
        with operators.results_on("cuda"):  # gloo copies what NCCL does not
            return wait_for(work, *args)

    def profile(profiler: Any, *, activities: Collection[ProfilerActivity] | None = None, **kwargs: Any) -> None:
        kept = [one for one in activities or () if one != ProfilerActivity.CUDA]
        begin_profile(profiler, activities=kept or None, **kwargs)

    def grouped(lists: Any, with_indices: bool = False) -> dict[Any, Any]:
        groups: dict[Any, Any] = group_tensors(lists, with_indices)
        return {(value[0][0][0].device, key[1]): value for key, value in groups.items()}

    with contextlib.ExitStack() as stack:
        for owner, values in (
            (torch.Tensor, cuda.of_tensors()),
            (torch, cuda.of_torch() | cuda.classes | {"compile": lambda model=None, **_: model}),
            (torch.UntypedStorage, {"resize_": resize}),
            (torch._C, {"_group_tensors_by_device_and_dtype": grouped}),
            (torch.nn.Module, {"compile": lambda *_, **__: None}),
            (torch.cuda, cuda.functions()),
            (torch.cuda.nvtx, {"range_push": lambda _: None, "range_pop": lambda: None}),
            (torch.cuda.nccl, {"version": lambda: (2, 27, 5)}),
            (torch.accelerator, cuda.of_accelerator()),
            (dist, groups.functions()),
            (distributed_c10d, groups.functions()),
            (dist.Work, {"wait": wait}),
            (_KinetoProfile, {"__init__": profile}),
            (threading.Thread, {"run": run_with_operators}),
        ):
            stack.enter_context(mock.patch.multiple(owner, create=True, **values))
        stack.enter_context(mock.patch.dict(os.environ, DS_ACCELERATOR="cuda"))
        if imported := sys.modules.get("deepspeed.accelerator.real_accelerator"):  # for another one
            its = importlib.import_module("deepspeed.accelerator.cuda_accelerator")
            zero_init = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
            stack.enter_context(mock.patch.object(imported, "ds_accelerator", its.CUDA_Accelerator()))
            stack.enter_context(mock.patch.object(zero_init, "_orig_torch_tensor", torch.tensor))  # restored by it
        stack.enter_context(ranges_made_by(ledger.phase))
        stack.enter_context(operators)
        yield ledger


def main() -> None:
    """Run a script with stand-in GPUs; its exit code is this one's."""
    parser = argparse.ArgumentParser(description="Runs a script of this project with stand-in GPUs.")
    parser.add_argument("--gpus", type=int, default=1, help="how many GPUs the machine seems to have")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    sys.argv = [options.script, *options.arguments]
    with stand_in_gpu(gpus=options.gpus) as ledger:
        exit_now = os._exit

        def write_and_exit(code: int) -> NoReturn:  # a training ends so, past every handler
            ledger.write()
            exit_now(code)

        with mock.patch.object(os, "_exit", write_and_exit):
            sys.path.insert(0, str(Path(options.script).parent))
            runpy.run_path(options.script, run_name="__main__")
        ledger.write()


if __name__ == "__main__":
    main()

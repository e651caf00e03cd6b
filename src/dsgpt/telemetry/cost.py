"""Memory and traffic of a rank in a step.

The peak of the process; the bytes of model state that a rank holds in an optimizer step, by device; the collectives,
sends and receives of the step, in calls and bytes. State and traffic are what ``planner`` predicts. They are measured
once in a run, and the record calls the result ``cost``. Storages are counted, so views add nothing.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsgpt.common.text import byte_size
from dsgpt.machine.device import gather_objects
from dsgpt.machine.topology import ring_factor
from dsgpt.record.schema import PEAKS
from dsgpt.telemetry.meter import WARM_UP_STEPS

# Peak memory of this process, in bytes; None where it is unknown.


def peak_rss_bytes() -> int | None:
    """Largest resident set of this process so far.

    From ``/proc/self/status`` (VmHWM): ``getrusage`` also counts the launcher's memory from before the ``exec``.
    """
    with contextlib.suppress(FileNotFoundError):
        peak = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
        return int(peak[1]) * 1024 if peak else None
    return None


def peak_cuda_bytes(device: torch.device) -> tuple[int | None, int | None]:
    """Largest memory (allocated, reserved by PyTorch) on this rank's GPU so far; (None, None) on CPU."""
    if device.type != "cuda":
        return None, None
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def peak_bytes(kind: str) -> int | None:
    """The peak of what this process used of its device so far: allocated on its GPU, or resident in host memory.

    Args:
        kind: ``cuda`` or ``cpu``.
    """
    return peak_cuda_bytes(torch.device(kind))[0] if kind == "cuda" else peak_rss_bytes()


class TrainingPeaks:
    """Peak memory of training steps and validations, without that of saves and generation as far as possible.

    The GPU's counters are reset after each save. The peak of the resident set cannot be reset: from the next ``note``
    on it includes what a save used. It never includes what the last save or measuring inference used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.figures: dict[str, int | None] = dict.fromkeys(PEAKS)
        """The memory keys of an epoch's record and of the summary, as of the last ``note``."""
        self.reset()

    def reset(self) -> None:
        """Reset the GPU's counters: what was allocated until now was not for training."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def note(self) -> None:
        """Read the peaks so far."""
        for name, peak in zip(PEAKS, (*peak_cuda_bytes(self._device), peak_rss_bytes()), strict=True):
            self.figures[name] = max((value for value in (self.figures[name], peak) if value is not None), default=None)


Categories = Mapping[str, Iterable[Tensor]]
"""Model state by category."""
Report = Callable[[dict[str, Any]], None]
"""Receives what was measured, as the record or a file beside it has it."""
StateBytes = dict[str, dict[str, int]]
"""Bytes by category and device type, for example ``{"optimizer": {"cpu": 4096}}``."""


def state_bytes(categories: Categories) -> StateBytes:
    """Bytes of the storages under the tensors of each category.

    A storage counts whole and once, in the first category that has a tensor in it: views of a flat buffer, or gradients
    in a bucket, count as the buffer. A category without bytes has an empty dictionary.
    """
    seen: set[tuple[str, int]] = set()
    totals: StateBytes = {}
    for category, tensors in categories.items():
        by_device = totals.setdefault(category, {})
        for tensor in tensors:
            storage, kind = tensor.untyped_storage(), tensor.device.type
            place = (str(tensor.device), storage.data_ptr())
            if storage.nbytes() and place not in seen:
                seen.add(place)
                by_device[kind] = by_device.get(kind, 0) + storage.nbytes()
    return totals


# The traffic of a rank, in calls and bytes: collectives, sends and receives.
#
# All of them pass through PyTorch's dispatcher as c10d:: or _c10d_functional:: operators, whichever code calls them:
# this package, DeepSpeed, FSDP's hooks in the backward pass, DDP's reducer in C++. Nothing is patched. An operator that
# is not listed here is reported instead of being left out.


class _Operator(NamedTuple):
    operation: str
    payload: int | None = 0
    """Position of the argument that holds the payload."""
    per_rank: bool = False
    """Whether the payload is that argument once for every rank of the group."""


# The payload is as ``ring_factor`` defines it.
_C10D = {
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_"), _Operator("all_reduce")),
    **dict.fromkeys(("_allgather_base_", "allgather_into_tensor_coalesced_"), _Operator("all_gather")),
    **dict.fromkeys(("allgather_", "allgather_coalesced_"), _Operator("all_gather")),
    **dict.fromkeys(("_reduce_scatter_base_", "reduce_scatter_"), _Operator("reduce_scatter", payload=1)),
    "reduce_scatter_tensor_coalesced_": _Operator("reduce_scatter", payload=1),
    **dict.fromkeys(("alltoall_base_", "alltoall_"), _Operator("all_to_all", payload=1)),
    "gather_": _Operator("gather", payload=1, per_rank=True),
    "scatter_": _Operator("scatter", per_rank=True),
    "broadcast_": _Operator("broadcast"),
    "reduce_": _Operator("reduce"),
    "send": _Operator("send"),
    **dict.fromkeys(("recv_", "recv_any_source_"), _Operator("recv")),
    **dict.fromkeys(("barrier", "monitored_barrier_"), _Operator("barrier", payload=None)),
}
_GATHERS = ("all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced")
_SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced")
_REDUCES = ("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_")
_FUNCTIONAL = {
    **dict.fromkeys(_REDUCES, _Operator("all_reduce")),
    **dict.fromkeys(_GATHERS, _Operator("all_gather", per_rank=True)),
    **dict.fromkeys(_SCATTERS, _Operator("reduce_scatter")),
    "all_to_all_single": _Operator("all_to_all"),
    **dict.fromkeys(("broadcast", "broadcast_"), _Operator("broadcast")),
    "isend": _Operator("send"),
    "irecv": _Operator("recv"),
}
_OPERATORS = {"c10d": _C10D, "_c10d_functional": _FUNCTIONAL}
_LOCAL = {"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"}
"""Operators in the same two namespaces that send nothing."""


def operation_of(operator: str) -> str | None:
    """The operation of a ``c10d::`` operator; None for other names. Functional operators call these."""
    namespace, _, name = operator.partition("::")
    entry = _C10D.get(name) if namespace == "c10d" else None
    return entry.operation if entry else None


@dataclass
class Traffic:
    """Operations of one kind in one group, added up."""

    operation: str
    """A name that ``ring_factor`` knows."""
    group: tuple[int, ...]
    """The ranks that take part."""
    calls: int = 0
    payload_bytes: int = 0

    @property
    def ring_bytes(self) -> int:
        """Bytes that this rank sends if the collectives are rings."""
        return round(self.payload_bytes * ring_factor(self.operation, len(self.group)))


class Communication(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ has no types
    """A context that counts what this rank communicates inside it. No operation is changed."""

    supports_higher_order_operators = True  # of compiled code that recomputes activations; else it would fail

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._traffic: dict[tuple[str, tuple[int, ...]], Traffic] = {}
        self.unknown: set[str] = set()
        """Names of operators that may have communicated and are not counted."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Run compiled code as it is; otherwise it would run eagerly, and round differently."""
        return True

    @property
    def traffic(self) -> list[Traffic]:
        """Traffic counted so far, in the order in which each kind appeared first."""
        return list(self._traffic.values())

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: tuple[type[Tensor], ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Count ``func`` and run it. DTensor and other subclasses first split it into operators, which are counted."""
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and kind is not FakeTensor for kind in types):
            return NotImplemented
        if isinstance(func, OpOverload) and func.namespace in _OPERATORS:
            self._note(func, _OPERATORS[func.namespace], args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note(
        self, func: OpOverload, operators: dict[str, _Operator], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if (name := func._schema.name.partition("::")[2]) in _LOCAL:
            return
        if name not in operators:
            self.unknown.add(func._schema.name)
            return
        operator = operators[name]
        # The schema may be longer than the call: an argument that is not given has its default.
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        group = _ranks(given)
        sent = [] if operator.payload is None else tree_leaves(given[names[operator.payload]])
        entry = self._traffic.setdefault((operator.operation, group), Traffic(operator.operation, group))
        entry.calls += 1
        entry.payload_bytes += sum(tensor.nbytes for tensor in sent) * (len(group) if operator.per_rank else 1)


def _ranks(given: dict[str, Any]) -> tuple[int, ...]:
    group = given["group_name"] if "group_name" in given else given["process_group"]
    if isinstance(group, str):
        group = _resolve_process_group(dist.distributed_c10d.GroupName(group))
    if isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))


# Both in one step of the run.

MODEL_STATE = ("parameters", "gradients", "optimizer", "master")
"""The categories that make up the total; buffers are reported separately."""


class TrafficMeter:
    """Measures one step of this process on every rank; other steps run unchanged.

    It measures the last warm-up step, or the last step of a shorter run: the first steps allocate and trace, and the
    times of later ones are reported. A step that fp16 overflow skipped has no gradients to measure, so the next step is
    measured too.

    Args:
        state_tensors: returns this rank's model state at the moment, by category, with ``gradients`` among them.
        last_step: of the run.
        report: called on every rank with the ``cost`` block of the record.
    """

    def __init__(self, state_tensors: Callable[[], Categories], *, last_step: int, report: Report) -> None:
        self._state_tensors, self._last_step, self._report = state_tensors, last_step, report
        self._steps_seen = 0
        self.done = False
        """Whether a step was measured."""
        self.watched = False
        """Whether the latest step was measured, which made it slower."""
        self.own: list[Traffic] | None = None
        """The traffic of this rank in the measured step; None before, and if it cannot be counted."""

    @contextlib.contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """A context for optimizer step ``step``: measures it if it is the one to measure; collective."""
        self._steps_seen += 1
        self.watched = not self.done and (self._steps_seen >= WARM_UP_STEPS or step == self._last_step)
        if not self.watched:
            yield
            return
        gradients: dict[str, int] | None = None

        def note(*_: Any) -> None:
            """Keep the most: an engine may step one parameter group after another, and free the gradients of each."""
            nonlocal gradients
            now = state_bytes(self._state_tensors())["gradients"]
            gradients = max(gradients or {}, now, key=lambda by_device: sum(by_device.values()))

        hook = register_optimizer_step_pre_hook(note)
        try:
            with Communication() as communication:
                yield
        finally:
            hook.remove()
        state: KnownStateBytes = {**state_bytes(self._state_tensors()), "gradients": gradients}
        ranks: list[RankTraffic] = gather_objects((state, communication.traffic, communication.unknown))
        self.own = None if communication.unknown else communication.traffic
        self.done = all(state["gradients"] is not None for state, _, _ in ranks)
        if self.done or step == self._last_step:
            self._report(traffic_record(step, ranks))


def traffic_line(measured: dict[str, Any]) -> str:
    """The ``cost`` block in one line."""
    state, traffic = measured["model_state_bytes_per_rank"], measured["communication_per_step"]
    parts = ", ".join(f"{name} {byte_size(state[name])}" for name in MODEL_STATE if state[name] != 0)
    sent = byte_size(None if traffic is None else traffic["ring_bytes_per_rank"])
    return f"cost: model state of a rank {byte_size(state['total'])} ({parts}); sent per step {sent}"


KnownStateBytes = Mapping[str, dict[str, int] | None]
"""``StateBytes``, with None for gradients that no optimizer stepped on."""
RankTraffic = tuple[KnownStateBytes, list[Traffic], set[str]]
"""Measurements of one rank: model state, traffic, and operators that could not be counted."""


def traffic_record(step: int, ranks: list[RankTraffic]) -> dict[str, Any]:
    """The ``cost`` block of the record: every rank's totals, and details of the ranks that hold and send most.

    The gradients and the total are None where the measured step was skipped.
    """
    unknown = sorted({operator for _, _, unknown in ranks for operator in unknown})
    states = [state for state, _, _ in ranks]
    complete = all(state["gradients"] is not None for state in states)
    sums = [{name: sum((by_device or {}).values()) for name, by_device in state.items()} for state in states]
    totals = [sum(state[name] for name in MODEL_STATE) for state in sums]
    largest = totals.index(max(totals))
    devices = Counter[str]()
    for name in MODEL_STATE:
        devices.update(states[largest][name] or {})
    sent = [sum(entry.ring_bytes for entry in traffic) for _, traffic, _ in ranks]
    busiest = sent.index(max(sent))
    figures = ("calls", "payload_bytes", "ring_bytes")
    communication = {
        "rank": busiest,
        "ring_bytes_per_rank": sent[busiest],
        "payload_bytes_per_rank": sum(entry.payload_bytes for entry in ranks[busiest][1]),
        "by_op": [
            {"op": entry.operation, "ranks": list(entry.group), **{name: getattr(entry, name) for name in figures}}
            for entry in ranks[busiest][1]
        ],
        "ring_bytes_by_rank": sent,
    }
    return {
        "measured_step": step,
        "model_state_bytes_per_rank": {
            "rank": largest,
            **{name: None if states[largest][name] is None else sums[largest][name] for name in MODEL_STATE},
            "total": totals[largest] if complete else None,
            "by_device": dict(devices),
            "buffers": sums[largest]["buffers"],
            "total_by_rank": totals if complete else None,
        },
        "communication_per_step": None if unknown else communication,
        "uncounted_operators": unknown,
    }

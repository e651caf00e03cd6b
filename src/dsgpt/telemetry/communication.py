"""Counts the collectives, sends and receives of a rank, in calls and bytes: what ``planner`` predicts.

All of them pass through PyTorch's dispatcher as ``c10d::`` or ``_c10d_functional::`` operators, whichever code calls
them: this package, DeepSpeed, FSDP's hooks in the backward pass, DDP's reducer in C++. Nothing is patched. An operator
that is not listed here is reported instead of being left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsgpt.machine.topology import ring_factor


class _Operator(NamedTuple):
    operation: str
    payload: str | None
    """The argument that holds the payload."""
    per_rank: bool = False
    """Whether the payload is that argument once for every rank of the group."""


# The payload is as ``ring_factor`` defines it.
_C10D = {
    "allreduce_": _Operator("all_reduce", "tensors"),
    "allreduce_coalesced_": _Operator("all_reduce", "tensors"),
    "_allgather_base_": _Operator("all_gather", "output_tensor"),
    "allgather_": _Operator("all_gather", "output_tensors"),
    "allgather_coalesced_": _Operator("all_gather", "output_lists"),
    "allgather_into_tensor_coalesced_": _Operator("all_gather", "outputs"),
    "_reduce_scatter_base_": _Operator("reduce_scatter", "input_tensor"),
    "reduce_scatter_": _Operator("reduce_scatter", "input_tensors"),
    "reduce_scatter_tensor_coalesced_": _Operator("reduce_scatter", "inputs"),
    "alltoall_base_": _Operator("all_to_all", "input"),
    "alltoall_": _Operator("all_to_all", "input_tensors"),
    "gather_": _Operator("gather", "input_tensors", per_rank=True),
    "scatter_": _Operator("scatter", "output_tensors", per_rank=True),
    "broadcast_": _Operator("broadcast", "tensors"),
    "reduce_": _Operator("reduce", "tensors"),
    "send": _Operator("send", "tensors"),
    "recv_": _Operator("recv", "tensors"),
    "recv_any_source_": _Operator("recv", "tensors"),
    "barrier": _Operator("barrier", None),
    "monitored_barrier_": _Operator("barrier", None),
}
_FUNCTIONAL = {
    "all_reduce": _Operator("all_reduce", "input"),
    "all_reduce_": _Operator("all_reduce", "input"),
    "all_reduce_coalesced": _Operator("all_reduce", "inputs"),
    "all_reduce_coalesced_": _Operator("all_reduce", "inputs"),
    "all_gather_into_tensor": _Operator("all_gather", "input", per_rank=True),
    "all_gather_into_tensor_out": _Operator("all_gather", "input", per_rank=True),
    "all_gather_into_tensor_coalesced": _Operator("all_gather", "inputs", per_rank=True),
    "reduce_scatter_tensor": _Operator("reduce_scatter", "input"),
    "reduce_scatter_tensor_out": _Operator("reduce_scatter", "input"),
    "reduce_scatter_tensor_coalesced": _Operator("reduce_scatter", "inputs"),
    "all_to_all_single": _Operator("all_to_all", "input"),
    "broadcast": _Operator("broadcast", "input"),
    "broadcast_": _Operator("broadcast", "input"),
    "isend": _Operator("send", "tensor"),
    "irecv": _Operator("recv", "tensor"),
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
    """All operations of one kind in one group."""

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
        """What was counted, in the order in which each kind appeared first."""
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
        name = func._schema.name.partition("::")[2]
        if name in _LOCAL:
            return
        if name not in operators:
            self.unknown.add(func._schema.name)
            return
        operator = operators[name]
        # The schema may be longer than the call: an argument that is not given has its default.
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        group = _ranks(given)
        payload = sum(tensor.nbytes for tensor in _tensors(given[operator.payload])) if operator.payload else 0
        entry = self._traffic.setdefault((operator.operation, group), Traffic(operator.operation, group))
        entry.calls += 1
        entry.payload_bytes += payload * (len(group) if operator.per_rank else 1)


def _ranks(given: dict[str, Any]) -> tuple[int, ...]:
    if "group_name" in given:
        group = given["group_name"]
        group = _resolve_process_group(dist.distributed_c10d.GroupName(group)) if isinstance(group, str) else group
    else:
        group = given["process_group"]
    if isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in ``value``, a tensor or lists of them."""
    if isinstance(value, Tensor):
        yield value
    else:
        for inner in value:
            yield from _tensors(inner)

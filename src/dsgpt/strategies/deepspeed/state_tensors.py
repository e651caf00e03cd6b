"""The tensors in which DeepSpeed 0.19.8 keeps a rank's model state, found without importing DeepSpeed.

Its optimizers share no interface for this, so each one is searched for the attributes of all of them. A test
compares the sum with every tensor alive in the process.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from dsgpt.strategies.base import StateTensors, optimizer_tensors


def engine_tensors(optimizer: Any, parameters: Iterable[Tensor]) -> StateTensors:
    """The model state of a rank.

    Args:
        optimizer: from ``deepspeed.initialize``: DeepSpeed's wrapper around a torch optimizer, or at stage 0 in fp32
            the torch optimizer itself.
        parameters: of the model on this rank.
    """
    parameters = list(parameters)
    inner = getattr(optimizer, "optimizer", optimizer)
    return StateTensors(
        parameters=[
            *_present(optimizer, "bit16_groups_flat", "bf16_groups_flat", "lp_param_buffer"),
            *_held(parameters),
        ],
        gradients=[*_gradients(optimizer, inner, parameters)],
        optimizer=optimizer_tensors(inner),
        master=[parameter.detach() for parameter in _stepped(optimizer, inner)],
        buffers=[*_buffers(optimizer)],
    )


def _stepped(optimizer: Any, inner: torch.optim.Optimizer) -> list[Tensor]:
    """What the torch optimizer changes: this rank's fp32 weights; at stage 0 in fp32 the model's own parameters.

    While stages 1 to 3 step, ``param_groups`` holds one parameter group, or part of one, at a time.
    """
    shown = [parameter for group in inner.param_groups for parameter in group["params"]]
    return [*_present(optimizer, "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"), *shown]


def _held(parameters: list[Tensor]) -> Iterator[Tensor]:
    """Whole parameters, and at stage 3 this rank's part of each; there the whole is empty unless it is gathered."""
    for parameter in parameters:
        yield parameter.detach()
        if hasattr(parameter, "ds_tensor"):
            yield parameter.ds_tensor


def _gradients(optimizer: Any, inner: Any, parameters: list[Tensor]) -> Iterator[Tensor]:
    for parameter in [*_stepped(optimizer, inner), *parameters]:
        yield from _tensors([parameter.grad, getattr(parameter, "grad_accum", None)])
    yield from _present(optimizer, "averaged_gradients", "all_grad_tensors")  # stages 1 and 2
    yield from _present(optimizer, "accumulated_grads_in_cpu")  # the same with offload
    yield from _present(optimizer, "grad_partitions_flat_buffer")  # stage 3
    yield from _present(optimizer, "fp32_groups_gradients_flat")  # stage 1 in bf16


def _buffers(optimizer: Any) -> Iterator[Tensor]:
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        yield from _tensors(bucket.buffer)
    yield from _present(
        optimizer,
        "param_buffer_of_bit16_for_cpu_offload_groups",
        "temp_grad_buffer_for_cpu_offload",
        "temp_grad_buffer_for_gpu_offload",
    )


def pipeline_buffers(engine: Any) -> list[Tensor]:
    """What a pipeline engine keeps between steps: receive buffers, and activations of its last micro batches."""
    return [*_tensors(engine.pipe_buffers), *_present(engine, "pipe_recv_buf", "grad_layer")]


def _present(owner: Any, *names: str) -> Iterator[Tensor]:
    for name in names:
        yield from _tensors(getattr(owner, name, None))


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a tensor, or in lists and dictionaries of them; anything else holds none."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)

"""ZeRO-3's weights and moments, read and replaced by sub-group, in memory or swapped to nvme.

Written for DeepSpeed 0.19.8, whose own accessors read a whole sub-group from the drive for each parameter and each
moment.

A rank has an equal part of every parameter, cut from its elements in a row; the last parts may be shorter. The parts of
a sub-group's parameters lie end to end in one flat fp32 tensor.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dsgpt.checkpointing.training_state import ParamState, StateReader
from dsgpt.optimization.optimizer import STATE_NAMES, begin_state


@contextmanager
def _resident(optimizer: Any, index: int) -> Iterator[Tensor]:
    """The flat fp32 part that this rank has of sub-group ``index``, in memory together with its moments."""
    swapped = optimizer._swappable_optimizer_subgroup(index)
    if swapped:
        optimizer._optimizer_states_and_gradient_swap_in(index)
    try:
        yield optimizer.fp32_partitioned_groups_flat[index]
    finally:
        if swapped:
            optimizer._release_swap_buffers(index)


def iter_sharded_state(optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, ParamState]]:
    """Every parameter gathered whole, under its name in ``parameters``; collective.

    In the order of the sub-groups, so that each is read from the drive once.
    """
    names = {parameter.ds_id: name for name, parameter in parameters.items()}
    for index, group in enumerate(optimizer.fp16_groups):
        with _resident(optimizer, index) as flat:
            state = optimizer.optimizer.state.get(flat, {})
            for parameter in group:
                _, offset, length = optimizer.grad_position[parameter.ds_id]
                parts = [flat.detach(), *(state.get(key) for key in STATE_NAMES)]
                whole = (
                    None if part is None else optimizer._fp32_state_allgather(parameter, part.narrow(0, offset, length))
                    for part in parts
                )
                yield names[parameter.ds_id], ParamState(*whole)


@torch.no_grad()
def load_sharded_state(optimizer: Any, parameters: Mapping[str, nn.Parameter], reader: StateReader) -> None:
    """Take up what ``reader`` reads, each rank its own part, on any number of ranks; collective."""
    names = {parameter.ds_id: name for name, parameter in parameters.items()}
    optimizer.checkpoint_event_prologue()
    for index, group in enumerate(optimizer.fp16_groups):
        swapped = optimizer._swappable_optimizer_subgroup(index)
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_in(index)
        flat = optimizer.fp32_partitioned_groups_flat[index]
        moments = {}
        if reader.has_moments:
            moments = begin_state(optimizer.optimizer, flat, steps=reader.counters.optimizer_steps)
        for parameter in group:
            _, offset, length = optimizer.grad_position[parameter.ds_id]
            rank, state = optimizer._get_param_partition_rank(parameter), reader.state(names[parameter.ds_id])
            _copy_part(state.weight, flat.narrow(0, offset, length), rank=rank)
            for key, moment in moments.items():
                _copy_part(state.moments[key], moment.narrow(0, offset, length), rank=rank)
        optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_out(index)  # moments in memory are given files of their own
    optimizer.checkpoint_event_epilogue()  # gathers the parameters that every rank keeps whole


def _copy_part(whole: Tensor, part: Tensor, *, rank: int) -> None:
    """Fill ``part``, the flat one of ``rank``; what of it is past the end of ``whole`` is padding, and stays."""
    own = whole.flatten()[rank * part.numel() : (rank + 1) * part.numel()]
    part[: own.numel()].copy_(own)

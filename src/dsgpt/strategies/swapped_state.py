"""ZeRO-3's state where DeepSpeed 0.19.8 swaps weights or moments to nvme: read, saved and restored by sub-group.

DeepSpeed's own ways do not serve here. Its accessors read a whole sub-group from the drive for each parameter and each
moment. Its ``load_checkpoint`` copies files back but restores neither Adam's moments, whose files nobody knows of in a
new process, nor Adam's counter, nor any sub-group that is too small to be swapped: training would go on in silence with
zero moments and with initial biases.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsgpt.checkpointing.writing import save_object
from dsgpt.optimization.optimizer import STATE_NAMES
from dsgpt.strategies.base import ParamState


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


def iter_swapped_state(optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, ParamState]]:
    """Every parameter gathered whole, under its name in ``parameters``; collective.

    In the order of the sub-groups, so that each is read from the drive once.
    """
    names = {parameter.ds_id: name for name, parameter in parameters.items()}
    for index, group in enumerate(optimizer.fp16_groups):
        with _resident(optimizer, index) as flat:
            state = optimizer.optimizer.state.get(flat, {})
            for parameter in group:
                _, offset, length = optimizer.grad_position[parameter.ds_id]
                parts = [flat, *(state.get(key) for key in STATE_NAMES)]
                whole = (
                    None if part is None else optimizer._fp32_state_allgather(parameter, part.narrow(0, offset, length))
                    for part in parts
                )
                yield names[parameter.ds_id], ParamState(*whole)


def save_swapped(optimizer: Any, folder: Path, *, rank: int) -> None:
    """Write what this rank has of weights and optimizer state, a file per sub-group."""
    for index in range(len(optimizer.fp16_groups)):
        with _resident(optimizer, index) as flat:
            state = optimizer.optimizer.state.get(flat, {})
            # A copy, because torch saves whole storages, and these are of buffers.
            kept = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
            save_object({"weight": flat.detach().clone(), "state": kept}, _file(folder, rank, index))


@torch.no_grad()
def load_swapped(optimizer: Any, folder: Path, *, rank: int) -> None:
    """Take up what ``save_swapped`` wrote on as many ranks; collective.

    Raises:
        FileNotFoundError: ``folder`` holds no such state of this rank.
    """
    optimizer.checkpoint_event_prologue()
    for index in range(len(optimizer.fp16_groups)):
        saved = torch.load(_file(folder, rank, index), map_location="cpu", weights_only=True)
        swapped = optimizer._swappable_optimizer_subgroup(index)
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_in(index)
        flat = optimizer.fp32_partitioned_groups_flat[index]
        flat.copy_(saved["weight"])
        if saved["state"]:
            optimizer.optimizer.state[flat] = saved["state"]
        optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_out(index)  # moments in memory are given files of their own
    optimizer.checkpoint_event_epilogue()


def _file(folder: Path, rank: int, index: int) -> Path:
    return folder / f"zero3-rank-{rank:05}-group-{index:05}.pt"

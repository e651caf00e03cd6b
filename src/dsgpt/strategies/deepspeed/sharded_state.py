"""ZeRO-3's weights and moments, read and replaced by sub-group, in memory or swapped to nvme.

Written for DeepSpeed 0.19.8, whose own accessors read a whole sub-group from the drive for each parameter and each
moment.

Each rank has an equal, contiguous part of the elements of every parameter; the last parts may end in padding. The parts
of a sub-group's parameters lie end to end in one flat fp32 tensor.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from dsgpt.checkpointing.training_state import ParamState, StateReader
from dsgpt.optimization.optimizer import STATE_NAMES, begin_state
from dsgpt.strategies.deepspeed.engine_state import Part
from dsgpt.strategies.deepspeed.protocols import ShardedParameter, ShardingOptimizer, attached


class ShardedState:
    """The state of an engine at stage 3; see ``HeldState``.

    Args:
        optimizer: from ``deepspeed.initialize``.
        parameters: by canonical name.
    """

    def __init__(self, optimizer: ShardingOptimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._names: dict[int, str] = {attached(parameter, "ds_id"): name for name, parameter in parameters.items()}

    def iterate(self) -> Iterator[tuple[str, ParamState]]:
        """See ``HeldState``; in the order of the sub-groups, so that each is read from the drive once."""
        optimizer = self._optimizer
        for index, group in enumerate(optimizer.fp16_groups):
            with self._in_memory(index) as flat:
                state = optimizer.optimizer.state.get(flat, {})
                moments = {key: moment for key in STATE_NAMES if (moment := state.get(key)) is not None}
                held = ParamState(flat.detach(), **moments)
                for parameter in group:
                    yield self._names[parameter.ds_id], held.mapped(partial(self._gathered, parameter))

    @contextmanager
    def _in_memory(self, index: int) -> Iterator[Tensor]:
        """The flat fp32 part that this rank has of sub-group ``index``, in memory together with its moments."""
        swapped = self._optimizer._swappable_optimizer_subgroup(index)
        if swapped:
            self._optimizer._optimizer_states_and_gradient_swap_in(index)
        try:
            yield self._optimizer.fp32_partitioned_groups_flat[index]
        finally:
            if swapped:
                self._optimizer._release_swap_buffers(index)

    def _gathered(self, parameter: ShardedParameter, flat: Tensor) -> Tensor:
        """The whole of ``parameter`` from the part of it in each rank's ``flat``; collective."""
        return self._optimizer._fp32_state_allgather(parameter, self._part_of(parameter, flat))

    def _part_of(self, parameter: ShardedParameter, flat: Tensor) -> Tensor:
        _, offset, length = self._optimizer.grad_position[parameter.ds_id]
        return flat.narrow(0, offset, length)

    @torch.no_grad()
    def load(self, reader: StateReader, *, part: Part) -> None:
        """See ``HeldState``."""
        self._optimizer.checkpoint_event_prologue()
        for index in range(len(self._optimizer.fp16_groups)):
            self._load_group(index, reader, part=part)
        self._optimizer.checkpoint_event_epilogue()  # gathers the parameters that every rank keeps whole

    def _load_group(self, index: int, reader: StateReader, *, part: Part) -> None:
        optimizer = self._optimizer
        swapped = optimizer._swappable_optimizer_subgroup(index)
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_in(index)
        flat = optimizer.fp32_partitioned_groups_flat[index]
        moments = {}
        if reader.has_moments:
            moments = begin_state(optimizer.optimizer, flat, steps=reader.counters.optimizer_steps)
        for parameter in optimizer.fp16_groups[index]:
            rank, name = optimizer._get_param_partition_rank(parameter), self._names[parameter.ds_id]
            state = reader.state(name).mapped(partial(part, name))
            _copy_part(state.weight, self._part_of(parameter, flat), rank=rank)
            for key, moment in moments.items():
                _copy_part(state.moments[key], self._part_of(parameter, moment), rank=rank)
        optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_out(index)  # also moments that have no file yet


def _copy_part(whole: Tensor, part: Tensor, *, rank: int) -> None:
    """Fill ``part``, the flat part of ``rank``; its elements past the end of ``whole`` are padding and are not set."""
    own = whole.flatten()[rank * part.numel() : (rank + 1) * part.numel()]
    part[: own.numel()].copy_(own)

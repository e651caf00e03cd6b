"""Weights and moments of DeepSpeed's engines, read and replaced parameter by parameter.

Which part of which parameter a tensor-parallel rank holds (Shoeybi et al. 2019, "Megatron-LM", section 3). Queries,
keys, values and the wide layer of the MLP are split by their outputs: every rank computes some of the heads and some
of the hidden units. The two projections back into the residual stream are split by their inputs: every rank computes
what its heads and units contribute, and the sum over ranks is the layer's output. Their biases are added once, after
the sum, so every rank holds them whole, like positions and LayerNorms. The token embedding, which is also the head, is
split by its padded rows: every rank has consecutive ids.

Weights and moments of a DeepSpeed 0.19.8 engine at ZeRO stage 0, 1 or 2, read and replaced parameter by parameter. For
stage 3 see ``ShardedState``.

ZeRO-3's weights and moments, read and replaced by sub-group, in memory or swapped to nvme. Written for DeepSpeed
0.19.8, whose own accessors read a whole sub-group from the drive for each parameter and each moment.

Each rank has an equal, contiguous part of the elements of every parameter; the last parts may end in padding. The
parts of a sub-group's parameters lie end to end in one flat fp32 tensor.

The tensors in which DeepSpeed 0.19.8 keeps a rank's model state, found without importing DeepSpeed. Its optimizers
share no interface for this, so each one is searched for the attributes of all of them. A test compares the sum with
every tensor alive in the process.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dsgpt.checkpoints.pieces import Box, cut
from dsgpt.checkpoints.training_state import ParamState, Shards, StateReader
from dsgpt.model.config import STATE_NAMES
from dsgpt.model.gpt2 import Attend
from dsgpt.strategies.base import StateTensors, begin_state, optimizer_tensors, state_names

SPLIT = {
    "attn.qkv.weight": (3, 0),
    "attn.qkv.bias": (3, 0),
    "attn.proj.weight": (1, 1),
    "mlp.fc.weight": (1, 0),
    "mlp.fc.bias": (1, 0),
    "mlp.proj.weight": (1, 1),
    "wte.weight": (1, 0),
}
"""Name, in a block inside it, to the number of matrices fused along the first dimension, and the dimension along which
each of them is split. Every rank has whole heads, with the query, key and value of each."""


def _rule(name: str) -> tuple[int, int] | None:
    """The entry of ``SPLIT`` for a canonical name; None for a parameter that every rank holds whole."""
    return SPLIT.get(name.split(".", 2)[2] if name.startswith("blocks.") else name)


def part_range(length: int, *, rank: int, size: int) -> tuple[int, int]:
    """The first of ``length`` rows or columns that tensor rank ``rank`` of ``size`` has, and how many it has."""
    first, end = (length * place // size for place in (rank, rank + 1))
    return first, end - first


def is_split(name: str) -> bool:
    """Whether each tensor rank holds a different part of the parameter with this canonical name."""
    return _rule(name) is not None


def take_part(name: str, whole: Tensor, *, rank: int, size: int) -> Tensor:
    """The part of a ``whole`` parameter on tensor rank ``rank`` of ``size``; all of it if it is not split."""
    rule = _rule(name)
    if rule is None or size == 1:
        return whole
    fused, dimension = rule
    matrices = whole.chunk(fused)
    first, length = part_range(matrices[0].shape[dimension], rank=rank, size=size)
    return torch.cat([matrix.narrow(dimension, first, length) for matrix in matrices])


def part_boxes(name: str, shape: Sequence[int], *, rank: int, size: int) -> list[Box]:
    """Boxes of the elements of ``take_part`` in the whole parameter of this ``shape``; flat and end to end."""
    rule = _rule(name)
    if rule is None or size == 1:
        return [Box.whole(shape)]
    fused, dimension = rule
    boxes = []
    for matrix in range(fused):
        start, part = [0] * len(shape), [shape[0] // fused, *shape[1:]]
        start[0] = matrix * part[0]
        first, part[dimension] = part_range(part[dimension], rank=rank, size=size)
        start[dimension] += first
        boxes.append(Box(tuple(start), tuple(part)))
    return boxes


def attend_with_own_dropout(attend: Attend, *, rank: int) -> Attend:
    """``attend`` with dropout masks that differ between tensor ranks, although their random streams are the same.

    The streams are the same so that all ranks drop the same elements of the activations that all of them hold. But each
    rank has different heads, which need different masks. The seed of these masks is drawn from the common stream, and
    the rank is added to it. So the streams stay equal, and a recomputed forward pass draws the same masks again.
    """

    def attend_with_own_dropout(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool) -> Tensor:
        if dropout == 0:
            return attend(q, k, v, dropout, causal)
        seed = int(torch.randint(2**62, ()))  # from the CPU's stream, so that nothing waits for a GPU
        with torch.random.fork_rng(devices=[q.device] if q.device.type == "cuda" else []):
            torch.manual_seed(seed + rank)
            return attend(q, k, v, dropout, causal)

    return attend_with_own_dropout


Part = Callable[[str], list[Box]]
"""Canonical name to the part of the parameter that this rank and its data peers hold together."""


class EngineState(ABC):
    """The weights and moments that the data ranks of an engine at stage 0, 1 or 2 hold together.

    Args:
        optimizer: the torch optimizer, which DeepSpeed's may wrap.
        parameters: of this rank, by canonical name.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self._torch, self._parameters = optimizer, parameters

    def moment_names(self) -> list[str]:
        """Members of ``STATE_NAMES`` that the optimizer has; call it before reading any of them."""
        return [key for key in STATE_NAMES if any(key in state for state in self._torch.state.values())]

    def shards(self, part: Part) -> Shards:
        """The part of the state that this rank holds, in stage 0 that of all data ranks; no communication."""
        keys, boxes = self.moment_names(), {}
        for name in self._parameters:
            if own := cut(part(name), *self._range(name)):
                boxes[name] = own
        return Shards(boxes, ((name, self._own(name, keys)) for name in boxes))

    @abstractmethod
    def _range(self, name: str) -> tuple[int, int]:
        """The elements of its data peers' part of a parameter that this rank holds: the first, and that behind them."""

    @abstractmethod
    def _own(self, name: str, keys: Sequence[str]) -> ParamState:
        """These elements, and those of the moments ``keys``; no communication."""

    @torch.no_grad()
    def load(self, reader: StateReader, *, part: Part) -> None:
        """Replace weights and moments with those of a checkpoint; each rank copies its own part, without communication.

        Settings of the optimizer (betas, learning rate) stay the recipe's.

        Args:
            reader: of the checkpoint.
            part: cuts what tensor ranks split.
        """
        if reader.has_moments:
            self._begin_moments(steps=reader.counters.optimizer_steps)
        for name, parameter in self._parameters.items():
            weight = reader.read(name, boxes=part(name))
            parameter.copy_(weight.view(parameter.shape))
            start, stop = self._range(name)
            if own := cut(part(name), start, stop):
                moments = {key: reader.read(name, key, boxes=own) for key in reader.index.moments}
                self._replace(name, ParamState(weight[start:stop], **moments))

    def _begin_moments(self, *, steps: int) -> None:
        """Give the torch optimizer the state that it has after ``steps`` steps, but with moments of zero."""
        for group in self._torch.param_groups:
            for parameter in group["params"]:
                begin_state(self._torch, parameter, steps=steps)

    @abstractmethod
    def _replace(self, name: str, state: ParamState) -> None:
        """Copy ``state``, this rank's elements, flat, into the fp32 weight and the moments of a parameter."""


class WholeState(EngineState):
    """Stage 0: every rank holds the whole state.

    In fp32 the engine's optimizer is torch's own, and it changes the parameters. In bf16 and fp16
    (``FP16_UnfusedOptimizer``) every parameter has an fp32 master.
    """

    def __init__(self, optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(getattr(optimizer, "optimizer", optimizer), parameters)
        self._masters: dict[nn.Parameter, Tensor] = {parameter: parameter for parameter in parameters.values()}
        groups = (getattr(optimizer, name, ()) for name in ("fp16_groups", "fp32_groups"))
        for low_group, high_group in zip(*groups, strict=True):
            self._masters.update(zip(low_group, high_group, strict=True))

    def _range(self, name: str) -> tuple[int, int]:
        return 0, self._parameters[name].numel()

    def _own(self, name: str, keys: Sequence[str]) -> ParamState:
        master = self._masters[self._parameters[name]]
        return ParamState(master.detach(), **{key: self._torch.state[master][key] for key in keys})

    def _replace(self, name: str, state: ParamState) -> None:
        master = self._masters[self._parameters[name]]
        master.copy_(state.weight.view(master.shape))
        for key in state_names(self._torch) if state.moments else ():
            self._torch.state[master][key].copy_(state.moments[key].view(master.shape))


class PartitionedState(EngineState):
    """Stages 1 and 2 (``DeepSpeedZeroOptimizer``, ``BF16_Optimizer``).

    The fp32 weights of a parameter group lie end to end in one flat tensor, of which each data rank has a part. The
    attribute ``_hp_mapping`` of a parameter says which piece of it this rank has.
    """

    def __init__(self, optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(optimizer.optimizer, parameters)
        self._optimizer = optimizer

    def moment_names(self) -> list[str]:
        """See ``EngineState``."""
        self._link_moments()
        return super().moment_names()

    def _link_moments(self) -> None:
        """Let DeepSpeed find every moment.

        It links the moments of all parameter groups after the first group's first step, when the other groups have
        none yet, and never again (``_lazy_init_hp_params_optimizer_state``, called in ``_optimizer_step``).
        """
        self._optimizer._hp_optimizer_states_linked = False
        self._optimizer._lazy_init_hp_params_optimizer_state()

    def _begin_moments(self, *, steps: int) -> None:
        super()._begin_moments(steps=steps)
        self._link_moments()

    def _fragment(self, name: str) -> Any:
        """DeepSpeed's description of this rank's piece; None if other data ranks hold all of the parameter."""
        return self._parameters[name]._hp_mapping  # type: ignore[attr-defined]  # DeepSpeed's

    def _range(self, name: str) -> tuple[int, int]:
        fragment = self._fragment(name)
        if fragment is None:
            return 0, 0
        piece = fragment.lp_fragment_address
        return piece.start, piece.start + piece.numel

    def _own(self, name: str, keys: Sequence[str]) -> ParamState:
        piece = self._fragment(name).get_hp_fragment
        return ParamState(piece().detach(), **{key: piece(key) for key in keys})

    def _replace(self, name: str, state: ParamState) -> None:
        fragment = self._fragment(name)
        for key in (None, *(fragment.optim_fragment or ())):
            fragment.get_hp_fragment(key).copy_(state.moments[key] if key else state.weight)


class ShardedState:
    """The state of an engine at stage 3, with the methods of ``EngineState`` that a strategy calls.

    Args:
        optimizer: from ``deepspeed.initialize``.
        parameters: by canonical name.
    """

    def __init__(self, optimizer: Any, parameters: Mapping[str, Any]) -> None:
        self._optimizer = optimizer
        self._names: dict[int, str] = {parameter.ds_id: name for name, parameter in parameters.items()}

    def shards(self, part: Part) -> Shards:
        """See ``EngineState``; the last elements of a rank's part may be padding, which is left out."""
        parameters = {self._names[each.ds_id]: each for group in self._optimizer.fp16_groups for each in group}
        own = {name: self._boxes(parameters[name], part) for name in self._names.values()}
        boxes = {name: each for name, each in own.items() if each}
        sizes = {name: sum(box.numel for box in each) for name, each in own.items()}

        def states() -> Iterator[tuple[str, ParamState]]:
            for parameter, parts in self._param_states():
                name = self._names[parameter.ds_id]
                if name in boxes:
                    yield name, parts.mapped(partial(self._part_of, parameter, stop=sizes[name]))

        return Shards(boxes, states())

    def _boxes(self, parameter: Any, part: Part) -> list[Box]:
        """Boxes of this rank's part of ``parameter``, in the whole."""
        optimizer = self._optimizer
        rank, (_, _, length) = optimizer._get_param_partition_rank(parameter), optimizer.grad_position[parameter.ds_id]
        return cut(part(self._names[parameter.ds_id]), rank * length, (rank + 1) * length)

    def _param_states(self) -> Iterator[tuple[Any, ParamState]]:
        """Every parameter, with the flat tensors of its sub-group; in their order, to read each from the drive once."""
        optimizer = self._optimizer
        for index, group in enumerate(optimizer.fp16_groups):
            swapped = optimizer._swappable_optimizer_subgroup(index)
            if swapped:
                optimizer._optimizer_states_and_gradient_swap_in(index)
            try:
                flat = optimizer.fp32_partitioned_groups_flat[index]
                state = optimizer.optimizer.state.get(flat, {})
                moments = {key: moment for key in STATE_NAMES if (moment := state.get(key)) is not None}
                for parameter in group:
                    yield parameter, ParamState(flat.detach(), **moments)
            finally:  # also where a save fails and the run goes on
                if swapped:
                    optimizer._release_swap_buffers(index)

    def _part_of(self, parameter: Any, flat: Tensor, *, stop: int | None = None) -> Tensor:
        """This rank's part of ``parameter`` in the tensor of its sub-group, up to its element ``stop``."""
        _, offset, length = self._optimizer.grad_position[parameter.ds_id]
        return flat.narrow(0, offset, length)[:stop]

    @torch.no_grad()
    def load(self, reader: StateReader, *, part: Part) -> None:
        """See ``EngineState``."""
        optimizer = self._optimizer
        optimizer.checkpoint_event_prologue()  # frees parameters that are gathered
        for index, group in enumerate(optimizer.fp16_groups):
            swapped = optimizer._swappable_optimizer_subgroup(index)
            if swapped:
                optimizer._optimizer_states_and_gradient_swap_in(index)
            flat, moments = optimizer.fp32_partitioned_groups_flat[index], {}
            if reader.has_moments:
                moments = begin_state(optimizer.optimizer, flat, steps=reader.counters.optimizer_steps)
            for parameter in group:
                state = reader.state(self._names[parameter.ds_id], self._boxes(parameter, part))
                stop = state.weight.numel()  # what is behind it is padding, and is not set
                self._part_of(parameter, flat, stop=stop).copy_(state.weight)
                for key, moment in moments.items():
                    self._part_of(parameter, moment, stop=stop).copy_(state.moments[key])
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
            if swapped:
                optimizer._optimizer_states_and_gradient_swap_out(index)  # also moments that have no file yet
        optimizer.checkpoint_event_epilogue()  # gathers the parameters that every rank keeps whole


def engine_tensors(optimizer: Any, parameters: Iterable[Tensor]) -> StateTensors:
    """The model state of a rank.

    At stage 3, the whole of a parameter is empty unless it is gathered, and this rank has a part of each. While stages
    1 to 3 step, ``param_groups`` holds one parameter group, or part of one, at a time.

    Args:
        optimizer: from ``deepspeed.initialize``: DeepSpeed's wrapper around a torch optimizer, or at stage 0 in fp32
            the torch optimizer itself.
        parameters: of the model on this rank.
    """
    parameters = list(parameters)
    inner = getattr(optimizer, "optimizer", optimizer)
    stepped = [parameter for group in inner.param_groups for parameter in group["params"]]
    masters = tensors_of(optimizer, "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat") + stepped
    low = tensors_of(optimizer, "bit16_groups_flat", "bf16_groups_flat", "lp_param_buffer")
    gradients = [gradient for owner in [*masters, *parameters] for gradient in tensors_of(owner, "grad", "grad_accum")]
    gradients += tensors_of(
        optimizer,
        *("averaged_gradients", "all_grad_tensors"),  # stages 1 and 2
        "accumulated_grads_in_cpu",  # the same with offload
        "grad_partitions_flat_buffer",  # stage 3
        "fp32_groups_gradients_flat",  # stage 1 in bf16
    )
    buckets = getattr(optimizer, "ipg_buckets", {}).values()
    return StateTensors(
        parameters=low + [part for whole in parameters for part in (whole.detach(), *tensors_of(whole, "ds_tensor"))],
        gradients=gradients,
        optimizer=optimizer_tensors(inner),
        master=[parameter.detach() for parameter in masters],
        buffers=[buffer for bucket in buckets for buffer in tensors_of(bucket, "buffer")]
        + tensors_of(
            optimizer,
            "param_buffer_of_bit16_for_cpu_offload_groups",
            "temp_grad_buffer_for_cpu_offload",
            "temp_grad_buffer_for_gpu_offload",
        ),
    )


def tensors_of(owner: Any, *names: str) -> list[Tensor]:
    """The tensors in those of these attributes that ``owner`` has: alone, or in lists and dictionaries of any class."""
    values = [getattr(owner, name, None) for name in names]
    tensors = []
    while values:
        value = values.pop()
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, dict | list | tuple):
            values += value.values() if isinstance(value, dict) else value
    return tensors


# Stages 1 and 2 in fp32 without a second copy of the weights. Written for DeepSpeed 0.19.8.


def step_on_weights(optimizer: Any) -> None:
    """Let ``optimizer``, DeepSpeed's of stage 1 or 2, update the fp32 weights of the model in place.

    It clones this rank's part of the weights as master weights in every precision, and copies them back after each
    step. In fp32 the part itself serves: 4P/N bytes and one pass over the weights are saved. With offload the master
    weights are in other memory, and in bf16 and fp16 in another precision; those stay, like other optimizers.
    """
    if type(optimizer).__name__ != "DeepSpeedZeroOptimizer" or optimizer.cpu_offload:
        return
    for group, masters in enumerate(optimizer.single_partition_of_fp32_groups):
        rank = torch.distributed.get_rank(group=optimizer.real_dp_process_group[group])
        part = optimizer.parallel_partitioned_bit16_groups[group][rank]
        if part.dtype == masters.dtype:
            masters.data = part
    optimizer._link_all_hp_params()  # each parameter's piece of the master weights

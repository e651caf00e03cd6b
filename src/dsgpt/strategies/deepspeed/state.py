"""Weights and moments of DeepSpeed's engines, read and replaced parameter by parameter.

Which part of which parameter a tensor-parallel rank holds (Shoeybi et al. 2019, "Megatron-LM", section 3). Queries,
keys, values and the wide layer of the MLP are split by their outputs: every rank computes some of the heads and some
of the hidden units. The two projections back into the residual stream are split by their inputs: every rank computes
what its heads and units contribute, and the sum over ranks is the layer's output. Their biases are added once, after
the sum, so every rank holds them whole, like embeddings and LayerNorms.

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
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dsgpt.checkpoints.training_state import ParamState, StateReader
from dsgpt.model.config import STATE_NAMES
from dsgpt.model.gpt2 import Attend
from dsgpt.strategies.base import StateTensors, optimizer_tensors
from dsgpt.strategies.optimizer import begin_state, state_names

SPLIT = {
    "attn.qkv.weight": (3, 0),
    "attn.qkv.bias": (3, 0),
    "attn.proj.weight": (1, 1),
    "mlp.fc.weight": (1, 0),
    "mlp.fc.bias": (1, 0),
    "mlp.proj.weight": (1, 1),
}
"""Name inside a block to the number of matrices fused along the first dimension, and the dimension along which each of
them is split. Every rank has whole heads, with the query, key and value of each."""


def _rule(name: str) -> tuple[int, int] | None:
    """The entry of ``SPLIT`` for a canonical name; None for a parameter that every rank holds whole."""
    return SPLIT.get(name.split(".", 2)[2]) if name.startswith("blocks.") else None


def is_split(name: str) -> bool:
    """Whether each tensor rank holds a different part of the parameter with this canonical name."""
    return _rule(name) is not None


def take_part(name: str, whole: Tensor, *, rank: int, size: int) -> Tensor:
    """What tensor rank ``rank`` of ``size`` holds of a ``whole`` parameter; all of it if it is not split."""
    rule = _rule(name)
    if rule is None or size == 1:
        return whole
    fused, dimension = rule
    return torch.cat([matrix.chunk(size, dimension)[rank] for matrix in whole.chunk(fused)])


def join_parts(name: str, parts: Sequence[Tensor]) -> Tensor:
    """The whole of a split parameter from every rank's part, by rank: undoes ``take_part``.

    Raises:
        ValueError: the parameter is not split.
    """
    rule = _rule(name)
    if rule is None:
        raise ValueError(f"{name} is not split over tensor ranks: take any rank's copy")
    fused, dimension = rule
    matrices = zip(*(part.chunk(fused) for part in parts), strict=True)
    return torch.cat([torch.cat(pieces, dimension) for pieces in matrices])


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


Part = Callable[[str, Tensor], Tensor]
"""(canonical name, whole tensor) to the part of it that this rank and its data peers hold together."""


class EngineState(ABC):
    """The weights and moments that the data ranks of an engine at stage 0, 1 or 2 hold together.

    Methods are collective among these ranks.

    Args:
        optimizer: the torch optimizer, which DeepSpeed's may wrap.
        parameters: of this rank, by canonical name.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self._torch = optimizer
        self._parameters = parameters

    def moment_names(self) -> list[str]:
        """Those of ``STATE_NAMES`` that the optimizer has; call it before reading any of them."""
        return [key for key in STATE_NAMES if any(key in state for state in self._torch.state.values())]

    @abstractmethod
    def value(self, name: str, key: str | None = None) -> Tensor:
        """The weight ``name``, or its moment ``key``, in fp32; collective among the data ranks."""

    def iterate(self) -> Iterator[tuple[str, ParamState]]:
        """Every parameter of this rank by canonical name, gathered from the data ranks, one at a time."""
        keys = self.moment_names()
        for name in self._parameters:
            yield name, ParamState(self.value(name), **{key: self.value(name, key) for key in keys})

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
            state = reader.state(name).mapped(partial(part, name))
            parameter.copy_(state.weight)
            self._replace(parameter, state)

    def _begin_moments(self, *, steps: int) -> None:
        """Give the torch optimizer the state that it has after ``steps`` steps, but with moments of zero."""
        for group in self._torch.param_groups:
            for parameter in group["params"]:
                begin_state(self._torch, parameter, steps=steps)

    @abstractmethod
    def _replace(self, parameter: nn.Parameter, state: ParamState) -> None:
        """Copy ``state`` into the fp32 weight and the moments of ``parameter``."""


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

    def value(self, name: str, key: str | None = None) -> Tensor:
        """See ``EngineState``; nothing is communicated."""
        master = self._masters[self._parameters[name]]
        if key is None:
            return master.detach()
        moment: Tensor = self._torch.state[master][key]
        return moment

    def _replace(self, parameter: nn.Parameter, state: ParamState) -> None:
        master = self._masters[parameter]
        master.copy_(state.weight)
        for key in state_names(self._torch) if state.moments else ():
            self._torch.state[master][key].copy_(state.moments[key])


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

    def value(self, name: str, key: str | None = None) -> Tensor:
        """See ``EngineState``."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state  # noqa: PLC0415

        parameter = self._parameters[name]
        whole: Tensor = safe_get_full_optimizer_state(parameter, key) if key else safe_get_full_fp32_param(parameter)
        return whole

    def _begin_moments(self, *, steps: int) -> None:
        super()._begin_moments(steps=steps)
        self._link_moments()

    def _replace(self, parameter: nn.Parameter, state: ParamState) -> None:
        fragment: Any = parameter._hp_mapping  # type: ignore[attr-defined]  # DeepSpeed's
        if fragment is None:  # other data ranks hold all of the parameter
            return
        piece = fragment.lp_fragment_address
        for key in (None, *(fragment.optim_fragment or ())):
            whole = state.moments[key] if key else state.weight
            fragment.get_hp_fragment(key).copy_(whole.flatten().narrow(0, piece.start, piece.numel))


class ShardedState:
    """The state of an engine at stage 3, with the methods of ``EngineState`` that a strategy calls.

    Args:
        optimizer: from ``deepspeed.initialize``.
        parameters: by canonical name.
    """

    def __init__(self, optimizer: Any, parameters: Mapping[str, Any]) -> None:
        self._optimizer = optimizer
        self._names: dict[int, str] = {parameter.ds_id: name for name, parameter in parameters.items()}

    def iterate(self) -> Iterator[tuple[str, ParamState]]:
        """See ``EngineState``; in the order of the sub-groups, so that each is read from the drive once."""
        optimizer = self._optimizer
        for index, group in enumerate(optimizer.fp16_groups):
            with self._in_memory(index) as flat:
                state = optimizer.optimizer.state.get(flat, {})
                moments = {key: moment for key in STATE_NAMES if (moment := state.get(key)) is not None}
                parts = ParamState(flat.detach(), **moments)
                for parameter in group:
                    yield self._names[parameter.ds_id], parts.mapped(partial(self._gathered, parameter))

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

    def _gathered(self, parameter: Any, flat: Tensor) -> Tensor:
        """The whole of ``parameter`` from the part of it in each rank's ``flat``; collective."""
        whole: Tensor = self._optimizer._fp32_state_allgather(parameter, self._part_of(parameter, flat))
        return whole

    def _part_of(self, parameter: Any, flat: Tensor) -> Tensor:
        _, offset, length = self._optimizer.grad_position[parameter.ds_id]
        return flat.narrow(0, offset, length)

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
                rank, name = optimizer._get_param_partition_rank(parameter), self._names[parameter.ds_id]
                state = reader.state(name).mapped(partial(part, name))
                _copy_part(state.weight, self._part_of(parameter, flat), rank=rank)
                for key, moment in moments.items():
                    _copy_part(state.moments[key], self._part_of(parameter, moment), rank=rank)
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
            if swapped:
                optimizer._optimizer_states_and_gradient_swap_out(index)  # also moments that have no file yet
        optimizer.checkpoint_event_epilogue()  # gathers the parameters that every rank keeps whole


def _copy_part(whole: Tensor, part: Tensor, *, rank: int) -> None:
    """Fill ``part``, the flat part of ``rank``; its elements past the end of ``whole`` are padding and are not set."""
    own = whole.flatten()[rank * part.numel() : (rank + 1) * part.numel()]
    part[: own.numel()].copy_(own)


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

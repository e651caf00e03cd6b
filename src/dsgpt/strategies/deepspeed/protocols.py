"""Types for the parts of DeepSpeed 0.19.8 that this folder uses; DeepSpeed ships none.

Which optimizer ``deepspeed.initialize`` returns depends on stage and precision, and the classes share no interface. At
stage 0 in fp32 it is the torch optimizer itself.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Engine(Protocol):
    """``DeepSpeedEngine``."""

    enable_backward_allreduce: bool
    """Whether ``backward`` reduces gradients over the ranks in a step's last micro batch."""

    def __call__(self, ids: Tensor, targets: Tensor, *, reduction: str = ..., first_position: int = ...) -> Tensor:
        """The loss of ``GPT2.forward``."""
        ...

    def train(self) -> object:
        """Switch dropout on."""
        ...

    def eval(self) -> object:
        """Switch dropout off."""
        ...

    def backward(self, loss: Tensor) -> object:
        """Divide ``loss`` by the accumulation steps and compute gradients."""
        ...

    def step(self) -> None:
        """Clip and take an optimizer step, in a step's last micro batch only."""
        ...

    def allreduce_gradients(self) -> None:
        """Average gradients over the data ranks."""
        ...

    def was_step_applied(self) -> bool:
        """Whether the last ``step`` changed weights."""
        ...

    def get_global_grad_norm(self) -> Tensor | float:
        """2-norm of the gradient before clipping, where the optimizer kept it."""
        ...


class PipelineGrid(Protocol):
    """``PipelineParallelGrid``."""

    def stage_to_global(self, stage_id: int) -> int:
        """The rank of ``stage_id`` in this rank's pipeline."""
        ...

    def get_pipe_parallel_group(self) -> dist.ProcessGroup:
        """The ranks of this rank's pipeline."""
        ...

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that hold one copy of the model together: all stages and tensor peers."""
        ...

    def get_slice_parallel_group(self) -> dist.ProcessGroup:
        """The tensor peers."""
        ...


class Timer(Protocol):
    """One timer of an engine."""

    def reset(self) -> None:
        """Forget what was measured."""
        ...


class PipelineEngine(Engine, Protocol):
    """``PipelineEngine``."""

    grid: PipelineGrid
    timers: Callable[[str], Timer]
    dp_group_loss: Tensor
    """After ``train_batch``: the mean loss over micro batches of this rank's pipeline, on every stage; 0-dim fp32."""
    _INSTRUCTION_MAP: dict[type, Callable[..., None]]

    def _exec_optimizer_step(self, lr_kwargs: dict[str, Any] | None = None) -> None: ...

    def train_batch(self, data_iter: Iterator[Any]) -> Tensor:
        """Take one optimizer step; the mean loss over micro batches and data ranks comes back on every rank."""
        ...

    def eval_batch(self, data_iter: Iterator[Any], *, reduce_output: None, bcast_loss: bool) -> list[Tensor]:
        """The losses of a step's micro batches, on the last stage."""
        ...

    def is_last_stage(self) -> bool:
        """Whether this rank computes losses."""
        ...


class UnfusedOptimizer(Protocol):
    """``FP16_UnfusedOptimizer``: stage 0 in bf16 and fp16."""

    optimizer: torch.optim.Optimizer
    fp16_groups: list[list[nn.Parameter]]
    """The model's parameters, in either precision."""
    fp32_groups: list[list[Tensor]]
    """Their master weights."""


class PartitioningOptimizer(Protocol):
    """``DeepSpeedZeroOptimizer`` and ``BF16_Optimizer``: stages 1 and 2."""

    optimizer: torch.optim.Optimizer
    _hp_optimizer_states_linked: bool

    def _lazy_init_hp_params_optimizer_state(self) -> None: ...


class FragmentAddress(Protocol):
    """Where a piece of a parameter lies in the whole, flat parameter."""

    start: int
    numel: int


class ParameterFragment(Protocol):
    """``tensor_fragment``: this rank's piece of one parameter at stages 1 and 2."""

    lp_fragment_address: FragmentAddress
    optim_fragment: dict[str, Tensor] | None
    """Names of the moments that are linked."""

    def get_hp_fragment(self, optim_state_key: str | None) -> Tensor:
        """This rank's piece of a moment, or with None of the fp32 weight; flat."""
        ...


class ShardedParameter(Protocol):
    """What ``zero.Init`` makes of a parameter at stage 3."""

    ds_id: int
    ds_shape: torch.Size


class ShardingOptimizer(Protocol):
    """``DeepSpeedZeroOptimizer_Stage3``."""

    optimizer: torch.optim.Optimizer
    fp16_groups: list[list[ShardedParameter]]
    """The model's parameters by sub-group."""
    fp32_partitioned_groups_flat: list[Tensor]
    """This rank's part of each sub-group."""
    grad_position: dict[int, tuple[int, int, int]]
    """``ds_id`` to sub-group, offset in its flat tensor, and elements."""
    sequence_parallel_size: int

    def _swappable_optimizer_subgroup(self, sub_group_id: int) -> bool: ...
    def _optimizer_states_and_gradient_swap_in(self, sub_group_id: int) -> None: ...
    def _optimizer_states_and_gradient_swap_out(self, sub_group_id: int) -> None: ...
    def _release_swap_buffers(self, sub_group_id: int) -> None: ...
    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None: ...
    def _fp32_state_allgather(self, param: ShardedParameter, fp32_state_partition: Tensor) -> Tensor: ...
    def _get_param_partition_rank(self, param: ShardedParameter) -> int: ...
    def checkpoint_event_prologue(self) -> None:
        """Free parameters that are gathered."""
        ...

    def checkpoint_event_epilogue(self) -> None:
        """Gather the parameters that every rank keeps whole."""
        ...


def attached(tensor: Tensor, name: str) -> Any:
    """The attribute ``name``, which DeepSpeed has set on ``tensor``."""
    return getattr(tensor, name)


def attach(tensor: Tensor, **marks: bool) -> None:
    """Set attributes on ``tensor`` that DeepSpeed looks for."""
    for name, value in marks.items():
        setattr(tensor, name, value)

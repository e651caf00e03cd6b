"""Weights and moments of a DeepSpeed 0.19.8 engine at ZeRO stage 0, 1 or 2, read and replaced parameter by parameter.

For stage 3 see ``sharded_state``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from dsgpt.checkpointing.training_state import ParamState, StateReader
from dsgpt.optimization.optimizer import STATE_NAMES, begin_state, state_names
from dsgpt.strategies.deepspeed.protocols import (
    ParameterFragment,
    PartitioningOptimizer,
    UnfusedOptimizer,
    attached,
)

Part = Callable[[str, Tensor], Tensor]
"""(canonical name, whole tensor) to the part of it that this rank and its data peers hold together."""


class HeldState(Protocol):
    """Weights and moments that the data ranks of an engine hold together. Methods are collective among them."""

    def iterate(self) -> Iterator[tuple[str, ParamState]]:
        """Every parameter of this rank by canonical name, gathered from the data ranks, one at a time."""
        ...

    def load(self, reader: StateReader, *, part: Part) -> None:
        """Replace weights and moments with those of a checkpoint; each rank copies its own part.

        Settings of the optimizer (betas, learning rate) stay the recipe's.

        Args:
            reader: of the checkpoint.
            part: cuts what tensor ranks split.
        """
        ...


class EngineState(ABC):
    """The state of an engine at stage 0, 1 or 2.

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
        """See ``HeldState``."""
        keys = self.moment_names()
        for name in self._parameters:
            yield name, ParamState(self.value(name), **{key: self.value(name, key) for key in keys})

    @torch.no_grad()
    def load(self, reader: StateReader, *, part: Part) -> None:
        """See ``HeldState``; nothing is communicated."""
        if reader.has_moments:
            self._begin_moments(steps=reader.counters.optimizer_steps)
        for name, parameter in self._parameters.items():
            state = reader.state(name).mapped(partial(part, name))
            parameter.copy_(state.weight)
            self._replace(parameter, state)

    def _begin_moments(self, *, steps: int) -> None:
        """Give the torch optimizer the state that it has after ``steps`` steps, but with moments of zero."""
        for group in self._torch.param_groups:
            for held in group["params"]:
                begin_state(self._torch, held, steps=steps)

    @abstractmethod
    def _replace(self, parameter: nn.Parameter, state: ParamState) -> None:
        """Copy ``state`` into the fp32 weight and the moments of ``parameter``."""


class WholeState(EngineState):
    """Stage 0: every rank holds the whole state.

    In fp32 the engine's optimizer is torch's own, and it changes the parameters. In bf16 and fp16
    (``FP16_UnfusedOptimizer``) every parameter has an fp32 master.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer | UnfusedOptimizer, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self._masters: dict[nn.Parameter, Tensor] = {}
        if isinstance(optimizer, torch.optim.Optimizer):
            super().__init__(optimizer, parameters)
            self._masters.update({parameter: parameter for parameter in parameters.values()})
        else:
            super().__init__(optimizer.optimizer, parameters)
            for low_group, high_group in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
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

    def __init__(self, optimizer: PartitioningOptimizer, parameters: Mapping[str, nn.Parameter]) -> None:
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
        fragment: ParameterFragment | None = attached(parameter, "_hp_mapping")
        if fragment is None:  # other data ranks hold all of the parameter
            return
        piece = fragment.lp_fragment_address
        for key in (None, *(fragment.optim_fragment or ())):
            whole = state.moments[key] if key else state.weight
            fragment.get_hp_fragment(key).copy_(whole.flatten().narrow(0, piece.start, piece.numel))

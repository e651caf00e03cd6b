"""Weights and moments of a DeepSpeed 0.19.8 engine at ZeRO stage 0, 1 or 2, read and replaced parameter by parameter.

DeepSpeed keeps them in one of three ways. At stage 0 in fp32 the engine's optimizer is torch's own, and it changes the
parameters. At stage 0 in bf16 and fp16 (``FP16_UnfusedOptimizer``) every parameter has an fp32 master. At stages 1 and
2 (``DeepSpeedZeroOptimizer``, ``BF16_Optimizer``) the parameters of a group lie end to end in fp32, each data rank has
a part of that, and every parameter knows by ``_hp_mapping`` which piece of it this rank has.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dsgpt.checkpointing.training_state import ParamState, StateReader
from dsgpt.optimization.optimizer import STATE_NAMES, begin_state

Part = Callable[[str, Tensor], Tensor]
"""From a canonical name and a whole tensor to what this rank and its data peers hold of it."""


class EngineState:
    """What the data ranks of an engine hold together.

    Args:
        optimizer: what ``deepspeed.initialize`` gave.
        parameters: of this rank, by canonical name.
    """

    def __init__(self, optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._torch: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        self._parameters = parameters
        self._partitioned = hasattr(optimizer, "_hp_optimizer_states_linked")
        self._masters: dict[nn.Parameter, Tensor] = {} if self._partitioned else _masters(optimizer, parameters)

    def moment_names(self) -> list[str]:
        """Those of ``STATE_NAMES`` that exist by now; call it before reading any of them."""
        self._link_moments()
        return [key for key in STATE_NAMES if any(key in state for state in self._torch.state.values())]

    def _link_moments(self) -> None:
        """Let DeepSpeed find every moment.

        Stages 1 and 2 link the moments of all parameter groups after the first group's first step, when the others have
        none yet, and never again (``_lazy_init_hp_params_optimizer_state``, called in ``_optimizer_step``).
        """
        if self._partitioned:
            self._optimizer._hp_optimizer_states_linked = False
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def value(self, name: str, key: str | None = None) -> Tensor:
        """The weight ``name``, or its moment ``key``, in fp32; the data ranks call it together."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state  # noqa: PLC0415

        parameter = self._parameters[name]
        if self._partitioned:
            return safe_get_full_optimizer_state(parameter, key) if key else safe_get_full_fp32_param(parameter)
        master = self._masters[parameter]
        return self._torch.state[master][key] if key else master.detach()

    def iterate(self) -> Iterator[tuple[str, ParamState]]:
        """Every parameter of this rank; the data ranks call it together."""
        keys = self.moment_names()
        for name in self._parameters:
            yield name, ParamState(self.value(name), **{key: self.value(name, key) for key in keys})

    @torch.no_grad()
    def load(self, reader: StateReader, *, part: Part) -> None:
        """Take up what ``reader`` reads, each rank its own; nothing is communicated.

        The state is the checkpoint's, the settings are the recipe's.

        Args:
            reader: of a checkpoint.
            part: cuts what tensor ranks split.
        """
        moments = {}
        if reader.has_moments:
            moments = {
                held: begin_state(self._torch, held, steps=reader.counters.optimizer_steps) for held in self._held()
            }
            self._link_moments()
        for name, parameter in self._parameters.items():
            state = ParamState(*(None if value is None else part(name, value) for value in reader.state(name)))
            parameter.copy_(state.weight)
            if self._partitioned:
                self._replace_own_piece(parameter, state)
            else:
                master = self._masters[parameter]
                master.copy_(state.weight)
                for key, moment in moments.get(master, {}).items():
                    moment.copy_(state.moments[key])

    def _held(self) -> list[Tensor]:
        """The fp32 tensors that the torch optimizer changes."""
        for name in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
            if hasattr(self._optimizer, name):
                return list(getattr(self._optimizer, name))
        return list(self._masters.values())

    @staticmethod
    def _replace_own_piece(parameter: nn.Parameter, state: ParamState) -> None:
        mapping = parameter._hp_mapping
        if mapping is None:  # other data ranks have all of it
            return
        piece = mapping.lp_fragment_address
        for key in (None, *(mapping.optim_fragment or ())):
            whole = state.moments[key] if key else state.weight
            mapping.get_hp_fragment(key).copy_(whole.flatten().narrow(0, piece.start, piece.numel))


def _masters(optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Stage 0: each parameter with the fp32 tensor that is trained for it."""
    if not hasattr(optimizer, "fp32_groups"):
        return {parameter: parameter for parameter in parameters.values()}
    groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    return {low: high for low_group, high_group in groups for low, high in zip(low_group, high_group, strict=True)}

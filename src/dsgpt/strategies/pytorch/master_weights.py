"""Low-precision weights to compute with, fp32 weights to train: what bf16 and fp16 mean in plain PyTorch.

Parameters and activations are in the low precision; the optimizer, its copy of the weights, the sum of the micro
batches' gradients and the loss are fp32 (Micikevicius et al. 2018, "Mixed precision training", sections 3.1 to 3.3).
"""

from typing import Protocol

import torch
from torch import Tensor, nn


class TrainedWeights(Protocol):
    """The fp32 weights that an optimizer changes, and their link to the weights that the model computes with."""

    parameters: dict[str, nn.Parameter]
    """Canonical name to plain fp32 tensor: a whole weight, or this rank's shard of it."""

    def gather_gradients(self) -> None:
        """Add the gradients of a backward pass to those of ``parameters``; call it after every backward pass."""
        ...

    def publish(self) -> None:
        """Copy the changed weights to the model; call it after every optimizer step."""
        ...

    def replace(self, name: str, value: Tensor) -> None:
        """Set one weight, in ``parameters`` and in the model."""
        ...


class MasterWeights:
    """An fp32 copy of the weights of ``model``, which is converted to ``dtype`` in place; in fp32, its own weights."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        model.to(dtype)
        self._low = dict(model.named_parameters())
        self.separate = dtype != torch.float32
        """Whether there are two copies of every weight."""
        self.parameters: dict[str, nn.Parameter] = (
            {name: nn.Parameter(value.detach().float()) for name, value in self._low.items()}
            if self.separate
            else self._low
        )
        """Canonical name to the parameter that the optimizer changes."""

    def by_low_parameter(self) -> dict[Tensor, nn.Parameter]:
        """From each parameter of the model to its master."""
        return {low: self.parameters[name] for name, low in self._low.items()}

    def gather_gradients(self) -> None:
        """Add the gradients of one micro batch to the fp32 sum; call it after every backward pass."""
        if not self.separate:
            return
        begun: tuple[list[Tensor], list[Tensor]] = [], []
        continued: tuple[list[Tensor], list[Tensor]] = [], []
        for name, low in self._low.items():
            if low.grad is None:
                continue
            master = self.parameters[name]
            sums, parts = begun if master.grad is None else continued
            if master.grad is None:
                master.grad = torch.empty_like(master)
            sums.append(master.grad)
            parts.append(low.grad)
            low.grad = None
        if begun[0]:
            torch._foreach_copy_(*begun)
        if continued[0]:
            torch._foreach_add_(*continued)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the changed master weights into the model; call it after every optimizer step."""
        if self.separate:
            torch._foreach_copy_(list(self._low.values()), list(self.parameters.values()))

    @torch.no_grad()
    def replace(self, name: str, value: Tensor) -> None:
        """Set one weight, in the master copy and in the model."""
        self.parameters[name].copy_(value)
        if self.separate:
            self._low[name].copy_(value)

"""fp32 master weights for a model that computes in bf16 or fp16: what "bf16" means under every strategy here.

Parameters and activations are in the low precision; the weights that the optimizer changes, the sum of the micro
batches' gradients and the loss are fp32 (Micikevicius et al. 2018, "Mixed precision training", sections 3.1 to 3.3).
"""

import torch
from torch import Tensor, nn


class MasterWeights:
    """Keeps the fp32 weights beside ``model``, which is converted to ``dtype`` in place. In fp32 they are one."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        model.to(dtype)
        self._low = dict(model.named_parameters())
        self._separate = dtype != torch.float32
        self.parameters: dict[str, nn.Parameter] = (
            {name: nn.Parameter(value.detach().float()) for name, value in self._low.items()}
            if self._separate
            else self._low
        )
        """Canonical name to the parameter that the optimizer changes."""

    def gather_gradients(self) -> None:
        """Add the gradients of one micro batch to the fp32 sum; call it after every backward pass."""
        if not self._separate:
            return
        for name, low in self._low.items():
            if low.grad is None:
                continue
            master = self.parameters[name]
            master.grad = low.grad.float() if master.grad is None else master.grad.add_(low.grad)
            low.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the changed master weights into the model; call it after every optimizer step."""
        if self._separate:
            for name, low in self._low.items():
                low.copy_(self.parameters[name])

    @torch.no_grad()
    def replace(self, name: str, value: Tensor) -> None:
        """Set one weight, in the master copy and in the model."""
        self.parameters[name].copy_(value)
        if self._separate:
            self._low[name].copy_(value)

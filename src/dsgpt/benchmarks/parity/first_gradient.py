"""The whole gradient of the first step, from what a strategy's optimizer holds after it."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

PLACES = ("exp_avg", "exp_avg_sq")
"""Where Adam keeps its moments; DeepSpeed links both or none."""


class SgdGradients:
    """While it is entered, SGD keeps the gradient that it steps on where Adam keeps its moments.

    SGD has no state of which a strategy would gather the whole. Put there, this rank's part of the gradient takes the
    way of Adam's first moment through ``Strategy.iter_state``, exactly: ``exp_avg`` with a beta1 of 0.
    """

    def __init__(self) -> None:
        self._optimizers: list[torch.optim.Optimizer] = []

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not isinstance(optimizer, torch.optim.SGD):
            return
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kept = (parameter.grad.detach().clone(), torch.zeros_like(parameter.grad))
                    optimizer.state[parameter].update(zip(PLACES, kept, strict=True))

    def __enter__(self) -> "SgdGradients":
        self._handle = register_optimizer_step_pre_hook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def forget(self) -> None:
        """Take out again what was kept: it is no model state, and later steps would carry it along."""
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for name in PLACES:
                    state.pop(name, None)


def full_gradient(exp_avg: Tensor, *, beta1: float, grad_norm: float, clipping: float) -> Tensor:
    """The gradient of the first step, from Adam's first moment after it.

    ``exp_avg`` is then (1 - beta1) times the clipped gradient (Kingma and Ba 2015, algorithm 1), and clipping divided
    by ``(norm + 1e-6) / clipping`` where that exceeds 1, in torch's ``clip_grad_norm_`` and in DeepSpeed alike.
    """
    shrunk = max(1.0, (grad_norm + 1e-6) / clipping) if clipping > 0 else 1.0
    return exp_avg / (1 - beta1) * shrunk

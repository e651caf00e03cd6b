"""Notes what optimizers step with, using PyTorch's hook that runs before every optimizer step of the process.

The hook sees torch's optimizers, DeepSpeed's CPU Adam, which is one of them, and those inside an engine or a pipeline.
It does not depend on what a strategy reports.
"""

from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

PLACES = ("exp_avg", "exp_avg_sq")
"""Where Adam keeps its moments. DeepSpeed links both or none."""


class _StepHook(ABC):
    """A context in which ``_note`` is called with every optimizer that is about to step."""

    @abstractmethod
    def _note(self, optimizer: torch.optim.Optimizer) -> None: ...

    def __enter__(self) -> Self:
        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._note(optimizer)

        self._handle = register_optimizer_step_pre_hook(before_step)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


class UsedRates(_StepHook):
    """Notes the learning rate of every parameter group of every optimizer that steps."""

    def __init__(self) -> None:
        self.seen: set[float] = set()

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen |= {float(group["lr"]) for group in optimizer.param_groups}


class SgdGradients(_StepHook):
    """Makes SGD keep the gradient that it steps on where Adam keeps its moments.

    SGD has no state that a strategy would gather. With the gradient in that place, ``Strategy.iter_state`` gathers it,
    as it gathers Adam's first moment with a beta1 of 0.
    """

    def __init__(self) -> None:
        self._optimizers: list[torch.optim.Optimizer] = []

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.SGD):
            return
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kept = (parameter.grad.detach().clone(), torch.zeros_like(parameter.grad))
                    optimizer.state[parameter].update(zip(PLACES, kept, strict=True))

    def forget(self) -> None:
        """Remove the gradients, which are not model state and would be kept through later steps."""
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for name in PLACES:
                    state.pop(name, None)


def full_gradient(exp_avg: Tensor, *, beta1: float, grad_norm: float, clipping: float) -> Tensor:
    """The gradient of the first step, from Adam's first moment after it.

    ``exp_avg`` is then (1 - beta1) times the clipped gradient (Kingma and Ba 2015, algorithm 1), and clipping divided
    it by ``(norm + 1e-6) / clipping`` if that exceeds 1, both in torch's ``clip_grad_norm_`` and in DeepSpeed.
    """
    shrunk = max(1.0, (grad_norm + 1e-6) / clipping) if clipping > 0 else 1.0
    return exp_avg / (1 - beta1) * shrunk

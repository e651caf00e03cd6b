"""The learning rates that optimizers step with, as the optimizers themselves have them."""

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class UsedRates:
    """While it is entered, notes the learning rate of every parameter group whenever an optimizer begins to step.

    The hook is PyTorch's own, for all optimizers of the process: torch's, DeepSpeed's CPU Adam, which is one of them,
    and those that an engine or a pipeline keeps to itself. What a strategy reports is not asked.
    """

    def __init__(self) -> None:
        self.seen: set[float] = set()

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.seen |= {float(group["lr"]) for group in optimizer.param_groups}

    def __enter__(self) -> "UsedRates":
        self._handle = register_optimizer_step_pre_hook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

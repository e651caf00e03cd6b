"""Fewer passes over the gradients of ``BF16_Optimizer``, DeepSpeed's stage 1 in bf16. Written for DeepSpeed 0.19.8.

It fills gradients in both precisions with zeros after each step, adds to both what the next backward pass computes, and
converts each gradient in memory of its own before it is added.
"""

from functools import partial
from typing import Any

import torch
from torch import nn


def spare_passes(optimizer: Any, *, single_rank: bool, engine: Any) -> None:
    """Replace methods of ``optimizer`` if it is a ``BF16_Optimizer``; others stay as they are.

    Args:
        optimizer: from ``deepspeed.initialize``.
        single_rank: whether there is nothing to reduce, so that the engine need not copy all gradients to buckets.
        engine: the optimizer's.
    """
    if type(optimizer).__name__ != "BF16_Optimizer":
        return
    clear = optimizer.clear_lp_grads
    optimizer.clear_lp_grads = lambda *_, **__: clear(set_to_none=True)
    optimizer.clear_hp_grads = partial(_forget_sums, optimizer)
    optimizer._update_hp_grad = partial(_add_to_sum, optimizer)
    if single_rank:
        engine.enable_backward_allreduce = False


def _forget_sums(optimizer: Any) -> None:
    """Let the next gradients replace the fp32 sums. Every parameter has a gradient in every step."""
    optimizer.fp32_groups_has_gradients = [[False] * len(group) for group in optimizer.fp32_groups_gradients]


@torch.no_grad()
def _add_to_sum(optimizer: Any, low: nn.Parameter, group: int, index: int, clear_lp_grads: bool) -> None:
    """Add the gradient of ``low`` to its fp32 sum, or begin the sum with it."""
    if low.grad is None:
        return
    total, begun = optimizer.fp32_groups_gradients[group][index], optimizer.fp32_groups_has_gradients[group]
    gradient = low.grad.view(total.shape)
    if begun[index]:
        total.add_(gradient)
    else:
        total.copy_(gradient)
    begun[index] = True
    low._hp_grad = total  # type: ignore[attr-defined]  # DeepSpeed's
    if clear_lp_grads:
        low.grad.zero_()

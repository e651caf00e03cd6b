"""The optimizer of a recipe, its state, and the gradient norm: the same for every strategy."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dsgpt.config.recipe_blocks import OptimizerRecipe
from dsgpt.model.names import STATE_NAMES, decays

BLOCK = 512
"""Elements of a gradient whose squares are summed in fp32."""


def parameter_groups(parameters: Mapping[str, nn.Parameter], recipe: OptimizerRecipe) -> list[dict[str, Any]]:
    """Two groups, with and without weight decay, in the order of ``parameters`` (canonical name to parameter)."""
    decayed = [parameter for name, parameter in parameters.items() if decays(name)]
    plain = [parameter for name, parameter in parameters.items() if not decays(name)]
    return [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]


def build_optimizer(
    groups: Iterable[dict[str, Any]], recipe: OptimizerRecipe, *, fused: bool = True
) -> torch.optim.Optimizer:
    """``torch.optim``'s AdamW or SGD over ``groups``; the loop sets the learning rate before every step.

    Args:
        groups: as ``parameter_groups`` makes them.
        recipe: its settings.
        fused: update in one pass over the memory of a parameter and its state, on GPUs and CPUs alike. How an element
            is rounded then depends on its place in the tensor.
    """
    if recipe.type == "SGD":
        return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov, fused=fused)
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=fused)


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set the learning rate of the next steps; ``optimizer`` is torch's, or DeepSpeed's wrapper of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def state_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Those of ``STATE_NAMES`` that ``optimizer`` keeps from its first step on."""
    if "betas" in optimizer.defaults:
        return STATE_NAMES[:2]
    return STATE_NAMES[2:] if optimizer.defaults.get("momentum") else ()


def begin_state(optimizer: torch.optim.Optimizer, parameter: Tensor, *, steps: int) -> dict[str, Tensor]:
    """Make the state of ``parameter`` after ``steps`` steps, with zeros for moments, which the caller fills.

    torch and DeepSpeed's CPU Adam make the state only in their first step. torch counts the steps in a tensor, on
    the parameter's device if the optimizer is fused, and DeepSpeed in a Python number.

    Returns:
        The moments by name, each of the shape and on the device of ``parameter``.
    """
    moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in state_names(optimizer)}
    state: dict[str, Any] = dict(moments)
    if "betas" in optimizer.defaults:
        of_torch, device = type(optimizer).__module__.startswith("torch."), torch.device("cpu")
        if optimizer.defaults.get("fused"):
            device = parameter.device
        state["step"] = torch.tensor(float(steps), device=device) if of_torch else steps
    optimizer.state[parameter] = state
    return moments


def global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all ``gradients`` together, 0-dim fp32."""
    return square_sum(gradients).sqrt().float()


def square_sum(gradients: Iterable[Tensor]) -> Tensor:
    """The sum of the squares of all elements of ``gradients``, 0-dim fp64, on their device."""
    norms = [block_norms(gradient) for gradient in gradients]
    return torch.cat(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)


def block_norms(gradient: Tensor) -> Tensor:
    """The 2-norm of each block of ``BLOCK`` elements, (blocks,), computed in fp32 and returned in fp64.

    One fp32 sum of squares over an embedding of millions of small values is off by up to 1e-4 relative. fp64 for every
    element is exact, but takes thirty times longer on a CPU.
    """
    flat = gradient.detach().reshape(-1).float()
    whole = flat.numel() // BLOCK * BLOCK
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, BLOCK), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:])[None]  # 0 if nothing is left
    return torch.cat([norms, rest]).double()

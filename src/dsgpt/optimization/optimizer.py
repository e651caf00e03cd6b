"""The optimizer of a recipe, its state, and the gradient norm: the same for every strategy."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dsgpt.config.recipe_blocks import OptimizerRecipe

STATE_NAMES = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""The state of a parameter, as torch and DeepSpeed both name it: Adam's two moments, SGD's momentum."""


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter: to matrices and embeddings, not to biases and LayerNorms.

    The name decides, not the dimensions: a ZeRO-3 or FSDP shard of a matrix is flat.
    """
    return name.endswith(".weight") and ".ln_" not in f".{name}"


def parameter_groups(parameters: Mapping[str, nn.Parameter], recipe: OptimizerRecipe) -> list[dict[str, Any]]:
    """Two groups, with and without weight decay, in the order of ``parameters`` (canonical name to parameter)."""
    decayed = [parameter for name, parameter in parameters.items() if decays(name)]
    plain = [parameter for name, parameter in parameters.items() if not decays(name)]
    return [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]


def build_optimizer(groups: Iterable[dict[str, Any]], recipe: OptimizerRecipe) -> torch.optim.Optimizer:
    """``torch.optim``'s AdamW or SGD over ``groups``; the loop sets the learning rate before every step."""
    if recipe.type == "SGD":
        return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov)
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)


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

    torch and DeepSpeed's CPU Adam make the state only in their first step. torch counts the steps in a tensor,
    DeepSpeed in a Python number.

    Returns:
        The moments by name, each of the shape and on the device of ``parameter``.
    """
    moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in state_names(optimizer)}
    state: dict[str, Any] = dict(moments)
    if "betas" in optimizer.defaults:
        state["step"] = torch.tensor(float(steps)) if type(optimizer).__module__.startswith("torch.") else steps
    optimizer.state[parameter] = state
    return moments


def global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all ``gradients`` together, 0-dim fp32.

    Squares are summed in fp64: an fp32 sum over an embedding of millions of small values is off by up to 1e-4 relative.
    """
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm.float()

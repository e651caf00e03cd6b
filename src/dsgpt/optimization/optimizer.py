"""The optimizer that the recipe asks for, built once for every strategy."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dsgpt.config.recipe_blocks import OptimizerRecipe

STATE_NAMES = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""What optimizers keep of every parameter, as torch and DeepSpeed both name it: Adam's two moments, SGD's momentum."""


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter: to matrices and embeddings, not to biases and LayerNorms.

    Decided by the name, not by the dimensions: a ZeRO-3 or FSDP shard of a matrix is flat.
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
    """``torch.optim``'s AdamW, Adam or SGD over ``groups``; the learning rate is set anew before every step."""
    if recipe.type == "SGD":
        return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov)
    kind = torch.optim.AdamW if recipe.type == "AdamW" else torch.optim.Adam
    return kind(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Use ``lr`` from the next step on; ``optimizer`` is torch's, or DeepSpeed's wrapper with the same groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def state_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Those of ``STATE_NAMES`` that ``optimizer`` keeps from its first step on."""
    if "betas" in optimizer.defaults:
        return STATE_NAMES[:2]
    return STATE_NAMES[2:] if optimizer.defaults.get("momentum") else ()


def begin_state(optimizer: torch.optim.Optimizer, parameter: Tensor, *, steps: int) -> dict[str, Tensor]:
    """Give ``parameter`` the state that it would have after ``steps`` steps, its moments zero, for the caller to fill.

    torch makes it in the first step alone, and DeepSpeed's CPU Adam, which counts in whole numbers, does the same.

    Returns:
        The moments by name, each of the shape and on the device of ``parameter``.
    """
    moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in state_names(optimizer)}
    state: dict[str, Any] = dict(moments)
    if "betas" in optimizer.defaults:
        state["step"] = torch.tensor(float(steps)) if type(optimizer).__module__.startswith("torch.") else steps
    optimizer.state[parameter] = state
    return moments

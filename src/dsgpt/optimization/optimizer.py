"""The optimizer that the recipe asks for, built once for every strategy."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dsgpt.recipe import OptimizerRecipe

STATE_NAMES = ("exp_avg", "exp_avg_sq")
"""Adam's moments, as torch and DeepSpeed both name them."""


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


@contextlib.contextmanager
def keep_settings(optimizer: Any) -> Iterator[None]:
    """Put back afterwards what the recipe made of betas, weight decay and the like.

    For loading a checkpoint, whose settings would replace them; ``optimizer`` is as for ``set_learning_rate``.
    """
    before = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    yield
    for group, settings in zip(optimizer.param_groups, before, strict=True):
        group.update(settings)

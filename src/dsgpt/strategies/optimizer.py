"""What is the same under every strategy: initial weights, optimizer and its state, gradient norm, learning rate.

The learning rate is a pure function of the optimizer step, value for value what DeepSpeed's own schedulers give:
DeepSpeed 0.19.8, ``deepspeed/runtime/lr_schedules.py``: WarmupLR, WarmupDecayLR, WarmupCosineLR. A scheduler there
counts from -1 and is stepped after the optimizer, so steps 1 and 2 of a run both use the start of the warm-up. Under
WarmupCosineLR, step 1 uses a learning rate of 0 instead.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dsgpt.config.recipe_blocks import OptimizerRecipe, SchedulerRecipe
from dsgpt.config.run_config import RunConfig
from dsgpt.model.config import STATE_NAMES, decays
from dsgpt.model.gpt2 import initial_value

# The initial value of every parameter, drawn from seed and name, or published.

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The precision by the name that a configuration gives it."""
InitialValues = Callable[[str, torch.Size], Tensor]
"""(canonical name, whole shape) to the whole initial value, fp32 on the CPU; the same on every rank."""


def initial_values(config: RunConfig) -> InitialValues:
    """The function from which the strategies of this run get initial weights, whole, before they split them.

    Raises:
        UserError: the source that ``--init_from`` names is gone.
    """
    if config.init_from is not None:
        return config.init_from.weights(config.model)
    return partial(initial_value, config=config.model, seed=config.options.seed)


@torch.no_grad()
def initialize_whole(model: nn.Module, config: RunConfig) -> None:
    """Give every parameter of a whole, unsharded ``model`` its initial value, in place."""
    values = initial_values(config)
    for name, parameter in model.named_parameters():
        parameter.copy_(values(name, parameter.shape))


# The optimizer of a recipe, its state, and the gradient norm.

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


# The learning rate of a step.

Schedule = Callable[[int], float]
"""From the optimizer step (the first is 1) to the learning rate that it uses."""


def build_schedule(recipe: SchedulerRecipe | None, *, base_lr: float, total_steps: int) -> Schedule:
    """The schedule that ``recipe`` asks for; a constant ``base_lr`` without one.

    Args:
        recipe: the JSON's ``scheduler`` block; an omitted ``total_num_steps`` becomes ``total_steps``.
        base_lr: the optimizer's ``lr``.
        total_steps: optimizer steps of the whole run.
    """
    if recipe is None:
        return lambda _: base_lr
    ratio = _RATIOS[recipe.type](recipe, recipe.total_num_steps or total_steps)
    if recipe.type == "WarmupCosineLR":
        return lambda step: base_lr * ratio(step - 2) if step > 1 else 0.0
    low = recipe.warmup_min_lr
    high = recipe.warmup_max_lr
    if high is None:
        high = base_lr if recipe.type == "WarmupLR" else 0.001
    return lambda step: low + (high - low) * ratio(step - 2) if step > 1 else low


def _warmup(recipe: SchedulerRecipe) -> tuple[int, Callable[[int], float]]:
    """Length of the warm-up, and its fraction (0 to 1) at DeepSpeed's counter ``i``, which starts at 0."""
    steps = max(2, recipe.warmup_num_steps)
    if recipe.warmup_type == "linear":
        return steps, lambda i: i / steps
    inverse = 1.0 / math.log(steps)  # as DeepSpeed rounds it
    return steps, lambda i: inverse * math.log(i + 1)


def _constant_after_warmup(recipe: SchedulerRecipe, _total: int) -> Callable[[int], float]:
    steps, fraction = _warmup(recipe)
    return lambda i: fraction(i) if i < steps else 1.0


def _linear_after_warmup(recipe: SchedulerRecipe, total: int) -> Callable[[int], float]:
    steps, fraction = _warmup(recipe)
    return lambda i: fraction(i) if i < steps else max(0.0, (total - i) / max(1.0, total - steps))


def _cosine_after_warmup(recipe: SchedulerRecipe, total: int) -> Callable[[int], float]:
    steps, fraction = _warmup(recipe)
    lowest, start = recipe.cos_min_ratio, recipe.warmup_min_ratio

    def ratio(i: int) -> float:
        if i < steps:
            return start + fraction(i) * (1 - start)
        progress = min(1.0, (i - steps + 1) / max(1, total - steps))
        return max(0.0, lowest + (1 - lowest) * (1 + math.cos(math.pi * progress)) / 2)

    return ratio


_RATIOS = {
    "WarmupLR": _constant_after_warmup,
    "WarmupDecayLR": _linear_after_warmup,
    "WarmupCosineLR": _cosine_after_warmup,
}

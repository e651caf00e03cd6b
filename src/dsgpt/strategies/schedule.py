"""The learning rate as a pure function of the optimizer step, value for value what DeepSpeed's own schedulers give.

DeepSpeed 0.19.8, ``deepspeed/runtime/lr_schedules.py``: WarmupLR, WarmupDecayLR, WarmupCosineLR. A scheduler there
counts from -1 and is stepped after the optimizer, so steps 1 and 2 of a run both use the start of the warm-up. Under
WarmupCosineLR, step 1 uses a learning rate of 0 instead.
"""

import math
from collections.abc import Callable

from dsgpt.config.recipe_blocks import SchedulerRecipe

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
    high = recipe.warmup_max_lr if recipe.warmup_max_lr is not None else _default_max_lr(recipe, base_lr)
    return lambda step: low + (high - low) * ratio(step - 2) if step > 1 else low


def _default_max_lr(recipe: SchedulerRecipe, base_lr: float) -> float:
    return base_lr if recipe.type == "WarmupLR" else 0.001


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

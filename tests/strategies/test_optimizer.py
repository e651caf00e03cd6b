"""The optimizer and its schedule, beside PyTorch and DeepSpeed.

Groups, AdamW, weight decay and the state of a resume are compared with plain PyTorch in ``tests/benchmarks``.
"""

import itertools
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules

from dsgpt.config.recipe_blocks import OptimizerRecipe, SchedulerRecipe
from dsgpt.strategies.base import build_optimizer, build_schedule, global_norm, parameter_groups


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_uses_the_settings_of_the_recipe(nesterov):
    """Two equal gradients of 0.1 by hand; a matrix decays, a bias does not."""
    recipe = OptimizerRecipe(type="SGD", lr=1.0, momentum=0.5, nesterov=nesterov, weight_decay=0.25)
    named = {"wpe.weight": torch.nn.Parameter(torch.ones(2)), "ln_f.bias": torch.nn.Parameter(torch.ones(2))}
    optimizer = build_optimizer(parameter_groups(named, recipe), recipe)
    expected, momentum = {"wpe.weight": 1.0, "ln_f.bias": 1.0}, dict.fromkeys(named, 0.0)
    for _ in range(2):
        for name, parameter in named.items():
            parameter.grad = torch.full((2,), 0.1)
            gradient = 0.1 + (0.25 * expected[name] if name == "wpe.weight" else 0)
            momentum[name] = 0.5 * momentum[name] + gradient
            expected[name] -= gradient + 0.5 * momentum[name] if nesterov else momentum[name]
        optimizer.step()
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.detach(), torch.full((2,), expected[name]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_norm_is_exact_to_fp32(dtype, scale):
    """Also of many small values, and of one large value beside them."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3000, 200), (7,), (1,), (200, 50)]
    gradients = [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in shapes]
    gradients += [torch.tensor([scale]), torch.full((1_000_000,), 1e-4 * scale)]
    norm = global_norm(gradients)
    exact = torch.linalg.vector_norm(torch.cat([gradient.double().flatten() for gradient in gradients]))
    assert (norm.dtype, norm.shape) == (torch.float32, ())
    assert norm.item() == pytest.approx(exact.item(), rel=1e-7)


# Every learning rate equals the one that DeepSpeed's scheduler sets on a torch optimizer.


BASE_LR = 3e-4
STEPS = 60


def deepspeed_rates(kind: str, params: dict[str, Any], *, total_steps: int) -> list[float]:
    """The rate of every step. As in DeepSpeed's engine, the scheduler steps after the optimizer."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE_LR)
    if kind != "WarmupLR":
        params = {"total_num_steps": total_steps} | params
    scheduler = getattr(lr_schedules, kind)(optimizer, **params)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


WARMUPS = [1, 2, 3, 10, 59, 200]
TOTALS = [1, 2, 12, 40, 60, 500]
CASES: list[tuple[str, dict[str, Any], int]] = []
for warmup, warmup_type in itertools.product(WARMUPS, ("linear", "log")):
    common = {"warmup_num_steps": warmup, "warmup_type": warmup_type}
    CASES += [
        ("WarmupLR", common, STEPS),
        ("WarmupLR", common | {"warmup_min_lr": 1e-5, "warmup_max_lr": 7e-4}, STEPS),
        ("WarmupLR", common | {"warmup_min_lr": 1e-3}, STEPS),
    ]
    for total in TOTALS:
        CASES += [
            ("WarmupDecayLR", common, total),
            ("WarmupDecayLR", common | {"warmup_min_lr": 1e-5, "warmup_max_lr": 7e-4, "total_num_steps": total}, 77),
            ("WarmupCosineLR", common, total),
            ("WarmupCosineLR", common | {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.3, "total_num_steps": total}, 77),
        ]
CASES += [(kind, {}, total) for kind in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR") for total in (30, 2000)]
CASES += [("WarmupCosineLR", {"warmup_num_steps": 5, "cos_min_ratio": 0.0}, 20)]


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_every_rate_is_deepspeeds(kind):
    compared = 0
    for case, params, total_steps in CASES:
        if case != kind:
            continue
        schedule = build_schedule(SchedulerRecipe(type=kind, **params), base_lr=BASE_LR, total_steps=total_steps)
        ours = [schedule(step) for step in range(1, STEPS + 1)]
        assert ours == deepspeed_rates(kind, params, total_steps=total_steps), (params, total_steps)
        compared += len(ours)
    assert compared >= 36 * STEPS
    assert build_schedule(None, base_lr=0.25, total_steps=9)(7) == 0.25

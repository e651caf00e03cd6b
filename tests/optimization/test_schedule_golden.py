"""Every learning rate equals the one that DeepSpeed's scheduler sets on a torch optimizer."""

import itertools
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules

from dsgpt.config.recipe_blocks import SchedulerRecipe
from dsgpt.strategies.schedule import build_schedule

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
            (
                "WarmupCosineLR",
                common | {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.3, "total_num_steps": total},
                77,
            ),
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


@pytest.mark.parametrize("kind", ["WarmupDecayLR", "WarmupCosineLR"])
def test_an_omitted_total_is_the_length_of_the_run(kind):
    left_out = build_schedule(SchedulerRecipe(type=kind, warmup_num_steps=5), base_lr=1.0, total_steps=30)
    given = build_schedule(
        SchedulerRecipe(type=kind, warmup_num_steps=5, total_num_steps=30), base_lr=1.0, total_steps=999
    )
    assert [left_out(step) for step in range(1, 40)] == [given(step) for step in range(1, 40)]


def test_the_first_two_steps_share_the_start_of_the_warm_up():
    schedule = build_schedule(
        SchedulerRecipe(type="WarmupLR", warmup_num_steps=4, warmup_type="linear"), base_lr=0.4, total_steps=9
    )
    assert [schedule(step) for step in range(1, 9)] == pytest.approx([0.0, 0.0, 0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_without_a_scheduler_the_rate_is_constant():
    schedule = build_schedule(None, base_lr=0.25, total_steps=10)
    assert {schedule(step) for step in range(1, 100)} == {0.25}

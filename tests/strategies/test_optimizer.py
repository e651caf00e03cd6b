"""The optimizer and its schedule, beside PyTorch and DeepSpeed."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime import lr_schedules

from dsgpt.config.recipe_blocks import OptimizerRecipe, SchedulerRecipe
from dsgpt.model.config import GPT2Config, decays
from dsgpt.model.gpt2 import GPT2, initialize
from dsgpt.strategies.optimizer import (
    BLOCK,
    begin_state,
    block_norms,
    build_optimizer,
    build_schedule,
    global_norm,
    parameter_groups,
    set_learning_rate,
    square_sum,
)

# The optimizer: decay for the right parameters, each parameter in one group, and torch's arithmetic.


CONFIG = GPT2Config(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=101)
ADAMW = OptimizerRecipe(type="AdamW", lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.5)


def parameters() -> dict[str, torch.nn.Parameter]:
    model = GPT2(CONFIG)
    initialize(model, config=CONFIG, seed=0)
    return dict(model.named_parameters())


def test_decay_is_for_matrices_and_embeddings():
    by_name = parameters()
    assert {name for name in by_name if decays(name)} == {name for name, p in by_name.items() if p.dim() == 2}
    assert decays("wte.weight")
    assert decays("wpe.weight")
    assert not decays("ln_f.weight")


def test_every_parameter_is_in_exactly_one_group():
    by_name = parameters()
    decayed, plain = parameter_groups(by_name, ADAMW)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.5, 0.0)
    grouped = [id(parameter) for group in (decayed, plain) for parameter in group["params"]]
    assert len(grouped) == len(set(grouped)) == len(by_name)
    assert set(grouped) == {id(parameter) for parameter in by_name.values()}


def test_groups_do_not_depend_on_a_shards_shape():
    flat = {name: torch.nn.Parameter(parameter.detach().flatten()[:7]) for name, parameter in parameters().items()}
    sizes = [len(group["params"]) for group in parameter_groups(flat, ADAMW)]
    assert sizes == [len(group["params"]) for group in parameter_groups(parameters(), ADAMW)]


def test_adamw_uses_the_settings_of_the_recipe():
    by_name = parameters()
    optimizer = build_optimizer(parameter_groups(by_name, ADAMW), ADAMW)
    before = {name: parameter.detach().clone() for name, parameter in by_name.items()}
    for parameter in by_name.values():
        parameter.grad = torch.full_like(parameter, 0.1)
    set_learning_rate(optimizer, 0.02)
    optimizer.step()
    for name, parameter in by_name.items():
        # decoupled decay, then a step of 0.1 / (0.1 + eps)
        kept = before[name] * (1 - 0.02 * 0.5 if decays(name) else 1)
        torch.testing.assert_close(parameter.detach(), kept - 0.02 * 0.1 / (0.1 + 1e-6), atol=1e-6, rtol=1e-5)
        assert optimizer.state[parameter]["exp_avg"].flatten()[0].item() == pytest.approx(0.2 * 0.1, rel=1e-5)
        assert optimizer.state[parameter]["exp_avg_sq"].flatten()[0].item() == pytest.approx(0.1 * 0.01, rel=1e-5)


@pytest.mark.parametrize(("nesterov", "second"), [(False, 0.1 * (1 + 0.5)), (True, 0.1 * (1 + 0.5 * (1 + 0.5)))])
def test_sgd_uses_the_settings_of_the_recipe(nesterov, second):
    recipe = OptimizerRecipe(type="SGD", lr=1.0, momentum=0.5, nesterov=nesterov)
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = build_optimizer(parameter_groups({"wte.weight": weight}, recipe), recipe)
    for _ in range(2):
        before = weight.detach().clone()
        weight.grad = torch.full((3,), 0.1)
        optimizer.step()
    torch.testing.assert_close(before - weight.detach(), torch.full((3,), second))


@pytest.mark.parametrize(
    "recipe",
    [ADAMW, OptimizerRecipe(type="SGD", lr=1.0, momentum=0.5), OptimizerRecipe(type="SGD", lr=1.0)],
    ids=["AdamW", "momentum", "SGD"],
)
def test_begin_state_makes_the_state_of_the_first_step(recipe):
    def built(weight: torch.nn.Parameter) -> torch.optim.Optimizer:
        return build_optimizer(parameter_groups({"wte.weight": weight}, recipe), recipe)

    stepped, weight = torch.nn.Parameter(torch.zeros(3, 2)), torch.nn.Parameter(torch.zeros(3, 2))
    stepped.grad = torch.ones(3, 2)
    expected, found = built(stepped), built(weight)
    expected.step()
    moments = begin_state(found, weight, steps=1)
    theirs, ours = dict(expected.state[stepped]), dict(found.state[weight])
    assert moments.keys() == {key for key in theirs if theirs[key] is not None} - {"step"}
    assert {key: (value.shape, value.dtype) for key, value in ours.items()} == {
        key: (value.shape, value.dtype) for key, value in theirs.items() if value is not None
    }
    assert ours.get("step") == theirs.get("step")
    assert all(not value.any() and not value.requires_grad for value in moments.values())


def test_sgd_uses_the_weight_decay_of_the_recipe():
    recipe = OptimizerRecipe(type="SGD", lr=1.0, weight_decay=0.25)
    named = {"wpe.weight": torch.nn.Parameter(torch.ones(2)), "ln_f.bias": torch.nn.Parameter(torch.ones(2))}
    optimizer = build_optimizer(parameter_groups(named, recipe), recipe)
    for parameter in named.values():
        parameter.grad = torch.zeros(2)
    optimizer.step()
    assert named["wpe.weight"].tolist() == [0.75, 0.75]
    assert named["ln_f.bias"].tolist() == [1.0, 1.0]


# The global gradient norm, compared with numpy in float64.


def in_float64(gradients: list[torch.Tensor]) -> float:
    return float(np.sqrt(sum((part.double().numpy() ** 2).sum() for part in gradients)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_norm_is_exact_to_fp32(dtype, scale):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3000, 200), (7,), (1,), (200, 50)]
    gradients = [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in shapes]
    norm = global_norm(gradients)
    assert (norm.dtype, norm.shape) == (torch.float32, ())
    assert norm.item() == pytest.approx(in_float64(gradients), rel=1e-7)


def test_norms_of_blocks_are_those_of_consecutive_elements():
    gradient = torch.arange(2 * BLOCK + 3, dtype=torch.float32)
    norms = block_norms(gradient.view(-1, 1))
    assert norms.dtype == torch.float64
    expected = [torch.linalg.vector_norm(part.double()) for part in gradient.split(BLOCK)]
    torch.testing.assert_close(norms, torch.stack(expected), rtol=1e-6, atol=0)


def test_the_squares_of_nothing_are_zero():
    assert square_sum([]).item() == 0
    assert square_sum([torch.empty(0), torch.ones(3)]).item() == pytest.approx(3)


def test_many_small_values_beside_a_large_one_count():
    gradients = [torch.tensor([1.0]), torch.full((1_000_000,), 1e-4)]
    assert global_norm(gradients).item() == pytest.approx(1.01**0.5, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_gives_a_non_finite_norm(bad):
    assert not torch.isfinite(global_norm([torch.ones(3), torch.tensor([bad])]))


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

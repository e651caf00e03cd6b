"""The optimizer: decay for the right parameters, each parameter in one group, and torch's arithmetic."""

import pytest
import torch

from dsgpt.config.recipe_blocks import OptimizerRecipe
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2, initialize
from dsgpt.model.names import decays
from dsgpt.strategies.optimizer import begin_state, build_optimizer, parameter_groups, set_learning_rate

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

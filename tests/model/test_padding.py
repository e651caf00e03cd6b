"""The rows that pad the vocabulary to a multiple of 64 have no effect."""

import pytest
import torch

from dsgpt.config.recipe_blocks import OptimizerRecipe
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2, initialize
from dsgpt.strategies.optimizer import build_optimizer, parameter_groups


def small_model(vocab_size: int) -> GPT2:
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, block_size=12, vocab_size=vocab_size)
    model = GPT2(config)
    initialize(model, config=config, seed=0)
    return model


IDS = torch.arange(24).view(2, 12) * 4 % 97


@pytest.mark.parametrize(("vocab_size", "rows"), [(1, 64), (63, 64), (64, 64), (65, 128), (101, 128), (50_257, 50_304)])
def test_padded_size(vocab_size, rows):
    config = GPT2Config(n_layer=1, n_head=1, n_embd=2, block_size=1, vocab_size=vocab_size)
    assert config.padded_vocab_size == rows
    assert GPT2(config).lm_head.weight.shape == (rows, 2)


@pytest.mark.parametrize("scale", [1e4, -1e4, float("inf"), float("nan")])
def test_extreme_weights_in_padded_rows_change_nothing(scale):
    model = small_model(101).eval()
    logits, loss = model(IDS), model(IDS, IDS.roll(1))
    with torch.no_grad():
        model.wte.weight[101:] = scale
    assert model(IDS).shape == (2, 12, 101)
    assert torch.equal(model(IDS), logits)
    assert torch.equal(model(IDS, IDS.roll(1)), loss)
    assert model(IDS).argmax(dim=-1).max() < 101


def test_padded_rows_have_no_gradient_and_stay_zero():
    model = small_model(101)
    recipe = OptimizerRecipe(type="AdamW", lr=0.1, weight_decay=0.1)
    optimizer = build_optimizer(parameter_groups(dict(model.named_parameters()), recipe), recipe)
    for _ in range(3):
        optimizer.zero_grad()
        model(IDS, IDS.roll(1)).backward()
        assert not model.wte.weight.grad[101:].any()
        assert model.wte.weight.grad[:101].abs().sum(dim=1).min() > 0  # the softmax gives every real row a gradient
        optimizer.step()
    assert not model.wte.weight[101:].any()

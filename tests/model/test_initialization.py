"""Initial weights depend on the seed and the parameter's name, and nothing else."""

import pytest
import torch

from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2, initial_value, initialize

CONFIG = GPT2Config(n_layer=8, n_head=4, n_embd=64, block_size=256, vocab_size=1000)


def initialized(config: GPT2Config = CONFIG, *, seed: int = 1) -> dict[str, torch.Tensor]:
    model = GPT2(config)
    initialize(model, config=config, seed=seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def value(name: str, *, seed: int = 1) -> torch.Tensor:
    return initial_value(name, SHAPES[name], config=CONFIG, seed=seed)


SHAPES = {name: parameter.shape for name, parameter in GPT2(CONFIG).named_parameters()}
DRAWN = [name for name in SHAPES if name.endswith(".weight") and "ln_" not in name]


def test_a_parameter_initialized_alone_has_the_same_values():
    torch.manual_seed(5)
    whole = initialized()
    torch.manual_seed(6)  # the global random stream has no influence
    for name in reversed(SHAPES):
        assert torch.equal(value(name), whole[name]), name


def test_other_parameters_have_no_influence():
    deeper = initialized(GPT2Config(**(CONFIG.as_dict() | {"n_layer": 2, "dropout": 0.3})))
    whole = initialized()
    assert set(deeper) < set(whole)
    for name, part in deeper.items():
        scale = 2.0 if name.endswith("proj.weight") else 1.0  # 1/sqrt(2 * 2) against 1/sqrt(2 * 8)
        torch.testing.assert_close(part, whole[name] * scale, atol=1e-8, rtol=1e-6)


def test_every_name_and_every_seed_has_different_values():
    firsts = [value(name, seed=seed).flatten()[:4] for name in DRAWN for seed in (1, 2, 12)]
    directions = torch.stack([torch.nn.functional.normalize(first, dim=0) for first in firsts])
    similarity = directions @ directions.T - torch.eye(len(firsts))
    assert similarity.abs().max() < 0.999999


@pytest.mark.parametrize("name", DRAWN)
def test_standard_deviation_and_mean(name):
    drawn = value(name)[: CONFIG.vocab_size] if name == "wte.weight" else value(name)
    residual = name.endswith(("attn.proj.weight", "mlp.proj.weight"))
    std = 0.02 / (2 * CONFIG.n_layer) ** 0.5 if residual else 0.02
    assert drawn.std().item() == pytest.approx(std, rel=0.05)
    assert abs(drawn.mean().item()) < 5 * std / drawn.numel() ** 0.5


def test_biases_layer_norms_and_padding_are_constant():
    for name, parameter in initialized().items():
        if name.endswith(".bias"):
            assert not parameter.any(), name
        elif "ln_" in name:
            assert (parameter == 1).all(), name
    padded = initialized()["wte.weight"][CONFIG.vocab_size :]
    assert padded.shape == (24, 64)
    assert not padded.any()


def test_golden_values():
    """Fails if a refactoring changes the initial weights."""
    drawn = initial_value("blocks.0.attn.qkv.weight", torch.Size([192, 64]), config=CONFIG, seed=1337)
    assert drawn[0, :3].tolist() == pytest.approx([-0.0075954907, 0.0095580406, 0.01964546], abs=1e-8)

"""The published sizes, and impossible shapes."""

from dataclasses import asdict

import pytest
import torch

from dsgpt.model.config import PRESETS, GPT2Config, shape_problems
from dsgpt.model.gpt2 import GPT2

PUBLISHED = {"small": 124_439_808, "medium": 354_823_168, "large": 774_030_080, "xl": 1_557_611_200}


@pytest.mark.parametrize(("size", "count"), PUBLISHED.items())
def test_published_parameter_counts(size, count):
    assert PRESETS[size].parameter_count() == count


def test_tiny_is_about_13_million():
    assert PRESETS["tiny"].parameter_count() == pytest.approx(13e6, rel=0.05)


@pytest.mark.parametrize("size", PRESETS)
def test_formula_counts_the_real_model(size):
    config = PRESETS[size]
    with torch.device("meta"):
        model = GPT2(config)
    padding = (config.padded_vocab_size - config.vocab_size) * config.n_embd
    assert sum(parameter.numel() for parameter in model.parameters()) - padding == config.parameter_count()


def test_names_are_canonical():
    """Every strategy, checkpoint and export uses these names."""
    config = GPT2Config(n_layer=1, n_head=1, n_embd=4, block_size=2, vocab_size=3)
    kinds = ("ln_1", "attn.qkv", "attn.proj", "ln_2", "mlp.fc", "mlp.proj")
    block = [f"blocks.0.{kind}.{what}" for kind in kinds for what in ("weight", "bias")]
    expected = ["wte.weight", "wpe.weight", *block, "ln_f.weight", "ln_f.bias"]
    assert [name for name, _ in GPT2(config).named_parameters()] == expected


GOOD = {"n_layer": 2, "n_head": 4, "n_embd": 48, "block_size": 8, "vocab_size": 10, "dropout": 0.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_head", 5),
        ("n_head", 17),
        ("n_head", 96),
        ("n_layer", 0),
        ("n_head", -1),
        ("vocab_size", 0),
        ("dropout", 1.0),
        ("dropout", float("nan")),
    ],
)
def test_impossible_shapes_name_the_flag(snapshot, field, value):
    changes = {field: value}
    assert shape_problems(GOOD | changes) == snapshot
    with pytest.raises(ValueError, match="--"):
        GPT2Config(**GOOD | changes)


@pytest.mark.parametrize("width", [36, 48, 97, 1_000_000_007])
@pytest.mark.parametrize("heads", [5, 7, 50])
def test_suggested_heads_divide_the_width(width, heads):
    (line,) = shape_problems(GOOD | {"n_embd": width, "n_head": heads})
    named = [int(word) for word in line.split("take ")[1].removesuffix(" heads").split(" or ")]
    assert named
    assert all(width % count == 0 for count in named)


def test_shape_survives_a_round_trip():
    assert GPT2Config(**PRESETS["tiny"].as_dict()) == PRESETS["tiny"]
    assert asdict(PRESETS["tiny"]) == PRESETS["tiny"].as_dict()

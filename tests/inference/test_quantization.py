"""Weights in 8 bits: how far they are off, and that evaluation predicts with the weights that generation has."""

import pytest
import torch
from random_models import random_model, random_prompts

from dsgpt.inference.decoder import Decoder, _Step, round_to_int8, to_int8
from dsgpt.inference.generation import generate_batch
from dsgpt.model.gpt2 import GPT2, Block


def test_no_weight_is_off_by_more_than_half_a_step():
    """A step is a 127th of the largest weight of the same output; an output without weights stays one."""
    weight = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1], [1e-3], [100], [1], [0]]
    )
    values, scales = to_int8(weight)
    assert values.dtype == torch.int8
    assert (values.abs().amax(dim=1)[:4] == 127).all()
    steps = weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((values * scales[:, None] - weight).abs() <= steps / 2 * 1.0001).all()


@torch.inference_mode()
@pytest.mark.parametrize(("rows", "length"), [(1, 5), (3, 4), (2, 20)])
def test_evaluation_has_the_weights_of_generation(rows, length):
    """The logits in 8 bits are those of the rounded model within the rounding of bf16, which is finer than 8 bits."""
    ids = torch.tensor([row * 9 for row in random_prompts(rows, longest=1)])[:, :1].repeat(1, length)
    model, exact = random_model().to(torch.bfloat16), random_model()
    round_to_int8(exact)
    sequences = Decoder(model, batch_size=rows, quantize="int8").begin(ids[:, :-1].tolist(), new_tokens=1)
    sequences.read_prompts()
    found, expected, unrounded = sequences.append(ids[:, -1]), exact(ids)[:, -1], random_model()(ids)[:, -1]
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()
    assert (unrounded - expected).abs().max() > 0.002 * expected.abs().max()


def without_biases() -> GPT2:
    """In bf16; a bias would round the products a second time."""
    model = random_model().to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    return model


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("engine", ["decoder", "compiled step"])
def test_every_weight_of_the_head_and_of_the_layers_is_the_rounded_one(engine, rows):
    """Exactly: products with rows of the identity, few or many at a time, are the weights that the engine reads.

    The bounds on logits above would not see a single layer that is not rounded.
    """
    model, rounded = without_biases(), without_biases()
    round_to_int8(rounded)
    step = _Step(model, quantize="int8") if engine == "compiled step" else Decoder(model, quantize="int8")
    blocks = [block for block in rounded.blocks if isinstance(block, Block)]
    pairs = [(step.head, rounded.lm_head.weight[: rounded.config.vocab_size])]
    for layer, block in zip(step.layers, blocks, strict=True):
        linears = block.attn.qkv, block.attn.proj, block.mlp.fc, block.mlp.proj
        pairs += zip((layer.qkv, layer.proj, layer.fc, layer.out), (each.weight for each in linears), strict=True)
    assert len(pairs) == 1 + 4 * len(blocks)
    for linear, weight in pairs:
        product = linear if engine == "compiled step" else linear.product
        identity = torch.eye(weight.shape[1], dtype=torch.bfloat16).split(rows)
        assert torch.equal(torch.cat([product(part) for part in identity]).T, weight)


def test_the_embedding_of_ids_is_not_rounded():
    model, before = random_model(), random_model()
    round_to_int8(model)
    assert torch.equal(model.wte.weight, before.wte.weight)
    assert not torch.equal(model.lm_head.weight, before.lm_head.weight)
    assert not torch.equal(model.blocks[0].mlp.fc.weight, before.blocks[0].mlp.fc.weight)


def test_a_batch_is_generated():
    decoder = Decoder(random_model().to(torch.bfloat16), batch_size=3, quantize="int8")
    assert len(list(generate_batch(decoder, random_prompts(3, longest=9), new_tokens=6))) == 6

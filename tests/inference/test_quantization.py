"""Weights in 8 bits: how far they are off, and that evaluation predicts with the weights that generation has."""

import pytest
import torch
from random_models import random_model, random_prompts

from dsgpt.inference.decoder import Decoder
from dsgpt.inference.generation import generate_batch
from dsgpt.inference.quantization import round_to_int8, to_int8


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


def test_the_embedding_of_ids_is_not_rounded():
    model, before = random_model(), random_model()
    round_to_int8(model)
    assert torch.equal(model.wte.weight, before.wte.weight)
    assert not torch.equal(model.lm_head.weight, before.lm_head.weight)
    assert not torch.equal(model.blocks[0].mlp.fc.weight, before.blocks[0].mlp.fc.weight)


def test_a_batch_is_generated():
    decoder = Decoder(random_model().to(torch.bfloat16), batch_size=3, quantize="int8")
    assert len(list(generate_batch(decoder, random_prompts(3, longest=9), new_tokens=6))) == 6

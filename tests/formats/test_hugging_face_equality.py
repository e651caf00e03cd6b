"""With the same weights the model is transformers' GPT-2: logits, loss and the gradient of every parameter."""

import pytest
import torch
from transformers import GPT2Config as HuggingFaceConfig
from transformers import GPT2LMHeadModel

from dsgpt.formats.hugging_face import to_hugging_face
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2, initialize

SHAPES = [
    {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24, "vocab_size": 101},
    {"n_layer": 3, "n_head": 1, "n_embd": 8, "block_size": 7, "vocab_size": 128},
    {"n_layer": 1, "n_head": 3, "n_embd": 12, "block_size": 1, "vocab_size": 63},
]


def pair(shape: dict[str, int]) -> tuple[GPT2, GPT2LMHeadModel]:
    """Our model, every parameter random (biases and LayerNorms too), and theirs with the same values."""
    config = GPT2Config(**shape)
    ours = GPT2(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    theirs = GPT2LMHeadModel(
        HuggingFaceConfig(
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_embd=config.n_embd,
            n_positions=config.block_size,
            vocab_size=config.vocab_size,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="eager",
        )
    ).train()
    mapped = dict(to_hugging_face(ours.named_parameters(), config))
    mapped = {name: value.detach() for name, value in mapped.items()}
    outcome = theirs.load_state_dict(mapped, strict=False)
    assert outcome.unexpected_keys == []
    assert outcome.missing_keys in ([], ["lm_head.weight"])  # tied to wte
    return ours.train(), theirs


def batch(shape: dict[str, int], *, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, shape["vocab_size"], (3, length + 1), generator=generator)
    ids[0, 0], ids[-1, -1] = shape["vocab_size"] - 1, shape["vocab_size"] - 1  # the last real id, read and predicted
    return ids[:, :-1], ids[:, 1:]


CASES = [(shape, length) for shape in SHAPES for length in sorted({1, 5, shape["block_size"]})]
CASES = [(shape, length) for shape, length in CASES if length <= shape["block_size"]]


@pytest.mark.parametrize(("shape", "length"), CASES)
def test_logits_loss_and_every_gradient(shape, length):
    ours, theirs = pair(shape)
    inputs, targets = batch(shape, length=length)
    logits, expected = ours(inputs), theirs(inputs).logits
    assert logits.shape == expected.shape == (3, length, shape["vocab_size"])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)

    loss = ours(inputs, targets)
    expected_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected_loss, atol=1e-5, rtol=0)
    loss.backward()
    expected_loss.backward()
    gradients = dict(to_hugging_face(((name, p.grad) for name, p in ours.named_parameters()), ours.config))
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert set(gradients) == set(wanted)
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0 or length == 1, name
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_loss_is_transformers_own_loss():
    ours, theirs = pair(SHAPES[0])
    ids = batch(SHAPES[0], length=20)[0]
    expected = theirs(ids, labels=ids).loss
    torch.testing.assert_close(ours(ids[:, :-1], ids[:, 1:]), expected, atol=1e-5, rtol=0)


def test_ignored_targets_count_in_no_loss():
    ours, _ = pair(SHAPES[0])
    inputs, targets = batch(SHAPES[0], length=6)
    few = targets.clone()
    few[1:] = -100
    torch.testing.assert_close(ours(inputs, few), ours(inputs[:1], targets[:1]))
    summed = ours(inputs, few, reduction="sum")
    torch.testing.assert_close(summed, ours(inputs[:1], targets[:1]) * 6)


def test_initial_model_carries_over_too():
    config = GPT2Config(**SHAPES[0])
    ours, theirs = pair(SHAPES[0])
    initialize(ours, config=config, seed=3)
    theirs.load_state_dict(dict(to_hugging_face(ours.named_parameters(), config)), strict=False)
    inputs, _ = batch(SHAPES[0], length=9)
    torch.testing.assert_close(ours(inputs), theirs(inputs).logits, atol=1e-5, rtol=1e-5)

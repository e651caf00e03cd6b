"""Dropout is applied only in training; recomputing activations changes no value."""

import pytest
import torch
from torch import nn

from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2, initialize

SHAPE = {"n_layer": 3, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 101}
IDS = torch.randint(0, 101, (4, 17), generator=torch.Generator().manual_seed(0))


def model_with(dropout: float, **options: bool) -> GPT2:
    config = GPT2Config(**SHAPE, dropout=dropout)
    model = GPT2(config, **options)
    initialize(model, config=config, seed=0)
    return model


def loss_and_gradients(model: GPT2) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(7)
    loss = model(IDS[:, :-1], IDS[:, 1:])
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def test_dropout_is_applied_in_training_and_not_in_evaluation():
    model = model_with(0.5)
    assert not torch.equal(model.train()(IDS[:, :-1]), model(IDS[:, :-1]))
    assert torch.equal(model.eval()(IDS[:, :-1]), model(IDS[:, :-1]))
    assert torch.equal(model(IDS[:, :-1]), model_with(0.0).train()(IDS[:, :-1]))


def test_every_dropout_layer_drops_its_share():
    """GPT-2 drops after the embedding, after attention's and the MLP's projection, and inside attention."""
    model = model_with(0.25).train()
    dropped: dict[str, float] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):

            def note(_module, _inputs, output, name=name):
                dropped[name] = (output == 0).float().mean().item()

            module.register_forward_hook(note)
    torch.manual_seed(0)
    model(IDS[:, :-1])
    places = [f"blocks.{layer}.{part}.residual_dropout" for layer in range(3) for part in ("attn", "mlp")]
    assert set(dropped) == {"embedding_dropout", *places}
    assert all(share == pytest.approx(0.25, abs=0.05) for share in dropped.values()), dropped


def test_attention_weights_are_dropped_too():
    model = model_with(0.5).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert not torch.equal(model(IDS[:, :-1]), model(IDS[:, :-1]))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_changes_no_value(dropout):
    loss, gradients = loss_and_gradients(model_with(dropout).train())
    again, recomputed = loss_and_gradients(model_with(dropout, activation_checkpointing=True).train())
    assert torch.equal(loss, again)
    assert all(torch.equal(gradients[name], recomputed[name]) for name in gradients)


@pytest.mark.parametrize(("checkpointing", "passes"), [(False, 1), (True, 2)])
def test_activation_checkpointing_recomputes_every_block(checkpointing, passes):
    model = model_with(0.0, activation_checkpointing=checkpointing).train()
    ran = [0] * 3
    for layer, block in enumerate(model.blocks):

        def count(_module, _inputs, layer=layer):
            ran[layer] += 1

        block.register_forward_pre_hook(count)
    loss_and_gradients(model)
    assert ran == [passes] * 3


def test_later_tokens_do_not_influence_earlier_ones():
    model = model_with(0.0).eval()
    changed = IDS[:, :-1].clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 101
    before, after = model(IDS[:, :-1]), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9], after[:, 9])

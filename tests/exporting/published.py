"""Small random models as Hugging Face's own library publishes them, and a pickle that no model may be."""

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from dsgpt.model.gpt2 import GPT2
from dsgpt.model.gpt2 import GPT2Config as OurConfig

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64}


def published(*, vocab_size: int, **changes: Any) -> GPT2LMHeadModel:
    """A model in evaluation mode with every parameter random, biases and LayerNorms too."""
    settings = SHAPE | {"vocab_size": vocab_size, "bos_token_id": 0, "eos_token_id": 0} | changes
    model = GPT2LMHeadModel(GPT2Config(**settings)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def publish(folder: Path, *, vocab_size: int, **changes: Any) -> GPT2LMHeadModel:
    """The same, written into ``folder``."""
    model = published(vocab_size=vocab_size, **changes)
    model.save_pretrained(folder)
    return model


class RunsCode:
    """Unpickled without restriction, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def our_model(weights: dict[str, torch.Tensor], config: OurConfig) -> GPT2:
    """Our model with the given canonical weights, in evaluation mode."""
    model = GPT2(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


@torch.no_grad()
def largest_difference(ours: GPT2, theirs: GPT2LMHeadModel) -> float:
    """Of the logits, over random ids in every position."""
    config = ours.config
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(config.vocab_size, (3, config.block_size), generator=generator)
    a, b = ours(ids), theirs(ids).logits
    assert a.shape == b.shape == (3, config.block_size, config.vocab_size)
    return (a - b).abs().max().item()

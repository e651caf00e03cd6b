"""A small model with random weights, large enough that logits differ by far more than rounding."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from dsgpt.formats.hugging_face import hugging_face_config, to_hugging_face
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2

VOCABULARY = 101


def random_model(block_size: int = 24) -> GPT2:
    config = GPT2Config(n_layer=3, n_head=4, n_embd=32, block_size=block_size, vocab_size=VOCABULARY, dropout=0.5)
    model = GPT2(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


def random_prompts(count: int, *, longest: int) -> list[list[int]]:
    """Prompts of mixed lengths."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def save_published(model: GPT2, folder: Path) -> Path:
    """The model as transformers would save it, without a tokenizer."""
    folder.mkdir()
    config = hugging_face_config(model.config, dtype="fp32", end_of_text=None)
    (folder / "config.json").write_text(json.dumps(config))
    weights = to_hugging_face(model.named_parameters(), model.config)
    save_file({name: value.detach().contiguous() for name, value in weights}, folder / "model.safetensors")
    return folder

"""Weights in 8 bits. Each output has its own scale, and zero stays zero; activations are not quantized."""

import torch
from torch import Tensor, nn

from dsgpt.model.gpt2 import GPT2

LARGEST = 127


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values in int8, (out, in), and scales in fp32, (out,), whose product is close to ``weight``, (out, in)."""
    wide = weight.float()
    scales = (wide.abs().amax(dim=1) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scales[:, None]).round().to(torch.int8), scales


@torch.no_grad()
def round_to_int8(model: GPT2) -> None:
    """Replace the weights that ``Decoder(model, quantize="int8")`` quantizes by what they become.

    The embedding of ids keeps its weights: the head, which shares them, gets its own.
    """
    model.lm_head.weight = nn.Parameter(_rounded(model.lm_head.weight))
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear):
            module.weight.copy_(_rounded(module.weight))


def _rounded(weight: Tensor) -> Tensor:
    values, scales = to_int8(weight)
    return (values * scales.to(weight.dtype).float()[:, None]).to(weight.dtype)

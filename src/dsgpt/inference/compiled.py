"""The step of one token through ``torch.compile``: one graph for each batch size and each size of the cache.

On GPUs it becomes a CUDA graph. On CPUs weights are constants, so that the compiler arranges them, and it measures
which of its products and PyTorch's is faster.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsgpt.inference.quantization import to_int8
from dsgpt.model.gpt2 import GPT2, Block

GRANULE = 128
"""Positions by which the cache grows from one graph to the next."""

Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""See ``_Step.forward``."""


class _Int8(nn.Module):
    """A linear layer with weights in 8 bits."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        values, scales = to_int8(weight.detach())
        self.values: Tensor
        self.scales: Tensor
        self.register_buffer("values", values)
        self.register_buffer("scales", scales.to(weight.dtype))
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """(N, in) to (N, out)."""
        if x.device.type == "cpu":
            out: Tensor = torch.ops.aten._weight_int8pack_mm(x, self.values, self.scales)
        else:
            out = F.linear(x, self.values.to(x.dtype)) * self.scales
        return out if self.bias is None else out + self.bias


class _Layer(nn.Module):
    """The parts of a transformer block."""

    def __init__(self, block: Block, linear: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = block.ln_1, block.ln_2
        self.qkv, self.proj = linear(block.attn.qkv), linear(block.attn.proj)
        self.fc, self.out = linear(block.mlp.fc), linear(block.mlp.proj)


class _Step(nn.Module):
    """One token of every sequence of a batch."""

    def __init__(self, model: GPT2, *, quantize: str) -> None:
        super().__init__()

        def linear(module: nn.Linear) -> nn.Module:
            return _Int8(module.weight, module.bias) if quantize == "int8" else module

        self.heads = model.config.n_head
        self.wte, self.wpe, self.ln_f = model.wte, model.wpe, model.ln_f
        head = nn.Linear(model.config.n_embd, model.config.vocab_size, bias=False, device="meta")
        head.weight = nn.Parameter(model.wte.weight.detach()[: model.config.vocab_size], requires_grad=False)
        self.head = linear(head)
        self.layers = nn.ModuleList(_Layer(block, linear) for block in model.blocks if isinstance(block, Block))

    def forward(self, ids: Tensor, places: Tensor, column: Tensor, padding: Tensor, cache: Tensor) -> Tensor:
        """The logits that follow ``ids``, (B, V) in fp32.

        Args:
            ids: (B,).
            places: their positions in the model, (B,).
            column: their place in the cache, (1,).
            padding: positions of the cache that each sequence leaves unused at its start, (B, 1).
            cache: of each layer, keys and values, (B, nh, P, hs) each; gets those of ``ids``.
        """
        batch, columns = len(ids), torch.arange(cache.shape[4], device=ids.device)
        seen = ((columns <= column) & (columns >= padding))[:, None, None]  # (B, 1, 1, P)
        x = self.wte(ids) + self.wpe(places)  # (B, C)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, _Layer)
            qkv = layer.qkv(layer.attention_norm(x)).view(batch, 1, 3, self.heads, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, nh, 1, hs) each
            cache[index, 0].index_copy_(2, column, k)
            cache[index, 1].index_copy_(2, column, v)
            y = F.scaled_dot_product_attention(q, cache[index, 0], cache[index, 1], attn_mask=seen)
            x = x + layer.proj(y.reshape(batch, -1))
            x = x + layer.out(F.gelu(layer.fc(layer.mlp_norm(x)), approximate="tanh"))
        logits: Tensor = self.head(self.ln_f(x)).float()
        return logits


def compiled_step(model: GPT2, *, quantize: str) -> Step:
    """The step of ``model``, which compiles when it is first called with a batch size and a size of the cache."""
    step = _Step(model, quantize=quantize).eval().requires_grad_(False)
    if model.wte.weight.device.type == "cuda":
        graph: Step = torch.compile(step, dynamic=False, mode="reduce-overhead")
        return graph
    compiled = torch.compile(step, dynamic=False)

    def call(*inputs: Tensor) -> Tensor:
        with warnings.catch_warnings(), _settings():
            warnings.simplefilter("ignore", UserWarning)  # the compiler's own use of deprecated storages
            found: Tensor = compiled(*inputs)
        return found

    return call


def _settings() -> Any:
    """The compiler's settings for CPUs."""
    from torch._inductor import config, select_algorithm  # noqa: PLC0415 - takes a second

    select_algorithm.PRINT_AUTOTUNE = False
    return config.patch(
        freezing=True,
        max_autotune=True,
        max_autotune_gemm_backends="CPP,ATEN",
        max_autotune_report_choices_stats=False,
    )

"""Generate tokens with a key-value cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2


class Cache:
    """Keys and values of every layer for all positions so far, preallocated for the model's whole context."""

    def __init__(self, config: GPT2Config, *, batch_size: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.n_layer, 2, batch_size, config.n_head, config.block_size, config.n_embd // config.n_head)
        self._store = torch.empty(shape, dtype=dtype, device=device)  # (layer, key or value, B, nh, P, hs)
        self._last_layer = config.n_layer - 1
        self.length = 0

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``key``, ``value``, (B, nh, T, hs), for ``layer``; return all so far, (B, nh, length + T, hs)."""
        end = self.length + key.shape[2]
        keys, values = self._store[layer]
        keys[:, :, self.length : end], values[:, :, self.length : end] = key, value
        if layer == self._last_layer:
            self.length = end
        return keys[:, :, :end], values[:, :, :end]


@torch.inference_mode()
def generate(
    model: GPT2,
    prompt: Tensor,
    *,
    new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Yield ``new_tokens`` ids that continue ``prompt``, one at a time.

    Args:
        model: in evaluation mode.
        prompt: ids of shape (T,), at least one, on the model's device; T + new_tokens must fit its positions.
        new_tokens: how many to generate.
        temperature: 0 always takes the likeliest id; higher is more varied.
        top_k: sample among the ``top_k`` likeliest ids only.
        generator: the random stream; on the model's device.

    Raises:
        ValueError: prompt and new tokens do not fit the model's positions.
    """
    positions = model.config.block_size
    if prompt.numel() == 0 or prompt.numel() + new_tokens > positions:
        raise ValueError(
            f"a prompt of {prompt.numel()} ids and {new_tokens} new ones do not fit into {positions} positions"
        )
    weight = model.wte.weight
    cache = Cache(model.config, batch_size=1, dtype=weight.dtype, device=weight.device)
    ids = prompt[None]  # (1, T)
    for _ in range(new_tokens):
        logits = model(ids, cache=cache)[0, -1].float()  # (V,)
        ids = _choose(logits, temperature=temperature, top_k=top_k, generator=generator)[None]  # (1, 1)
        yield int(ids)


def _choose(logits: Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(keepdim=True)
    if top_k is not None and top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    return torch.multinomial((logits / temperature).softmax(dim=0), 1, generator=generator)

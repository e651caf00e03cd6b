"""The adapter to this project's inference room: the only file of this suite that knows how it decodes."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dsgpt.checkpointing.selection import find_checkpoint, open_model_files
from dsgpt.inference.decode import Cache, generate
from dsgpt.inference.trained_model import load_model
from dsgpt.model.gpt2 import GPT2, Attend, Block, dense_attention


class OwnModel:
    """The model of a checkpoint in fp32, decoded greedily.

    Args:
        checkpoint: a run folder, a checkpoint or a portable folder.
        device: ``cpu`` or ``cuda``.

    Raises:
        UserError: there is no usable model.
    """

    def __init__(self, checkpoint: Path, device: str) -> None:
        files = open_model_files(find_checkpoint(checkpoint, flag="--checkpoint"))
        self._model = load_model(files, torch.device(device))
        self._device = torch.device(device)

    def generate(self, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> Iterator[list[int]]:
        """Yield the next id of every prompt, ``new_tokens`` times; each is on the host when it is yielded."""
        if len(prompts) == 1:
            _attend_with(self._model, dense_attention)
            for token in generate(self._model, torch.tensor(prompts[0], device=self._device), new_tokens=new_tokens):
                yield [token]
            return
        yield from _batched(self._model, prompts, new_tokens=new_tokens)

    @torch.inference_mode()
    def margins(self, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        """By how much the likeliest id's logit exceeds the second's, at each of ``ids``, which continue ``prompt``."""
        _attend_with(self._model, dense_attention)
        read = torch.tensor([[*prompt, *ids[:-1]]], device=self._device)
        logits = self._model(read)[0, len(prompt) - 1 :].float()  # (new tokens, V)
        first, second = logits.topk(2, dim=1).values.T
        margins: list[float] = (first - second).tolist()
        return margins


def _attend_with(model: GPT2, attend: Attend) -> None:
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attn.attend = attend


def _masked(mask: Tensor) -> Attend:
    """Attention to the positions of ``mask``, (B, 1, T, P)."""

    def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool) -> Tensor:  # noqa: ARG001
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attend


@torch.inference_mode()
def _batched(model: GPT2, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> Iterator[list[int]]:
    """Decode prompts of different lengths together; the shorter ones are padded on the left."""
    device, width = model.wte.weight.device, max(map(len, prompts))
    padding = torch.tensor([width - len(prompt) for prompt in prompts], device=device)[:, None]  # (B, 1)
    padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    ids = torch.tensor(padded, device=device)  # (B, T)
    cache = Cache(model.config, batch_size=len(prompts), dtype=model.wte.weight.dtype, device=device)
    for _ in range(new_tokens):
        places = torch.arange(cache.length, cache.length + ids.shape[1], device=device)  # (T,)
        seen = torch.arange(cache.length + ids.shape[1], device=device)  # (P,)
        mask = (seen[None, None] <= places[:, None]) & (seen >= padding)[:, None]  # (B, T, P)
        mask |= (seen == places[:, None])[None]  # a padded position sees itself, or its softmax would be NaN
        _attend_with(model, _masked(mask[:, None]))
        x = model.wte(ids) + model.wpe((places - padding).clamp(min=0))  # (B, T, C)
        for block in model.blocks:
            x = block(x, cache)
        ids = model.lm_head(model.ln_f(x[:, -1:])).argmax(dim=2)  # (B, 1)
        yield ids[:, 0].tolist()

"""Perplexity over windows that may overlap.

Of overlapping windows only the tokens that no earlier window predicted count, so each token counts once, with at least
``length - stride`` tokens before it (https://huggingface.co/docs/transformers/perplexity).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsgpt.model.gpt2 import GPT2

_IGNORED = -100
"""A target that does not count."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """How well a text was predicted."""

    nats: float
    """The sum of the cross-entropies of all tokens."""
    tokens: int
    windows: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; infinite where that has no floating-point number."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def bits_per_byte(self, size: int) -> float:
        """Bits per byte of the text, which compares models with different tokenizers."""
        return self.nats / math.log(2) / size


@dataclass(frozen=True)
class Window:
    """A part of the ids that the model reads at once."""

    start: int
    end: int
    """The model reads ids ``start`` to ``end``, the latter excluded, and predicts each one's successor."""
    counted: int
    """How many predictions count: the last ones."""


def windows_of(targets: int, *, length: int, stride: int) -> list[Window]:
    """Windows that predict each of ``targets`` ids once; the first and the last may count more or fewer than others."""
    found: list[Window] = []
    end = 0
    while end < targets:
        before, end = end, min(targets, end + stride if found else length)
        found.append(Window(max(0, end - length), end, end - before))
    return found


@torch.inference_mode()
def predict(
    model: GPT2,
    ids: Sequence[int] | Tensor,
    *,
    length: int,
    stride: int,
    batch_size: int,
    progress: Callable[[int], None] = lambda _: None,
) -> Prediction:
    """Predict every id but the first.

    Args:
        model: in evaluation mode.
        ids: at least two; (n,), on the CPU.
        length: ids of a window; at most the model's positions.
        stride: ids from one window to the next; at most ``length``.
        batch_size: windows that are computed together.
        progress: gets the number of windows since its last call.
    """
    ids, device = torch.as_tensor(ids), model.wte.weight.device
    windows = windows_of(len(ids) - 1, length=length, stride=stride)
    nats = 0.0
    for batch in _batches(windows, batch_size):
        inputs = torch.stack([ids[window.start : window.end] for window in batch]).long()  # (B, T)
        targets = torch.stack([ids[window.start + 1 : window.end + 1] for window in batch]).long()
        for row, window in zip(targets, batch, strict=True):
            row[: len(row) - window.counted] = _IGNORED
        nats += float(model(inputs.to(device), targets.to(device), reduction="sum"))
        progress(len(batch))
    return Prediction(nats=nats, tokens=len(ids) - 1, windows=len(windows))


def _batches(windows: list[Window], size: int) -> Iterator[list[Window]]:
    """Windows of equal length, ``size`` at a time; the first or the last window may be shorter than the others."""
    batch: list[Window] = []
    for window in windows:
        if batch and (len(batch) == size or window.end - window.start != batch[0].end - batch[0].start):
            yield batch
            batch = []
        batch.append(window)
    yield batch

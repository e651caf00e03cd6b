"""Choosing the next id from logits. Every sequence has a random stream of its own, whatever else is in its batch."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next id is drawn. Each of these narrows what the ones before it left."""

    repetition_penalty: float = 1.0
    """Divides positive logits of ids that the text already has, and multiplies negative ones (Keskar et al. 2019)."""
    temperature: float = 0.0
    """Divides the logits; 0 always takes the likeliest id."""
    top_k: int | None = None
    """Draw from this many likeliest ids; None from all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest ids whose probabilities reach this sum (Holtzman et al. 2020)."""
    min_p: float = 0.0
    """Draw from ids that are at least this share as probable as the likeliest (Nguyen et al. 2024)."""


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution of the next id, (B, V), from ``logits``, (B, V) in fp32; the temperature must be above 0."""
    logits = (logits - logits.amax(dim=1, keepdim=True)) / sampling.temperature  # at most 0, so nothing overflows
    count = min(sampling.top_k or logits.shape[1], logits.shape[1])
    if count < logits.shape[1] or sampling.top_p < 1:
        likeliest = logits.topk(count).values  # (B, k), falling
        if sampling.top_p < 1:
            before = likeliest.softmax(dim=1).cumsum(dim=1) - likeliest.softmax(dim=1)
            likeliest = likeliest.masked_fill(before >= sampling.top_p, float("inf"))
        logits = logits.masked_fill(logits < likeliest.amin(dim=1, keepdim=True), float("-inf"))
    found = logits.softmax(dim=1)
    if sampling.min_p > 0:
        found = found.masked_fill(found < sampling.min_p * found.amax(dim=1, keepdim=True), 0.0)
        found = found / found.sum(dim=1, keepdim=True)
    return found


class Chooser:
    """Chooses the next id of every sequence of a batch.

    Args:
        sampling: how.
        prompts: the ids that each sequence starts with.
        generators: the random stream of each sequence, on the CPU, so that devices draw alike.
        vocab_size: ids, V.
        device: of the logits.
    """

    def __init__(
        self,
        sampling: Sampling,
        *,
        prompts: Sequence[Sequence[int]],
        generators: Sequence[torch.Generator],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._sampling, self._generators = sampling, generators
        self._seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self._seen = torch.zeros((len(prompts), vocab_size), dtype=torch.bool, device=device)
            for row, prompt in zip(self._seen, prompts, strict=True):
                row[torch.tensor(prompt, device=device)] = True

    def choose(self, logits: Tensor) -> Tensor:
        """The next ids, (B,), from ``logits``, (B, V) in fp32; V for a row that has a NaN."""
        logits = self._penalized(logits)
        if self._sampling.temperature == 0:
            largest = logits.max(dim=1)  # the first of equal ones; argmax takes three times as long on CPUs
            ids = largest.indices.masked_fill(largest.values.isnan(), logits.shape[1])
        else:
            ids = self._draw(probabilities(logits, self._sampling))
        if self._seen is not None:
            self._seen.scatter_(1, ids[:, None].clamp(max=logits.shape[1] - 1), True)
        return ids

    def distribution(self, logits: Tensor) -> Tensor:
        """The probabilities, (B, V), with which ``choose`` would draw from ``logits``."""
        logits = self._penalized(logits)
        if self._sampling.temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(dim=1), logits.shape[1]).float()
        return probabilities(logits, self._sampling)

    def _penalized(self, logits: Tensor) -> Tensor:
        if self._seen is None:
            return logits
        penalty = self._sampling.repetition_penalty
        return torch.where(self._seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)

    def _draw(self, found: Tensor) -> Tensor:
        """One id of each row of probabilities, (B, V), where its stream's number falls in their running sum.

        The sum is in fp64 and in the order of ids. So another batch, which rounds logits differently, draws the same.
        """
        numbers = [torch.rand(1, dtype=torch.float64, generator=generator) for generator in self._generators]
        sums = found.double().cumsum(dim=1)
        total = sums[:, -1:]
        drawn = torch.stack(numbers).to(found.device) * total  # (B, 1)
        below = torch.nextafter(total, torch.zeros_like(total))  # a product that rounds up to the sum has no id
        return torch.searchsorted(sums, torch.minimum(drawn, below), right=True)[:, 0]


def random_stream(seed: int, number: int) -> torch.Generator:
    """The random stream of sequence ``number`` under ``seed``: the same for any number of sequences."""
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)

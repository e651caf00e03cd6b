"""Ids in, ids out: decoding, sampling, likely next ids, and the latency of generation.

Times generation with a trained model: one prompt, batch 1, greedy, key-value cache, after a warm-up. The whole
measurement takes about ten seconds at most: a slow model repeats less often, and a very slow one generates fewer
tokens.
"""

import hashlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsgpt.common.errors import UserError
from dsgpt.inference.commands import Sampling
from dsgpt.inference.decoder import Decoder
from dsgpt.model.gpt2 import GPT2
from dsgpt.record.schema import GENERATED_TOKENS

# Choosing the next id from logits. Every sequence has a random stream of its own, whatever else is in its batch.


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


# Ids in, ids out: decodes batches, greedily or by sampling.

GREEDY = Sampling()


def generate_batch(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    sampling: Sampling = GREEDY,
    generators: Sequence[torch.Generator] = (),
) -> Iterator[list[int]]:
    """Yield the next id of every sequence, ``new_tokens`` times.

    Args:
        decoder: the model.
        prompts: the ids that each sequence starts with, at least one each.
        new_tokens: ids to generate; with the longest prompt they must fit the model's positions.
        sampling: how ids are chosen.
        generators: a random stream for each prompt, on the CPU; only needed above temperature 0.

    Raises:
        ValueError: prompts and new ids do not fit the model's positions.
        UserError: no id can be drawn, because logits are not finite.
    """
    sequences = decoder.begin(prompts, new_tokens=new_tokens)
    chooser = Chooser(
        sampling,
        prompts=prompts,
        generators=generators,
        vocab_size=decoder.config.vocab_size,
        device=decoder.embedding.device,
    )
    logits = sequences.read_prompts()
    for left in reversed(range(new_tokens)):
        ids = chooser.choose(logits)
        found = ids.tolist()  # waits for the device
        if max(found) >= decoder.config.vocab_size:
            raise UserError("the model's logits are NaN or infinite, though its weights are finite: it is unusable")
        yield found
        if left:
            logits = sequences.append(ids)


def generate(decoder: Decoder, prompt: Sequence[int], *, new_tokens: int) -> Iterator[int]:
    """Yield the ``new_tokens`` likeliest ids after ``prompt``, one at a time.

    Raises:
        ValueError: they do not fit the model's positions.
    """
    for (following,) in generate_batch(decoder, [prompt], new_tokens=new_tokens):
        yield following


# Which ids are likeliest to follow a text, as the model says and as sampling draws them.


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An id that may follow."""

    id: int
    probability: float
    """The model's: softmax of its logits."""
    drawn: float
    """The probability with which it is drawn; 0 if sampling leaves it out."""


def likeliest(decoder: Decoder, ids: Sequence[int], *, count: int, sampling: Sampling) -> list[Candidate]:
    """The ``count`` ids that the model finds likeliest after ``ids``, the likeliest first.

    Raises:
        ValueError: there are no ``ids``, or they leave no position for one more.
    """
    logits = decoder.begin([ids], new_tokens=1).read_prompts()  # (1, V)
    chooser = Chooser(
        sampling, prompts=[ids], generators=(), vocab_size=decoder.config.vocab_size, device=logits.device
    )
    found, drawn = logits.softmax(dim=1)[0], chooser.distribution(logits)[0]  # (V,)
    chosen = found.topk(min(count, len(found)))
    return [
        Candidate(id=int(each), probability=float(value), drawn=float(drawn[each]))
        for each, value in zip(chosen.indices.tolist(), chosen.values.tolist(), strict=True)
    ]


MAX_PROMPT_TOKENS = 16
REPETITIONS = 15
TOTAL_SEC, WARM_UP_SEC = 10.0, 1.0
"""Bounds on the whole measurement and on its warm-up; the generation of one token is never interrupted."""


def measure_latency(model: GPT2, ids: Tensor) -> dict[str, Any] | None:
    """Generate up to 100 tokens after the start of ``ids`` and time it; the median of up to 15 repetitions.

    Args:
        model: whole, in the precision it trained in, in evaluation mode.
        ids: validation ids on the model's device, (n,).

    Returns:
        The ``inference`` block of the record, times in seconds; None where there is no prompt, or no position after it.
    """
    positions, started = model.config.block_size, time.perf_counter()
    prompt = ids[: min(MAX_PROMPT_TOKENS, positions // 2)]
    new_tokens = min(GENERATED_TOKENS, positions - prompt.numel())
    if prompt.numel() == 0:
        return None
    decoder, start = Decoder(model), prompt.tolist()
    token_sec = _warm_up(decoder, start, new_tokens)
    left = TOTAL_SEC - (time.perf_counter() - started)
    new_tokens = max(1, min(new_tokens, int(left / token_sec)))
    seconds: list[float] = []
    while not seconds or (len(seconds) < REPETITIONS and time.perf_counter() - started + max(seconds) < TOTAL_SEC):
        began = time.perf_counter()
        for _ in generate(decoder, start, new_tokens=new_tokens):
            pass  # fetches each id from the device as soon as it is generated, as an application does
        seconds.append(time.perf_counter() - began)
    latency = statistics.median(seconds)
    return {
        "prompt_tokens": prompt.numel(),
        "new_tokens": new_tokens,
        "batch_size": 1,
        "repetitions": len(seconds),
        "latency_sec": latency,
        "latency_min_sec": min(seconds),
        "latency_max_sec": max(seconds),
        "tokens_per_sec": new_tokens / latency,
    }


def _warm_up(decoder: Decoder, prompt: list[int], new_tokens: int) -> float:
    """Generate for ``WARM_UP_SEC``, but two tokens at least; returns the seconds of a token after the first one.

    The first token loads kernels and reads the prompt.
    """
    times = [time.perf_counter()]
    for _ in generate(decoder, prompt, new_tokens=new_tokens):
        times.append(time.perf_counter())
        if len(times) > 2 and times[-1] - times[0] > WARM_UP_SEC:
            break
    first = 1 if len(times) > 2 else 0
    return max((times[-1] - times[first]) / (len(times) - 1 - first), 1e-9)

"""Times generation with a trained model: one prompt, batch 1, greedy, key-value cache, after a warm-up.

The whole measurement takes about ten seconds at most: a slow model repeats less often, and a very slow one generates
fewer tokens.
"""

import statistics
import time
from typing import Any

from torch import Tensor

from dsgpt.inference.decoder import Decoder
from dsgpt.inference.generation import generate
from dsgpt.model.gpt2 import GPT2
from dsgpt.telemetry.record import GENERATED_TOKENS

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
        seconds.append(_timed(decoder, start, new_tokens))
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


def _timed(decoder: Decoder, prompt: list[int], new_tokens: int) -> float:
    started = time.perf_counter()
    for _ in generate(decoder, prompt, new_tokens=new_tokens):
        pass  # fetches each id from the device as soon as it is generated, as an application does
    return time.perf_counter() - started

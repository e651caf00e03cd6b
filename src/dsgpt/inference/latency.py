"""Times generation with a trained model: one prompt, batch 1, greedy, key-value cache, after a warm-up."""

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from dsgpt.inference.decode import generate
from dsgpt.model.gpt2 import GPT2
from dsgpt.telemetry.record import GENERATED_TOKENS

MAX_PROMPT_TOKENS = 16
REPETITIONS = 15


def measure_latency(model: GPT2, ids: Tensor) -> dict[str, Any] | None:
    """Generate up to 100 tokens after the start of ``ids`` and time it; the median of 15 runs after a warm-up.

    Args:
        model: whole, in the precision it trained in, in evaluation mode.
        ids: validation ids on the model's device, (n,).

    Returns:
        The ``inference`` block of the record, times in seconds; None where the model has a single position.
    """
    positions = model.config.block_size
    prompt = ids[: min(MAX_PROMPT_TOKENS, positions // 2)]
    new_tokens = min(GENERATED_TOKENS, positions - prompt.numel())
    if prompt.numel() == 0:
        return None
    seconds = [_timed(model, prompt, new_tokens) for _ in range(1 + REPETITIONS)][1:]
    latency = statistics.median(seconds)
    return {
        "prompt_tokens": prompt.numel(),
        "new_tokens": new_tokens,
        "batch_size": 1,
        "repetitions": REPETITIONS,
        "latency_sec": latency,
        "latency_min_sec": min(seconds),
        "latency_max_sec": max(seconds),
        "tokens_per_sec": new_tokens / latency,
    }


def _timed(model: GPT2, prompt: Tensor, new_tokens: int) -> float:
    started = time.perf_counter()
    for _ in generate(model, prompt, new_tokens=new_tokens):
        pass  # fetches each id from the device as soon as it is generated, as an application does
    if prompt.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started

"""Interleaved rounds: in each, every contender continues the same prompts, and the weights' bytes are read once."""

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsgpt.benchmarks.decoding.contenders import Continued, draw_model, draw_prompts, open_contender
from dsgpt.benchmarks.decoding.work import HUGGING_FACE, OURS, RATIO_GOAL, SHARE_GOAL, Work, peers_of
from dsgpt.model.gpt2 import GPT2
from dsgpt.runtime.huge_pages import HugePages

READS = 5
"""Readings of the weights' bytes in a round; the fastest counts."""
_COLUMNS = 4096


def measure_row(work: Work, *, rounds: int, device: torch.device, checkout: Path | None) -> dict[str, Any]:
    """Seconds of every contender in every round, the ratio to transformers, and the share of the memory's floor.

    In each round another contender is the first, so that a machine that becomes slower favours none. Warm-up and
    loading do not count; reading the prompts counts, except in the share, which is of the tokens after the first.

    Raises:
        UserError: nanoGPT's checkout has another model.
    """
    model, prompts = draw_model(work, device), draw_prompts(work, device)
    kinds = peers_of(work, nanogpt=checkout is not None)
    contenders = {kind: open_contender(kind, work, model, checkout=checkout) for kind in kinds}
    size = bytes_read(model, quantize=work.quantize)
    read = _reader(size, device)
    for contender in contenders.values():
        contender(prompts)
    found: dict[str, list[Continued]] = {kind: [] for kind in kinds}
    floors: list[float] = []
    for number in range(rounds):
        for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
            found[kind].append(contenders[kind](prompts))
        floors.append(min(_timed(read, device) for _ in range(READS)))
    seconds = {kind: [each.seconds for each in turns] for kind, turns in found.items()}
    token_sec = [each.token_sec for each in found[OURS] if each.token_sec]
    return {
        "key": work.key,
        "title": work.title,
        "work": work.as_dict(),
        "bytes_per_token": size,
        "seconds": {kind: span(values) for kind, values in seconds.items()},
        "token_sec": span(token_sec),
        "floor_sec": span(floors),
        "ratios": {
            kind: span([theirs / ours for theirs, ours in zip(seconds[kind], seconds[OURS], strict=True)])
            for kind in kinds[1:]
        },
        "share": span([floor / token for floor, token in zip(floors, token_sec, strict=True)]),
        "same_ids": found[OURS][0].ids == found[HUGGING_FACE][0].ids,
        "ratio_goal": RATIO_GOAL if work.has_goals else None,
        "share_goal": SHARE_GOAL if work.has_goals else None,
    }


def bytes_read(model: GPT2, *, quantize: str = "none") -> int:
    """Bytes of weights that every token needs: all but the positions, and of the embedding, as head, no padding.

    In 8 bits, a matrix has a byte for each weight and a scale for each output.
    """
    head = model.wte.weight[: model.config.vocab_size]
    read = [head, *(weight for name, weight in model.named_parameters() if not name.startswith(("wte", "wpe")))]
    if quantize == "none":
        return sum(weight.nbytes for weight in read)
    return sum(
        weight.numel() + len(weight) * weight.element_size() if weight.dim() == 2 else weight.nbytes for weight in read
    )


def _reader(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A matrix of ``size`` bytes in fp32, and a vector to multiply it by: the fastest way here to read memory once.

    The matrix is in huge pages, like those of our weights whose layout is PyTorch's.
    """
    matrix = torch.ones((max(1, size // 4 // _COLUMNS), _COLUMNS), device=device)
    return HugePages().copy(matrix), torch.ones(_COLUMNS, device=device)


def _timed(read: tuple[Tensor, Tensor], device: torch.device) -> float:
    started = time.perf_counter()
    torch.mv(*read)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def span(values: list[float]) -> dict[str, Any]:
    """Median, smallest and largest of ``values``, and all of them."""
    return {"median": statistics.median(values), "smallest": min(values), "largest": max(values), "values": values}

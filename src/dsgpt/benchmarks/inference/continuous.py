"""Continuous batching as transformers does it: a new request joins the batch between two tokens of the others."""

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dsgpt.benchmarks.inference.protocol import Answer, Request, clock
from dsgpt.common.errors import UserError

PAGE_TOKENS = 32
"""Of the key-value cache. With pages as long as most requests, half of the cache would be empty."""
LONGEST_WAIT_SEC = 600.0
"""For the next answer while requests are running; then the engine counts as stuck."""


class ContinuousEngine:
    """``model.init_continuous_batching`` with paged attention (PyTorch's SDPA).

    Args:
        folder: the exported model.
        device: ``cpu`` or ``cuda``.
        slots: the most requests at a time.
    """

    def __init__(self, folder: Path, *, device: str, slots: int) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig  # noqa: PLC0415 - takes seconds
        from transformers.generation.configuration_utils import ContinuousBatchingConfig  # noqa: PLC0415

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="paged|sdpa")
        model = model.to(device).eval()
        settings: Any = GenerationConfig  # it has no types
        positions = model.config.n_positions
        self._manager = model.init_continuous_batching(
            generation_config=settings(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=slots * -(-positions // PAGE_TOKENS) + 1,
                max_batch_tokens=max(positions, slots),
                max_requests_per_batch=slots,
                allow_block_sharing=False,  # the turns repeat their prompts
                auto_switch_to_flash=False,  # its rounding differs, and only GPUs have it
            ),
        )
        self._manager.start()

    def serve(self, requests: Sequence[Request], *, slots: int) -> list[Answer]:
        """See ``protocol.Engine``.

        Raises:
            UserError: the engine failed, or did not answer for ``LONGEST_WAIT_SEC``.
        """
        waiting, running, began = deque(requests), 0, clock()
        last = began
        answers: list[Answer] = []
        while waiting or running:
            if not running:
                time.sleep(max(0.0, waiting[0].arrival - (clock() - began)))
            while waiting and running < slots and waiting[0].arrival <= clock() - began:
                self._submit(waiting.popleft())
                running += 1
                last = clock()
            until_next = waiting[0].arrival - (clock() - began) if waiting and running < slots else LONGEST_WAIT_SEC
            found = self._manager.get_result(timeout=min(max(0.0, until_next), LONGEST_WAIT_SEC))
            if found is not None:
                answers.append(_answer(found, began))
                running, last = running - 1, clock()
            elif not self._manager.is_running() or clock() - last >= LONGEST_WAIT_SEC:
                raise UserError("continuous batching stopped answering")
        return answers

    def _submit(self, request: Request) -> None:
        self._manager.add_request(
            request.prompt,
            request_id=str(request.number),
            max_new_tokens=request.new_tokens,
            record_timestamps=True,
            eos_token_id=-1,
        )

    def close(self) -> None:
        """End the thread that generates."""
        self._manager.stop(block=True)


def _answer(found: Any, began: float) -> Answer:
    if found.error is not None:
        raise UserError(f"continuous batching failed at request {found.request_id}: {found.error}")
    return Answer(
        number=int(found.request_id),
        started=found.lifespan[0] - began,
        token_times=[when - began for when in found.timestamps],
        ids=list(found.generated_tokens),
    )

"""Decodes many sequences together, with transformers' continuous batching.

Its manager has a thread that computes. Another thread hands the results to the event loop.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from dsgpt.serving.errors import NOT_FINITE, ApiError
from dsgpt.serving.sampling import Sampler, Sampling
from dsgpt.serving.twins import twin_of

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel
    from transformers.generation.continuous_batching import ContinuousBatchingManager

PAGE = 32
"""Tokens of a page of the key-value cache."""
PREFILL_TOKENS = 512
"""Tokens that a forward pass reads at most, unless the batch is larger; a longer prompt takes several passes."""
STOP_SEC = 5


@dataclass(eq=False)
class Sequence:
    """One sequence that is decoded. Only the event loop uses it."""

    name: str
    changed: asyncio.Event
    """Set when tokens arrive or the sequence ends."""
    started: float
    ids: list[int] = field(default_factory=list)
    """The tokens so far; the last one may be end-of-text."""
    finished: bool = False
    error: str | None = None
    queue_sec: float | None = None
    """Seconds before its first forward pass; None before it."""


class Engine:
    """Decodes sequences.

    Args:
        model: in evaluation mode, with the attention ``sdpa``.
        batch: sequences that are decoded together.
    """

    def __init__(self, model: "GPT2LMHeadModel", *, batch: int) -> None:
        self._manager = _manager(twin_of(model), batch=batch)
        self._manager.logit_processor = Sampler(partial(self._in_loop, self._not_finite))  # type: ignore[assignment]
        self._names = itertools.count()
        self._open: dict[str, Sequence] = {}
        self._loop: asyncio.AbstractEventLoop
        self.failed = False
        """Whether a thread ended by an error; then no request can be answered."""

    def start(self) -> None:
        """Start the threads. Called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._manager.start()
        threading.Thread(target=self._route, name="results", daemon=True).start()

    def submit(
        self, ids: list[int], *, new_tokens: int, sampling: Sampling, ends: frozenset[int], changed: asyncio.Event
    ) -> Sequence:
        """Begin a sequence.

        Args:
            ids: the prompt; with ``new_tokens`` it fits the model's positions.
            new_tokens: the most to generate.
            sampling: how to choose them.
            ends: ids that end the sequence.
            changed: is set when the sequence changes.

        Raises:
            ApiError: the engine failed or was closed.
        """
        sequence = Sequence(str(next(self._names)), changed, time.perf_counter())
        self._open[sequence.name] = sequence
        name = None
        if not self.failed:
            name = self._manager.add_request(
                ids,
                request_id=sequence.name,
                max_new_tokens=new_tokens,
                streaming=True,
                eos_token_id=sorted(ends) or -1,
                sampling=sampling,
            )
        if name is None:
            del self._open[sequence.name]
            raise ApiError(503, "the model is not available", code="engine_failed")
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Stop decoding a sequence, unless it has finished."""
        if self._open.pop(sequence.name, None) is not None:
            self._manager.cancel_request(sequence.name)

    def close(self) -> None:
        """End the threads; sequences that are left fail."""
        self._manager.stop(block=True, timeout=STOP_SEC, hard_stop=True)

    def _route(self) -> None:
        for output in self._manager:
            self._in_loop(self._receive, output)
        while (output := self._manager.get_result(timeout=0)) is not None:
            self._in_loop(self._receive, output)
        self._in_loop(self._ended)

    def _in_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():  # the server has ended, and nobody waits for a result
                raise

    def _receive(self, output: Any) -> None:
        sequence = self._open.get(output.request_id)
        if sequence is None:
            return  # cancelled
        sequence.ids, sequence.finished, sequence.error = output.generated_tokens, output.is_finished(), output.error
        sequence.queue_sec = max(0.0, output.lifespan[0] - output.created_time)
        if sequence.finished:
            del self._open[sequence.name]
        sequence.changed.set()

    def _not_finite(self, name: str) -> None:
        sequence = self._open.get(name)
        if sequence is not None:
            self.cancel(sequence)
            sequence.finished, sequence.error = True, NOT_FINITE
            sequence.changed.set()

    def _ended(self) -> None:
        self.failed = True
        for sequence in self._open.values():
            sequence.finished, sequence.error = True, "the engine ended"
            sequence.changed.set()
        self._open.clear()


def _manager(model: "GPT2LMHeadModel", *, batch: int) -> "ContinuousBatchingManager":
    from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: PLC0415 - takes seconds

    positions = model.config.n_positions
    generation: Any = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, eos_token_id=-1, max_new_tokens=positions
    )
    config = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=batch * -(-positions // PAGE) + 1,
        max_batch_tokens=max(PREFILL_TOKENS, batch),
        max_requests_per_batch=batch,
        max_blocks_per_request=0,
        safety_margin=0.0,
        allow_block_sharing=False,  # the time of an answer would tell what others asked
        use_async_batching=False,
        use_cuda_graph=False,
        auto_switch_to_flash=False,
    )
    return model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)

"""Decodes many sequences together, with transformers' continuous batching.

Two of its managers share the weights: a greedy one, which takes the largest logit as ``dsgpt.inference`` does and sorts
nothing, and one that samples. Each has a thread that computes. Another thread hands its results to the event loop.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsgpt.serving.errors import ApiError
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
        batch: sequences that are decoded together, greedily and by sampling each.
        end_of_text: the id that ends a sequence; None if there is none.
    """

    def __init__(self, model: "GPT2LMHeadModel", *, batch: int, end_of_text: int | None) -> None:
        self._end = -1 if end_of_text is None else end_of_text
        self._managers = {sampled: _manager(twin_of(model), batch=batch, sampled=sampled) for sampled in (False, True)}
        self._names = itertools.count()
        self._open: dict[str, tuple[Sequence, ContinuousBatchingManager]] = {}
        self._routers: list[threading.Thread] = []
        self._loop: asyncio.AbstractEventLoop
        self.failed = False
        """Whether a thread ended by an error; then no request can be answered."""

    def start(self) -> None:
        """Start the threads. Called in the event loop."""
        self._loop = asyncio.get_running_loop()
        for manager in self._managers.values():
            manager.start()
            router = threading.Thread(target=self._route, args=(manager,), name="results", daemon=True)
            router.start()
            self._routers.append(router)

    def submit(
        self, ids: list[int], *, new_tokens: int, temperature: float | None, top_p: float, changed: asyncio.Event
    ) -> Sequence:
        """Begin a sequence.

        Args:
            ids: the prompt; with ``new_tokens`` it fits the model's positions.
            new_tokens: the most to generate.
            temperature: above 0; None for greedy decoding.
            top_p: share of the probability to sample from, above 0.
            changed: is set when the sequence changes.

        Raises:
            ApiError: the engine failed or was closed.
        """
        manager = self._managers[temperature is not None]
        sequence = Sequence(str(next(self._names)), changed, time.perf_counter())
        settings: dict[str, Any] = {} if temperature is None else {"temperature": float(temperature), "top_p": top_p}
        self._open[sequence.name] = (sequence, manager)
        name = None
        if not self.failed:
            name = manager.add_request(
                ids,
                request_id=sequence.name,
                max_new_tokens=new_tokens,
                streaming=True,
                eos_token_id=self._end,
                **settings,
            )
        if name is None:
            del self._open[sequence.name]
            raise ApiError(503, "the model is not available", code="engine_failed")
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Stop decoding a sequence, unless it has finished."""
        _, manager = self._open.pop(sequence.name, (None, None))
        if manager is not None:
            manager.cancel_request(sequence.name)

    def close(self) -> None:
        """End the threads; sequences that are left fail."""
        for manager in self._managers.values():
            manager.stop(block=True, timeout=STOP_SEC, hard_stop=True)

    def _route(self, manager: "ContinuousBatchingManager") -> None:
        for output in manager:
            self._in_loop(self._receive, output)
        while (output := manager.get_result(timeout=0)) is not None:
            self._in_loop(self._receive, output)
        self._in_loop(self._ended)

    def _in_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():  # the server has ended, and nobody waits for a result
                raise

    def _receive(self, output: Any) -> None:
        sequence, _ = self._open.get(output.request_id, (None, None))
        if sequence is None:
            return  # cancelled
        sequence.ids, sequence.finished, sequence.error = output.generated_tokens, output.is_finished(), output.error
        sequence.queue_sec = max(0.0, output.lifespan[0] - output.created_time)
        if sequence.finished:
            del self._open[sequence.name]
        sequence.changed.set()

    def _ended(self) -> None:
        self.failed = True
        for sequence, _ in self._open.values():
            sequence.finished, sequence.error = True, "the engine ended"
            sequence.changed.set()
        self._open.clear()


def _manager(model: "GPT2LMHeadModel", *, batch: int, sampled: bool) -> "ContinuousBatchingManager":
    from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: PLC0415 - takes seconds

    positions = model.config.n_positions
    generation: Any = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=sampled, eos_token_id=-1, max_new_tokens=positions
    )
    if sampled:  # values other than the defaults, because transformers makes no processors for defaults
        generation.temperature, generation.top_p, generation.top_k = 0.5, 0.5, None
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
        per_request_processors=True,
    )
    return model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)

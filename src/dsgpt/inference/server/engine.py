"""The model of a server: opened, decoding many sequences together, scoring finished ones.

Decodes many sequences together, with transformers' continuous batching. Its manager has a thread that computes.
Another thread hands the results to the event loop.

The sampler here draws the tokens. transformers' own processors of logits have no seeds and no ``min_p`` per request,
and one row of logits that is not finite ends their thread, with all requests (``torch.multinomial``).
"""

import asyncio
import copy
import itertools
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsgpt.common.errors import Problems, UserError
from dsgpt.formats.tokenizer_files import open_tokenizer
from dsgpt.inference.commands import ServeOptions
from dsgpt.inference.generation import draw, probabilities
from dsgpt.inference.model_files import device_for, open_model, write_model
from dsgpt.inference.server.requests import NOT_FINITE, ApiError, Drawing
from dsgpt.machine.console import Console

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel, PreTrainedTokenizerBase
    from transformers.generation.continuous_batching import ContinuousBatchingManager
    from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState


# Draws the next token of every sequence of a batch, each by the settings of its request.


class Sampler:
    """Takes the place of a manager's ``ContinuousBatchingLogitsProcessorList``.

    The manager takes the largest score of a row as the next token; the sampler makes that the token that it drew.

    Args:
        fail: is called with the name of a sequence whose logits are not finite.
    """

    tensors_required, do_processing = 0, True

    def __init__(self, fail: Callable[[str], None]) -> None:
        self._fail = fail
        self._states: list[RequestState] = []

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Nothing to check: the engine gives each request one ``Drawing``."""

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Nothing to fill: no setting is kept in tensors."""

    def prepare_tensor_args(self, requests_in_batch: "list[FutureRequestState]", arg_storage: Tensor) -> Tensor:
        """Note which sequence each row of the next scores is of."""
        self._states = [request.state for request in requests_in_batch if request.has_new_token]
        return arg_storage

    def __call__(self, _ids: Tensor, scores: Tensor, _arguments: Tensor) -> Tensor:
        """Draw a token for each row of ``scores`` (sequences, vocabulary), and return scores with it as the largest."""
        alike: dict[Drawing, list[tuple[int, float]]] = {}
        """Rows, and the random number of each, by the settings of their draw."""
        finite = scores.amax(dim=-1).isfinite().tolist()  # NaN, too, is its row's largest
        for row, state in enumerate(self._states):
            drawing: Drawing = state.logit_processor_kwargs["sampling"]
            if not finite[row]:
                self._fail(state.request_id)
            elif drawing.temperature > 0:
                number = drawing.number(len(state.initial_tokens) + len(state.generated_tokens))
                alike.setdefault(replace(drawing, seed=None), []).append((row, number))
        for drawing, drawn in alike.items():
            rows, numbers = zip(*drawn, strict=True)
            scores[rows, draw(probabilities(scores[rows, :], drawing), numbers)] = torch.inf
        return scores


# Copies of a model that share its weights, one for each thread that computes with it.


def twin_of(model: "GPT2LMHeadModel") -> "GPT2LMHeadModel":
    """A copy of ``model`` with the same tensors and a configuration of its own.

    During a forward pass of the paged engine, transformers 5.23 keeps ``is_causal = False`` in the configuration. With
    one configuration in two threads it can stay there, and the attention of every later pass without a mask is no
    longer causal.
    """
    return copy.deepcopy(model, {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())})


# Opens a model for serving: exports it on the fly, and loads the export with transformers.


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model and what belongs to it."""

    name: str
    """Name of the model in requests."""
    model: "GPT2LMHeadModel"
    tokenizer: "PreTrainedTokenizerBase"
    positions: int
    """The model's context length in tokens."""
    vocabulary: int
    end_of_text: frozenset[int]
    """Ids that end a text: the tokenizer's, and those of the model's ``generation_config.json``."""
    created: int
    """Time at which its weights were written, in seconds since 1970."""


def open_served(options: ServeOptions) -> ServedModel:
    """Open the model of any folder that ``src/convert.py --from`` reads. Nothing of its tokenizer is executed.

    Raises:
        UserError: there is no usable model, it has no tokenizer, or there is no such device.
    """
    problems, source = Problems(), options.checkpoint
    device = device_for(options.device, precision="fp32", problems=problems)
    problems.raise_if_any()
    model = open_model(source, which=options.which, flag="--checkpoint")
    if model.refused:
        raise UserError(f"--checkpoint {model.refused}")
    if not model.tokenizer:
        why = "because its training data had none"
        raise UserError(f"--checkpoint {source}: has no tokenizer, {why}: cannot read text")
    from transformers import GPT2LMHeadModel  # noqa: PLC0415 - takes seconds; mistakes should not

    with tempfile.TemporaryDirectory(prefix="dsgpt-serve-") as place:
        folder = Path(place) / "model"
        write_model(model, folder, form="hf", dtype="fp32", console=Console(speaks=False))
        loaded: Any = GPT2LMHeadModel.from_pretrained(
            folder, attn_implementation="sdpa", dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
        tokenizer = open_tokenizer(folder, what=f"--checkpoint {source}", clean_up_tokenization_spaces=False)
    ends = {tokenizer.eos_token_id, *model.ends} - {None}
    return ServedModel(
        name=options.model_name or source.resolve().name,
        model=loaded.to(device).eval(),
        tokenizer=tokenizer,
        positions=model.config.block_size,
        vocabulary=model.config.vocab_size,
        end_of_text=frozenset(end for end in ends if end < model.config.vocab_size),
        created=int(model.source.stat().st_mtime),
    )


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

    def fail(self, error: str) -> None:
        """End it with an error."""
        self.finished, self.error = True, error
        self.changed.set()


class Engine:
    """Decodes sequences.

    Args:
        model: in evaluation mode, with the attention ``sdpa``.
        batch: sequences that are decoded together.
    """

    def __init__(self, model: "GPT2LMHeadModel", *, batch: int) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: PLC0415 - takes seconds

        positions = model.config.n_positions
        ends = {"eos_token_id": -1, "max_new_tokens": positions}
        generation: Any = GenerationConfig(do_sample=False, **ends)  # type: ignore[no-untyped-call]
        off = ("use_async_batching", "use_cuda_graph", "auto_switch_to_flash")
        words: dict[str, Any] = dict.fromkeys(off, False) | {"max_blocks_per_request": 0, "safety_margin": 0.0}
        words |= {"allow_block_sharing": False}  # the time of an answer would tell what others asked
        words |= {"page_size": PAGE, "num_blocks": batch * -(-positions // PAGE) + 1}
        words |= {"max_requests_per_batch": batch, "max_batch_tokens": max(PREFILL_TOKENS, batch)}
        config, twin = ContinuousBatchingConfig(**words), twin_of(model)
        self._manager: ContinuousBatchingManager = twin.init_continuous_batching(generation, config)
        self._manager.logit_processor = Sampler(partial(self._in_loop, self._fail))  # type: ignore[assignment]
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
        self, ids: list[int], *, new_tokens: int, sampling: Drawing, ends: frozenset[int], changed: asyncio.Event
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
        words: dict[str, Any] = {"request_id": sequence.name, "max_new_tokens": new_tokens, "sampling": sampling}
        words |= {"eos_token_id": sorted(ends) or -1, "streaming": True}
        if self.failed or self._manager.add_request(ids, **words) is None:
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
        if (sequence := self._open.get(output.request_id)) is None:
            return  # cancelled
        sequence.ids, sequence.finished, sequence.error = output.generated_tokens, output.is_finished(), output.error
        sequence.queue_sec = max(0.0, output.lifespan[0] - output.created_time)
        if sequence.finished:
            del self._open[sequence.name]
        sequence.changed.set()

    def _fail(self, name: str) -> None:
        """End the sequence ``name``, whose logits are not finite."""
        if sequence := self._open.get(name):
            self.cancel(sequence)
            sequence.fail(NOT_FINITE)

    def _ended(self) -> None:
        self.failed = True
        for sequence in self._open.values():
            sequence.fail("the engine ended")
        self._open.clear()


# Log probabilities of tokens, from one forward pass over a finished sequence.

CHUNK = 64
"""Positions whose logits are held at a time."""


class Scorer:
    """Scores sequences with the model.

    Args:
        model: in evaluation mode.
    """

    def __init__(self, model: "GPT2LMHeadModel") -> None:
        self._model = twin_of(model)
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scores")
        """Thread that calls ``score``, so that sequences that wait for it keep no other thread."""

    def score(self, ids: list[int], *, first: int, top: int) -> list[tuple[float, list[tuple[int, float]]]]:
        """The natural log probability of each token from ``first`` on, given those before it, and the likeliest ones.

        Args:
            ids: the sequence.
            first: index of the first token to score; at least 1.
            top: how many of the likeliest tokens to name at each position.

        Returns:
            For each token, its log probability, and pairs of id and log probability, the likeliest first.

        Raises:
            ApiError: the model's logits are not finite.
        """
        scores: list[tuple[float, list[tuple[int, float]]]] = []
        if first >= len(ids):
            return scores
        with torch.inference_mode():
            tokens = torch.tensor([ids], device=self._model.device)
            outputs = self._model.transformer(tokens[:, :-1], use_cache=False)
            hidden = outputs.last_hidden_state[0, first - 1 :]  # (n, C)
            for start in range(0, len(hidden), CHUNK):
                logs = self._model.lm_head(hidden[start : start + CHUNK]).float().log_softmax(dim=-1)  # (chunk, V)
                chosen = tokens[0, first + start : first + start + len(logs), None]
                own, best = logs.gather(1, chosen), logs.topk(max(top, 1), dim=-1)
                if not own.isfinite().all():  # JSON has no such numbers
                    raise ApiError(500, f"the model failed to answer ({NOT_FINITE})", code="engine_failed")
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                likeliest = [list(zip(*pair, strict=True))[:top] for pair in pairs]
                scores += zip(own[:, 0].tolist(), likeliest, strict=True)
        return scores

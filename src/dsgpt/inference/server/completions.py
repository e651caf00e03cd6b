"""``POST /v1/completions``: from a request to its answer, whole or as a stream; how many are accepted, and counted."""

import asyncio
import contextlib
import json
import math
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Gauge, Histogram, ProcessCollector
from prometheus_client import Counter as CounterOf
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from dsgpt.common.json_files import clipped
from dsgpt.inference.commands import Key, Limits
from dsgpt.inference.generation import INCOMPLETE, Continuation
from dsgpt.inference.server import requests
from dsgpt.inference.server.engine import Engine, Scorer, Sequence, ServedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


# What ``/metrics`` tells Prometheus. No figure has a text of a request in it.

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The figures of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        counter = partial(CounterOf, registry=self.registry)
        ended = "Requests for completions that ended, by status; 499: the client hung up"
        self.requests = counter("dsgpt_requests", ended, ["status"])
        of_key = "Requests for completions by the name of their key"
        self.of_keys = counter("dsgpt_key_requests", of_key, ["key", "status"])
        self.tokens = counter("dsgpt_tokens", "Tokens read and written", ["kind"])
        self.open = Gauge("dsgpt_open_sequences", "Sequences that are decoded or wait", registry=self.registry)
        histogram = partial(Histogram, buckets=SECONDS, registry=self.registry)
        self.seconds = histogram("dsgpt_request_seconds", "From a request to the end of its answer")
        self.first_token = histogram("dsgpt_first_token_seconds", "From a request to its first token")
        self.queue = histogram("dsgpt_queue_seconds", "How long a sequence waited for its first forward pass")


# How many sequences a server accepts at a time, and how many requests of a key.

LONGEST_WAIT_SEC = 60
MINUTE_SEC = 60
_WEIGHT = 0.1
"""Weight of the newest sequence in the mean time of a sequence."""


def _busy(message: str, *, wait_sec: int) -> requests.ApiError:
    """The refusal of a request that the client should repeat after ``wait_sec``."""
    return requests.ApiError(429, message, code="rate_limit_exceeded", headers={"retry-after": str(wait_sec)})


class Gate:
    """Counts the sequences that are decoded or wait, and refuses those that find no place.

    Args:
        limits: the places.
        metrics: shows how many are taken.
        keys: how many clients have a key of their own. Of several, one has at most half of the places.
    """

    def __init__(self, limits: Limits, metrics: Metrics, *, keys: int = 1) -> None:
        self._batch, self._places, self._metrics = limits.batch, limits.batch + limits.queue, metrics
        self._places_of_key = self._places if keys < 2 else -(-self._places // 2)
        self._taken: Counter[str | None] = Counter()
        """Places by the name of the key; of None without keys."""
        self._admitted: dict[str, deque[float]] = {}
        self._mean_sec = 1.0

    def admit(self, key: Key | None) -> None:
        """Count a request of ``key``.

        Raises:
            ApiError: the key had all its requests of the last minute.
        """
        if key is None or key.per_minute is None:
            return
        past, now = self._admitted.setdefault(key.name, deque(maxlen=key.per_minute)), time.monotonic()
        if len(past) == key.per_minute and (wait := past[0] + MINUTE_SEC - now) > 0:
            limit = f"the key {key.name!r} may send {key.per_minute} requests a minute"
            raise _busy(f"{limit}: repeat the request later", wait_sec=math.ceil(wait))
        past.append(now)

    @contextlib.contextmanager
    def places(self, count: int, *, key: Key | None = None, prompts: int = 1) -> Iterator[None]:
        """A context that holds ``count`` places for ``key``, for as many completions of ``prompts`` prompts.

        Raises:
            ApiError: there are never so many places, or not now.
        """
        name, most = key.name if key else None, self._places_of_key
        of_key = f" of the key {name!r}" if most < self._places else ""
        if count > most:
            several = f" ({prompts:,} prompts, {count // prompts} of each)" if prompts > 1 else ""
            message = f"the request asks for {clipped(count)} completions{several}, and the server takes {most}{of_key}"
            param = "n" if prompts == 1 else "prompt"
            raise requests.ApiError(400, f"{message} at a time: ask for fewer", param=param, code="invalid_value")
        everyone = self._taken.total()
        for taken, most, whose in ((everyone, self._places, ""), (self._taken[name], self._places_of_key, of_key)):
            if taken + count > most:
                wait = math.ceil(self._mean_sec * max(1.0, everyone / self._batch))
                message = f"the server is busy: {taken} of {most} places{whose} are taken; repeat the request later"
                raise _busy(message, wait_sec=min(max(wait, 1), LONGEST_WAIT_SEC))
        try:
            self._taken[name] += count
            self._metrics.open.set(self._taken.total())
            yield
        finally:
            self._taken[name] -= count
            self._metrics.open.set(self._taken.total())

    def took(self, seconds: float) -> None:
        """Note how long a sequence was decoded, for the times that refused clients are told to wait."""
        self._mean_sec += _WEIGHT * (seconds - self._mean_sec)


# The answers to a request for completions, in OpenAI's form.


@dataclass(kw_only=True)
class Choice:
    """One completion of a request."""

    index: int
    prompt: requests.Prompt
    sequence: Sequence
    """The decoding of the completion; it has finished already if no token is asked for."""
    text: Continuation
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None

    def take(self) -> str:
        """The text that became certain since the last call; sets ``finish_reason`` at the end."""
        finished = self.sequence.finished
        for token in self.sequence.ids[len(self.text.ids) :]:  # nothing is added to a text that ended
            self.text.add(token)
        if finished:
            self.text.finish()
        if self.text.ended or finished:
            self.finish_reason = "stop" if self.text.ended else "length"
        return self.text.news(last=finished)

    def with_text(self, text: str, *, echo: bool) -> dict[str, Any]:
        """The choice in an answer, with a part of its text or all of it; behind its prompt with ``echo``."""
        reason, text = self.finish_reason, (self.prompt.text if echo else "") + text
        return {"text": text, "index": self.index, "logprobs": self.logprobs, "finish_reason": reason}


def usage_of(choices: list[Choice], prompts: list[requests.Prompt]) -> dict[str, int]:
    """Tokens read and generated so far: end-of-text included, and none behind a stop sequence."""
    read = sum(len(prompt.ids) for prompt in prompts)
    written = sum(len(choice.text.ids) + (choice.text.ended == "end of text") for choice in choices)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def add_logprobs(choice: Choice, *, top: int, echo: bool, scorer: Scorer, tokenizer: "Tokenizer") -> None:
    """Give a finished choice its ``logprobs``: of its tokens, and with ``echo`` those of the prompt.

    The log probabilities are the model's own, before temperature and ``top_p``. The first token of a sequence has none.
    ``top_logprobs`` have the token itself beside the ``top`` likeliest ones, as OpenAI's and vLLM's.
    """
    before = choice.prompt.ids
    first = 0 if echo and choice.prompt.text else len(before)  # an empty prompt is an end-of-text that has no text
    ids = before + choice.text.ids
    scores: list[Any] = [None] * (first == 0) + scorer.score(ids, first=max(first, 1), top=top)
    length = len(choice.text.text) + (len(choice.prompt.text) if echo else 0)
    offsets = (len(str(tokenizer.decode(ids[first:end])).rstrip(INCOMPLETE)) for end in range(first, len(ids)))
    rows = [row for row in zip(ids[first:], offsets, scores, strict=True) if row[1] < length]  # not behind a stop text

    def name_of(token: int) -> str:
        """Text of a token; a token that is a part of a character is ``token_id:N``, as in vLLM."""
        text = str(tokenizer.decode([token]))
        return f"token_id:{token}" if INCOMPLETE in text else text

    best = [score and {name_of(one): log for one, log in [*score[1], (token, score[0])]} for token, _, score in rows]
    names, own = [name_of(token) for token, _, _ in rows], [score and score[0] for _, _, score in rows]
    choice.logprobs = {"tokens": names, "token_logprobs": own, "top_logprobs": best if top else None}
    choice.logprobs["text_offset"] = [offset for _, offset, _ in rows]


# ``POST /v1/completions``: reads a request, has it decoded, and sends the answer whole or as a stream.

SMALL_BODY = 16 << 10
"""Bytes of the largest body that counts as small."""
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Completions:
    """The endpoint, an ASGI application.

    Args:
        served: the model.
        limits: of what is accepted.
        keys: as in ``Gate``.
    """

    def __init__(self, served: ServedModel, limits: Limits, *, keys: int = 1) -> None:
        self.served, self.limits, self.metrics = served, limits, Metrics()
        self.engine, self.scorer = Engine(served.model, batch=limits.batch), Scorer(served.model)
        self.gate = Gate(limits, self.metrics, keys=keys)
        self._readers = ThreadPoolExecutor(1, "reads"), ThreadPoolExecutor(1, "reads large ones")
        """Threads that read requests, small and large ones: one at a time each, because each keeps a core busy. A small
        one does not wait for the large ones of others."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and count how it ended."""
        status, exchange = 500, _Exchange(scope, receive, send, stall_sec=self.limits.stall_sec)
        key: Key | None = scope["key"]
        try:
            async with asyncio.timeout(self.limits.request_sec):
                await self._answer(Request(scope, receive), exchange)
            status = 200
        except TimeoutError:
            message = f"the answer took longer than {self.limits.request_sec:g} s: ask for fewer tokens, or later"
            error = requests.ApiError(504, message, code="timeout", headers={"x-should-retry": "false"})
            status = error.status
            await exchange.fail(error)
        except (requests.ApiError, requests.GoneError) as error:
            status = error.status
            if isinstance(error, requests.ApiError):
                await exchange.fail(error)
        finally:
            self.metrics.requests.labels(status).inc()
            if key is not None:
                self.metrics.of_keys.labels(key.name, status).inc()
            self.metrics.seconds.observe(time.perf_counter() - exchange.began)

    async def _answer(self, http: Request, exchange: "_Exchange") -> None:
        key: Key | None = http.scope["key"]
        self.gate.admit(key)
        body = await requests.read_body(http, limits=self.limits)
        read = partial(asyncio.get_running_loop().run_in_executor, self._readers[len(body) > SMALL_BODY])
        with self.gate.places(1, key=key):
            request = await read(requests.read_request, body)
        if request.model != self.served.name:
            message = f"the model {request.model[:80]!r} does not exist here: use {self.served.name!r}"
            raise requests.ApiError(404, message, param="model", code="model_not_found")
        prompts = max(1, len(request.prompts))
        with self.gate.places(prompts * request.n, key=key, prompts=prompts):
            work = asyncio.create_task(self._complete(request, exchange, read))
            gone = asyncio.create_task(_hung_up(http.receive))
            try:
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done() and not exchange.ended:
                    raise requests.GoneError(499)
                await work
            finally:
                for task in (work, gone):
                    task.cancel()
                await asyncio.gather(work, gone, return_exceptions=True)

    async def _complete(
        self, request: requests.CompletionRequest, exchange: "_Exchange", read: Callable[..., Awaitable[Any]]
    ) -> None:
        """Decode the completions and send them; at the end those that are not finished are cancelled."""
        served, changed, echo = self.served, asyncio.Event(), request.echo
        choices: list[Choice] = []
        encode = partial(requests.read_prompts, vocabulary=served.vocabulary, positions=served.positions)
        prompts: list[requests.Prompt] = await read(encode, request, served.tokenizer)
        new_tokens = requests.new_tokens_of(request, prompts, positions=served.positions, limits=self.limits)
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        answer: dict[str, Any] = head | {"model": served.name, "choices": []}
        ends, nothing = request.ends(served.end_of_text), Sequence("", changed, time.perf_counter(), finished=True)
        submit = partial(self.engine.submit, new_tokens=new_tokens, ends=ends, changed=changed)
        try:
            if not new_tokens:
                changed.set()  # nothing will
            for index, prompt in enumerate(prompt for prompt in prompts for _ in range(request.n)):
                sequence = submit(prompt.ids, sampling=request.drawing(index)) if new_tokens else nothing
                stops = [request.stop] if isinstance(request.stop, str) else request.stop
                text = Continuation(served.tokenizer, stop=stops, ends=ends)
                choices.append(Choice(index=index, prompt=prompt, sequence=sequence, text=text))
            begun: set[int] = set()
            async for choice, new in self._steps(request, choices, changed, began=exchange.began):
                if request.stream:
                    part = choice.with_text(new, echo=echo and choice.index not in begun)
                    begun.add(choice.index)
                    if part["text"] or choice.finish_reason:
                        await exchange.send_event(answer | {"choices": [part]})
            answer["usage"] = usage_of(choices, prompts)
            if not request.stream:
                whole = [choice.with_text(choice.text.text, echo=echo) for choice in choices]
                await exchange.send_whole(JSONResponse(answer | {"choices": whole}))
                return
            if request.stream_options is not None and request.stream_options.include_usage:
                await exchange.send_event(answer)
            await exchange.send_event(None, more=False)
        finally:
            for choice in choices:
                self.engine.cancel(choice.sequence)
            if choices:  # also those of an answer that nobody read
                usage = usage_of(choices, prompts)
                for kind in ("prompt", "completion"):
                    self.metrics.tokens.labels(kind).inc(usage[f"{kind}_tokens"])

    async def _steps(
        self, request: requests.CompletionRequest, choices: list[Choice], changed: asyncio.Event, *, began: float
    ) -> AsyncIterator[tuple[Choice, str]]:
        """Each choice with its new text, until all are finished; a choice with log probabilities comes whole."""
        left = list(choices)
        while left:
            await changed.wait()
            changed.clear()
            for choice in list(left):
                sequence, had_ids = choice.sequence, bool(choice.text.ids)
                if sequence.error:
                    raise requests.ApiError(500, f"the model failed to answer ({sequence.error})", code="engine_failed")
                text = choice.take()
                if choice.text.ids and not had_ids:
                    self.metrics.first_token.observe(time.perf_counter() - began)
                if choice.finish_reason:
                    left.remove(choice)
                    if sequence.queue_sec is not None:  # it was decoded
                        self.engine.cancel(sequence)
                        self.gate.took(time.perf_counter() - sequence.started)
                        self.metrics.queue.observe(sequence.queue_sec)
                if request.logprobs is None:
                    yield choice, text
                elif choice.finish_reason:
                    top, echo, tokenizer = request.logprobs, request.echo, self.served.tokenizer
                    score = partial(add_logprobs, choice, top=top, echo=echo, scorer=self.scorer, tokenizer=tokenizer)
                    await asyncio.get_running_loop().run_in_executor(self.scorer.thread, score)
                    yield choice, choice.text.text


async def _hung_up(receive: Receive) -> None:
    """Return when the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Exchange:
    """Sends one answer. A stream begins with its first part, so that an earlier error still has a status."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, stall_sec: float) -> None:
        self._scope, self._receive, self._send, self._stall_sec = scope, receive, send, stall_sec
        self._started = self._streams = False
        self.began = time.perf_counter()
        """Time at which the request arrived."""
        self.ended = False
        """Whether the last part of the answer was handed to the server, which then also reports a disconnection."""

    async def send_whole(self, answer: Response) -> None:
        """Send an answer that is no stream."""
        await answer(self._scope, self._receive, self._patiently)

    async def send_event(self, body: Any, *, more: bool = True) -> None:
        """Send a part of a stream; its end, which is None or an error, without ``more``."""
        if not self._streams:
            self._streams = True
            await self._patiently({"type": "http.response.start", "status": 200, "headers": STREAM})
        data = f"data: {'[DONE]' if body is None else json.dumps(body, ensure_ascii=False)}\n\n"
        await self._patiently({"type": "http.response.body", "body": data.encode(), "more_body": more})

    async def fail(self, error: requests.ApiError) -> None:
        """Send the error: as the response, or as the last event of a stream that has begun."""
        with contextlib.suppress(requests.GoneError):
            if self._streams and not self.ended:
                await self.send_event(error.body(), more=False)
            elif not self._started:
                await self.send_whole(error.response())

    async def _patiently(self, message: Message) -> None:
        """Send, or give up on a client that takes nothing."""
        self._started = True
        self.ended = message["type"] == "http.response.body" and not message.get("more_body", False)
        try:
            async with asyncio.timeout(self._stall_sec):
                await self._send(message)
        except TimeoutError as error:
            raise requests.GoneError(408) from error

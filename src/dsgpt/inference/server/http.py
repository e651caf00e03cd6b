"""HTTP of the server: bodies, errors, metrics, and how many requests are accepted."""

import asyncio
import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from starlette.requests import ClientDisconnect, Request
from starlette.types import Send

from dsgpt.common.json_files import clipped
from dsgpt.inference.server.options import Key, Limits

# Errors that a client sees: a status and a body in the form of OpenAI's.

NOT_FINITE = "its logits are not finite"


class ApiError(Exception):
    """A request that is refused or failed.

    Args:
        status: of HTTP.
        message: one line: what is wrong, and what to do.
        param: the field of the request at fault.
        code: a word that programs can compare.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The body of the response."""
        return {"error": {"message": self.message, "type": self._kind(), "param": self.param, "code": self.code}}

    def _kind(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


class ClientGoneError(Exception):
    """The client hung up, so nobody reads an answer. Counted as status 499, as nginx does."""

    status = 499


class SlowReaderError(Exception):
    """The client did not take its answer in time. Counted as status 408; the connection is closed."""

    status = 408


async def read_body(request: Request, *, limits: Limits) -> bytes:
    """The body of a request.

    Raises:
        ApiError: it is not JSON by its type, too large, or does not arrive in time.
        ClientGoneError: the client hung up before its end.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a web page of another site can send other types to this machine without asking
        raise ApiError(415, "the body must have the content type application/json", code="unsupported_media_type")
    body = bytearray()
    try:
        async with asyncio.timeout(limits.stall_sec):
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes:
                    message = f"the body has more than {limits.body_bytes:,} bytes: send a shorter prompt"
                    raise ApiError(413, message, code="request_too_large", headers={"connection": "close"})
    except TimeoutError as error:
        message = f"the body did not arrive within {limits.stall_sec:g} s"
        raise ApiError(408, message, code="request_timeout", headers={"connection": "close"}) from error
    except ClientDisconnect as error:
        raise ClientGoneError from error
    return bytes(body)


async def send_json(send: Send, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
    """Send a whole response."""
    data = json.dumps(body, ensure_ascii=False).encode()
    fields = {"content-type": "application/json", "content-length": str(len(data)), **(headers or {})}
    encoded = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": data, "more_body": False})


async def send_error(send: Send, error: ApiError) -> None:
    """Send an error in OpenAI's form."""
    await send_json(send, error.status, error.body(), error.headers)


# What ``/metrics`` tells Prometheus. No figure has a text of a request in it.

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The figures of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "dsgpt_requests",
            "Requests for completions that ended, by status; 499: the client hung up",
            ["status"],
            registry=self.registry,
        )
        self.of_keys = Counter(
            "dsgpt_key_requests",
            "Requests for completions by the name of their key",
            ["key", "status"],
            registry=self.registry,
        )
        self.tokens = Counter("dsgpt_tokens", "Tokens read and written", ["kind"], registry=self.registry)
        self.open = Gauge("dsgpt_open_sequences", "Sequences that are decoded or wait", registry=self.registry)
        self.seconds = self._histogram("dsgpt_request_seconds", "From a request to the end of its answer")
        self.first_token = self._histogram("dsgpt_first_token_seconds", "From a request to its first token")
        self.queue = self._histogram("dsgpt_queue_seconds", "How long a sequence waited for its first forward pass")

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=SECONDS, registry=self.registry)


# How many sequences a server accepts at a time, and how many requests of a key.

LONGEST_WAIT_SEC = 60
MINUTE_SEC = 60
_WEIGHT = 0.1
"""Of the newest sequence in the mean time of a sequence."""


class Gate:
    """Counts the sequences that are decoded or wait, and refuses those that find no place.

    Args:
        limits: the places.
        metrics: shows how many are taken.
    """

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self._batch, self._places, self._metrics = limits.batch, limits.batch + limits.queue, metrics
        self._taken = 0
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
            message = f"the key {key.name!r} may send {key.per_minute} requests a minute: repeat the request later"
            raise ApiError(429, message, code="rate_limit_exceeded", headers={"retry-after": str(math.ceil(wait))})
        past.append(now)

    @contextlib.contextmanager
    def places(self, count: int, *, prompts: int = 1) -> Iterator[None]:
        """A context that holds ``count`` places, for as many completions of ``prompts`` prompts.

        Raises:
            ApiError: there are never so many places, or not now.
        """
        if count > self._places:
            several = f" ({prompts:,} prompts, {count // prompts} of each)" if prompts > 1 else ""
            message = f"the request asks for {clipped(count)} completions{several}, and the server takes {self._places}"
            param = "n" if prompts == 1 else "prompt"
            raise ApiError(400, f"{message} at a time: ask for fewer", param=param, code="invalid_value")
        if self._taken + count > self._places:
            wait = math.ceil(self._mean_sec * max(1.0, self._taken / self._batch))
            raise ApiError(
                429,
                f"the server is busy: {self._taken} of {self._places} places are taken; repeat the request later",
                code="rate_limit_exceeded",
                headers={"retry-after": str(min(max(wait, 1), LONGEST_WAIT_SEC))},
            )
        self._take(count)
        try:
            yield
        finally:
            self._take(-count)

    def took(self, seconds: float) -> None:
        """Note how long a sequence was decoded, for the times that refused clients are told to wait."""
        self._mean_sec += _WEIGHT * (seconds - self._mean_sec)

    def _take(self, count: int) -> None:
        self._taken += count
        self._metrics.open.set(self._taken)

"""``src/serve.py``: the paths of the server, its connections, and its start and end.

Connections: how many, how long they may be silent, and what of HTTP is refused. Left alone, uvicorn counts connections
only when a request has arrived, and gives the head of a request all the time that it takes. It also hangs up on a
client that shuts its writing side.
"""

import asyncio
import contextlib
import errno
import gc
import hmac
import logging
import os
import re
import resource
import signal
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import h11
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from dsgpt.common.errors import EXIT_DONE, EXIT_INTERRUPTED, UserError
from dsgpt.inference.commands import Key, ServeOptions, is_loopback, keys_of
from dsgpt.inference.server.completions import Completions
from dsgpt.inference.server.engine import Engine, open_served
from dsgpt.inference.server.requests import ApiError
from dsgpt.machine.console import print_line

# The server's paths, and who may use them.

LOCAL_NAMES = {"127.0.0.1", "localhost", "[::1]"}
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:[0-9]{1,5})?")
ONCE = (b"authorization", b"content-length", b"content-type", b"host", b"transfer-encoding")
"""Headers of which two would mean that two programs on the way may read different ones."""
REQUEST_ID = re.compile(rb"[!-~]{1,128}")


def make_app(completions: Completions, *, keys: Sequence[Key], loopback: str | None) -> Starlette:
    """The application.

    Args:
        completions: answers completions.
        keys: requests must bring one of them, except those for ``/health``; empty for none.
        loopback: the name or address of this machine that the server is bound to, which requests must name; None if
            it is bound to more than loopback.
    """
    served = completions.served
    model = {"id": served.name, "object": "model", "created": served.created, "owned_by": "dsgpt"}
    model["max_model_len"] = served.positions

    async def models(request: Request) -> Response:  # noqa: ARG001 - Starlette calls it so
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        if request.path_params["name"] != served.name:
            raise HTTPException(404, f"the model does not exist here: use {served.name!r}")
        return JSONResponse(model)

    async def chat(request: Request) -> Response:  # noqa: ARG001
        raise HTTPException(404, "a base model without a chat template: use /v1/completions")

    async def health(request: Request) -> Response:  # noqa: ARG001
        failed = completions.engine.failed
        return JSONResponse({"status": "failed" if failed else "ok"}, status_code=503 if failed else 200)

    async def metrics(request: Request) -> Response:  # noqa: ARG001
        return Response(generate_latest(completions.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    read = {"/v1/models": models, "/v1/models/{name:path}": one_model, "/health": health, "/metrics": metrics}
    routes = [Route(path, endpoint) for path, endpoint in read.items()]
    routes.append(Route("/v1/completions", completions, methods=["POST"]))
    routes.append(Route("/v1/chat/completions", chat, methods=["GET", "POST"]))
    guard, handlers = Middleware(Guard, keys=keys, loopback=loopback), {HTTPException: _refused, Exception: _failed}
    app = Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)
    app.router.redirect_slashes = False  # the address would be the client's own Host; the guard drops the slash
    return app


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:80]}: {error.detail}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return ApiError(error.status_code, message, code=code, headers=dict(error.headers or {})).response()


async def _failed(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return ApiError(500, "an error of the server", code="internal_error").response()


class Guard:
    """Refuses requests without a key, requests of web pages that reach loopback under another name, and unclear heads.

    Every answer gets the request's ``x-request-id``, or a new one. A slash at the end of a path counts for nothing.

    Args:
        app: gets the other requests, with the name of their key in the scope.
        keys: as in ``make_app``.
        loopback: as in ``make_app``.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[Key], loopback: str | None) -> None:
        self._app, self._keys, self._names = app, keys, None
        if loopback is not None:
            self._names = LOCAL_NAMES | {f"[{loopback}]" if ":" in loopback else loopback.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 400 or 401."""
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        name = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", name)]
            await send(message)

        path = scope["path"].removesuffix("/") or "/"
        scheme, _, secret = headers.get(b"authorization", b"").partition(b" ")
        keys = self._keys if scheme.lower() == b"bearer" else ()
        same = [each for each in keys if hmac.compare_digest(secret.strip(b" "), each.secret.encode())]
        fault = self._fault_of(scope["headers"])
        if not fault and self._keys and path != "/health" and not same:
            message = "the request needs the server's API key: Authorization: Bearer KEY"
            fault = ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        answer = fault.response() if fault else self._app
        await answer({**scope, "path": path, "key": same[0] if same else None}, receive, send_named)

    def _fault_of(self, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
        counts = Counter(name for name, _ in headers)
        twice = [name.decode() for name in ONCE if counts[name] > 1]
        if counts[b"transfer-encoding"] and counts[b"content-length"]:
            twice = ["length of the body (Content-Length with Transfer-Encoding)"]
        if twice:  # what another program on the way took for the next request may lie behind it
            message = f"the request has more than one {twice[0]}: send one"
            return ApiError(400, message, code="invalid_header", headers={"connection": "close"})
        host = HOST.fullmatch(dict(headers).get(b"host", b"").decode("latin-1").lower())
        if self._names is not None and (host is None or host[1] not in self._names):
            message = "this server is only for this machine: call it 127.0.0.1 or localhost"
            return ApiError(400, message, code="invalid_host")
        return None


CONNECTIONS = 512
"""The most connections at a time."""
BACKLOG = 128
"""Connections that the system keeps until they are accepted. asyncio accepts so many at once, before any is counted."""
OWN_FILES = 128
"""Files that the process may open beside its connections."""
HEAD_SEC = 10
"""Seconds from a connection, or from the first byte of a further request, to the end of the request's head."""
PROBE_SEC = 0.05, 1.0
"""Seconds from the first interim response to the second, and at most between later ones: pauses double."""
LOG_SEC = 60
LENGTH = re.compile(rb"^content-length[ \t]*:([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 1\r\nconnection: close\r\n\r\n"


def connection_limit() -> int:
    """The most connections that this process has files for, at most ``CONNECTIONS``; raises its soft limit of files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = CONNECTIONS + BACKLOG + OWN_FILES
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(1, allowed - BACKLOG - OWN_FILES)


class _Parser(h11.Connection):
    """Refuses several lengths of a body, of which h11 keeps one if they are equal."""

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            lengths = LENGTH.findall(re.split(rb"\r?\n\r?\n", self.trailing_data[0], maxsplit=1)[0])
            if len(lengths) > 1 or b"," in b"".join(lengths):
                self._process_error(h11.CLIENT)
                raise h11.RemoteProtocolError("several Content-Length headers")
        return super().next_event()


class Connection(H11Protocol):
    """One connection. At the limit the one that is silent for longest makes room; without any, a new one is refused."""

    def __init__(self, *arguments: Any, **words: Any) -> None:
        super().__init__(*arguments, **words)
        self.conn = _Parser(h11.SERVER)
        self._most, self.limit_concurrency = self.limit_concurrency, None  # uvicorn would refuse the last one, too
        self._silent_since = time.monotonic()
        self._head: asyncio.TimerHandle | None = None
        self._shut = False

    @property
    def waits(self) -> bool:
        """Whether it has no request that is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Make room for it, or refuse it."""
        super().connection_made(transport)
        self._time_head(starts=True)
        if self._most is not None and len(self.connections) > self._most:
            silent = [one for one in self.connections if isinstance(one, Connection) and one.waits and one is not self]
            if silent:
                self.logger.warning("more than %d connections: closed those that were silent for longest", self._most)
                last = min(silent, key=lambda one: (one.cycle is not None, one._silent_since))
                last.transport.abort()
            else:
                self.logger.warning("more than %d connections: refused further ones", self._most)
                last = self
                transport.write(REFUSAL)
                transport.close()
            self.connections.discard(last)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the timer, too."""
        self._time_head(starts=False)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Time the head of a request from its first byte to its last."""
        super().data_received(data)
        if not self.waits:
            self._time_head(starts=False)
        elif self._head is None:
            self._time_head(starts=True)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in place of the application that reads its body; behind an answer, only hang up."""
        if self.cycle is not None and not self.waits:
            self.cycle.disconnected = True  # uvicorn would log a traceback of the answer that comes too late
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Close the connection of a client that will send nothing more."""
        self._silent_since = time.monotonic()
        super().on_response_complete()
        if self._shut and self.waits:
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a client that shuts its writing side behind its request: keep the connection until then."""
        self._shut = not self.waits and not self.cycle.more_body
        if self._shut and self.cycle.scope["http_version"] == "1.1":  # HTTP/1.0 has no interim responses
            self._probe(PROBE_SEC[0])
        return self._shut

    def _probe(self, pause: float) -> None:
        """Send interim responses as long as there is no other, the next after ``pause`` seconds.

        The system cannot tell a client that shut its writing side from one that is gone, until it sends to it twice.
        """
        if not (self.waits or self.cycle.response_started or self.transport.is_closing()):
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
            self.loop.call_later(pause, self._probe, min(2 * pause, PROBE_SEC[1]))

    def _time_head(self, *, starts: bool) -> None:
        """End the timer of a request's head; start it anew if it ``starts``."""
        if self._head is not None:
            self._head.cancel()
        self._head = self.loop.call_later(HEAD_SEC, self._give_up) if starts else None

    def _give_up(self) -> None:
        self.logger.warning("closed connections that sent no request within %d s", HEAD_SEC)
        self.transport.close()


class OnceAMinute(logging.Filter):
    """Lets each message through once in ``LOG_SEC``; of a system without files for connections, without a traceback.

    Without files for connections, asyncio schedules many attempts to listen again. If the server ends before them, each
    finds its socket closed and asyncio logs a traceback, which tells the operator nothing: it is dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the message is new."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            record.msg, record.args, record.exc_info = f"cannot accept connections: {error.strerror}", (), None
        elif isinstance(error, ValueError) and "._start_serving" in record.getMessage():
            return False
        message, now = record.getMessage().partition("\n")[0] + repr(error), time.monotonic()
        self._shown = {key: shown for key, shown in self._shown.items() if now - shown < LOG_SEC}
        new = message not in self._shown
        self._shown.setdefault(message, now)
        return new


def quieten_logs() -> None:
    """Let uvicorn and asyncio repeat no message within a minute."""
    only = OnceAMinute()
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(only)


# ``src/serve.py``: a server from its options to its exit code.

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ECHO_SEC = 0.2
"""Seconds after the first signal in which further ones count as the same request: a terminal and a parent may both send
one."""
KEEP_ALIVE_SEC = 65
"""Seconds that an idle connection stays open: longer than clients (httpx and openai 5 s) and load balancers (60 s) keep
theirs. Otherwise a request that is sent while the server closes the connection is lost."""
SEND_BUFFER = 64 << 10
"""Bytes of an answer that the system keeps for a client that does not read."""


def serve(options: ServeOptions) -> int:
    """Serve until a signal; then finish what was accepted, and return 0.

    Raises:
        UserError: the model, the address or the key is unusable.
    """
    keys, loopback = keys_of(options), options.host if is_loopback(options.host) else None
    with contextlib.closing(_listen(options)) as listener:
        from transformers.utils import logging as of_transformers  # noqa: PLC0415 - takes seconds; mistakes should not

        of_transformers.set_verbosity_error()  # type: ignore[no-untyped-call]  # some warnings show the ids of a prompt
        of_transformers.disable_progress_bar()  # type: ignore[no-untyped-call]
        served = open_served(options)
        limits = options.limits
        completions = Completions(served, limits, keys=len(keys))
        quieten_logs()
        app = make_app(completions, keys=keys, loopback=loopback)
        host = f"[{options.host}]" if ":" in options.host else options.host
        many = f"{limits.batch} sequences at a time, {limits.queue} may wait"
        about = f"serving {served.name} at http://{host}:{listener.getsockname()[1]}/v1 ({many}); stop with Ctrl-C"
        asyncio.run(_serve(app, completions.engine, listener, about=about))
    return EXIT_DONE


async def _serve(app: object, engine: Engine, listener: socket.socket, *, about: str) -> None:
    gc.freeze()  # a body of many small lists starts collections, which would look at all modules and weights
    engine.start()
    print_line(about)
    try:
        await _Server(http_config(app, connections=connection_limit())).serve(sockets=[listener])
    finally:
        await asyncio.to_thread(engine.close)


def http_config(app: Any, *, connections: int) -> uvicorn.Config:
    """Settings of uvicorn for at most ``connections`` connections at a time."""
    words: dict[str, Any] = dict.fromkeys(("access_log", "server_header", "proxy_headers"), False)
    words |= {"http": Connection, "ws": "none", "lifespan": "off", "log_config": None, "backlog": BACKLOG}
    words |= {"limit_concurrency": connections, "timeout_keep_alive": KEEP_ALIVE_SEC}
    return uvicorn.Config(app, **words)


class _Server(uvicorn.Server):
    """Stops at the first signal when all accepted requests are answered, and at the second one at once."""

    _asked_at: float | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals inside. uvicorn's own repeats them at its end, which would end the process by the signal."""
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Note the first signal; end the process at the second one."""
        now, name = time.monotonic(), signal.Signals(sig).name
        if self._asked_at is None:
            self._asked_at, self.should_exit = now, True
            _say(f"{name}: finishing what was accepted; a second signal ends it at once")
        elif now - self._asked_at > ECHO_SEC:
            _say(f"error: {name}: ended at once")
            os._exit(EXIT_INTERRUPTED)


def _say(line: str) -> None:
    """Print to standard error, also inside a signal handler."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"{line}\n".encode())


def _listen(options: ServeOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        listener = socket.create_server((options.host, options.port), family=family, backlog=BACKLOG)
    except OverflowError as error:
        raise UserError(f"--port {options.port}: a port is at most 65535") from error
    except OSError as error:
        where = f"on {options.host} ({error.strerror})"
        raise UserError(f"--port {options.port}: cannot be opened {where}: give another one") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # connections inherit both
    abandoned_ms = int(2 * options.limits.stall_sec * 1000)  # the system drops what an ended answer left unread
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, abandoned_ms)
    return listener

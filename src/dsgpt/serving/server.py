"""``src/serve.py``: a server from its options to its exit code."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from types import FrameType

import uvicorn

from dsgpt.common.errors import EXIT_DONE, EXIT_INTERRUPTED, UserError
from dsgpt.serving.app import make_app
from dsgpt.serving.completions import Completions
from dsgpt.serving.connection import BACKLOG, Connection, connection_limit, quieten_logs
from dsgpt.serving.engine import Engine
from dsgpt.serving.gate import Gate
from dsgpt.serving.metrics import Metrics
from dsgpt.serving.opening import open_served
from dsgpt.serving.options import ServeOptions, is_loopback, keys_of
from dsgpt.serving.scoring import Scorer
from dsgpt.telemetry.console import print_line

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
    listener = _listen(options)
    with contextlib.closing(listener):
        _quieten_libraries()
        served = open_served(
            options.checkpoint, which=options.which, name=options.model_name, device_kind=options.device
        )
        metrics, limits = Metrics(), options.limits
        completions = Completions(
            served=served,
            engine=Engine(served.model, batch=limits.batch),
            scorer=Scorer(served.model),
            limits=limits,
            metrics=metrics,
            gate=Gate(limits, metrics),
        )
        app = make_app(completions, keys=keys, loopback=loopback)
        quieten_logs()
        asyncio.run(_serve(app, completions.engine, listener, about=_about(options, served.name, listener)))
    return EXIT_DONE


async def _serve(app: object, engine: Engine, listener: socket.socket, *, about: str) -> None:
    gc.freeze()  # a body of many small lists starts collections, which would look at all modules and weights
    engine.start()
    print_line(about)
    try:
        await _Server(http_config(app, connections=connection_limit())).serve(sockets=[listener])
    finally:
        await asyncio.to_thread(engine.close)


def http_config(app: object, *, connections: int) -> uvicorn.Config:
    """How the application is served, on at most ``connections`` at a time."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=connections,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SEC,
    )


class _Server(uvicorn.Server):
    """Stops at the first signal when all accepted requests are answered, and at the second one at once."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._asked_at: float | None = None

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
        raise UserError(
            f"--port {options.port}: cannot be opened on {options.host} ({error.strerror}): give another one"
        ) from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # connections inherit both
    abandoned_ms = int(2 * options.limits.stall_sec * 1000)  # the system drops what an ended answer left unread
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, abandoned_ms)
    return listener


def _quieten_libraries() -> None:
    """Keep transformers from logging warnings: some of them show the ids of a prompt."""
    from transformers.utils import logging  # noqa: PLC0415 - takes seconds; mistakes should not

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _about(options: ServeOptions, name: str, listener: socket.socket) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    limits = options.limits
    return (
        f"serving {name} at http://{host}:{listener.getsockname()[1]}/v1 "
        f"({limits.batch} sequences at a time, {limits.queue} may wait); stop with Ctrl-C"
    )

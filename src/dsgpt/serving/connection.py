"""Connections: how many, how long they may be silent, and what of HTTP is refused.

uvicorn counts connections only when a request has arrived, gives the head of a request all the time that it takes, and
hangs up on a client that shuts its writing side.
"""

import asyncio
import errno
import logging
import re
import resource
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS = 512
"""The most connections at a time."""
BACKLOG = 128
"""Connections that the system keeps until they are accepted. asyncio accepts so many at once, before any is counted."""
OWN_FILES = 128
"""Files that the process may open beside its connections."""
HEAD_SEC = 10
"""Seconds from a connection, or from the first byte of a further request, to the end of the request's head."""
PROBE_SEC = 1
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
        self._expect_head()
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
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Time the head of a request from its first byte to its last."""
        super().data_received(data)
        if not self.waits:
            self._expect_nothing()
        elif self._head is None:
            self._expect_head()

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
        self._shut = not self.waits and not self.cycle.more_body and self.cycle.scope["http_version"] == "1.1"
        if self._shut:
            self._probe()
        return self._shut

    def _probe(self) -> None:
        """Send an interim response as long as there is no other.

        The system cannot tell a client that shut its writing side from one that is gone, until it sends to it.
        """
        if not (self.waits or self.cycle.response_started or self.transport.is_closing()):
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
            self.loop.call_later(PROBE_SEC, self._probe)

    def _expect_head(self) -> None:
        self._head = self.loop.call_later(HEAD_SEC, self._give_up)

    def _expect_nothing(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _give_up(self) -> None:
        self.logger.warning("closed connections that sent no request within %d s", HEAD_SEC)
        self.transport.close()


class OnceAMinute(logging.Filter):
    """Lets each message through once in ``LOG_SEC``; of a system without files for connections, without a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the message is new."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            record.msg, record.args, record.exc_info = f"cannot accept connections: {error.strerror}", (), None
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

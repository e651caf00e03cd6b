"""Silent clients, unclear heads and half-closed connections: uvicorn on a port, with applications without a model."""

import asyncio
import contextlib
import errno
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import uvicorn
from small_run import within

from dsgpt.inference.commands import Key
from dsgpt.inference.server import server as connection
from dsgpt.inference.server.completions import Metrics
from dsgpt.inference.server.server import http_config, make_app, quieten_logs

KEY = "0123456789abcdef"
HOST = b"Host: localhost\r\n"


def application(**words: Any) -> Any:
    """The server's own, with a model of which only the name is asked for."""
    served = SimpleNamespace(name="m", created=0, positions=8)
    completions = SimpleNamespace(served=served, engine=SimpleNamespace(failed=False), metrics=Metrics())
    return make_app(completions, **{"keys": [], "loopback": "127.0.0.1"} | words)


@contextlib.contextmanager
def listening(app: Any, *, connections: int = 100, kind: type[socket.socket] = socket.socket) -> Iterator[int]:
    """The port of a server in a thread, whose socket is of the ``kind``."""
    server = uvicorn.Server(http_config(app, connections=connections))
    with kind() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))  # not uvicorn's choice of loop
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def connect(port: int, data: bytes = b"") -> socket.socket:
    """A connection that sent ``data``, and keeps little of what it is sent until somebody reads it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(60)
    client.connect(("127.0.0.1", port))
    client.sendall(data)
    return client


def rest(client: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    read = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            read += part
    return read


class Slow:
    """Answers when it is told to, and notes who hung up."""

    def __init__(self) -> None:
        self.asked = self.gone = 0
        self.answer = threading.Event()

    async def __call__(self, scope: Any, receive: Callable, send: Callable) -> None:
        await receive()
        self.asked += 1
        hung_up = asyncio.ensure_future(receive())
        while not (self.answer.is_set() or hung_up.done()):
            await asyncio.sleep(0.01)
        self.gone += hung_up.done()
        hung_up.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


GET = b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"


def health(client: socket.socket) -> bytes:
    """Its answer, whose head and body may come one after the other."""
    client.sendall(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
    answer = b""
    while not answer.endswith(b"}"):
        answer += client.recv(65536) or b"}"
    return answer


def test_connections_without_a_request_are_closed_and_idle_ones_kept(monkeypatch):
    monkeypatch.setattr(connection, "HEAD_SEC", 1000)
    with listening(application()) as port:
        kept = connect(port)
        assert health(kept).startswith(b"HTTP/1.1 200 ")
        monkeypatch.setattr(connection, "HEAD_SEC", 1)
        silent, half = connect(port), connect(port, b"GET /health HTTP/1.1\r\nX-A: ")
        assert (rest(silent), rest(half)) == (b"", b"")
        assert health(kept).startswith(b"HTTP/1.1 200 ")
        kept.sendall(b"GET /health HTTP/1.1\r\n")  # uvicorn's own timer ends with the first byte
        assert b"HTTP" not in rest(kept)


def test_silent_connections_make_room_and_requests_that_are_answered_do_not(monkeypatch):
    monkeypatch.setattr(connection, "HEAD_SEC", 1000)
    slow = Slow()
    with listening(slow, connections=4) as port:
        silent = [connect(port, b"GET"[: number % 4]) for number in range(20)]
        busy = [connect(port, GET) for _ in range(4)]
        within(lambda: slow.asked == 4)
        assert [rest(client) for client in silent] == [b""] * 20
        assert rest(connect(port)).startswith(b"HTTP/1.1 503 ")
        slow.answer.set()
        assert [client.recv(65536)[:12] for client in busy] == [b"HTTP/1.1 200"] * 4
        assert connect(port, GET).recv(65536).startswith(b"HTTP/1.1 200 ")  # of an idle one's place
        assert slow.gone == 0


def test_clients_that_shut_their_writing_side_are_answered():
    """Of one request, of two, and of HTTP/1.0."""
    slow, requests = Slow(), [[GET], [GET, GET], [GET.replace(b"1.1", b"1.0")]]
    with listening(slow) as port:
        clients = [connect(port, b"".join(asked)) for asked in requests]
        for client in clients:
            client.shutdown(socket.SHUT_WR)
        within(lambda: slow.asked == len(clients))
        time.sleep(1.5)  # the second probe
        slow.answer.set()
        for client, asked in zip(clients, requests, strict=True):
            answers = re.findall(rb"HTTP/1.1 (\d+) ", rest(client))
            assert [status for status in answers if status != b"100"] == [b"200"] * len(asked)
        assert slow.gone == 0


@pytest.mark.parametrize("answered", [False, True])
def test_a_body_that_is_no_http_logs_no_traceback(caplog, answered: bool):
    """It arrives before the application, which does not wait for it, has answered, or afterwards."""
    head, body = b"GET /health HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n", b"no chunk\r\n"
    with listening(application()) as port:
        client = connect(port, head if answered else head + body)
        if answered:
            assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
            client.sendall(body)
        assert rest(client).count(b"HTTP/1.1 400 ") == (not answered)
    assert [entry.getMessage() for entry in caplog.records if entry.exc_info] == []


HEADS: dict[str, tuple[bytes, int]] = {
    "fine": (HOST, 200),
    "a port": (b"Host: [::1]:8000\r\n", 200),
    "a name behind an address": (b"Host: [::1]evil.com\r\n", 400),
    "a name behind a port": (b"Host: localhost:80@evil.com\r\n", 400),
    "another name": (b"Host: evil.com\r\n", 400),
    "two hosts": (HOST + HOST, 400),
    "two content types": (HOST + b"Content-Type: application/json\r\nContent-Type: text/plain\r\n", 400),
    "two equal lengths": (HOST + b"Content-Length: 0\r\ncontent-length : 0\r\n", 400),
    "equal lengths": (HOST + b"Content-Length: 0\r\nA: b\r\nCONTENT-LENGTH: 0\r\n", 400),
    "equal lengths in one": (HOST + b"Content-Length: 0, 0\r\n", 400),
    "both lengths": (HOST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", 400),
    "two keys": (HOST + f"Authorization: Bearer x\r\nAuthorization: Bearer {KEY}\r\n".encode(), 400),
}


def test_unclear_heads_are_refused():
    """What could be read in two ways ends the connection: what follows may be meant as part of it."""
    with listening(application()) as port:
        for case, (head, status) in HEADS.items():
            with connect(port, b"GET /health HTTP/1.1\r\n" + head + b"\r\n") as client:
                answer = client.recv(65536)
                assert answer.startswith(b"HTTP/1.1 %d " % status), case
                if case.startswith(("two ", "equal", "both")):
                    assert b"connection: close\r\n" in answer.lower()
                    assert rest(client).count(b"HTTP/1.1") == 0


ASKED = [
    ("/v1/models/", f"bearer {KEY}", 200),
    ("/v1/models", f"BEARER   {KEY}", 200),
    ("/v1/models/m", f"Bearer {KEY}", 200),
    ("/v1/models/gpt-4", f"Bearer {KEY}", 404),
    ("/v1/nothing", f"Bearer {KEY}", 404),
    ("/v1/completions/", f"Bearer {KEY}", 405),  # not redirected
    ("/v1/models", f"Bearer {KEY}0", 401),
    ("/v1/models", f"Basic {KEY}", 401),
    ("/v1/models", KEY, 401),
    ("/v1/completions", "", 401),
    ("/metrics", "", 401),
    ("/health/", "", 200),
    ("/health//", "", 401),
]


def test_keys_and_paths_in_every_spelling():
    app = application(keys=[Key(name="a", secret="another-key-than-this"), Key(name="b", secret=KEY)], loopback=None)
    headers = {"host": "any.example", "x-forwarded-proto": "https", "x-request-id": "mine"}
    with listening(app) as port, httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers=headers) as client:
        for path, authorization, status in ASKED:
            answer = client.get(path, headers={"authorization": authorization})
            assert (answer.status_code, answer.headers["x-request-id"]) == (status, "mine"), (path, authorization)
            assert status < 400 or "\n" not in answer.json()["error"]["message"]
        other = client.get("/health", headers={"x-request-id": "not one"})
    assert re.fullmatch("[0-9a-f]{32}", other.headers["x-request-id"])


class Exhausted(socket.socket):
    """The socket of a process that has no files for connections, until there are some."""

    files = threading.Event()

    def accept(self) -> tuple[socket.socket, Any]:
        if not self.files.is_set():
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_process_without_files_for_connections_says_so_once_a_minute(monkeypatch, caplog):
    """Also one that ends while asyncio plans to listen again."""
    monkeypatch.setattr(asyncio.constants, "ACCEPT_RETRY_DELAY", 0.05)
    for name in ("uvicorn.error", "asyncio"):
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    quieten_logs()
    with listening(application(), kind=Exhausted) as port:
        client = connect(port)
        time.sleep(1)  # many attempts
        Exhausted.files.set()
        assert health(client).startswith(b"HTTP/1.1 200 ")
        Exhausted.files.clear()
        connect(port)
        time.sleep(0.3)
    lines = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert lines == ["cannot accept connections: Too many open files"]
    assert [entry for entry in caplog.records if entry.exc_info] == []


def test_connections_are_as_many_as_there_are_files(monkeypatch):
    """The soft limit is raised as far as it goes."""
    limits: list[Any] = []
    monkeypatch.setattr("resource.setrlimit", lambda _, pair: limits.append(pair))
    for hard, found in ((40, 1), (300, 44), (10**6, 512)):
        monkeypatch.setattr("resource.getrlimit", lambda _, hard=hard: (40, hard))
        assert connection.connection_limit() == found
    assert limits == [(300, 300), (768, 10**6)]

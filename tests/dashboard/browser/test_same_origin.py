"""Which requests the dashboard's server answers, over HTTP and as websockets, and that it asks no other machine."""

import ast
import http.client
from collections.abc import Iterator

import pytest
from dashboard_server import Server, serving

LISTENING = """\
import sys
def note(event, about):
    if event in {"socket.connect", "socket.sendto", "socket.getaddrinfo"}:
        with open(FILE, "a") as file:
            print(repr(about[1] if event == "socket.connect" else about[:2]), file=file)
open(FILE, "w").close()
sys.addaudithook(note)
"""
WEBSOCKET = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A dashboard of no runs, of which ``connections.txt`` beside its log lists where it connects to."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "sitecustomize.py").write_text(f"FILE = {str(folder / 'connections.txt')!r}\n{LISTENING}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        with serving(folder, log=folder / "log.txt", flags=["--allowed_host", "Lab.example"]) as started:
            started.wait()
            yield started


def status(server: Server, path: str, headers: dict[str, str], *fields: tuple[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("GET", path, skip_host=True)
    for name, value in (*headers.items(), *fields):
        connection.putheader(name, value.replace("PORT", str(server.port)))
    connection.endheaders()
    found = connection.getresponse().status
    connection.close()
    return found


@pytest.mark.parametrize(
    ("hosts", "origins", "allowed"),
    [
        (["127.0.0.1:PORT"], [], True),
        (["127.0.0.1:PORT"], ["http://127.0.0.1:PORT"], True),
        (["localhost:1234"], ["http://localhost:1234"], True),  # the other end of an SSH tunnel
        (["[::1]:1234"], ["http://[::1]:1234"], True),
        (["lab.example"], ["https://lab.example"], True),
        (["localhost:PORT"], ["http://localhost:1234"], False),  # another port's page
        (["localhost:PORT"], ["http://127.0.0.1:PORT"], False),
        (["localhost:PORT"], ["http://LOCALHOST:PORT"], False),
        (["127.0.0.1:PORT"], ["http://evil.example"], False),
        (["127.0.0.1:PORT"], ["null"], False),
        (["127.0.0.1:PORT"], ["http://127.0.0.1:PORT", "http://evil.example"], False),
        (["evil.example:PORT"], [], False),  # a name that was made to resolve to 127.0.0.1
        (["evil.example:PORT"], ["http://evil.example:PORT"], False),
        (["[::1]evil.example"], [], False),
        (["localhost:80@evil.example"], [], False),
        (["127.0.0.1.evil.example"], [], False),
        (["10.0.0.7:PORT"], [], False),
        (["localhost", "evil.example"], [], False),
        ([], [], False),
    ],
)
def test_only_the_page_itself_is_answered(server, hosts, origins, allowed):
    fields = [("Host", host) for host in hosts] + [("Origin", origin) for origin in origins]
    refused = {400, 403}  # uvicorn itself refuses a field twice
    assert status(server, "/", {}, *fields) in ({200} if allowed else refused)
    assert status(server, "/_stcore/stream", WEBSOCKET, *fields) in ({101} if allowed else refused)


def test_the_server_asks_no_other_machine(server):
    for origin in ("http://evil.example", "http://localhost:1"):
        fields = [("Host", f"127.0.0.1:{server.port}"), ("Origin", origin)]
        assert status(server, "/_stcore/stream", WEBSOCKET, *fields) == 403
    noted = server.log.with_name("connections.txt").read_text().splitlines()
    asked = [each for each in map(ast.literal_eval, noted) if not isinstance(each, str)]
    assert not [each for each in asked if each[0] not in {"127.0.0.1", "::1"}]

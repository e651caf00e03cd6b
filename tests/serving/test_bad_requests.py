"""What a client does wrong has an answer of its own in OpenAI's form, and the next request works."""

import contextlib
import json
import re
import socket
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest
from running_server import MODEL, PLACES, POSITIONS, Server, within

from dsgpt.inference.server.options import Limits
from dsgpt.inference.server.requests import ApiError, Prompt, new_tokens_of, read_prompts, read_request

SECRET = "a secret of a user"
"""A part of every prompt here; the log has it nowhere."""


@pytest.fixture(autouse=True)
def next_request_works(server: Server):
    expected = server.complete("x").choices[0].text
    yield
    within(lambda: server.metric("dsgpt_open_sequences") == 0)
    assert server.complete("x").choices[0].text == expected
    assert SECRET not in server.log.read_text()
    assert "Traceback" not in server.log.read_text()


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": SECRET, "max_tokens": 4} | fields).encode()


BAD: dict[str, tuple[bytes, int, str, str | None]] = {
    "not JSON": (body()[:-1], 400, "invalid_json", None),
    "a list": (b"[1]", 400, "invalid_json", None),
    "NaN": (body().replace(b": 4", b": NaN"), 400, "invalid_json", None),
    "a key twice": (body()[:-1] + b', "n": 1, "n": 2}', 400, "invalid_json", None),
    "too deep": (body()[:-1] + b', "user": ' + b"[" * 9000 + b"]" * 9000 + b"}", 400, "invalid_json", None),
    "invalid UTF-8": (body().replace(b"secret", b"caf\xe9"), 400, "invalid_json", None),
    "half a pair": (body().replace(b"secret", rb"\ud800"), 400, "invalid_json", None),
    "no model": (b'{"prompt": "x"}', 400, "missing_required_parameter", "model"),
    "unknown model": (body(model="gpt-4"), 404, "model_not_found", "model"),
    "unknown field": (body(promt="x"), 400, "unknown_parameter", "promt"),
    "a number for the prompt": (body(prompt=7), 400, "invalid_type", "prompt"),
    "texts and ids": (body(prompt=["a", 7]), 400, "invalid_type", "prompt"),
    "no prompts": (body(prompt=[]), 400, "invalid_value", "prompt"),
    "an id too large": (body(prompt=[257]), 400, "invalid_value", "prompt"),
    "a negative id": (body(prompt=[-1]), 400, "invalid_value", "prompt"),
    "an id beyond 64 bits": (body(prompt=[2**70]), 400, "invalid_value", "prompt"),
    "text for a number": (body(max_tokens="4"), 400, "invalid_type", "max_tokens"),
    "true for a number": (body(n=True), 400, "invalid_type", "n"),
    "a negative number": (body(max_tokens=-1), 400, "invalid_value", "max_tokens"),
    "nothing to do": (body(max_tokens=0), 400, "invalid_value", "max_tokens"),
    "too hot": (body(temperature=2.1), 400, "invalid_value", "temperature"),
    "an empty stop": (body(stop=""), 400, "invalid_value", "stop"),
    "five stops": (body(stop=list("abcde")), 400, "invalid_value", "stop"),
    "unsupported": (body(suffix="x"), 400, "unsupported_parameter", "suffix"),
    "a seed beyond 64 bits": (body(seed=2**63), 400, "invalid_value", "seed"),
    "a token to stop at that is none": (body(stop_token_ids=[257]), 400, "invalid_value", "stop_token_ids"),
    "more prompts than places": (body(prompt=["x"] * (PLACES + 1)), 400, "invalid_value", "prompt"),
    "more than any limit": (body(n=129), 400, "invalid_value", "n"),
    "does not fit": (body(prompt="x" * POSITIONS, max_tokens=1), 400, "context_length_exceeded", "prompt"),
    "completion does not fit": (body(max_tokens=POSITIONS), 400, "context_length_exceeded", "prompt"),
    "more than all places": (body(n=PLACES + 1), 400, "invalid_value", "n"),
    "too large": (body(user="x" * 20_000), 413, "request_too_large", None),
}


@pytest.mark.parametrize("mistake", BAD)
def test_each_mistake_has_its_answer(server: Server, mistake: str):
    data, status, code, param = BAD[mistake]
    before = server.ended(status)
    answer = server.http.post(
        f"{server.url}/v1/completions", content=data, headers={"content-type": "application/json"}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["type"] == "invalid_request_error"
    assert error["message"] and "\n" not in error["message"] and len(error["message"]) < 300
    assert SECRET not in error["message"]
    assert server.ended(status) == before + 1


def test_the_servers_own_limit_of_tokens():
    """A request may ask for as many; one that does not say how many gets no more."""
    limits = Limits(batch=1, queue=1, new_tokens=10, body_bytes=1, request_sec=1, stall_sec=1)

    def allowed(max_tokens: int | None, limits: Limits, prompt_tokens: int = 1) -> int:
        request, prompts = read_request(body(max_tokens=max_tokens)), [Prompt(ids=[0] * prompt_tokens, text="")]
        return new_tokens_of(request, prompts, positions=POSITIONS, limits=limits)

    assert (allowed(10, limits), allowed(None, limits), allowed(None, limits, POSITIONS - 3)) == (10, 10, 3)
    assert (allowed(11, replace(limits, new_tokens=None)), allowed(None, replace(limits, new_tokens=None))) == (11, 16)
    with pytest.raises(ApiError, match=r"^max_tokens must be at most 10 here$") as caught:
        allowed(11, limits)
    assert (caught.value.status, caught.value.param) == (400, "max_tokens")


@dataclass
class Counting:
    """Stands for a tokenizer; its tokens have ``width`` characters, and it knows how many it was given."""

    width: int
    given: int = 0
    eos_token_id = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.given += len(text)
        return [0] * (len(text) // self.width)


@pytest.mark.parametrize(("width", "refused"), [(1, True), (7, True), (20, False)])
def test_of_a_text_that_is_far_too_long_only_the_beginning_is_encoded(width, refused):
    tokenizer, text = Counting(width), "x" * 18 * POSITIONS
    request = read_request(body(prompt=text))
    if refused:
        with pytest.raises(ApiError, match="far longer: shorten it"):
            read_prompts(request, tokenizer, vocabulary=1, positions=POSITIONS)
        assert tokenizer.given == 16 * POSITIONS
    else:
        (prompt,) = read_prompts(request, tokenizer, vocabulary=1, positions=POSITIONS)
        assert (len(prompt.ids), prompt.text) == (18 * POSITIONS // width, text)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "code"),
    [
        ("POST", "/v1/completions", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        ("GET", "/v1/completions", {}, 405, "method_not_allowed"),
        ("POST", "/v1/nothing", {}, 404, "not_found"),
        ("GET", "/v1/models/gpt-4", {}, 404, "not_found"),
        ("GET", "/v1/models", {"host": "rebound.example:80"}, 400, "invalid_host"),
    ],
)
def test_wrong_ways_to_ask(server: Server, method, path, headers, status, code):
    answer = server.http.request(
        method, f"{server.url}{path}", headers=headers, content=body() if method == "POST" else None
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def connect(server: Server, data: bytes, *, length: int | None = None) -> socket.socket:
    """A connection that sent a request; it reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.port))
    client.settimeout(60)
    head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    client.sendall("\r\n".join([*head, f"Content-Length: {length or len(data)}", "", ""]).encode() + data)
    return client


def test_a_body_that_does_not_arrive(server: Server):
    with connect(server, body()[:10], length=1000) as client:
        answer = _read_all(client)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code": "request_timeout"' in answer


def test_a_reader_that_does_not_read_is_cut_off(server: Server):
    before = server.ended(408)
    with connect(server, body(n=PLACES, max_tokens=100, stream=True, logprobs=5)) as client:
        within(lambda: server.ended(408) == before + 1, seconds=60)
        read = _read_all(client)
    assert read.startswith(b"HTTP/1.1 200 ") and b"[DONE]" not in read


def _read_all(client: socket.socket) -> bytes:
    read = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            read += part
    return read


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_places(server: Server, stream: bool):
    """On a busy machine the answer may be done before this client looks, or hangs up: then it asks again."""

    def hung_up() -> bool:
        answered, gone = server.ended(200), server.ended(499)
        client = connect(server, body(n=PLACES, max_tokens=100, stream=stream))
        within(lambda: server.metric("dsgpt_open_sequences") == PLACES or server.ended(200) > answered)
        client.close()
        within(lambda: server.ended(499) + server.ended(200) > gone + answered)
        return bool(server.ended(499) > gone)

    within(hung_up)
    assert server.metric("dsgpt_open_sequences") == 0


def test_a_client_that_hangs_up_in_its_body(server: Server):
    before = server.ended(499)
    connect(server, body()[:10], length=1000).close()
    within(lambda: server.ended(499) == before + 1)


def test_without_a_place_a_request_is_refused_and_repeated_by_the_client(server: Server):
    stream = server.complete(n=PLACES, max_tokens=100, stream=True)
    next(stream)
    with pytest.raises(openai.RateLimitError) as caught:
        server.complete()
    assert re.fullmatch(r"[1-9]\d?", caught.value.response.headers["retry-after"])
    assert caught.value.code == "rate_limit_exceeded"
    rest = threading.Thread(target=lambda: list(stream))
    rest.start()
    again = server.openai.with_options(max_retries=5).completions.create(model=MODEL, prompt="x", max_tokens=2)
    assert again.usage.completion_tokens >= 1
    rest.join()


def test_many_clients_hang_up_at_random_instants(server: Server):
    """Also while a sequence ends or meets its stop sequence."""
    for number in range(60):
        stop = {"stop": ["a", "e", " "]} if number % 2 else {}
        client = connect(server, body(n=2, max_tokens=1 + number % 7, stream=bool(number % 3), temperature=1.0, **stop))
        time.sleep(0.001 * (number % 12))
        client.close()
    assert server.http.get(f"{server.url}/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (body(stream=True, stream_options={"include_usage": True, "usage": 1}), "stream_options.usage is not a known"),
        (body(stream_options={"include_usages": True}), "(did you mean include_usage?)"),
        (body(stop=1), "stop must be a text of 1 to 256 characters, or a list of at most 4 of them"),
        (body().decode().encode("utf-16"), "the body is not JSON: it is UTF-16 text, not UTF-8: encode it as UTF-8"),
        (body(max_tokens=9**4000), "max_tokens: Input should be less than 9223372036854775808, not "),
        (body(prompt=[9**4000]), "prompt has the token id "),
        (body()[:-1] + b', "n": ' + b"9" * 4301 + b"}", "a whole number in it has more than 4,300 digits"),
        (body(n=10**18), "the request asks for 1000000000000000000 completions, and the server takes 32 at a time"),
        (body(prompt=["x", "y"], n=20), "asks for 40 completions (2 prompts, 20 of each), and the server takes 32"),
    ],
)
def test_messages_say_what_to_send_instead(server: Server, data: bytes, message: str):
    answer = server.http.post(
        f"{server.url}/v1/completions", content=data, headers={"content-type": "application/json"}
    )
    assert message in answer.json()["error"]["message"] and len(answer.content) < 300


def test_a_byte_order_mark_is_no_part_of_the_body(server: Server):
    headers = {"content-type": "application/json"}
    answer = server.http.post(f"{server.url}/v1/completions", content=b"\xef\xbb\xbf" + body(), headers=headers)
    assert answer.json()["usage"]["completion_tokens"] == 4

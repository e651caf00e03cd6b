"""A server does not start open to others or with a tokenizer that brings code, and stops when its answers are given."""

import asyncio
import json
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
import openai
import pytest
from harmful_tokenizers import bring_code, seal
from running_server import BATCH, MODEL, PLACES, Server, ready, running, within

from dsgpt.common.errors import UserError
from dsgpt.inference.server.completions import Completions, Gate, Metrics
from dsgpt.inference.server.engine import Engine, Scorer, open_served
from dsgpt.inference.server.options import Key, Limits, ServeOptions, keys_of
from dsgpt.inference.server.server import http_config, make_app, serve

KEY, SLOW_KEY = "0123456789abcdef", "fedcba9876543210"
LIMITS = Limits(batch=2, queue=2, new_tokens=None, body_bytes=1000, request_sec=60, stall_sec=10)


def refusal(checkpoint: Path, **changes: Any) -> str:
    flags = {"which": "latest", "model_name": None, "host": "127.0.0.1", "port": 0, "api_key_file": None}
    with pytest.raises(UserError) as caught:
        serve(ServeOptions(**{"checkpoint": checkpoint, "device": "cpu", "limits": LIMITS} | flags | changes))
    (line,) = caught.value.problems
    assert "\n" not in line
    return line


def test_without_a_key_no_other_machine_is_answered(tmp_path, monkeypatch):
    monkeypatch.delenv("DSGPT_API_KEY", raising=False)
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        assert refusal(tmp_path, host=host) == (
            f"--host {host}: other machines can reach it, so requests need a key: put one into DSGPT_API_KEY or a file "
            "for --api_key_file, or use --host 127.0.0.1"
        )
    (tmp_path / "key").write_text("short\n")
    (tmp_path / "key").chmod(0o600)
    assert "a key has at least 16 ASCII characters" in refusal(tmp_path, host="::", api_key_file=tmp_path / "key")
    assert "is not a readable key" in refusal(tmp_path, api_key_file=tmp_path / "missing")


def test_a_file_of_keys_that_others_may_write_is_refused(tmp_path, capsys):
    file, options = _key(tmp_path), ServeOptions.__new__(ServeOptions)
    for mode in (0o600, 0o444, 0o640, 0o620, 0o606):
        file.chmod(mode)
        if mode & 0o022:
            assert refusal(tmp_path, api_key_file=file).endswith(f"so choose the keys: chmod go-w {file}")
        else:
            object.__setattr__(options, "api_key_file", file)
            assert keys_of(options) == [Key(name="DSGPT_API_KEY", secret=KEY)]
        warned = f"warning: --api_key_file {file}: other users may read the keys: chmod go-r {file}\n"
        assert capsys.readouterr().err == (warned if mode in (0o444, 0o640) else "")


@pytest.mark.parametrize(
    ("lines", "problems"),
    [
        (["ann 0123456789abcdef", "", "bob 0123456789abcdeX 60"], []),
        ([KEY, KEY], ["line 1: write NAME KEY", "line 2: write NAME KEY"]),
        (["a key with spaces"], ["key: write NAME KEY or NAME KEY REQUESTS_PER_MINUTE, or a KEY alone"]),
        ([f"ann {KEY} 0"], ["key: write NAME KEY"]),
        ([f"ann/bob {KEY}"], ["key: write NAME KEY"]),
        (["ann short", f"bob {KEY}"], ["line 1: a key has at least 16 ASCII characters"]),
        (
            [f"ann {KEY}", f"bob {KEY}", f"ann {KEY}1"],
            ["line 2: its name or its key is", "line 3: its name or its key"],
        ),
        (["", " "], ["a key has at least 16 ASCII characters"]),
    ],
)
def test_every_bad_line_of_a_file_of_keys_is_named(tmp_path, lines, problems):
    (tmp_path / "key").write_text("\n".join(lines) + "\n")
    (tmp_path / "key").chmod(0o600)
    options = ServeOptions.__new__(ServeOptions)
    object.__setattr__(options, "api_key_file", tmp_path / "key")
    if problems:
        with pytest.raises(UserError) as caught:
            keys_of(options)
        assert len(caught.value.problems) == len(problems)
        for line, expected in zip(caught.value.problems, problems, strict=True):
            assert expected in line and not any(word in line for word in ("short", KEY))
    else:
        assert [(key.name, key.per_minute) for key in keys_of(options)] == [("ann", None), ("bob", 60)]
        assert KEY not in repr(keys_of(options))


def test_what_cannot_be_served_is_refused_in_one_line(tmp_path):
    assert refusal(tmp_path).startswith(f"--checkpoint {tmp_path}: holds no checkpoint; ")
    assert refusal(tmp_path, host="no.such.host.invalid").startswith("--host no.such.host.invalid: is not an address")
    assert refusal(tmp_path, port=70_000) == "--port 70000: a port is at most 65535"
    assert "cannot be opened" in refusal(tmp_path, host="192.0.2.1", api_key_file=_key(tmp_path))


def _key(folder: Path) -> Path:
    (folder / "key").write_text(f"{KEY}\n")
    (folder / "key").chmod(0o600)
    return folder / "key"


def test_a_connection_is_kept_longer_than_clients_and_load_balancers_keep_it():
    """Otherwise a request that is sent while the server closes its connection has no answer."""
    clients = httpx2.Limits().keepalive_expiry, openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry
    assert http_config(None, connections=1).timeout_keep_alive > max(*clients, 60)


def test_code_of_a_tokenizer_never_runs(checkpoint, tmp_path):
    marker = bring_code(checkpoint / "tokenizer", marker=tmp_path / "ran")
    seal(checkpoint)
    assert "asks for its own code (auto_map), which is never run" in refusal(checkpoint)
    assert not marker.exists()


def test_an_answer_that_takes_too_long_and_an_engine_that_fails(run_dir, monkeypatch):
    """In this process: no machine is too fast for a limit of a millisecond."""
    served = open_served(run_dir, which="latest", name=MODEL, device_kind="cpu")
    engine, metrics = Engine(served.model, batch=2), Metrics()
    limits = replace(LIMITS, request_sec=0.001)
    completions = Completions(
        served=served,
        engine=engine,
        scorer=Scorer(served.model),
        limits=limits,
        metrics=metrics,
        gate=Gate(limits, metrics),
    )
    app = make_app(completions, keys=[], loopback="127.0.0.2")
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    values = {"model": MODEL, "prompt": "x", "max_tokens": 100}

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError

    async def ask() -> tuple[httpx2.Response, ...]:
        engine.start()
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.2") as client:
            ask_for_text = partial(client.post, "/v1/completions", json=values)
            late = await ask_for_text()
            transport.app = make_app(replace(completions, limits=LIMITS), keys=[], loopback="127.0.0.2")
            with monkeypatch.context() as patch:
                patch.setattr(engine, "submit", broken)
                unexpected = await ask_for_text()
            monkeypatch.setattr(engine, "_receive", lambda _: None)  # no token arrives before the engine ends
            begun = asyncio.create_task(ask_for_text())
            while not (engine._open or begun.done()):
                await asyncio.sleep(0.001)
            await asyncio.to_thread(engine.close)
            return late, unexpected, await begun, await ask_for_text(), await client.get("/health")

    *answers, health = asyncio.run(ask())
    found = [(answer.status_code, answer.json()["error"]["code"]) for answer in answers]
    assert found == [(504, "timeout"), (500, "internal_error"), (500, "engine_failed"), (503, "engine_failed")]
    assert answers[0].headers["x-should-retry"] == "false"
    assert (health.status_code, health.json()) == (503, {"status": "failed"})
    statuses = [{"status": status} for status in ("504", "500", "503", "200")]
    counts = [metrics.registry.get_sample_value("dsgpt_requests_total", status) for status in statuses]
    assert counts == [1, 2, 1, None]
    assert metrics.registry.get_sample_value("dsgpt_open_sequences") == 0


@pytest.fixture(scope="module")
def two(run_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    """Two servers, one of them with a key and open to other machines; the tests below end them."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "keys").write_text(f"ann {KEY}\nslow {SLOW_KEY} 2\n")
    (folder / "keys").chmod(0o600)
    words = ["--max_batch", BATCH, "--max_queue", PLACES - BATCH]
    keys = ["--host", "0.0.0.0", "--api_key_file", folder / "keys"]
    with (
        running(run_dir, *words, log=folder / "0.txt") as first,
        running(run_dir, *words, *keys, log=folder / "1.txt") as second,
    ):
        second.key = KEY
        yield ready(first), ready(second)


def test_only_requests_with_the_key_are_answered(two):
    _, server = two
    assert server.complete().usage.completion_tokens == 8
    for wrong in ("none", KEY[:-1], KEY + "0"):
        with pytest.raises(openai.AuthenticationError) as caught:
            server.openai.with_options(api_key=wrong).models.list()
        assert caught.value.code == "invalid_api_key"
    assert server.http.get(f"{server.url}/metrics").status_code == 401
    assert server.http.get(f"{server.url}/health").status_code == 200
    assert server.http.get(f"{server.url}/health", headers={"host": "example.org"}).status_code == 200


def test_a_key_has_its_requests_a_minute_and_its_name_in_the_metrics(two):
    _, server = two
    slow, words = server.openai.with_options(api_key=SLOW_KEY), {"model": MODEL, "prompt": "x", "max_tokens": 1}
    began = time.monotonic()
    for _ in range(2):
        assert slow.completions.create(**words).usage.completion_tokens == 1
    with pytest.raises(openai.RateLimitError) as caught:
        slow.completions.create(**words)
    assert 60 - (time.monotonic() - began) <= int(caught.value.response.headers["retry-after"]) <= 60
    assert "the key 'slow' may send 2 requests a minute" in caught.value.message
    assert server.complete().usage.completion_tokens == 8
    head = {"authorization": f"Bearer {KEY}"}
    text = httpx2.get(f"{server.url}/metrics", headers=head).text
    assert 'dsgpt_key_requests_total{key="slow",status="200"} 2.0' in text
    assert 'dsgpt_key_requests_total{key="slow",status="429"} 1.0' in text
    assert 'dsgpt_key_requests_total{key="ann",status="200"} ' in text
    assert KEY not in text and SLOW_KEY not in text


def test_clients_that_send_malformed_prompts_leave_the_others_their_answers(two, capsys):
    """Four clients, 256 KB each. The bound is for busy machines; ``-s`` shows the time."""
    server, _ = two
    items, statuses, done = (b"{}", b"[]", b"[null]", b"1.5"), Counter(), threading.Event()

    def flood(item: bytes) -> None:
        body = b'{"model": "tiny", "prompt": [' + b",".join([item] * (260_000 // (len(item) + 1))) + b"]}"
        with httpx2.Client(headers={"content-type": "application/json"}, timeout=60) as client:
            while not done.is_set():
                statuses[client.post(f"{server.url}/v1/completions", content=body).status_code] += 1

    with ThreadPoolExecutor(len(items)) as pool:
        floods, seconds = [pool.submit(flood, item) for item in items], []
        try:
            within(lambda: statuses.total() >= len(items), seconds=60)
            for _ in range(10):
                began = time.perf_counter()
                assert server.complete().usage.completion_tokens == 8
                seconds.append(time.perf_counter() - began)
        finally:
            done.set()
    assert [flood.exception() for flood in floods] == [None] * len(items)
    assert set(statuses) == {400}
    with capsys.disabled():
        print(f"\nhonest client: median {median(seconds):.3f} s, slowest {max(seconds):.3f} s; flood: {statuses[400]}")
    assert max(seconds) < 10


def many(server: Server) -> Any:
    """A stream that has begun, of as many completions as the server takes."""
    stream = server.complete(n=PLACES, max_tokens=100, stream=True)
    return stream, [next(stream)]


def test_the_first_signal_ends_the_server_when_all_answers_are_given(two):
    server, _ = two
    stream, parts = many(server)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: [*parts, *stream])
        server.process.send_signal(signal.SIGTERM)
        parts = answer.result()
    assert sorted(part.choices[0].index for part in parts if part.choices[0].finish_reason) == list(range(PLACES))
    assert server.process.wait(timeout=30) == 0
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(server.url)
    assert server.log.read_text() == "SIGTERM: finishing what was accepted; a second signal ends it at once\n"


def test_the_second_signal_ends_the_server_at_once(two):
    """An answer that its client does not read would keep the server for the twenty seconds of the default."""
    _, server = two
    values = {"model": MODEL, "prompt": "def ", "max_tokens": 100, "n": PLACES, "stream": True, "logprobs": 5}
    head = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    with server.http.stream("POST", f"{server.url}/v1/completions", content=json.dumps(values), headers=head):
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=10) == 130
    assert server.log.read_text().splitlines()[-1] == "error: SIGINT: ended at once"

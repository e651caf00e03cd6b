"""A running server: what its clients get, what it refuses, what it takes at a time, and how it ends."""

import contextlib
import doctest
import json
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch
from small_run import REPOSITORY, command_line, random_ids, within, write_inputs, write_tokens
from test_connections import connect, rest

from dsgpt.benchmarks.serving import ANSWERED, PROMPTS, Load, ServerProcess
from dsgpt.inference.decoder import Decoder
from dsgpt.inference.generation import generate
from dsgpt.inference.model_files import load
from dsgpt.training.command import train

MODEL, POSITIONS = "tiny", 128
"""The name of the model, and its context length."""
BATCH, PLACES = 8, 64
"""Sequences that the server decodes together, and takes at a time."""
MOST = PLACES // 2
"""Sequences that it takes of one key."""
KEY, SLOW_KEY = "0123456789abcdef", "fedcba9876543210"
START_SEC = 300
SECRET = "a secret of a user"
"""A part of many prompts here; the log has it nowhere."""
TEXTS = ["def ", "x", "import os\n", "  return é", "a" * 60, "日本", "\n\n", "if True:"]
NEW = 40


@dataclass
class Server:
    process: subprocess.Popen[str]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @cached_property
    def http(self) -> httpx2.Client:
        return httpx2.Client(headers={"authorization": f"Bearer {KEY}", "content-type": "application/json"}, timeout=60)

    @cached_property
    def openai(self) -> openai.OpenAI:
        """The real client; it repeats nothing by itself."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def complete(self, prompt: Any = "def ", **fields: Any) -> Any:
        """One completion, greedy unless ``fields`` say otherwise."""
        values = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0} | fields
        return self.openai.completions.create(**values)

    def post(self, data: bytes) -> httpx2.Response:
        return self.http.post(f"{self.url}/v1/completions", content=data)

    def metric(self, line: str) -> float:
        """A figure of ``/metrics``; 0 if it has none yet."""
        value = re.search(rf"^{re.escape(line)} (\S+)$", self.http.get(f"{self.url}/metrics").text, flags=re.MULTILINE)
        return float(value.group(1)) if value else 0.0

    def ended(self, status: int) -> float:
        """How many requests ended with this status."""
        return self.metric(f'dsgpt_requests_total{{status="{status}"}}')


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step; tests only read it."""
    folder = write_inputs(tmp_path_factory.mktemp("serving"))
    for name in ("train", "val"):
        tokenizer = json.loads((folder / f"{name}.json").read_text())["tokenizer"]
        write_tokens(folder / f"{name}.bin", random_ids(8 * POSITIONS + 1), tokenizer=tokenizer)
    flags = {"max_position_embeddings": POSITIONS, "max_train_steps": 1, "no_inference": True}
    assert train(command_line(folder, **flags)) == 0
    return folder / "run"


@contextlib.contextmanager
def serving(run_dir: Path, folder: Path, *more: object) -> Iterator[Server]:
    """A server in a process of its own, as users start it."""
    words = [REPOSITORY / "src" / "serve.py", "--checkpoint", run_dir, "--model_name", MODEL, "--port", 0, *more]
    words += ["--device", "cpu", "--max_batch", BATCH, "--max_queue", PLACES - BATCH]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, *map(str, words)], stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout and select.select([process.stdout], [], [], START_SEC)[0], (folder / "log").read_text()
        line = process.stdout.readline()
        address = re.search(r"^serving \S+ at http://[^ ]+:(\d+)/v1", line)
        assert address, line + (folder / "log").read_text()
        yield Server(process, int(address.group(1)), folder / "log")
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two keys; all tests but the last share it."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "keys").write_text(f"ann {KEY}\nslow {SLOW_KEY} 2\n")
    (folder / "keys").chmod(0o600)
    with serving(run_dir, folder, "--stall_timeout", 5, "--api_key_file", folder / "keys") as server:
        yield server


@pytest.fixture(autouse=True)
def next_request_works(server: Server) -> Iterator[None]:
    """After every test the server has all its places and answers; its log has no prompt and no traceback."""
    expected = server.complete("x").choices[0].text
    yield
    within(lambda: server.metric("dsgpt_open_sequences") == 0)
    assert server.complete("x").choices[0].text == expected
    log = server.log.read_text()
    assert SECRET not in log and "Traceback" not in log


# It answers the real `openai` client as OpenAI's interface says, with the text of our own generator.


@pytest.fixture(scope="module")
def own(run_dir):
    """Our own decoder and tokenizer."""
    loaded = load(run_dir, which="latest", device=torch.device("cpu"), precision="fp32")
    return Decoder(loaded.model), loaded.tokenizer, loaded.model


def greedy(own, prompt: str, new: int = NEW) -> list[int]:
    return list(generate(own[0], own[1].encode(prompt, add_special_tokens=False), new_tokens=new))


def named(tokenizer, token: int) -> str:
    text = tokenizer.decode([token])
    return f"token_id:{token}" if "\ufffd" in text else text


def texts_of(answer: Any) -> list[str]:
    return [choice.text for choice in answer.choices]


def test_greedy_ids_and_text_are_those_of_the_generator_alone_and_together(server: Server, own):
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        together = list(pool.map(lambda prompt: server.complete(prompt, max_tokens=NEW, logprobs=0), TEXTS))
    for prompt, answer in zip(TEXTS, together, strict=True):
        expected, (choice,) = greedy(own, prompt), answer.choices
        assert choice.logprobs.tokens == [named(own[1], token) for token in expected]
        assert choice.text == own[1].decode(expected)
        assert (choice.finish_reason, answer.usage.completion_tokens) == ("length", NEW)
        assert answer.usage.prompt_tokens == len(own[1].encode(prompt))
    alone = server.complete(TEXTS[0], max_tokens=NEW)
    assert texts_of(alone) == texts_of(together[0])
    assert alone.id != together[0].id


def test_the_sessions_of_the_page_are_what_the_client_sees(server: Server, capsys):
    """With this server's address, model and key."""
    page = (REPOSITORY / "docs" / "serving.md").read_text(encoding="utf-8")
    page = page.replace("http://127.0.0.1:8000", server.url).replace("demo-zero1", MODEL)
    page = page.replace('api_key="none"', f'api_key="{KEY}"')
    example, session = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert capsys.readouterr().out == server.complete("def main(", max_tokens=32).choices[0].text
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(doctest.DocTestParser().get_doctest(session, names, "docs/serving.md", None, 0))
    assert (runner.failures, runner.tries) == (0, 15), capsys.readouterr().out


def test_a_list_of_prompts_as_text_or_ids(server: Server, own):
    ids = [own[1].encode(prompt) for prompt in TEXTS[:3]]
    texts = [own[1].decode(greedy(own, prompt, 8)) for prompt in TEXTS[:3]]
    for prompt in (TEXTS[:3], ids):
        answer = server.complete(prompt, n=2)
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert answer.usage.prompt_tokens == sum(map(len, ids))  # each prompt once
        assert texts_of(answer) == [text for text in texts for _ in range(2)]
    assert texts_of(server.complete(ids[0])) == texts[:1]
    assert server.complete("").usage.prompt_tokens == 1


def test_a_stream_has_the_whole_answers_text_and_ends_with_its_usage(server: Server):
    asked = {"prompt": TEXTS[:4], "max_tokens": NEW, "echo": True}
    whole = server.complete(**asked)
    *parts, last = server.complete(**asked, stream=True, stream_options={"include_usage": True})
    texts, reasons = dict.fromkeys(range(4), ""), {}
    for part in parts:
        (choice,) = part.choices
        texts[choice.index] += choice.text
        if choice.finish_reason:
            assert choice.index not in reasons
            reasons[choice.index] = choice.finish_reason
    assert list(texts.values()) == texts_of(whole)
    assert all(texts[index].startswith(prompt) for index, prompt in enumerate(TEXTS[:4]))
    assert reasons == dict.fromkeys(range(4), "length")
    assert len(parts) >= 20
    assert (last.choices, last.usage) == ([], whole.usage)
    assert {part.id for part in parts} == {last.id}


def test_a_stop_sequence_ends_the_text_before_it_also_across_tokens(server: Server, own):
    text = server.complete(max_tokens=100).choices[0].text
    place = next(place for place in range(2, 90) if "\ufffd" not in text[place : place + 3])
    stop = text[place : place + 3]
    expected = text[: text.index(stop)]
    answer = server.complete(max_tokens=100, stop=["never this", stop], logprobs=1)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (expected, "stop")
    assert answer.usage.completion_tokens == len(own[1].encode(expected + stop))
    assert all(offset < len(expected) for offset in choice.logprobs.text_offset)
    ids = greedy(own, "def ")
    by_id = server.complete(max_tokens=100, logprobs=0, extra_body={"stop_token_ids": [ids[9]]})
    assert by_id.choices[0].logprobs.tokens == [named(own[1], token) for token in ids[: ids.index(ids[9])]]
    assert by_id.usage.completion_tokens == ids.index(ids[9]) + 1  # the one that ended it
    streamed = list(server.complete(max_tokens=100, stop=stop, stream=True))
    assert "".join(part.choices[0].text for part in streamed) == expected
    assert streamed[-1].choices[0].finish_reason == "stop"


def test_logprobs_are_the_models(server: Server, own):
    _, tokenizer, model = own
    answer = server.complete("def ", max_tokens=12, temperature=1.0, n=3, logprobs=3, echo=True)
    before = tokenizer.encode("def ")
    assert len(set(texts_of(answer))) > 1  # it samples
    for choice in answer.choices:
        ids_by_name = {named(tokenizer, token): token for token in range(257)}
        ids = [ids_by_name[name] for name in choice.logprobs.tokens]
        assert ids[: len(before)] == before
        with torch.inference_mode():
            logs = model(torch.tensor([ids]))[0].log_softmax(-1)
        expected = [logs[place, token].item() for place, token in enumerate(ids[1:])]
        assert choice.logprobs.text_offset[:4] == [0, 1, 2, 3]
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
        for place, best in enumerate(choice.logprobs.top_logprobs[1:]):
            likeliest = {named(tokenizer, token): logs[place, token].item() for token in logs[place].topk(3).indices}
            assert best == pytest.approx(likeliest | {choice.logprobs.tokens[place + 1]: expected[place]}, abs=1e-4)
    empty = server.complete("", max_tokens=6, echo=True, logprobs=0).choices[0]
    assert (empty.text, len(empty.logprobs.tokens)) == (tokenizer.decode(greedy(own, "<|endoftext|>", 6)), 6)
    assert None not in empty.logprobs.token_logprobs
    scored = server.complete("def ", max_tokens=0, echo=True, logprobs=1)
    assert (scored.choices[0].text, scored.usage.completion_tokens) == ("def ", 0)
    assert scored.choices[0].logprobs.token_logprobs[1:] == pytest.approx(expected[: len(before) - 1], abs=1e-4)


def test_logprobs_stay_the_same_while_other_sequences_are_decoded(server: Server):
    def score() -> list[float]:
        return server.complete("def main", max_tokens=0, echo=True, logprobs=0).choices[0].logprobs.token_logprobs

    alone = score()
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(server.complete, max_tokens=100, n=2, temperature=float(kind)) for kind in range(2)]
        while not all(other.done() for other in others):
            assert score() == alone
    assert score() == alone


def test_a_seed_repeats_an_answer_alone_and_beside_others(server: Server):
    def ask(seed: int | None, **fields: Any) -> list[str]:
        return texts_of(server.complete("def ", max_tokens=30, temperature=1.0, seed=seed, **fields))

    alone, filtered = ask(3, n=2), ask(3, extra_body={"top_k": 20, "min_p": 0.01})
    assert alone[0] != alone[1] and alone[:1] != ask(4) != ask(None) != ask(None)
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(ask, seed, top_p=0.5, n=2) for seed in (None, 3, 4, None)]
        assert ask(3, n=2) == alone
        assert ask(3) == alone[:1]
        assert ask(3, extra_body={"top_k": 20, "min_p": 0.01}) == filtered
    assert {len(other.result()) for other in others} == {2}
    for cold in ({"temperature": 1e-9}, {"temperature": 2e-4}, {"temperature": 1.0, "top_p": 1e-6}):
        assert texts_of(server.complete(n=2, **cold)) == texts_of(server.complete()) * 2


def test_models_health_and_metrics(server: Server):
    (model,) = server.openai.models.list().data
    assert (model.id, model.max_model_len, server.openai.models.retrieve(MODEL).id) == (MODEL, POSITIONS, MODEL)
    assert re.fullmatch("[0-9a-f]{32}", server.complete()._request_id)
    with pytest.raises(openai.NotFoundError, match="a base model without a chat template: use /v1/completions"):
        server.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
    kinds = [f'dsgpt_tokens_total{{kind="{kind}"}}' for kind in ("prompt", "completion")]
    times = [f"dsgpt_{name}_seconds" for name in ("request", "first_token", "queue")]
    lines = [*kinds, *(f"{name}_{part}" for part in ("count", "sum") for name in times)]
    before = [server.metric(line) for line in lines]
    server.complete(n=2 * BATCH, max_tokens=40)  # half of them wait until the others have all their tokens
    within(lambda: server.metric(f"{times[0]}_count") > before[2])  # it is counted after the client has its answer
    after = [server.metric(line) for line in lines]
    prompt, completion, *counts, request, first_token, queue = (b - a for a, b in zip(before, after, strict=True))
    assert (prompt, completion, counts) == (4, 2 * BATCH * 40, [1, 2 * BATCH, 2 * BATCH])
    assert 0 < queue < first_token < 2 * BATCH * request


# Keys, and how many sequences one of them may have.


def test_a_key_has_its_requests_a_minute_its_places_and_its_name_in_the_metrics(server: Server):
    """While one key has all its places, another is answered."""
    slow, words = server.openai.with_options(api_key=SLOW_KEY), {"model": MODEL, "prompt": "x", "max_tokens": 1}
    stream = server.complete(n=MOST, max_tokens=100, stream=True)
    next(stream)
    began = time.monotonic()
    for _ in range(2):
        assert slow.completions.create(**words).usage.completion_tokens == 1
    with pytest.raises(openai.RateLimitError) as caught:
        slow.completions.create(**words)
    assert 60 - (time.monotonic() - began) <= int(caught.value.response.headers["retry-after"]) <= 60
    assert "the key 'slow' may send 2 requests a minute" in caught.value.message
    list(stream)
    text = server.http.get(f"{server.url}/metrics").text
    assert 'dsgpt_key_requests_total{key="slow",status="200"} 2.0' in text
    assert 'dsgpt_key_requests_total{key="slow",status="429"} 1.0' in text
    assert 'dsgpt_key_requests_total{key="ann",status="200"} ' in text
    assert KEY not in text and SLOW_KEY not in text


# What a client does wrong has an answer of its own in OpenAI's form.


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": SECRET, "max_tokens": 4} | fields).encode()


MISTAKES = Path(__file__).with_name("mistakes.txt").read_text(encoding="utf-8").rstrip().split("\n\n")
"""Of each its name, the body of the request, and status, code, parameter and message of the answer."""
ENCODINGS = {"# UTF-16": "utf-16", "# invalid UTF-8": "latin-1"}


def test_each_mistake_has_its_answer(server: Server):
    """In a body, ``9{4000}`` stands for 4,000 nines."""
    for mistake in MISTAKES:
        name, shown, expected = mistake.split("\n")
        data = re.sub(r"(\S)\{(\d+)\}", lambda found: found[1] * int(found[2]), shown)
        before = server.ended(int(expected[:3]))
        answer = server.post(data.encode(ENCODINGS.get(name, "utf-8")))
        error = answer.json()["error"]
        assert f"{answer.status_code} {error['code']} {error['param']}: {error['message']}" == expected, name
        assert error["type"] == "invalid_request_error"
        assert "\n" not in error["message"] and len(answer.content) < 300 and SECRET not in error["message"]
        assert server.ended(answer.status_code) == before + 1
    server.http.headers["content-type"] = "text/plain"  # what a web page of another site can send without asking
    assert server.post(body()).json()["error"]["code"] == "unsupported_media_type"
    server.http.headers["content-type"] = "application/json"
    assert server.post(b"\xef\xbb\xbf" + body(temperature=0)).json()["usage"]["completion_tokens"] == 4


# Clients that hang up, that do not read, that do not send, or that send too much.


def asking(server: Server, data: bytes, *, length: int | None = None) -> socket.socket:
    """A connection that sent a request; it reads nothing."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {KEY}\r\nContent-Length: {length or len(data)}\r\n\r\n"
    return connect(server.port, head.encode() + data)


def test_who_does_not_send_or_does_not_read_is_cut_off(server: Server):
    before = server.ended(408)
    reader = asking(server, body(n=MOST, max_tokens=100, stream=True, logprobs=5))
    with reader, asking(server, body()[:10], length=1000) as sender:
        answer = rest(sender)
        within(lambda: server.ended(408) == before + 2)
        read = rest(reader)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer
    assert read.startswith(b"HTTP/1.1 200 ") and b"[DONE]" not in read


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_places(server: Server, stream: bool):
    """On a busy machine the answer may be done before this client looks, or hangs up: then it asks again."""

    def hung_up() -> bool:
        answered, gone = server.ended(200), server.ended(499)
        client = asking(server, body(n=MOST, max_tokens=100, stream=stream))
        within(lambda: server.metric("dsgpt_open_sequences") == MOST or server.ended(200) > answered)
        client.close()
        within(lambda: server.ended(499) + server.ended(200) > gone + answered)
        return bool(server.ended(499) > gone)

    within(hung_up)
    before = server.ended(499)
    asking(server, body()[:10], length=1000).close()  # in its body
    within(lambda: server.ended(499) == before + 1)


def test_many_clients_hang_up_at_random_instants(server: Server):
    """Also while a sequence ends or meets its stop sequence."""
    for number in range(60):
        stop = {"stop": ["a", "e", " "]} if number % 2 else {}
        asked = {"n": 2, "max_tokens": 1 + number % 7, "stream": bool(number % 3), "temperature": 1.0}
        client = asking(server, body(**asked, **stop))
        time.sleep(0.001 * (number % 12))
        client.close()
    assert server.http.get(f"{server.url}/health").json() == {"status": "ok"}


MALFORMED = [
    '{"model": "tiny", "prompt": [' + ",".join([item] * (260_000 // (len(item) + 1))) + "]}"
    for item in ("{}", "[]", "[null]", "1.5")
]
LONG = json.dumps({"model": MODEL, "prompt": "<|endoftext|>" * 19_230})
"""250,000 characters of tokens so long that the whole is encoded."""


def test_clients_that_send_large_requests_leave_another_its_answers(server: Server):
    """The bound is for busy machines."""
    bodies, statuses, done, seconds = [*MALFORMED, LONG], Counter(), threading.Event(), []

    def flood(body: str) -> None:
        with httpx2.Client(headers=server.http.headers, timeout=60) as client:
            while not done.is_set():
                statuses[client.post(f"{server.url}/v1/completions", content=body).status_code] += 1

    with ThreadPoolExecutor(len(bodies)) as pool:
        floods = [pool.submit(flood, body) for body in bodies]
        try:
            within(lambda: statuses.total() >= len(bodies))
            for _ in range(10):
                began = time.perf_counter()
                assert server.complete().usage.completion_tokens == 8
                seconds.append(time.perf_counter() - began)
        finally:
            done.set()
    assert [flood.exception() for flood in floods] == [None] * len(bodies)
    assert set(statuses) == {400}
    assert max(seconds) < 10


def test_nothing_is_lost_mixed_up_or_answered_twice(server: Server, monkeypatch):
    """Under several times its capacity, by the clients of the suite that measures servers."""
    for name in ("AsyncClient", "get"):  # those of the suite have no key
        monkeypatch.setattr(httpx2, name, partial(getattr(httpx2, name), headers=server.http.headers))
    load, measured = Load(server.url, MODEL, PROMPTS, max_tokens=24, seed=1), ServerProcess.__new__(ServerProcess)
    measured.url = server.url
    alone = [one.text for one in load.steady(len(PROMPTS), clients=1)[0]]
    before = server.ended(200), server.ended(429)
    served, _ = load.poisson(load.instants(150, per_sec=1000))
    assert {(one.answers, one.failure) for one in served} == {(1, None)}
    assert all(one.accepted_sec <= one.whole_sec for one in served)
    assert [one.text for one in served] == [alone[number % len(PROMPTS)] for number in range(150)]
    assert len({one.name for one in served}) == 150
    assert server.ended(200) - before[0] == 150
    assert measured.metric(ANSWERED) == server.ended(200)
    assert server.ended(429) - before[1] == sum(one.refusals for one in served) > 0


# The first signal ends a server when all answers are given, the second one at once.


@pytest.mark.parametrize(
    ("number", "logprobs", "code", "last"),
    [
        pytest.param(
            *(signal.SIGTERM, None, 0, "SIGTERM: finishing what was accepted; a second signal ends it at once"),
            marks=pytest.mark.long,
        ),
        (signal.SIGINT, 5, 130, "error: SIGINT: ended at once"),
    ],
)
def test_signals(run_dir: Path, tmp_path: Path, number: signal.Signals, logprobs: int | None, code: int, last: str):
    """An answer that its client does not read would keep the server for the twenty seconds of the default."""
    with serving(run_dir, tmp_path) as server:
        answer = asking(server, body(n=PLACES, max_tokens=40, stream=True, logprobs=logprobs))
        answer.recv(100)
        server.process.send_signal(number)
        if logprobs is None:
            assert rest(answer).count(b'"finish_reason": "') == PLACES
        else:
            time.sleep(0.5)
            server.process.send_signal(number)
        assert (server.process.wait(START_SEC), server.log.read_text().splitlines()[-1]) == (code, last)

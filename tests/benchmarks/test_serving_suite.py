"""The suite that measures a server under load: its clients, its rounds, its figures, and what it finds wrong."""

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from small_run import Quiet, running, within

from dsgpt.benchmarks import serving
from dsgpt.benchmarks.frame import record_head
from dsgpt.common.errors import UserError

# What the load test reports is wrong, from the figures of its rounds.

FOLDER = Path("no-folder")
OPTIONS = serving.ServingOptions(output=FOLDER, page=FOLDER, checkpoint=FOLDER, requests=50, rounds=2)
RESETS_PEAKS = pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system keeps the peaks")


def a_round(number: int, *, answered: int, lost: int = 0, **changes: Any) -> dict[str, Any]:
    """Answered requests, which took up to 1 s after up to 100 s of refusals, and lost ones."""
    shares = random.Random(0).sample([(place + 1) / answered for place in range(answered)], answered)
    requests = [served(f"{each}", accepted_sec=each, whole_sec=100 * each, refusals=3) for each in shares]
    requests += [served("", answers=0, accepted_sec=300.0, whole_sec=300.0, refusals=200)] * lost
    seen = {"answered_by_the_servers_count": answered, "peak_rss_bytes": 2_000_000, "open_sequences": 0}
    times = {"round": number, "seconds": 50.0, "offered_per_sec": 20.0}
    return serving.round_of(requests, alone=["", "b"], earlier=set()) | times | seen | changes


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({}, None),
        ({"answered": 0, "failures": {"answered 503: no": 4}}, "round 2: 4 answered 503: no"),
        ({"offered_per_sec": 3.9}, "the load was only 1.9 times what the server answers"),
        ({"answered_by_the_servers_count": 3}, "round 2: 1 lost"),
        ({"answered_by_the_servers_count": 5}, "round 2: 1 answered twice"),
        ({"answered_twice": 1}, "round 2: 1 answered twice"),
        ({"wrong_texts": 2}, "round 2: 2 wrong texts"),
        ({"open_sequences": 1}, "round 2: 1 sequences left"),
        ({"peak_rss_bytes": 2_042_000}, "the memory grew from the first round to the last"),
    ],
)
def test_the_load_test_names_what_is_wrong(changes, failure):
    command = serving.Serving(replace(OPTIONS, requests=4), FOLDER)
    command._exit_code, command._capacity = 0, 2.0
    rounds = [a_round(number, answered=4, seconds=2.0, offered_per_sec=40.0) for number in (1, 2)]
    record = record_head("1.0", device="cpu") | command.record([rounds[0], rounds[1] | changes])
    assert failure is None or any(line.startswith(failure) for line in command.failures(record))
    assert bool(command.failures(record)) == (failure is not None)
    page = serving.serving_page(record, source="load.json")
    assert record["rounds"][0]["accepted_sec"] == {"p50": 0.5, "p95": 1.0, "p99": 1.0}
    in_texts = failure is None or any(word in failure for word in ("grew", "left", "only"))
    assert ("**Every request was answered once" in page) == in_texts


def served(name: str, text: str = "b", **changes: Any) -> serving.Served:
    facts = {"prompt": 1, "answers": 1, "refusals": 0, "accepted_sec": 0.1, "whole_sec": 0.2}
    return serving.Served(**facts | {"name": name, "text": text} | changes)


def test_requests_of_a_round_are_counted():
    lost = served("", answers=0, failure="answered 504: late")
    found = serving.round_of([served("a"), served("b"), lost, lost], alone=["x", "b"], earlier={"z"})
    assert (found["answered"], found["answered_twice"], found["wrong_texts"]) == (2, 0, 0)
    assert found["failures"] == {"answered 504: late": 2}
    for twice in (served("a"), served("z"), served("c", answers=2)):  # of this round, of an earlier one, in one answer
        assert serving.round_of([served("a"), twice], alone=["x", "b"], earlier={"z"})["answered_twice"] == 1
    assert serving.round_of([served("a", "x")], alone=["x", "b"], earlier=set())["wrong_texts"] == 1


def test_as_many_requests_arrive_as_are_asked_for():
    instants = serving.Load("", serving.MODEL, serving.PROMPTS, max_tokens=1, seed=1).instants(4000, per_sec=50)
    assert instants == sorted(instants)
    assert instants[-1] == pytest.approx(80, rel=0.05)  # three standard errors of the mean


# The load test's own parts: its clients, its rounds, its figures, and the memory that it reads.

Answer = tuple[int, dict[str, str], Any]
"""Status, headers and body."""


@contextlib.contextmanager
def answering(answer: Callable[[int], Answer]) -> Iterator[tuple[str, list[Any]]]:
    """The address of a server in this process, and what it was asked; ``answer`` gets the number of the request."""
    asked: list[Any] = []

    class Handler(Quiet):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            status, headers, body = answer(len(asked) - 1)
            data = json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"content-length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    with running(HTTPServer(("127.0.0.1", 0), Handler)) as address:
        yield address, asked


def test_clients_ask_again_as_the_server_says_and_report_what_they_waited_and_got(monkeypatch):
    """Two refusals, then an answer with two choices, then an error; then the server is gone."""
    answers: list[Answer] = [
        (429, {"retry-after": "0.02"}, {}),
        (429, {"retry-after": "0.04"}, {}),
        (200, {}, {"id": "its name", "choices": [{"text": "first"}, {"text": "second"}]}),
        (503, {}, {}),
    ]
    waits, sleep = [], asyncio.sleep

    async def noted(seconds: float) -> None:
        waits.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(serving.asyncio, "sleep", noted)
    with answering(answers.__getitem__) as (url, asked):
        load = serving.Load(url, serving.MODEL, serving.PROMPTS, max_tokens=3, seed=1)
        (answer,), seconds = load.poisson([0.01])
        arrival, first, second = waits
        with pytest.raises(UserError, match=r"^src/serve.py does not answer 1 of 1 requests: answered 503: "):
            load.steady(1, clients=1)
    body = {"model": serving.MODEL, "max_tokens": 3, "temperature": 0, "prompt": serving.PROMPTS[0]}
    assert asked == [body] * 4
    assert (answer.answers, answer.name, answer.text, answer.refusals) == (2, "its name", "first", 2)
    assert arrival == 0.01
    assert 0.02 <= first <= 0.04 <= second <= 0.08
    assert answer.whole_sec - answer.accepted_sec >= first + second - 0.01  # a timer may be a little early
    assert 0 < answer.accepted_sec < answer.whole_sec < seconds
    (gone,), _ = load.poisson([0.0])
    assert (gone.answers, gone.failure.split(":")[0]) == (0, "ConnectError")


class ScriptedLoad(serving.Load):
    """Clients whose answers are those of a script, and change the server's ``metrics``."""

    asked: ClassVar[list[Any]] = []
    metrics: ClassVar[dict[str, float]] = {serving.ANSWERED: 7.0, "dsgpt_open_sequences": 0.0}

    def steady(self, requests: int, *, clients: int) -> tuple[list[serving.Served], float]:
        self.asked.append((requests, clients))
        return self._served(requests), 10.0 * len(self.asked)

    def poisson(self, instants: Any) -> tuple[list[serving.Served], float]:
        self.asked.append((len(instants), instants[-1]))
        requests = self._served(len(instants))
        if len(self.asked) > 4:  # the second round
            requests[1], requests[2] = replace(requests[1], name="4-1"), replace(requests[2], text="")
        self.metrics[serving.ANSWERED] += 54 - len(self.asked)  # 50, then 49
        return requests, 5.0

    def _served(self, requests: int) -> list[serving.Served]:
        prompts = [number % len(serving.PROMPTS) for number in range(requests)]
        return [served(f"{len(self.asked)}-{n}", f"of {each}", prompt=each) for n, each in enumerate(prompts)]


def test_a_round_offers_several_times_the_capacity_and_counts_what_the_server_and_the_clients_saw(monkeypatch):
    peaks = iter([900, 100, 500, 102])  # those before the rounds are of other work
    facts = {"url": "http://server", "peak_bytes": peaks.__next__, "stop": lambda: 3}
    server = SimpleNamespace(**facts, metric=ScriptedLoad.metrics.__getitem__)
    monkeypatch.setattr(serving, "ServerProcess", lambda *_, **options: contextlib.nullcontext(server))
    monkeypatch.setattr(serving, "Load", ScriptedLoad)
    suite = serving.Serving(OPTIONS, FOLDER)
    first, second = suite.results()
    places, steady = serving.BATCH + serving.QUEUE, 10 * serving.BATCH
    assert ScriptedLoad.asked[:3] == [(len(serving.PROMPTS), 1), (steady, places), (steady, places)]
    keys = ("round", "answered", "answered_by_the_servers_count", "answered_twice", "wrong_texts", "peak_rss_bytes")
    assert [[each[key] for key in keys] for each in (first, second)] == [[1, 50, 50, 0, 0, 100], [2, 50, 49, 1, 1, 102]]
    record = suite.record([first, second])
    capacity = steady / 30  # the last of the steady ones takes 30 s
    assert (record["capacity_per_sec"], record["exit_code"], record["growth"]) == (capacity, 3, 1.02)
    for each, (_, last) in zip((first, second), ScriptedLoad.asked[3:], strict=True):
        assert each["offered_per_sec"] == pytest.approx(4 * capacity, rel=0.5)
        assert each["offered_per_sec"] == 50 / last
    assert record["load"] == min(first["offered_per_sec"], second["offered_per_sec"]) / 10  # more than the capacity


def test_the_page_counts_what_is_wrong():
    """A lost request has no latency: its waits are those of a client that gave up."""
    suite = serving.Serving(replace(OPTIONS, requests=104), FOLDER)
    suite._capacity, suite._exit_code = 5.0, None
    first = a_round(1, answered=100, lost=4, answered_twice=2, wrong_texts=3)
    record = suite.record([first, a_round(2, answered=100, lost=4, answered_by_the_servers_count=99)])
    assert record["load"] == 4.0  # against the capacity, which is more than the rounds answered
    times = "0.50 / 0.95 / 0.99 s | 50.00 / 95.00 / 99.00 s | 2 MB |"
    assert serving.summary_lines(record)[-1] == f"| 2 | 100 | 5 | 0 | 0 | 1100 | 50.0 | {times}"
    page = serving.serving_page(record_head("1.0", device="cpu") | record, source="x.json")
    assert "**9 requests were lost; 5 were answered twice or with another text.**" in page


SCRIPT = """
import signal, sys

held = bytearray(200 << 20)
signal.signal(signal.SIGUSR1, lambda *_: held.clear())
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print("serving tiny at http://127.0.0.1:9/v1", flush=True)
while True:
    signal.pause()
"""
"""A program with the first line of ``src/serve.py`` that frees its memory when it is told to."""


@RESETS_PEAKS
def test_the_memory_is_the_servers_and_its_peak_that_since_the_last_reading(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "serve.py").write_text(SCRIPT, encoding="utf-8")
    with serving.ServerProcess(tmp_path, FOLDER, device="cpu", log=tmp_path / "log") as server:
        assert server.url == "http://127.0.0.1:9"
        within(lambda: 200 << 20 < server.peak_bytes() < 300 << 20)
        server._process.send_signal(signal.SIGUSR1)
        within(lambda: 0 < server.peak_bytes() < 100 << 20)
        assert server.stop() == 3

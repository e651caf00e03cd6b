"""A server under several times its capacity answers every request once; the load test reports what is wrong."""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from running_server import MODEL, Server

from dsgpt.benchmarks.serving import (
    ANSWERED,
    PROMPTS,
    Load,
    Served,
    ServerProcess,
    ServingOptions,
    _ServingCommand,
    round_of,
    serving_page,
)
from dsgpt.common.errors import UserError
from dsgpt.inference.server.completions import Gate, Metrics
from dsgpt.inference.server.options import Limits
from dsgpt.inference.server.requests import ApiError


def test_nothing_is_lost_mixed_up_or_answered_twice(server: Server):
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
    assert server.metric("dsgpt_open_sequences") == 0


def results(**changes: Any) -> list[dict[str, Any]]:
    one = {"prompt": 0, "answers": 1, "name": "a", "text": "b", "refusals": 2, "accepted_sec": 0.1, "whole_sec": 1.0}
    good = {
        "round": 1,
        "answered": 4,
        "answered_by_the_servers_count": 4,
        "answered_twice": 0,
        "wrong_texts": 0,
        "seconds": 2.0,
        "offered_per_sec": 40.0,
        "failures": {},
        "peak_rss_bytes": 1000,
        "open_sequences": 0,
        "requests": [{**one, "accepted_sec": number / 10} for number in range(1, 5)],
    }
    return [good, good | {"round": 2} | changes]


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({}, None),
        ({"answered": 3}, "round 2: 1 lost"),
        ({"answered": 0, "failures": {"answered 503: no": 4}}, "round 2: 4 answered 503: no"),
        ({"offered_per_sec": 3.9}, "the load was only 1.9 times what the server answers"),
        ({"seconds": 0.19}, "the load was only 1.9 times what the server answers"),
        ({"answered_by_the_servers_count": 3}, "round 2: 1 lost"),
        ({"answered_by_the_servers_count": 5}, "round 2: 1 answered twice"),
        ({"answered_twice": 1}, "round 2: 1 answered twice"),
        ({"wrong_texts": 2}, "round 2: 2 wrong texts"),
        ({"open_sequences": 1}, "round 2: 1 sequences left"),
        ({"peak_rss_bytes": 1021}, "the memory grew from the first round to the last"),
    ],
)
def test_the_load_test_names_what_is_wrong(tmp_path: Path, changes, failure):
    options = ServingOptions(
        output=tmp_path, page=tmp_path, keep=None, checkpoint=tmp_path, requests=4, times=4, rounds=2, device="cpu"
    )
    command = _ServingCommand(options, tmp_path)
    command._exit_code, command._capacity, rounds = 0, 2.0, results(**changes)
    record = command.record(rounds, seconds=5)
    assert failure is None or any(line.startswith(failure) for line in command.failures(rounds, record))
    assert bool(command.failures(rounds, record)) == (failure is not None)
    page = serving_page(record, source="load.json")
    assert record["rounds"][0]["accepted_sec"] == {"p50": 0.2, "p95": 0.4, "p99": 0.4}
    in_texts = failure is None or any(word in failure for word in ("grew", "left", "only"))
    assert ("**Every request was answered once" in page) == in_texts


def served(name: str, text: str = "b", **changes: Any) -> Served:
    facts = {
        "prompt": 1,
        "answers": 1,
        "refusals": 0,
        "accepted_sec": 0.1,
        "whole_sec": 0.2,
        "name": name,
        "text": text,
    }
    return Served(**facts | changes)


def test_requests_of_a_round_are_counted():
    lost = served("", answers=0, failure="answered 504: late")
    found = round_of([served("a"), served("b"), lost, lost], alone=["x", "b"], known={"z"})
    assert (found["answered"], found["answered_twice"], found["wrong_texts"]) == (2, 0, 0)
    assert found["failures"] == {"answered 504: late": 2}
    for twice in (served("a"), served("z"), served("c", answers=2)):  # of this round, of an earlier one, in one answer
        assert round_of([served("a"), twice], alone=["x", "b"], known={"z"})["answered_twice"] == 1
    assert round_of([served("a", "x")], alone=["x", "b"], known=set())["wrong_texts"] == 1


def test_arrivals_are_poisson_and_as_many_as_asked_for():
    instants = Load("", MODEL, PROMPTS, max_tokens=1, seed=1).instants(4000, per_sec=50)
    gaps = [later - earlier for earlier, later in pairwise([0.0, *instants])]
    assert sum(gaps) / 4000 == pytest.approx(1 / 50, rel=0.05)  # three standard errors of the mean
    assert sum(gap > 1 / 50 for gap in gaps) / 4000 == pytest.approx(math.exp(-1), abs=0.025)


def test_a_server_that_answers_with_errors_or_not_at_all_loses_requests():
    """In this process: every second request is answered with an error."""

    class Failing(BaseHTTPRequestHandler):
        asked = 0

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            Failing.asked += 1
            body = json.dumps({"id": f"{Failing.asked}", "choices": [{"text": "b"}]}).encode()
            self.send_response(503 if Failing.asked % 2 else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Failing) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        load = Load(f"http://127.0.0.1:{http.server_port}", MODEL, PROMPTS, max_tokens=1, seed=1)
        answered, _ = load.poisson([0.0, 0.0, 0.0, 0.05])
        with pytest.raises(UserError, match=r"^src/serve.py does not answer 1 of 2 requests: answered 503: "):
            load.steady(2, clients=1)
        http.shutdown()
    assert sorted(one.answers for one in answered) == [0, 0, 1, 1]
    assert answered[3].whole_sec < 60
    gone, _ = load.poisson([0.0])
    assert (gone[0].answers, gone[0].failure.split(":")[0]) == (0, "ConnectError")


def test_refused_clients_are_told_to_wait_longer_when_sequences_take_longer():
    limits = Limits(batch=2, queue=2, new_tokens=None, body_bytes=1, request_sec=1, stall_sec=1)
    gate, waits = Gate(limits, Metrics()), []
    for seconds in (0.01, 5.0, 500.0):
        for _ in range(100):
            gate.took(seconds)
        with gate.places(4), pytest.raises(ApiError) as caught, gate.places(1):
            pass
        waits.append(int(caught.value.headers["retry-after"]))
    assert waits == [1, 10, 60]

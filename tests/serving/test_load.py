"""A server under several times its capacity answers every request once; the load test reports what is wrong."""

from pathlib import Path
from typing import Any

import pytest
from running_server import MODEL, Server

from dsgpt.benchmarks.serving.command import PROMPTS, ServingOptions, _ServingCommand
from dsgpt.benchmarks.serving.load import Load
from dsgpt.benchmarks.serving.page import serving_page
from dsgpt.serving.errors import ApiError
from dsgpt.serving.gate import Gate
from dsgpt.serving.metrics import Metrics
from dsgpt.serving.options import Limits


def test_nothing_is_lost_mixed_up_or_answered_twice(server: Server):
    load = Load(server.url, MODEL, PROMPTS, max_tokens=24, seed=1)
    alone = [one.text for one in load.steady(len(PROMPTS), clients=1)[0]]
    before = server.ended(200), server.ended(429)
    served, _ = load.poisson(150, per_sec=1000)
    assert [one.text for one in served] == [alone[number % len(PROMPTS)] for number in range(150)]
    assert len({one.name for one in served}) == 150
    assert server.ended(200) - before[0] == 150
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
    command._exit_code, rounds = 0, results(**changes)
    record = command.record(rounds, seconds=5)
    assert failure is None or failure in command.failures(rounds, record)
    assert bool(command.failures(rounds, record)) == (failure is not None)
    page = serving_page(record, source="load.json")
    assert record["rounds"][0]["accepted_sec"] == {"p50": 0.2, "p95": 0.4, "p99": 0.4}
    in_texts = failure is None or "grew" in failure or "left" in failure
    assert ("**Every request was answered once" in page) == in_texts


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

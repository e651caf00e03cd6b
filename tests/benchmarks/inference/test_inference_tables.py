"""The tables of many requests have the figures under their names, and a worker serves the turn that it is told."""

import io
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_many_requests import OPTIONS, answer, request

from dsgpt.benchmarks import inference_engines as ours
from dsgpt.benchmarks import inference_worker as worker
from dsgpt.benchmarks.inference import _InferenceCommand, inference_page, summary_lines
from dsgpt.benchmarks.inference_turns import EngineProcess
from dsgpt.benchmarks.inference_worker import ANSWER, ONE, STATIC, as_words, open_engine
from dsgpt.record.suites import Concurrency, Engine, Load, Percentiles
from dsgpt.record.sweeps import Spread


def percentiles(unit: float) -> Percentiles:
    return Percentiles(p50=unit, p95=2 * unit, p99=4 * unit)


def load(times: float) -> Load:
    """Every figure is another one; those of the second concurrency are several times those of the first."""
    return Load(
        requests=4,
        offered_tokens_per_sec=500.0 * times,
        tokens_per_sec=Spread(median=60 * times, smallest=50 * times, largest=90 * times, values=[1.0, 2.0]),
        ttft_sec=percentiles(0.003 * times),
        time_per_token_sec=percentiles(0.001 * times),
        latency_sec=percentiles(0.007 * times),
        queue_sec=percentiles(0.002 * times),
        request_tokens_per_sec=percentiles(20 * times),
        peak_memory_bytes=int(500e6 * times),
    )


def engine(name: str, **changes: Any) -> Engine:
    facts: dict[str, Any] = {"version": None, "load_sec": 1.5, "same_ids": 8, "answers": 8, "differences": []}
    return Engine(name=name, **facts | {"by_concurrency": {"1": load(1), "4": load(3)}} | changes)


RECORD = asdict(
    Concurrency(
        schema_version="1.0",
        timestamp_utc="now",
        git_commit="c",
        env={"torch_version": "2"},
        hardware={"gpu_name": None, "cpu_name": "CPU", "cpu_count": 2, "device": "cpu"},
        checkpoint="run",
        model={"n_layer": 2, "n_embd": 8, "vocab_size": 101},
        threads=2,
        trace_sha256="x",
        seed=1,
        requests=4,
        prompt_tokens=30,
        new_tokens=20,
        repeats=2,
        alone_sec=0.25,
        gap_sec={"1": 0.5, "4": 0.125},
        seconds=9.0,
        engines=[engine("one"), engine("continuous", same_ids=5, by_concurrency={"4": load(2)}, failure="it broke")],
    )
)


def test_the_page_has_every_figure_under_its_name():
    page = inference_page(RECORD, source="x.json")
    assert "| at once | offered, tokens/s | one: tokens/s; p50 latency | continuous: tokens/s; p50 latency |" in page
    assert "| 1 | 500 | 60 (50 to 90); 0.007 s | failed |" in page
    assert "| 4 | 1,500 | 180 (150 to 270); 0.021 s | 120 (100 to 180); 0.014 s |" in page
    header = "first token, ms | per token, ms | latency, ms | in the queue, ms | tokens/s of a request"
    assert f"| p50 / p95 / p99 | {header} | peak memory, MB |" in page
    first, second = page.partition("### 4 at once")[::2]
    assert (
        "| one | 3.0 / 6.0 / 12.0 | 1.0 / 2.0 / 4.0 | 7.0 / 14.0 / 28.0 | 2.0 / 4.0 / 8.0 | 20 / 40 / 80 | 500 |"
        in first
    )
    assert (
        "| continuous | 6.0 / 12.0 / 24.0 | 2.0 / 4.0 / 8.0 | 14.0 / 28.0 / 56.0 | 4.0 / 8.0 / 16.0 | 40 / 80 / 160 | "
        "1,000 |" in second
    )
    assert "| continuous | failed | failed |" in first
    assert "* one: 8 of 8 answers" in page
    assert "* continuous: 5 of 8 answers" in page
    assert summary_lines(RECORD) == [
        "one: 180 tokens per second and p95 latency 0.042 s at 4 at once; 8 of 8 answers have our ids",
        "continuous: failed: it broke",
        "continuous: 120 tokens per second and p95 latency 0.028 s at 4 at once; 5 of 8 answers have our ids",
    ]


def test_an_engine_with_other_ids_is_a_failure():
    command = _InferenceCommand(OPTIONS)
    command._measured = [engine("one"), engine("static", same_ids=7), engine("continuous", failure="it broke")]
    assert command.failures([], {}) == ["continuous: failed: it broke", "static: 1 of 8 answers have other ids"]


def test_answers_stand_beside_their_requests_in_whatever_order_they_ended():
    process = EngineProcess.__new__(EngineProcess)
    peaks = iter((700, 300))

    def ask(turn: dict[str, Any]) -> dict[str, Any]:
        ended = [answer(one["number"], 0.0, 1.0 + turn["slots"]) for one in reversed(turn["requests"])]
        return {"answers": as_words(ended), "peak_bytes": next(peaks)}

    process._ask = ask
    requests = [request(number, 0.0) for number in (4, 2, 3)]
    for slots, peak in ((1, 700), (2, 300)):
        found = process.serve(requests, slots=slots)
        assert [one.number for one in found] == [4, 2, 3]
        assert {tuple(one.token_times) for one in found} == {(1.0 + slots,)}
        assert process.peak_bytes == peak  # of this turn


def test_a_worker_serves_each_turn_with_its_slots_and_reports_the_peak_of_the_turn(monkeypatch, tmp_path, capsys):
    """The clock shows the 2 s that opening takes; a turn takes as much memory as it has slots."""
    done: list[Any] = []
    now = [10.0]

    def opened(job: dict[str, Any]) -> SimpleNamespace:
        now[0] += 2.0
        done.append(job["kind"])

        def serve(requests, *, slots):
            done.append((requests, slots))
            return [answer(one.number, 0.0, 1.0) for one in requests]

        return SimpleNamespace(serve=serve, close=lambda: done.append("closed"))

    (tmp_path / "job.json").write_text(json.dumps({"kind": "one", "device": "cpu", "slots": 9}), encoding="utf-8")
    requests = [request(3, 0.5, prompt=2), request(5, 1.0)]
    turns = [{"requests": as_words(requests), "slots": slots} for slots in (1, 4)]
    monkeypatch.setattr(sys, "argv", ["worker", str(tmp_path / "job.json")])
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(turn) + "\n" for turn in turns)))
    monkeypatch.setattr(worker, "open_engine", opened)
    monkeypatch.setattr(worker, "clock", lambda: now[0])
    monkeypatch.setattr(worker, "_forget_peak", lambda device: done.append(f"{device} forgotten"))
    monkeypatch.setattr(worker, "_peak_bytes", lambda _: 100 * done[-1][1])
    worker.main()
    assert done == ["one", "cpu forgotten", (requests, 1), "cpu forgotten", (requests, 4), "closed"]
    loaded, *found = [json.loads(line.removeprefix(ANSWER)) for line in capsys.readouterr().out.splitlines()]
    assert loaded == {"load_sec": 2.0, "version": None}
    assert [(len(one["answers"]), one["peak_bytes"]) for one in found] == [(2, 100), (2, 400)]


@pytest.mark.parametrize(("kind", "largest"), [(ONE, 1), (STATIC, 4)])
def test_one_decodes_one_request_and_static_as_many_as_the_slots(monkeypatch, kind, largest):
    asked: list[Any] = []
    monkeypatch.setattr(ours, "OwnModel", lambda *words, **options: asked.append((*words, options)))
    opened: Any = open_engine({"kind": kind, "slots": 4, "threads": 0, "checkpoint": "run", "device": "cpu"})
    assert asked == [(Path("run"), "cpu", {"batch_size": largest})]
    assert opened._largest == largest

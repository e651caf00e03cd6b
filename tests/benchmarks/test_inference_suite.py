"""The suite of many requests: its engines and its tables."""

import io
import json
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_run import REPOSITORY
from test_many_requests import OPTIONS, TRACE, answer, request, write_run

from dsgpt.benchmarks import inference_engines as continuous
from dsgpt.benchmarks import inference_engines as ours
from dsgpt.benchmarks import inference_worker as worker
from dsgpt.benchmarks.inference import Inference, _selected, inference_page, summary_lines
from dsgpt.benchmarks.inference_engines import ContinuousEngine, OwnModel
from dsgpt.benchmarks.inference_turns import EngineProcess, Engines, Trace, _environment
from dsgpt.benchmarks.inference_worker import ANSWER, ONE, STATIC, Answer, as_words, open_engine
from dsgpt.common.errors import UserError
from dsgpt.record.suites import Concurrency, Engine, Load, Percentiles, Spread

# Engines get what they are told, and what they report is measured where it should be.


class ScriptedProcess:
    """A process whose every answer to a turn takes as many seconds as the number of the turn."""

    def __init__(self, fails_at: int = 99) -> None:
        self.turns: list[tuple[int, int]] = []
        self.peak_bytes, self._fails_at = 0, fails_at

    def serve(self, requests, *, slots) -> list[Answer]:
        self.turns.append((len(requests), slots))
        self.peak_bytes = 100 * len(self.turns)
        if len(self.turns) == self._fails_at:
            raise UserError("it broke")
        return [answer(one.number, 1.0, 1.5, 1.0 + len(self.turns)) for one in requests]


def engines(**processes: ScriptedProcess) -> Engines:
    made = Engines.__new__(Engines)
    made._processes, made.failures = processes, {}
    return made


def test_what_is_timed_is_warm_and_has_the_slots_of_its_turn():
    one, static = ScriptedProcess(), ScriptedProcess(fails_at=3)
    tested, trace = engines(one=one, static=static), Trace(seed=1, requests=TRACE.requests * 2)
    alone = tested.alone(trace, vocab_size=101)
    assert alone.mean_sec == 2.0  # of the second answer to each request
    assert list(alone.ids) == list(range(14))
    requests = trace.arriving(gap_sec=1, vocab_size=101)
    tested.warm_up(requests, slots=16)
    turns = [tested.turn("static", requests, concurrency=slots, repeat=1) for slots in (3, 4, 5)]
    assert (one.turns, static.turns) == ([(8, 1), (14, 1), (8, 16)], [(8, 16), (14, 3), (14, 4)])
    assert (turns[0].concurrency, turns[0].peak_bytes, len(turns[0].answers)) == (3, 200, 14)
    assert turns[1:] == [None, None]
    assert tested.failures == {"static": "it broke"}
    with pytest.raises(UserError, match=r"^the engine one failed: it broke$"):
        engines(one=ScriptedProcess(fails_at=1)).warm_up(requests, slots=1)


def test_only_the_first_requests_of_a_trace_are_selected():
    assert _selected(TRACE, 2).requests == TRACE.requests[:2]
    assert _selected(TRACE, 0) is TRACE


def test_margins_are_those_of_the_ids_after_the_prompt(tmp_path):
    model, prompt = OwnModel(write_run(tmp_path), "cpu"), [3, 1, 4]
    ids = [step[0] for step in model.generate([prompt], new_tokens=5)]
    with torch.inference_mode():
        for place, margin in enumerate(model.margins(prompt, ids)):
            best = model._model(torch.tensor([[*prompt, *ids[:place]]]))[0, -1].topk(2)
            assert int(best.indices[0]) == ids[place]
            assert margin == pytest.approx(float(best.values[0] - best.values[1]), abs=1e-4)


def test_every_engine_has_the_threads_of_the_record():
    assert _environment(3)["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in _environment(0)


PEAKS = """
import os, subprocess, sys
from dsgpt.benchmarks import inference_worker as worker
bytearray(200 << 20)
before = worker._peak_bytes("cpu")
worker._forget_peak("cpu")
after = worker._peak_bytes("cpu")
child = subprocess.Popen([sys.executable, "-c", "bytearray(200 << 20); print(flush=True); input()"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(before, after, worker._peak_bytes("cpu"))
child.communicate(b"\\n")
"""
"""A process of its own: another test's memory would be in the figures."""


def test_the_peak_is_that_of_the_turn_and_of_processes_that_the_engine_started():
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system keeps the peaks")
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    before, after, with_child = map(int, done.stdout.split())
    assert before - after > 150 << 20
    assert with_child - after > 150 << 20


class ScriptedManager:
    """Answers each request in the order of their arrival, a result at each call."""

    def __init__(self) -> None:
        self.running: deque[tuple[str, float, int]] = deque()
        self.most = 0

    def add_request(self, prompt, *, request_id, max_new_tokens, **_):
        self.running.append((request_id, time.perf_counter(), max_new_tokens))
        self.most = max(self.most, len(self.running))

    def get_result(self, *, timeout):
        if not self.running:
            time.sleep(min(timeout, 0.01))
            return None
        time.sleep(0.002)
        name, added, count = self.running.popleft()
        times = [time.perf_counter()] * count
        return SimpleNamespace(
            request_id=name, error=None, lifespan=(added + 0.5, times[-1]), timestamps=times,
            generated_tokens=[7] * count, created_time=added,
        )  # fmt: skip

    def is_running(self):
        return True


def test_continuous_batching_gets_no_more_than_the_slots_and_waits_for_late_requests(monkeypatch):
    """A request that arrives later than the longest wait for an answer is no sign that the engine is stuck."""
    monkeypatch.setattr(continuous, "LONGEST_WAIT_SEC", 0.02)
    engine = ContinuousEngine.__new__(ContinuousEngine)
    engine._manager = manager = ScriptedManager()
    requests = [*(request(number, 0.0) for number in range(5)), request(5, 0.1), request(6, 0.1, new_tokens=3)]
    answers = {one.number: one for one in engine.serve(requests, slots=2)}
    assert manager.most == 2
    assert sorted(answers) == list(range(7))
    assert (answers[6].ids, len(answers[6].token_times)) == ([7] * 3, 3)
    assert all(
        one.started >= requests[number].arrival + 0.5 for number, one in answers.items()
    )  # not when it was added
    monkeypatch.setattr(manager, "get_result", lambda **_: None)
    with pytest.raises(UserError, match="stopped answering"):
        engine.serve(requests[:1], slots=1)


# The tables of many requests have the figures under their names, and a worker serves the turn that it is told.


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
    engines = [engine("one"), engine("static", same_ids=7), engine("continuous", failure="it broke")]
    record = {"engines": [asdict(one) for one in engines]}
    assert Inference(OPTIONS, REPOSITORY).failures(record) == [
        "continuous: failed: it broke",
        "static: 1 of 8 answers have other ids",
    ]


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

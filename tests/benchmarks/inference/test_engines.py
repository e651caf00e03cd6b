"""Engines get what they are told, and what they report is measured where it should be."""

import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_many_requests import TRACE, answer, request, write_run

from dsgpt.benchmarks import inference_engines as continuous
from dsgpt.benchmarks.inference import _selected
from dsgpt.benchmarks.inference_engines import ContinuousEngine, OwnModel
from dsgpt.benchmarks.inference_turns import Engines, Trace, _environment
from dsgpt.benchmarks.inference_worker import Answer
from dsgpt.common.errors import UserError


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

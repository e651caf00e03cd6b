"""``python src/benchmark.py inference``: real engines on a small model, and the figures made from their answers."""

import asyncio
import json
import math
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from make_trace import make_trace
from matplotlib.text import Text
from published import publish
from small_run import REPOSITORY
from test_serving_suite import RESETS_PEAKS

from dsgpt.benchmarks import inference, launch
from dsgpt.benchmarks import inference_worker as worker
from dsgpt.benchmarks.frame import run_suite
from dsgpt.benchmarks.inference import Inference, InferenceOptions, Trace, Turn, differences, load_of, percentiles
from dsgpt.charts.style import quiet_style
from dsgpt.charts.sweeps import concurrency_chart
from dsgpt.charts.themes import LIGHT
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.common.json_files import read_as
from dsgpt.inference.model_files import export
from dsgpt.machine.console import Console
from dsgpt.model.config import GPT2Config
from dsgpt.record.suites import Percentiles, read_concurrency

CONFIG = GPT2Config(n_layer=2, n_head=2, n_embd=32, block_size=48, vocab_size=101)
TRACE = make_trace(seed=1, requests=7, prompt_tokens=(2, 8, 20), new_tokens=(1, 6, 20))


def write_run(folder: Path) -> Path:
    """A run folder with a checkpoint of random weights, whose logits differ by far more than rounding."""
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"))
    publish(folder / "published", vocab_size=CONFIG.vocab_size, n_positions=CONFIG.block_size, **ends)
    run = folder / "run"
    run.mkdir()
    (run / "training_metrics.json").write_text(json.dumps({"run_id": "r", "inference": {"latency_sec": 0.25}}))
    out = run / "step-00000001"
    export(folder / "published", out, form="portable", dtype="fp32", which="latest", console=Console(speaks=False))
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The checkpoint of a run."""
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.mark.long
def test_every_engine_generates_the_same_ids_and_one_that_fails_is_shown_while_the_others_go_on(run, tmp_path, capsys):
    """A Python without vLLM stands for one whose vLLM does not start."""
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    write_json_atomic(tmp_path / "trace.json", asdict(TRACE))
    engines = ("one", "static", "continuous", "vllm")
    files = {"output": tmp_path / "out.json", "trace": tmp_path / "trace.json", "vllm": tmp_path / "environment"}
    options = InferenceOptions(checkpoint=run, concurrency=(1, 3), engines=engines, repeats=1, **files)
    assert run_suite(Inference, options, repository=REPOSITORY) == 1
    record, page = read_concurrency(tmp_path / "out.json"), (tmp_path / "out.md").read_text(encoding="utf-8")
    *measured, vllm = record.engines
    assert [engine.name for engine in record.engines] == list(engines)
    assert record.engines[2].version.startswith("transformers ")
    for engine in measured:
        assert (engine.same_ids, engine.differences, engine.failure) == (2 * len(TRACE.requests), [], None)
        assert list(engine.by_concurrency) == ["1", "3"]
        for load in engine.by_concurrency.values():
            assert load.requests == len(TRACE.requests)
            assert load.peak_memory_bytes > 1e8  # Python with torch
            for low, high in ((load.queue_sec, load.ttft_sec), (load.ttft_sec, load.latency_sec)):
                assert 0 <= low.p50 < high.p50
                assert low.p99 < high.p99
            assert load.request_tokens_per_sec.p50 >= load.request_tokens_per_sec.p99 > 0
    assert record.gap_sec == {"1": pytest.approx(2 * record.alone_sec), "3": pytest.approx(2 * record.alone_sec / 3)}
    assert vllm.failure == "its process ended with 1: ModuleNotFoundError: No module named 'vllm'"
    assert (vllm.load_sec, vllm.answers, vllm.by_concurrency) == (None, 0, {})
    assert f"* vllm failed: {vllm.failure}" in page
    assert page.count("| vllm | failed | failed |") == 2
    shown = capsys.readouterr().out
    assert shown.count(vllm.failure) == 3  # when it failed, in the summary, and at the end
    speed = measured[0].by_concurrency["3"].tokens_per_sec.median
    assert f"one: {speed:,.0f} tokens per second and p95 latency" in shown

    own = json.loads((run.parent / "training_metrics.json").read_text(encoding="utf-8"))
    loads = own["inference"].pop("by_concurrency")
    assert own == {"run_id": "r", "inference": {"latency_sec": 0.25}}
    assert loads["3"]["static"] == asdict(measured[1].by_concurrency["3"])

    other = replace(record, engines=[measured[0], replace(measured[2], same_ids=13), vllm])
    with quiet_style(LIGHT):
        chart = concurrency_chart(other)
    for line, engine in zip(chart.body.axes[0].get_lines(), other.engines, strict=True):
        points = [(load.tokens_per_sec.median, load.latency_sec.p50) for load in engine.by_concurrency.values()]
        assert [tuple(point) for point in line.get_xydata()] == points
    other_tokens = "OTHER TOKENS: continuous: 1 of 14 answers are not those of this project"
    texts = [text.get_text() for text in chart.figure.findobj(Text)]
    assert f"FAILED: vllm: {vllm.failure}\n{other_tokens}" in texts


def request(number: int, arrival: float, *, prompt: int = 1, new_tokens: int = 2) -> worker.Arrival:
    return worker.Arrival(number=number, arrival=arrival, prompt=[number] * prompt, new_tokens=new_tokens)


def turn(*pairs: tuple[worker.Arrival, worker.Answer], peak: int | None = None) -> Turn:
    requests, answers = zip(*pairs, strict=True)
    return Turn(engine="one", concurrency=1, repeat=1, requests=requests, answers=answers, peak_bytes=peak)


def answer(number: int, started: float, *times: float, ids: list[int] | None = None) -> worker.Answer:
    return worker.Answer(number=number, started=started, token_times=list(times), ids=ids or [5] * len(times))


def test_figures_of_answers_are_those_of_a_hand_made_case():
    """Two requests at 1 s and 3 s; the second waits for the first, as in a queue with one server."""
    one, other = request(0, 1.0, new_tokens=3), request(1, 3.0, new_tokens=1)
    first = turn((one, answer(0, 1.0, 2.0, 3.0, 4.0)), (other, answer(1, 4.0, 5.5)), peak=10)
    load = load_of([first, replace(first, peak_bytes=20)])
    later = turn((one, answer(0, 3.0, 9.0, 10.0, 11.0)))
    both = load_of([first, later])
    rates = [replace(first, answers=[replace(one, token_times=[when]) for one in first.answers]) for when in (4, 5, 9)]
    assert load_of(rates).tokens_per_sec.median == 1.0  # 4 tokens in 3, 4 and 8 seconds
    assert (both.requests, both.queue_sec.p99, both.ttft_sec.p99, both.latency_sec.p99) == (3, 2.0, 8.0, 10.0)
    assert load.requests == 4
    assert load.tokens_per_sec.values == [4 / 4.5, 4 / 4.5]  # from 1.0 to 5.5
    assert load.offered_tokens_per_sec == 4 / 4  # two gaps of 2 s
    assert load.queue_sec == Percentiles(p50=0.0, p95=1.0, p99=1.0)
    assert load.ttft_sec == Percentiles(p50=1.0, p95=2.5, p99=2.5)
    assert load.latency_sec == Percentiles(p50=2.5, p95=3.0, p99=3.0)
    assert load.time_per_token_sec == Percentiles(p50=1.0, p95=1.0, p99=1.0)  # only the first has two tokens
    assert load.request_tokens_per_sec == Percentiles(p50=1.0, p95=0.4, p99=0.4)
    assert load.peak_memory_bytes == 20
    assert percentiles([float(value) for value in range(100, 0, -1)]) == Percentiles(p50=50, p95=95, p99=99)


def test_a_difference_is_counted_and_shown():
    given = enumerate(([5, 6], [5, 9], [5]))
    answers = [answer(number, 0.0, *range(1, len(ids) + 1), ids=ids) for number, ids in given]
    reference, margins = {0: [5, 6], 1: [5, 6], 2: [5, 6]}, {1: [1.0, 1e-7], 2: [1.0, 0.5]}
    found = differences([*answers, *answers], reference, margins)
    assert [tuple(vars(one).values()) for one in found] == [(1, 1, 6, 9, 1e-7, 2), (2, 1, 6, -1, 0.5, 2)]
    record = json.loads((REPOSITORY / "checkpoint/reference/cpu-2-cores/inference.json").read_text(encoding="utf-8"))
    record["engines"][2] |= {"same_ids": 24, "differences": [vars(one) for one in found]}
    page = inference.inference_page(record, source="x.json")
    assert "* continuous: 24 of 960 answers" in page
    assert "| continuous | 1 | 1 | 6 | 9 | 1e-07 | 2 |\n| continuous | 2 | 1 | 6 | none | 0.5 | 2 |" in page
    suite = Inference(InferenceOptions(output=Path("o")), REPOSITORY)
    assert suite.failures(record) == ["continuous: 936 of 960 answers have other ids"]


class Scripted:
    """A model that takes a second for each step and answers with the first id of the prompt; time passes only here."""

    positions = 10

    def __init__(self) -> None:
        self.now, self.batches = 100.0, []

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def generate(self, prompts, *, new_tokens):
        self.batches.append([prompt[0] for prompt in prompts])
        for _ in range(new_tokens):
            self.sleep(1)
            yield [prompt[0] for prompt in prompts]


@pytest.fixture
def scripted(monkeypatch):
    model = Scripted()
    monkeypatch.setattr(worker, "clock", lambda: model.now)
    monkeypatch.setattr(time, "sleep", model.sleep)
    return model


def test_a_batch_is_what_waits_when_the_batch_before_it_ends_and_fits_the_positions_of_the_model(scripted):
    late = [request(2, 3.0, new_tokens=1), request(3, 3.2), request(4, 9.0)]
    engine = worker.BatchEngine(scripted, largest=8)
    answers = engine.serve([request(0, 0.5, new_tokens=3), request(1, 1.0), *late], slots=2)
    assert scripted.batches == [[0], [1, 2], [3], [4]]
    assert [one.started for one in answers] == [0.5, 3.5, 3.5, 5.5, 9.0]
    assert [one.token_times for one in answers] == [[1.5, 2.5, 3.5], [4.5, 5.5], [4.5], [6.5, 7.5], [10.0, 11.0]]
    assert [one.ids for one in answers] == [[0, 0, 0], [1, 1], [2], [3, 3], [4, 4]]
    scripted.batches.clear()  # each fits alone, but the longest prompt and the most new tokens together do not
    requests = [request(0, 0.0, prompt=8), request(1, 0.0, prompt=1, new_tokens=3), request(2, 0.0)]
    engine.serve([*requests, request(3, 20.0, new_tokens=8), request(4, 20.0, prompt=5)], slots=8)
    assert scripted.batches == [[0], [1, 2], [3], [4]]


def test_another_engine_is_the_first_each_time():
    of_a_repeat = ((1, "a"), (1, "b"), (4, "b"), (4, "a"))
    both = [(repeat, *turn) for repeat in (1, 2) for turn in of_a_repeat]
    assert list(inference.turn_order(("a", "b"), (1, 4), repeats=2)) == both


def test_arrivals_are_poisson_prompts_do_not_begin_alike_and_the_committed_trace_is_what_its_command_makes():
    gaps = [one.gap for one in make_trace(requests=4000).requests]
    assert sum(gaps) / len(gaps) == pytest.approx(1, abs=0.05)  # three standard errors of the mean
    assert sum(gap > 1 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.025)
    committed = read_as(inference.COMMITTED, Trace)
    assert committed == make_trace()
    requests = committed.arriving(gap_sec=0.5, vocab_size=50_257)
    assert len({one.prompt[0] for one in requests}) == len(requests)
    assert requests[0].arrival == 0
    assert requests[2].arrival - requests[1].arrival == pytest.approx(0.5 * committed.requests[2].gap)


class StandInVllm:
    """What ``VllmEngine`` uses of vLLM 0.32's asynchronous engine, which has an environment of its own.

    The outputs are as the real one gives them: ids in parts, with the statistics of the request.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most_running = self.running = 0
        self.asked: list[tuple[Any, ...]] = []
        kinds: dict[str, dict[str, Any]] = {"vllm.v1": {}, "vllm.v1.engine": {}}
        kinds["vllm"] = {"AsyncEngineArgs": SimpleNamespace, "SamplingParams": SimpleNamespace}
        kinds["vllm.v1.engine.async_llm"] = {"AsyncLLM": SimpleNamespace(from_engine_args=self.opened)}
        kinds["vllm.sampling_params"] = {"RequestOutputKind": SimpleNamespace(DELTA="delta")}
        for name, values in kinds.items():
            monkeypatch.setitem(sys.modules, name, SimpleNamespace(**values))

    def opened(self, arguments: SimpleNamespace) -> "StandInVllm":
        self.asked.append((arguments.dtype, arguments.enable_prefix_caching))
        return self

    async def generate(self, prompt, wanted, _name):
        self.asked.append((prompt, wanted.temperature, wanted.ignore_eos, wanted.max_tokens))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        metrics = SimpleNamespace(scheduled_ts=time.perf_counter() + 0.5)
        for part in ([7], [8, 9], [10]):
            await asyncio.sleep(0.002)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=part)], metrics=metrics)
        self.running -= 1


def test_vllm_is_asked_for_greedy_ids_and_never_for_more_than_the_slots(monkeypatch, tmp_path):
    stand_in = StandInVllm(monkeypatch)
    engine = worker.VllmEngine(tmp_path, slots=4)
    answers = engine.serve([request(number, 0.001 * number, new_tokens=4) for number in range(5)], slots=2)
    assert stand_in.asked[:2] == [("float32", False), ({"prompt_token_ids": [0]}, 0, True, 4)]
    assert stand_in.most_running == 2
    assert [(one.number, one.ids) for one in answers] == [(number, [7, 8, 9, 10]) for number in range(5)]
    for one in answers:
        assert one.token_times == sorted(one.token_times)
        assert one.token_times[1] == one.token_times[2]  # they came together
        assert one.started > 0.5  # the instant that the engine reports


class ScriptedWorker:
    """A worker whose every answer to a turn takes as many seconds as the number of the turn; the last request first."""

    def __init__(self, fails_at: int = 99) -> None:
        self.turns: list[tuple[int, int]] = []
        self._fails_at = fails_at

    def send(self, turn: dict[str, Any]) -> None:
        self.turns.append((len(turn["requests"]), turn["slots"]))
        self._numbers = [one["number"] for one in reversed(turn["requests"])]

    def read(self) -> dict[str, Any]:
        if (count := len(self.turns)) == self._fails_at:
            raise launch.WorkerEnded(1, "it broke")
        answers = [answer(number, 1.0, 1.5, 1.0 + count) for number in self._numbers]
        return {"answers": [asdict(one) for one in answers], "peak_bytes": 100 * count}


def test_what_is_timed_is_warm_and_has_the_slots_of_its_turn():
    one, static = ScriptedWorker(fails_at=4), ScriptedWorker(fails_at=3)
    suite = Inference(InferenceOptions(output=Path("o")), REPOSITORY)
    suite._workers, suite._failed, suite._model = {"one": one, "static": static}, {}, CONFIG
    suite._trace = Trace(seed=1, requests=TRACE.requests * 2)
    suite.answer_alone()
    assert (suite._alone_sec, list(suite._alone_ids)) == (2.0, list(range(14)))  # of the second answer to each request
    requests = suite._arrivals(1.0)
    for kind in ("one", "static"):
        suite.turn(kind, requests[:8], concurrency=16)
    turns = [suite.turn("static", requests, concurrency=slots, repeat=1) for slots in (3, 4, 5)]
    assert (one.turns, static.turns) == ([(8, 1), (14, 1), (8, 16)], [(8, 16), (14, 3), (14, 4)])
    assert (turns[0].concurrency, turns[0].peak_bytes) == (3, 200)  # of this turn
    assert [each.number for each in turns[0].answers] == list(range(14))
    assert turns[1:] == [None, None]
    assert suite._failed == {"static": "its process ended with 1: it broke"}
    with pytest.raises(UserError, match=r"^the engine one failed: its process ended with 1: it broke$"):
        suite.turn("one", requests, concurrency=1)


def test_margins_are_those_of_the_ids_after_the_prompt(run):
    model, prompt = worker.OwnModel(run, "cpu"), [3, 1, 4]
    ids = [step[0] for step in model.generate([prompt], new_tokens=5)]
    with torch.inference_mode():
        for place, margin in enumerate(model.margins(prompt, ids)):
            best = model._model(torch.tensor([[*prompt, *ids[:place]]]))[0, -1].topk(2)
            assert int(best.indices[0]) == ids[place]
            assert margin == pytest.approx(float(best.values[0] - best.values[1]), abs=1e-4)


def test_a_worker_has_its_threads_and_nothing_of_a_launcher(monkeypatch, tmp_path):
    """With a process that is not started."""
    environments = []
    monkeypatch.setattr(launch.subprocess, "Popen", lambda _, env, **more: environments.append(env))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    for threads in (3, 0):
        launch.LineWorker("a.module", {}, tmp_path / str(threads), threads=threads, variables={"RANK": 1})
    assert [one.get("OMP_NUM_THREADS") for one in environments] == ["3", None]
    assert [(one["RANK"], "DS_ACCELERATOR" in one) for one in environments] == [("1", False)] * 2


PEAKS = """
import subprocess, sys
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


@RESETS_PEAKS
def test_the_peak_is_that_of_the_turn_and_of_processes_that_the_engine_started():
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    before, after, with_child = map(int, done.stdout.split())
    assert before - after > 150 << 20
    assert with_child - after > 150 << 20


class ScriptedManager:
    """Transformers' engine: answers each request in the order of their arrival, a result at each call."""

    def __init__(self) -> None:
        self.running, self.most = deque[tuple[str, float, int]](), 0

    def add_request(self, prompt, *, request_id, max_new_tokens, **_):
        self.running.append((request_id, time.perf_counter(), max_new_tokens))
        self.most = max(self.most, len(self.running))

    def get_result(self, *, timeout):
        time.sleep(min(timeout, 0.002))
        if not self.running:
            return None
        name, added, count = self.running.popleft()
        result = {"request_id": name, "error": None, "lifespan": (added + 0.5, 0), "generated_tokens": [7] * count}
        return SimpleNamespace(**result, timestamps=[time.perf_counter()] * count, created_time=added)

    def is_running(self):
        return True


def test_continuous_batching_gets_no_more_than_the_slots_and_waits_for_late_requests(monkeypatch):
    """A request that arrives later than the longest wait for an answer is no sign that the engine is stuck."""
    monkeypatch.setattr(worker, "LONGEST_WAIT_SEC", 0.02)
    engine = worker.ContinuousEngine.__new__(worker.ContinuousEngine)
    engine._manager = manager = ScriptedManager()
    requests = [*(request(number, 0.0) for number in range(5)), request(5, 0.1), request(6, 0.1, new_tokens=3)]
    answers = sorted(engine.serve(requests, slots=2), key=lambda one: one.number)
    assert manager.most == 2
    assert [(one.number, len(one.ids)) for one in answers[4:]] == [(4, 2), (5, 2), (6, 3)]
    assert all(len(one.ids) == len(one.token_times) for one in answers)
    assert all(one.started >= asked.arrival + 0.5 for one, asked in zip(answers, requests, strict=True))
    monkeypatch.setattr(manager, "get_result", lambda **_: None)
    with pytest.raises(UserError, match="stopped answering"):
        engine.serve(requests[:1], slots=1)


@pytest.mark.parametrize(("kind", "largest"), [(worker.ONE, 1), (worker.STATIC, 4)])
def test_one_decodes_one_request_and_static_as_many_as_the_slots(monkeypatch, kind, largest):
    asked: list[Any] = []
    monkeypatch.setattr(worker, "OwnModel", lambda *words, **options: asked.append((*words, options)))
    opened: Any = worker.open_engine({"kind": kind, "slots": 4, "threads": 0, "checkpoint": "run", "device": "cpu"})
    assert asked == [(Path("run"), "cpu", {"batch_size": largest})]
    assert opened._largest == largest

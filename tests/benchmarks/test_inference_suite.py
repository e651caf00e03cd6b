"""``python src/benchmark.py inference``: real engines on a small model, and the figures made from their answers."""

import asyncio
import io
import json
import math
import random
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.text import Text
from safetensors.torch import save_file
from small_run import REPOSITORY

from dsgpt.benchmarks import inference_worker as worker
from dsgpt.benchmarks import launch
from dsgpt.benchmarks.frame import run_suite
from dsgpt.benchmarks.inference import Inference, InferenceOptions, inference_page, summary_lines
from dsgpt.benchmarks.inference_turns import (
    COMMITTED,
    Engines,
    Trace,
    Turn,
    differences,
    gap_sec,
    load_of,
    make_trace,
    percentiles,
    read_trace,
    same_answers,
    speeds,
    turn_order,
)
from dsgpt.benchmarks.launch import LineWorker, WorkerEnded
from dsgpt.charts.style import quiet_style
from dsgpt.charts.sweeps import concurrency_chart
from dsgpt.charts.themes import LIGHT
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.formats.hugging_face import hugging_face_config, to_hugging_face
from dsgpt.inference.model_files import export
from dsgpt.machine.console import Console
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2
from dsgpt.record.suites import Concurrency, Engine, Load, Percentiles, Spread, read_concurrency

CONFIG = GPT2Config(n_layer=2, n_head=2, n_embd=32, block_size=48, vocab_size=101)
ENGINES = ("one", "static", "continuous")
OPTIONS = InferenceOptions(
    output=Path("inference.json"),
    checkpoint=Path("no-run"),
    concurrency=(1, 3),
    engines=ENGINES,
    repeats=2,
    trace=Path("no.json"),
    vllm=Path("no-environment"),
)
TRACE = make_trace(seed=1, requests=7, prompt_tokens=(2, 8, 20), new_tokens=(1, 6, 20))


def write_run(folder: Path) -> Path:
    """A run folder with a checkpoint of random weights, whose logits differ by far more than rounding."""
    stream, model = torch.Generator().manual_seed(0), GPT2(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=stream) * 0.2)
    published = folder / "published"
    published.mkdir(parents=True)
    (published / "config.json").write_text(json.dumps(hugging_face_config(CONFIG, dtype="fp32", end_of_text=None)))
    weights = to_hugging_face(model.named_parameters(), CONFIG)
    save_file({name: value.detach().contiguous() for name, value in weights}, published / "model.safetensors")
    run = folder / "run"
    run.mkdir()
    (run / "training_metrics.json").write_text(json.dumps({"run_id": "r", "inference": {"latency_sec": 0.25}}))
    out = run / "step-00000001"
    export(published, out, form="portable", dtype="fp32", which="latest", console=Console(speaks=False))
    return out


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[int, Path, Path]:
    """Exit code, folder of the record, and the run's folder."""
    folder = tmp_path_factory.mktemp("inference")
    checkpoint = write_run(folder)
    write_json_atomic(folder / "trace.json", asdict(TRACE))
    options = replace(
        OPTIONS,
        output=folder / "out" / "inference.json",
        checkpoint=checkpoint,
        trace=folder / "trace.json",
    )
    return run_suite(Inference, options, repository=REPOSITORY), folder / "out", checkpoint.parent


def test_every_engine_generates_the_same_ids_and_has_every_figure_in_record_and_page(measured):
    code, out, _ = measured
    record, page = read_concurrency(out / "inference.json"), (out / "inference.md").read_text(encoding="utf-8")
    assert code == 0
    assert page.count("\n| one |") == page.count("\n| continuous |") == 3  # two concurrencies, and the versions
    assert "28 of 28 answers" in page
    assert [engine.name for engine in record.engines] == list(ENGINES)
    assert record.engines[2].version.startswith("transformers ")
    for engine in record.engines:
        assert engine.same_ids == engine.answers == 2 * 2 * len(TRACE.requests)
        assert engine.differences == []
        assert list(engine.by_concurrency) == ["1", "3"]
        for load in engine.by_concurrency.values():
            assert load.requests == 2 * len(TRACE.requests)
            assert len(load.tokens_per_sec.values) == 2
            assert load.peak_memory_bytes > 1e8  # Python with torch
            for low, high in ((load.queue_sec, load.ttft_sec), (load.ttft_sec, load.latency_sec)):
                assert 0 <= low.p50 < high.p50
                assert low.p99 < high.p99
            assert load.request_tokens_per_sec.p50 >= load.request_tokens_per_sec.p99 > 0
    assert record.gap_sec == {"1": pytest.approx(2 * record.alone_sec), "3": pytest.approx(2 * record.alone_sec / 3)}
    offered = [load.offered_tokens_per_sec for load in record.engines[0].by_concurrency.values()]
    assert offered[1] == pytest.approx(3 * offered[0])


def test_the_chart_has_a_line_for_each_engine(measured):
    record = read_concurrency(measured[1] / "inference.json")
    other = replace(record, engines=[record.engines[0], replace(record.engines[2], same_ids=27)])
    with quiet_style(LIGHT):
        lines = concurrency_chart(record).body.axes[0].get_lines()
        warned = concurrency_chart(other).figure.findobj(Text)
    assert len(lines) == len(ENGINES)
    for line, engine in zip(lines, record.engines, strict=True):
        loads = engine.by_concurrency.values()
        assert list(line.get_xdata()) == [load.tokens_per_sec.median for load in loads]
        assert list(line.get_ydata()) == [load.latency_sec.p50 for load in loads]
    stamps = [text.get_text() for text in warned if "OTHER TOKENS" in text.get_text()]
    assert stamps == ["OTHER TOKENS: continuous: 1 of 28 answers are not those of this project"]


def test_the_record_of_the_run_keeps_its_keys(measured):
    run = json.loads((measured[2] / "training_metrics.json").read_text(encoding="utf-8"))
    assert run["run_id"] == "r"
    assert run["inference"]["latency_sec"] == 0.25
    loads = run["inference"]["by_concurrency"]
    assert {slots: set(engines) for slots, engines in loads.items()} == {key: set(ENGINES) for key in ("1", "3")}
    record = json.loads((measured[1] / "inference.json").read_text(encoding="utf-8"))
    assert loads["3"]["static"] == record["engines"][1]["by_concurrency"]["3"]


def request(number: int, arrival: float, *, prompt: int = 1, new_tokens: int = 2) -> worker.Arrival:
    return worker.Arrival(number=number, arrival=arrival, prompt=[number] * prompt, new_tokens=new_tokens)


def turn(*pairs: tuple[worker.Arrival, worker.Answer], peak: int | None = None) -> Turn:
    requests, answers = zip(*pairs, strict=True)
    return Turn(engine="one", concurrency=1, repeat=1, requests=requests, answers=answers, peak_bytes=peak)


def answer(number: int, started: float, *times: float, ids: list[int] | None = None) -> worker.Answer:
    return worker.Answer(number=number, started=started, token_times=list(times), ids=ids or [5] * len(times))


def test_figures_of_answers_are_those_of_a_hand_made_case():
    """Two requests at 1 s and 3 s; the second waits for the first, as in a queue with one server."""
    first = turn(
        (request(0, 1.0, new_tokens=3), answer(0, 1.0, 2.0, 3.0, 4.0)),
        (request(1, 3.0, new_tokens=1), answer(1, 4.0, 5.5)),
        peak=10,
    )
    load = load_of([first, replace(first, peak_bytes=20)])
    later = turn((request(0, 1.0, new_tokens=3), answer(0, 3.0, 9.0, 10.0, 11.0)))
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


def test_percentiles_are_values_that_were_measured():
    hundred = [float(value) for value in random.Random(0).sample(range(1, 101), 100)]
    assert percentiles(hundred) == Percentiles(p50=50, p95=95, p99=99)
    assert speeds(hundred) == Percentiles(p50=51, p95=6, p99=2)  # 50, 95 and 99 of the 100 are at least that
    assert percentiles([7.0]) == speeds([7.0]) == Percentiles(p50=7, p95=7, p99=7)
    assert percentiles([]) is None


def test_a_difference_is_counted_and_shown(measured):
    own = turn(
        (request(0, 0.0), answer(0, 0.0, 1.0, 2.0, ids=[5, 6])),
        (request(1, 0.0), answer(1, 0.0, 1.0, 2.0, ids=[5, 9])),
        (request(2, 0.0), answer(2, 0.0, 1.0, ids=[5])),
    )
    reference, margins = {0: [5, 6], 1: [5, 6], 2: [5, 6]}, {1: [1.0, 1e-7], 2: [1.0, 0.5]}
    assert same_answers([own, own], reference) == 2
    found = differences([own, own], reference, margins)
    assert [(one.request, one.position, one.ours, one.theirs, one.margin, one.answers) for one in found] == [
        (1, 1, 6, 9, 1e-7, 2),
        (2, 1, 6, -1, 0.5, 2),
    ]
    record = json.loads((measured[1] / "inference.json").read_text(encoding="utf-8"))
    record["engines"][2] |= {"same_ids": 24, "differences": [vars(one) for one in found]}
    page = inference_page(record, source="x.json")
    assert "* continuous: 24 of 28 answers" in page
    assert "| continuous | 1 | 1 | 6 | 9 | 1e-07 | 2 |\n| continuous | 2 | 1 | 6 | none | 0.5 | 2 |" in page


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


def test_a_batch_is_what_waits_when_the_batch_before_it_ends(scripted):
    requests = [
        *(request(0, 0.5, new_tokens=3), request(1, 1.0), request(2, 3.0, new_tokens=1)),
        *(request(3, 3.2), request(4, 9.0)),
    ]
    answers = worker.BatchEngine(scripted, largest=8).serve(requests, slots=2)
    assert scripted.batches == [[0], [1, 2], [3], [4]]
    assert [one.started for one in answers] == [0.5, 3.5, 3.5, 5.5, 9.0]
    assert [one.token_times for one in answers] == [[1.5, 2.5, 3.5], [4.5, 5.5], [4.5], [6.5, 7.5], [10.0, 11.0]]
    assert [one.ids for one in answers] == [[0, 0, 0], [1, 1], [2], [3, 3], [4, 4]]


def test_one_at_a_time_has_no_batches_and_no_batch_outgrows_the_positions_of_the_model(scripted):
    """Each fits alone, but the longest prompt and the most new tokens together do not."""
    answers = worker.BatchEngine(scripted, largest=1).serve([request(0, 0.0), request(1, 0.0)], slots=8)
    assert (scripted.batches, [one.started for one in answers]) == ([[0], [1]], [0.0, 2.0])
    scripted.batches.clear()
    requests = [request(0, 0.0, prompt=8), request(1, 0.0, prompt=1, new_tokens=3), request(2, 0.0)]
    requests += [request(3, 20.0, new_tokens=8), request(4, 20.0, prompt=5)]
    worker.BatchEngine(scripted, largest=8).serve(requests, slots=8)
    assert scripted.batches == [[0], [1, 2], [3], [4]]


def test_another_engine_is_the_first_each_time():
    order = list(turn_order(("a", "b"), (1, 4), repeats=2))
    assert order == [
        *((1, 1, "a"), (1, 1, "b"), (1, 4, "b"), (1, 4, "a")),
        *((2, 1, "a"), (2, 1, "b"), (2, 4, "b"), (2, 4, "a")),
    ]
    assert gap_sec(0.5, 4) == 0.25


def test_the_committed_trace_is_what_its_command_makes():
    assert read_trace(COMMITTED) == make_trace()


def test_arrivals_are_poisson_and_prompts_do_not_begin_alike():
    trace = make_trace(requests=4000)
    gaps = [one.gap for one in trace.requests]
    assert sum(gaps) / len(gaps) == pytest.approx(1, abs=0.05)  # three standard errors of the mean
    assert sum(gap > 1 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.025)
    requests = read_trace(COMMITTED).arriving(gap_sec=0.5, vocab_size=50_257)
    assert len({one.prompt[0] for one in requests}) == len(requests)
    assert all(0 <= token < 50_257 for one in requests for token in one.prompt)
    other = replace(read_trace(COMMITTED), seed=2).arriving(gap_sec=0.5, vocab_size=50_257)
    assert other[0].prompt != requests[0].prompt
    assert requests[0].arrival == 0
    assert requests[2].arrival - requests[1].arrival == pytest.approx(0.5 * read_trace(COMMITTED).requests[2].gap)


def test_a_trace_that_the_model_cannot_answer_is_refused():
    long = replace(TRACE.requests[0], prompt_tokens=40, new_tokens=9)
    assert Trace(seed=1, requests=[long]).mistakes(positions=48) == [
        "request 0 has 40 and 9 tokens, and the model reads at most 48: give a trace of shorter requests"
    ]
    assert Trace(seed=1, requests=[]).mistakes(positions=48) == ["has no requests"]


def test_a_record_of_another_schema_is_refused(measured, tmp_path):
    record = json.loads((measured[1] / "inference.json").read_text(encoding="utf-8"))
    (tmp_path / "r.json").write_text(json.dumps(record | {"schema_version": "2.0"}))
    with pytest.raises(UserError, match=r"has schema 2\.0, and this program knows 1\.0"):
        read_concurrency(tmp_path / "r.json")
    assert isinstance(read_concurrency(measured[1] / "inference.json"), Concurrency)


class StandInVllm:
    """What ``VllmEngine`` uses of vLLM 0.32's asynchronous engine, which has an environment of its own.

    The outputs are as the real one gives them: ids in parts, with the statistics of the request.
    """

    def __init__(self) -> None:
        self.most_running = self.running = 0
        self.asked: list[SimpleNamespace] = []
        self.scheduled: dict[str, float] = {}

    def modules(self) -> dict[str, ModuleType]:
        kinds = {"vllm": {"AsyncEngineArgs": SimpleNamespace, "SamplingParams": SimpleNamespace}, "vllm.v1": {}}
        kinds["vllm.v1.engine"] = {}
        kinds["vllm.v1.engine.async_llm"] = {"AsyncLLM": SimpleNamespace(from_engine_args=self.from_engine_args)}
        kinds["vllm.sampling_params"] = {"RequestOutputKind": SimpleNamespace(DELTA="delta")}
        modules = {name: ModuleType(name) for name in kinds}
        for name, values in kinds.items():
            vars(modules[name]).update(values)
        return modules

    def from_engine_args(self, arguments: SimpleNamespace) -> "StandInVllm":
        self.arguments = arguments
        return self

    async def generate(self, prompt, wanted, name):
        self.asked.append(SimpleNamespace(name=name, prompt=prompt, wanted=wanted))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.002)
        scheduled = time.perf_counter()
        self.scheduled[name] = scheduled
        for part in ([7], [8, 9], [10])[: wanted.max_tokens]:
            await asyncio.sleep(0.002)
            yield SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=part)], metrics=SimpleNamespace(scheduled_ts=scheduled)
            )
        self.running -= 1

    def shutdown(self) -> None:
        self.asked.append(SimpleNamespace(name="shutdown"))


def test_vllm_is_asked_for_greedy_ids_and_never_for_more_than_the_slots(monkeypatch, tmp_path):
    stand_in = StandInVllm()
    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    engine, before = worker.VllmEngine(tmp_path, slots=4), time.perf_counter()
    answers = engine.serve([request(number, 0.001 * number, new_tokens=4) for number in range(5)], slots=2)
    engine.close()
    assert stand_in.most_running == 2
    assert stand_in.arguments.dtype == "float32"
    assert not stand_in.arguments.enable_prefix_caching
    assert [one.number for one in answers] == list(range(5))
    for one in answers:
        assert one.ids == [7, 8, 9, 10]
        assert one.token_times == sorted(one.token_times)
        assert one.token_times[1] == one.token_times[2]  # they came together
        assert 0.001 * one.number <= one.started < one.token_times[0]
    began = {round(stand_in.scheduled[f"1-{one.number}"] - one.started, 6) for one in answers}
    assert len(began) == 1  # the turn's, so queue times count to the instant that the engine reports
    assert began.pop() >= before
    first = stand_in.asked[0]
    assert (first.prompt, first.wanted.temperature, first.wanted.ignore_eos) == ({"prompt_token_ids": [0]}, 0, True)
    assert stand_in.asked[-1].name == "shutdown"


def test_an_engine_that_fails_is_shown_and_the_others_go_on(tmp_path, capsys):
    """A Python without vLLM stands for one whose vLLM does not start."""
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    write_json_atomic(tmp_path / "trace.json", asdict(TRACE))
    options = replace(
        OPTIONS, output=tmp_path / "inference.json", checkpoint=write_run(tmp_path),
        concurrency=(1,), engines=("vllm", "one"), repeats=1, requests=2, trace=tmp_path / "trace.json",
        vllm=tmp_path / "environment",
    )  # fmt: skip
    assert run_suite(Inference, options, repository=REPOSITORY) == 1
    record = read_concurrency(tmp_path / "inference.json")
    vllm, one = record.engines
    assert vllm.failure == "its process ended with 1: ModuleNotFoundError: No module named 'vllm'"
    assert (vllm.load_sec, vllm.answers, vllm.by_concurrency) == (None, 0, {})
    assert (one.failure, one.same_ids) == (None, 2)
    page = (tmp_path / "inference.md").read_text()
    assert f"* vllm failed: {vllm.failure}" in page
    assert "| vllm | failed | failed |" in page
    assert capsys.readouterr().out.count(vllm.failure) == 3  # when it failed, in the summary, and at the end
    with quiet_style(LIGHT):
        texts = concurrency_chart(record).figure.findobj(Text)
    assert f"FAILED: vllm: {vllm.failure}" in [text.get_text() for text in texts]


# Engines get what they are told, and what they report is measured where it should be.


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
            raise WorkerEnded(1, "it broke")
        answers = [answer(number, 1.0, 1.5, 1.0 + count) for number in self._numbers]
        return {"answers": [asdict(one) for one in answers], "peak_bytes": 100 * count}


def engines(**workers: ScriptedWorker) -> Engines:
    made = Engines.__new__(Engines)
    made._workers, made.failures = workers, {}
    return made


def test_what_is_timed_is_warm_and_has_the_slots_of_its_turn():
    one, static = ScriptedWorker(), ScriptedWorker(fails_at=3)
    tested, trace = engines(one=one, static=static), Trace(seed=1, requests=TRACE.requests * 2)
    alone = tested.alone(trace, vocab_size=101)
    assert alone.mean_sec == 2.0  # of the second answer to each request
    assert list(alone.ids) == list(range(14))
    requests = trace.arriving(gap_sec=1, vocab_size=101)
    tested.warm_up(requests, slots=16)
    turns = [tested.turn("static", requests, concurrency=slots, repeat=1) for slots in (3, 4, 5)]
    assert (one.turns, static.turns) == ([(8, 1), (14, 1), (8, 16)], [(8, 16), (14, 3), (14, 4)])
    assert (turns[0].concurrency, turns[0].peak_bytes) == (3, 200)  # of this turn
    assert [one.number for one in turns[0].answers] == list(range(14))
    assert {tuple(one.token_times) for one in turns[0].answers} == {(1.5, 3.0)}
    assert turns[1:] == [None, None]
    assert tested.failures == {"static": "its process ended with 1: it broke"}
    with pytest.raises(UserError, match=r"^the engine one failed: its process ended with 1: it broke$"):
        engines(one=ScriptedWorker(fails_at=1)).warm_up(requests, slots=1)


def test_margins_are_those_of_the_ids_after_the_prompt(tmp_path):
    model, prompt = worker.OwnModel(write_run(tmp_path), "cpu"), [3, 1, 4]
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
        LineWorker("a.module", {}, tmp_path / str(threads), threads=threads, variables={"RANK": 1})
    assert [one.get("OMP_NUM_THREADS") for one in environments] == ["3", None]
    assert [(one["RANK"], "DS_ACCELERATOR" in one) for one in environments] == [("1", False)] * 2


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
    monkeypatch.setattr(worker, "LONGEST_WAIT_SEC", 0.02)
    engine = worker.ContinuousEngine.__new__(worker.ContinuousEngine)
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


def three(unit: float) -> Percentiles:
    return Percentiles(p50=unit, p95=2 * unit, p99=4 * unit)


def load(times: float) -> Load:
    """Every figure is another one; those of the second concurrency are several times those of the first."""
    return Load(
        requests=4,
        offered_tokens_per_sec=500.0 * times,
        tokens_per_sec=Spread(median=60 * times, smallest=50 * times, largest=90 * times, values=[1.0, 2.0]),
        ttft_sec=three(0.003 * times),
        time_per_token_sec=three(0.001 * times),
        latency_sec=three(0.007 * times),
        queue_sec=three(0.002 * times),
        request_tokens_per_sec=three(20 * times),
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

    (tmp_path / "job.json").write_text(
        json.dumps({"kind": "one", "device": "cpu", "slots": 9, "mark": "> "}), encoding="utf-8"
    )
    requests = [request(3, 0.5, prompt=2), request(5, 1.0)]
    turns = [{"requests": [asdict(one) for one in requests], "slots": slots} for slots in (1, 4)]
    monkeypatch.setattr(sys, "argv", ["worker", str(tmp_path / "job.json")])
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(turn) + "\n" for turn in turns)))
    monkeypatch.setattr(worker, "open_engine", opened)
    monkeypatch.setattr(worker, "clock", lambda: now[0])
    monkeypatch.setattr(worker, "_forget_peak", lambda device: done.append(f"{device} forgotten"))
    monkeypatch.setattr(worker, "_peak_bytes", lambda _: 100 * done[-1][1])
    worker.main()
    assert done == ["one", "cpu forgotten", (requests, 1), "cpu forgotten", (requests, 4), "closed"]
    loaded, *found = [json.loads(line.removeprefix("> ")) for line in capsys.readouterr().out.splitlines()]
    assert loaded == {"load_sec": 2.0, "version": None}
    assert [(len(one["answers"]), one["peak_bytes"]) for one in found] == [(2, 100), (2, 400)]


@pytest.mark.parametrize(("kind", "largest"), [(worker.ONE, 1), (worker.STATIC, 4)])
def test_one_decodes_one_request_and_static_as_many_as_the_slots(monkeypatch, kind, largest):
    asked: list[Any] = []
    monkeypatch.setattr(worker, "OwnModel", lambda *words, **options: asked.append((*words, options)))
    opened: Any = worker.open_engine({"kind": kind, "slots": 4, "threads": 0, "checkpoint": "run", "device": "cpu"})
    assert asked == [(Path("run"), "cpu", {"batch_size": largest})]
    assert opened._largest == largest

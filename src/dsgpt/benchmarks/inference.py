"""``benchmark.py inference``: how engines answer many requests at once, on the same arrivals.

The trace says when requests arrive, how long their prompts are, and how many tokens each asks for. The committed one is
``trace.json`` beside this file; ``tests/benchmarks/make_trace.py`` draws it.
"""

import itertools
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from dsgpt.benchmarks import frame
from dsgpt.benchmarks.inference_worker import CONTINUOUS, ENGINES, ONE, STATIC, VLLM, Answer, Arrival
from dsgpt.benchmarks.launch import LineWorker, WorkerEnded
from dsgpt.common.command_line import COUNT, POSITIVE, choices, flag, switch
from dsgpt.common.errors import Problems, UserError
from dsgpt.common.files import sha256_of, write_json_atomic
from dsgpt.common.json_files import JsonError, parse_as, read_as, read_object
from dsgpt.common.text import duration, table
from dsgpt.machine.console import Console
from dsgpt.record.schema import RECORD_FILE
from dsgpt.record.suites import SCHEMA_VERSION, TITLES, Concurrency, Difference, Engine, Load, Percentiles, Spread
from dsgpt.training.status import RunLock

# The trace.

COMMITTED = Path(__file__).with_name("trace.json")


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A request of the trace."""

    gap: float
    """Between the arrival of the request before it and its own, in units of the mean gap."""
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Requests in the order in which they arrive."""

    seed: int
    """Seed of the trace, and of the prompts' ids, which depend on the model's vocabulary and are not in the file."""
    requests: list[Traced]

    def arriving(self, *, gap_sec: float, vocab_size: int) -> list[Arrival]:
        """The requests, with prompts of a vocabulary; they arrive ``gap_sec`` seconds apart in the mean."""
        # random ids: no two prompts begin alike, so that no engine can reuse what it computed for another
        stream, now, arrivals = random.Random(self.seed), 0.0, []
        for number, one in enumerate(self.requests):
            now += one.gap * gap_sec if number else 0.0
            prompt = [stream.randrange(vocab_size) for _ in range(one.prompt_tokens)]
            arrivals.append(Arrival(number=number, arrival=now, prompt=prompt, new_tokens=one.new_tokens))
        return arrivals


# From answers to figures: waiting times, percentiles, throughput, and which ids differ.


@dataclass(frozen=True, kw_only=True)
class Turn:
    """An engine's answers to the whole trace, once."""

    engine: str
    concurrency: int
    repeat: int
    """Number of the repeat, from 1."""
    requests: Sequence[Arrival]
    answers: Sequence[Answer]
    """Answers in the order of ``requests``."""
    peak_bytes: int | None

    @property
    def tokens_per_sec(self) -> float:
        """New tokens of all answers, from the first arrival to the last token."""
        tokens = sum(len(answer.ids) for answer in self.answers)
        return tokens / (max(answer.token_times[-1] for answer in self.answers) - self.requests[0].arrival)

    @property
    def offered_tokens_per_sec(self) -> float | None:
        """The tokens asked for, divided by the requests' mean gap times their number; None without a gap."""
        arrivals = [request.arrival for request in self.requests]
        gap = (arrivals[-1] - arrivals[0]) / max(1, len(arrivals) - 1)
        return sum(request.new_tokens for request in self.requests) / (gap * len(arrivals)) if gap else None


def percentiles(values: list[float]) -> Percentiles:
    """Percentiles of ``values``, which has at least one."""
    return Percentiles(**frame.percentiles(values))


def load_of(turns: Sequence[Turn]) -> Load:
    """The figures of an engine at one concurrency; ``turns`` are its repeats, at least one."""
    pairs = [pair for turn in turns for pair in zip(turn.requests, turn.answers, strict=True)]
    latency = [answer.token_times[-1] - request.arrival for request, answer in pairs]
    rates = [len(answer.ids) / seconds for (_, answer), seconds in zip(pairs, latency, strict=True)]
    several = [answer.token_times for _, answer in pairs if len(answer.token_times) > 1]
    per_token = [(times[-1] - times[0]) / (len(times) - 1) for times in several]
    slowest = percentiles([-rate for rate in rates])  # of a speed, what so many reach at least
    return Load(
        requests=len(pairs),
        offered_tokens_per_sec=turns[0].offered_tokens_per_sec,
        tokens_per_sec=Spread(**frame.span([turn.tokens_per_sec for turn in turns])),
        ttft_sec=percentiles([answer.token_times[0] - request.arrival for request, answer in pairs]),
        time_per_token_sec=percentiles(per_token) if per_token else None,
        latency_sec=percentiles(latency),
        queue_sec=percentiles([max(0.0, answer.started - request.arrival) for request, answer in pairs]),
        request_tokens_per_sec=Percentiles(p50=-slowest.p50, p95=-slowest.p95, p99=-slowest.p99),
        peak_memory_bytes=max((turn.peak_bytes for turn in turns if turn.peak_bytes is not None), default=None),
    )


def differences(
    answers: Iterable[Answer], reference: Mapping[int, list[int]], margins: Mapping[int, Sequence[float]]
) -> list[Difference]:
    """Places where answers leave ``reference``: each place and id once, with the number of answers.

    Args:
        answers: of an engine.
        reference: ids by request.
        margins: of the reference's ids, by request; needed only for requests with a difference.
    """
    places: Counter[tuple[int, int, int, int]] = Counter()
    for answer in answers:
        # an answer that stops early, or goes on, differs where one of the two has no id
        both = itertools.zip_longest(reference[answer.number], answer.ids, fillvalue=-1)
        if first := next(((place, *ids) for place, ids in enumerate(both) if ids[0] != ids[1]), None):
            places[(answer.number, *first)] += 1
    found = []
    for (number, place, ours, theirs), count in sorted(places.items()):
        margin = margins[number][: place + 1][-1]
        found.append(Difference(request=number, position=place, ours=ours, theirs=theirs, margin=margin, answers=count))
    return found


UTILISATION = 0.5
"""Share of the time that each slot works, if every request took as long as it takes alone. At 1 the queue of a single
slot would grow forever."""


def turn_order(kinds: Sequence[str], concurrency: Sequence[int], *, repeats: int) -> Iterator[tuple[int, int, str]]:
    """Repeat (from 1), concurrency and engine of every turn.

    The engines of a concurrency take their turns one after another, and each time another is the first, so that a
    machine that becomes slower favours none.
    """
    rounds = list(itertools.product(range(1, repeats + 1), concurrency))
    for number, kind in frame.turns(kinds, rounds=len(rounds)):
        yield *rounds[number - 1], kind


# What engines took for many requests, as it stands in the record of the run whose model answered.

KEY = "by_concurrency"
"""Key in the run's ``inference`` block."""


def with_engines(run: dict[str, Any], record: frame.Record) -> dict[str, Any]:
    """The record ``run`` of a run with the figures of ``record``, by the number of requests at once, then by engine."""
    by_slots: dict[str, dict[str, Any]] = {}
    for engine in record["engines"]:
        for slots, load in engine[KEY].items():
            by_slots.setdefault(slots, {})[engine["name"]] = load
    return run | {"inference": (run.get("inference") or {}) | {KEY: by_slots}}


def inference_page(record: frame.Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.inference`` makes it.
        source: the record's path, for the reader.
    """
    result = _read(record)
    threads = f", {result.threads} threads for each engine" if result.threads else ""
    head = frame.filled("inference", vars(result), source=source, took=duration(result.seconds), threads=threads)
    overview, details, loaded, whole = [], [], [], "{:,.0f}".format
    for slots in result.gap_sec:
        loads = [engine.by_concurrency.get(slots) for engine in result.engines]
        offered = next((load.offered_tokens_per_sec for load in loads if load), None)
        cells = [
            f"{frame.spread_words(one.tokens_per_sec, whole)}; {one.latency_sec.p50:.3f} s" if one else "failed"
            for one in loads
        ]
        overview.append([slots, "unknown" if offered is None else whole(offered), *cells])
        details += [f"### {slots} at once", _details(result, slots)]
    same, other = [], []
    for engine in result.engines:
        answers = f"{engine.same_ids:,} of {engine.answers:,} answers have the ids that `one` gives alone"
        same.append(f"{engine.name}: {answers}")
        for one in engine.differences:
            ids = ["none" if token < 0 else token for token in (one.ours, one.theirs)]
            other.append([engine.name, one.request, one.position, *ids, f"{one.margin:.2g}", one.answers])
        version = engine.version or ("this commit" if engine.load_sec else "unknown")
        seconds = "failed" if engine.load_sec is None else f"{engine.load_sec:.1f}"
        loaded.append([engine.name, TITLES.get(engine.name, engine.name), version, seconds])
    same += [f"{engine.name} failed: {engine.failure}" for engine in result.engines if engine.failure]
    of_differences = ["engine", "request", "new token", "our id", "its id", "our lead", "answers"]
    of_engines = [f"{engine.name}: tokens/s; p50 latency" for engine in result.engines]
    return frame.page_of(
        head,
        frame.section("Throughput and latency", ["at once", "offered, tokens/s", *of_engines], overview),
        "## At each concurrency",
        *details,
        frame.section("Engines", ["engine", "what it is", "version", "seconds to load"], loaded),
        frame.filled("inference-engines", {}),
        frame.listed("Same ids", same),
        *([frame.filled("inference-ids", {}), table(of_differences, other)] if other else []),
    )


def summary_lines(record: frame.Record) -> list[str]:
    """A line for each engine, for a console."""
    lines = []
    for engine in _read(record).engines:
        if engine.failure:
            lines.append(f"{engine.name}: failed: {engine.failure}")
        for slots, load in list(engine.by_concurrency.items())[-1:]:
            speed = f"{load.tokens_per_sec.median:,.0f} tokens per second"
            ids = f"{engine.same_ids} of {engine.answers} answers have our ids"
            lines.append(
                f"{engine.name}: {speed} and p95 latency {load.latency_sec.p95:.3f} s at {slots} at once; {ids}"
            )
    return lines


def _read(record: frame.Record) -> Concurrency:
    """The record with its types checked; raises ``JsonError``, a ``ValueError``."""
    return parse_as(json.dumps(record).encode(), Concurrency, unknown_keys=True)


def _details(result: Concurrency, slots: str) -> str:
    """Tables of all percentiles at one concurrency."""
    columns = ["first token, ms", "per token, ms", "latency, ms", "in the queue, ms", "tokens/s of a request"]
    rows = []
    for engine in result.engines:
        cells = ["failed"] * (len(columns) + 1)
        if load := engine.by_concurrency.get(slots):
            waits = (load.ttft_sec, load.time_per_token_sec, load.latency_sec, load.queue_sec)
            cells = [_three(wait, "{:,.1f}", scale=1000) for wait in waits]
            peak = "unknown" if load.peak_memory_bytes is None else f"{load.peak_memory_bytes / 1e6:,.0f}"
            cells += [_three(load.request_tokens_per_sec, "{:,.0f}"), peak]
        rows.append([engine.name, *cells])
    return table(["p50 / p95 / p99", *columns, "peak memory, MB"], rows)


def _three(values: Percentiles | None, form: str, *, scale: float = 1.0) -> str:
    if values is None:
        return "unknown"
    return " / ".join(form.format(value * scale) for value in (values.p50, values.p95, values.p99))


# The suite.

CONCURRENCY, REPEATS = (1, 2, 4, 8, 16), 3
DEFAULT_ENGINES = (ONE, STATIC, CONTINUOUS)
VLLM_ENVIRONMENT = Path(".venv-vllm")
WARM_UP_REQUESTS = 8
WORKER = "dsgpt.benchmarks.inference_worker"
PACKAGES = Path(__file__).resolve().parents[2]
"""The folder that ``dsgpt`` is in: vLLM's environment does not have it installed."""


@dataclass(frozen=True, kw_only=True)
class InferenceOptions(frame.SuiteOptions):
    """The command line."""

    checkpoint: Path = flag(Path, "DIR", default=frame.TRAINED)
    """run folder, checkpoint or portable folder (default: %(default)s)"""
    concurrency: tuple[int, ...] = flag(
        frame.counts("a whole number of at least 1, or several with commas between them"),
        "LIST",
        f"requests that an engine works on at once, at most (default: {','.join(map(str, CONCURRENCY))})",
        default=CONCURRENCY,
    )
    engines: tuple[str, ...] = flag(
        choices(ENGINES),
        "LIST",
        f"some of {', '.join(ENGINES)} (default: {','.join(DEFAULT_ENGINES)})",
        default=DEFAULT_ENGINES,
    )
    repeats: int = flag(POSITIVE, "N", "turns of each engine and concurrency (default: %(default)s)", default=REPEATS)
    requests: int = flag(COUNT, "N", "only the first N requests of the trace; 0 for all (default)", default=0)
    trace: Path = flag(Path, "FILE", "the requests (default: the committed ones)", default=COMMITTED)
    vllm: Path = flag(Path, "DIR", default=VLLM_ENVIRONMENT)
    """the environment with vLLM, which `make vllm` makes (default: %(default)s)"""
    device: str = frame.device_flag("cpu or cuda")
    peers: bool = switch()  # src/benchmark.py starts ``decoding`` if it is given
    """compare one request at a time with transformers and nanoGPT instead: the same as `decoding`, whose flags it
    takes"""


class Inference(frame.Suite[InferenceOptions, Turn]):
    """Lets engines answer the same requests in turn; the run of the checkpoint gets the figures, too.

    inference: let engines answer the same requests, which arrive at random instants, with 1, 2, 4, 8 and 16 of them at
    once. The engines: this project one at a time and in static batches, transformers' continuous batching, and vLLM.
    Compare time to the first token, time per token, latency, queue time, throughput and memory, and every token. The
    figures are also added to the run of the checkpoint. If an engine fails, the others go on. Exit code 0: all engines
    generated the same tokens; 1: otherwise, and if one failed.

    Examples:
      .venv/bin/python src/benchmark.py inference --checkpoint checkpoint/demo-zero1
      .venv/bin/python src/benchmark.py inference --concurrency 1,2,4,8,16 --engines one,static,continuous,vllm
      .venv/bin/python src/benchmark.py inference --concurrency 1,8 --engines one,continuous --repeats 1 --requests 16
      .venv/bin/python src/benchmark.py inference --peers --peer nanogpt=/tmp/nanoGPT

    `make vllm` installs vLLM into .venv-vllm.
    """

    name, record_of, schema_version, unit = "inference", "many requests", SCHEMA_VERSION, "turn"
    failure_line = "{}"
    flags, page, summary = InferenceOptions, staticmethod(inference_page), staticmethod(summary_lines)

    def plan(self) -> int:
        """Refuse what cannot be measured."""
        from dsgpt.checkpoints.store import find_checkpoint, open_model_files  # noqa: PLC0415 - torch

        options, problems, self._failed = self.options, Problems(), dict[str, str]()
        # absolute, but not resolved: the link itself tells Python the environment
        self._vllm_python = options.vllm.absolute() / "bin" / "python"
        if VLLM in options.engines and not self._vllm_python.exists():
            lacks = f"--vllm {options.vllm}: has no Python with vLLM"
            problems.add(f"{lacks}: run `make vllm`, or leave vllm out of --engines")
        try:
            trace = read_as(options.trace, Trace)
            self._trace = replace(trace, requests=trace.requests[: options.requests or None])
        except JsonError as error:
            problems.add(f"--trace {options.trace}: cannot be read as a trace of requests: {error}")
        with problems.collect():
            self._model = open_model_files(find_checkpoint(options.checkpoint, flag="--checkpoint")).config
        problems.raise_if_any()
        positions, at = self._model.block_size, f"--trace {options.trace}:"
        for number, one in enumerate(self._trace.requests):
            if one.gap < 0 or one.prompt_tokens < 1 or one.new_tokens < 1:
                problems.add(f"{at} request {number} needs a gap of at least 0, and at least 1 prompt and 1 new token")
            elif one.prompt_tokens + one.new_tokens > positions:
                given = f"{at} request {number} has {one.prompt_tokens} and {one.new_tokens} tokens"
                problems.add(f"{given}, and the model reads at most {positions}: give a trace of shorter requests")
        if not self._trace.requests:
            problems.add(f"{at} has no requests")
        problems.raise_if_any()
        self._kinds = tuple(dict.fromkeys(options.engines))
        self._turns = list(turn_order(self._kinds, options.concurrency, repeats=options.repeats))
        return len(self._turns)

    def begin(self) -> None:
        from dsgpt.inference.model_files import export  # noqa: PLC0415 - torch takes seconds

        options, exported = self.options, self.folder / "exported"
        export(options.checkpoint, exported, form="hf", dtype="fp32", which="latest", console=Console(speaks=False))
        self._job: dict[str, Any] = {
            "checkpoint": str(options.checkpoint.resolve()),
            "exported": str(exported.resolve()),
            "device": options.device,
            "threads": 0 if options.device == "cuda" else len(os.sched_getaffinity(0)),
            "slots": max(options.concurrency),
        }
        requests, names = len(self._trace.requests), ", ".join(self._kinds)
        self.console.say(f"engines {names}; {requests} requests a turn, {len(self._turns)} turns")

    def results(self) -> Iterator[Turn]:
        """The turns. The processes of all engines live until the last, and wait while it is another's turn.

        Raises:
            UserError: ``one`` failed, which all are compared with.
        """
        threads, variables = self._job["threads"], {"PYTHONPATH": str(PACKAGES), "HF_HUB_OFFLINE": "1"}
        self._workers: dict[str, LineWorker] = {}
        with ExitStack() as resources:
            for kind in dict.fromkeys((ONE, *self._kinds)):
                job, folder = self._job | {"kind": kind}, self.folder / kind
                python = self._vllm_python if kind == VLLM else Path(sys.executable)
                worker = LineWorker(WORKER, job, folder, threads=threads, variables=variables, python=python)
                self._workers[kind] = resources.enter_context(worker)
            self._facts = {kind: self._ask(kind) or {} for kind in self._workers}
            self.answer_alone()
            self._gaps = {each: self._alone_sec / (UTILISATION * each) for each in self.options.concurrency}
            for kind in self._workers:
                self.turn(kind, self._arrivals(0.0)[:WARM_UP_REQUESTS], concurrency=self._job["slots"])
            turns: list[Turn] = []
            for repeat, concurrency, kind in self._turns:
                requests = self._arrivals(self._gaps[concurrency])
                if turn := self.turn(kind, requests, concurrency=concurrency, repeat=repeat):
                    turns.append(turn)
                    yield turn
            self._measured = [self._engine(name, turns) for name in self._kinds]  # processes explain differences

    def _arrivals(self, gap: float) -> list[Arrival]:
        return self._trace.arriving(gap_sec=gap, vocab_size=self._model.vocab_size)

    def _ask(self, kind: str, question: object = None) -> dict[str, Any] | None:
        """The engine's answer; without a question, that it is ready. None if it fails, and if it failed before."""
        if kind in self._failed:
            return None
        try:
            if question is not None:
                self._workers[kind].send(question)
            return self._workers[kind].read()
        except WorkerEnded as error:
            if kind == ONE:
                raise UserError(f"the engine {kind} failed: {error}") from error
            self._failed[kind] = str(error)
            self.console.say(f"{kind}: failed: {error}; the others go on")
            return None

    def answer_alone(self) -> None:
        """Answer the trace twice without gaps, one request at a time, and time the second time."""
        requests = self._arrivals(0.0)
        self.turn(ONE, requests[:WARM_UP_REQUESTS], concurrency=1)
        served = self.turn(ONE, requests, concurrency=1)
        assert served is not None  # its failure is an error
        self._alone_ids = {answer.number: answer.ids for answer in served.answers}
        self._alone_sec = fmean(answer.token_times[-1] - answer.started for answer in served.answers)

    def turn(self, kind: str, requests: Sequence[Arrival], *, concurrency: int, repeat: int = 0) -> Turn | None:
        """Let the engine ``kind`` answer ``requests``; None if it fails, or failed before."""
        question = {"requests": [asdict(request) for request in requests], "slots": concurrency}
        if (served := self._ask(kind, question)) is None:
            return None
        by_number = {one["number"]: Answer(**one) for one in served["answers"]}
        measured = {"answers": [by_number[one.number] for one in requests], "peak_bytes": served["peak_bytes"]}
        return Turn(engine=kind, concurrency=concurrency, repeat=repeat, requests=requests, **measured)

    def _engine(self, name: str, turns: Sequence[Turn]) -> Engine:
        own, alone = [turn for turn in turns if turn.engine == name], self._alone_ids
        answers = [answer for turn in own for answer in turn.answers]
        prompts = {one.number: one.prompt for one in self._arrivals(0.0)}
        other = sorted({answer.number for answer in answers if answer.ids != alone[answer.number]})
        texts = [{"prompt": prompts[number], "ids": alone[number]} for number in other]
        leads = (self._ask(ONE, {"margins": texts}) or {})["margins"] if texts else []
        by_slots = {slots: [turn for turn in own if turn.concurrency == slots] for slots in self.options.concurrency}
        return Engine(
            name=name,
            **{"version": None, "load_sec": None} | self._facts[name],
            same_ids=sum(answer.ids == alone[answer.number] for answer in answers),
            answers=len(answers),
            differences=differences(answers, alone, dict(zip(other, leads, strict=True))),
            by_concurrency={str(slots): load_of(turns) for slots, turns in by_slots.items() if turns},
            failure=self._failed.get(name),
        )

    def line(self, result: Turn, *, count: str, left: str) -> str:
        speed = f"{result.tokens_per_sec:,.0f} tokens per second"
        return f"{count} repeat {result.repeat}, {result.concurrency} at once, {result.engine}: {speed}{left}"

    def record(self, results: Sequence[Turn]) -> frame.Record:  # noqa: ARG002 - measured with the engines
        """The record as ``dsgpt.record.suites.read_concurrency`` reads it."""
        options, trace = self.options, self._trace
        asked = {key: sum(getattr(one, key) for one in trace.requests) for key in ("prompt_tokens", "new_tokens")}
        asked |= {"seed": trace.seed, "requests": len(trace.requests), "repeats": options.repeats}
        head = {"checkpoint": options.checkpoint.as_posix(), "model": self._model.as_dict(), **asked}
        return head | {
            "threads": self._job["threads"] or None,
            "trace_sha256": sha256_of(options.trace),
            "alone_sec": self._alone_sec,
            "gap_sec": {str(slots): gap for slots, gap in self._gaps.items()},
            "engines": [asdict(engine) for engine in self._measured],
        }

    def failures(self, record: frame.Record) -> list[str]:
        engines = record["engines"]
        other = [(one, one["answers"] - one["same_ids"]) for one in engines if one["same_ids"] < one["answers"]]
        return [
            *(f"{one['name']}: failed: {one['failure']}" for one in engines if one["failure"]),
            *(f"{one['name']}: {count} of {one['answers']} answers have other ids" for one, count in other),
        ]

    def finish(self, record: frame.Record) -> None:
        """Put the figures into the record of the run.

        Raises:
            UserError: another process trains in the run's folder, or the record of the run cannot be read.
        """
        checkpoint = self.options.checkpoint  # a run folder, or a checkpoint in one
        files = [folder / RECORD_FILE for folder in (checkpoint, checkpoint.absolute().parent)]
        if file := next(filter(Path.is_file, files), None):
            with RunLock(file.parent) as lock:
                lock.take()
                try:
                    run = read_object(file)
                except JsonError as error:
                    raise UserError(f"{file}: cannot be read as the record of a run: {error}") from error
                write_json_atomic(file, with_engines(run, record))
            print(f"{KEY} in {file}")

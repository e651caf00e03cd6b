"""``benchmark.py inference``: how engines answer many requests at once, on the same arrivals."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.frame import TRAINED, Record, Suite, SuiteOptions, device_flag, filled, page_of, spread_words
from dsgpt.benchmarks.inference_turns import (
    COMMITTED,
    Engines,
    Turn,
    differences,
    gap_sec,
    load_of,
    read_trace,
    turn_order,
)
from dsgpt.benchmarks.inference_worker import CONTINUOUS, ENGINES, ONE, STATIC, VLLM
from dsgpt.common.command_line import COUNT, POSITIVE, choices, flag, switch, value
from dsgpt.common.errors import Problems, UserError
from dsgpt.common.files import sha256_of, write_json_atomic
from dsgpt.common.json_files import JsonError, parse_as, read_object
from dsgpt.common.text import duration, table
from dsgpt.machine.console import Console
from dsgpt.record.schema import RECORD_FILE
from dsgpt.record.suites import SCHEMA_VERSION, TITLES, Concurrency, Engine, Percentiles
from dsgpt.training.status import RunLock

# What engines took for many requests, as it stands in the record of the run whose model answered.

KEY = "by_concurrency"
"""Key in the run's ``inference`` block."""


def with_engines(run: dict[str, Any], record: Record) -> dict[str, Any]:
    """The record ``run`` of a run with the figures of ``record``, by the number of requests at once, then by engine."""
    by_slots: dict[str, dict[str, Any]] = {}
    for engine in record["engines"]:
        for slots, load in engine[KEY].items():
            by_slots.setdefault(slots, {})[engine["name"]] = load
    return run | {"inference": (run.get("inference") or {}) | {KEY: by_slots}}


def inference_page(record: Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.inference`` makes it.
        source: the record's path, for the reader.
    """
    result = _read(record)
    parts = [_head(result, source), "## Throughput and latency", _overview(result), "## At each concurrency"]
    for slots in result.gap_sec:
        parts += [f"### {slots} at once", _details(result, slots)]
    parts += ["## Engines", _engines(result), "## Same ids", _same_ids(result)]
    return page_of(*parts)


def summary_lines(record: Record) -> list[str]:
    """A line for each engine, for a console."""
    lines = []
    for engine in _read(record).engines:
        if engine.failure:
            lines.append(f"{engine.name}: failed: {engine.failure}")
        for slots, load in list(engine.by_concurrency.items())[-1:]:
            speed = f"{load.tokens_per_sec.median:,.0f} tokens per second"
            lines.append(
                f"{engine.name}: {speed} and p95 latency {load.latency_sec.p95:.3f} s at {slots} at once; "
                f"{engine.same_ids} of {engine.answers} answers have our ids"
            )
    return lines


def _read(record: Record) -> Concurrency:
    """The record with its types checked; raises ``JsonError``, a ``ValueError``."""
    return parse_as(json.dumps(record).encode(), Concurrency, unknown_keys=True)


def _head(result: Concurrency, source: str) -> str:
    threads = f", {result.threads} threads for each engine" if result.threads else ""
    return filled("inference", vars(result), source=source, took=duration(result.seconds), threads=threads)


def _overview(result: Concurrency) -> str:
    """Throughput and median latency of every engine, a row for each concurrency."""
    header = ["at once", "offered, tokens/s", *(f"{engine.name}: tokens/s; p50 latency" for engine in result.engines)]
    rows, whole = [], "{:,.0f}".format
    for slots in result.gap_sec:
        loads = [engine.by_concurrency.get(slots) for engine in result.engines]
        offered = next((load.offered_tokens_per_sec for load in loads if load), None)
        cells = [
            f"{spread_words(one.tokens_per_sec, whole)}; {one.latency_sec.p50:.3f} s" if one else "failed"
            for one in loads
        ]
        rows.append([slots, "unknown" if offered is None else f"{offered:,.0f}", *cells])
    return table(header, rows)


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


def _engines(result: Concurrency) -> str:
    rows = []
    for engine in result.engines:
        version = engine.version or ("this commit" if engine.load_sec else "unknown")
        seconds = "failed" if engine.load_sec is None else f"{engine.load_sec:.1f}"
        rows.append([engine.name, TITLES.get(engine.name, engine.name), version, seconds])
    shown = table(["engine", "what it is", "version", "seconds to load"], rows)
    return f"{shown}\n\n{filled('inference-engines', {})}"


def _same_ids(result: Concurrency) -> str:
    lines = [
        f"* {engine.name}: {engine.same_ids:,} of {engine.answers:,} answers have the ids that `one` gives alone"
        for engine in result.engines
    ]
    lines += [f"* {engine.name} failed: {engine.failure}" for engine in result.engines if engine.failure]
    rows = []
    for engine in result.engines:
        for one in engine.differences:
            ids = ["none" if token < 0 else token for token in (one.ours, one.theirs)]
            rows.append([engine.name, one.request, one.position, *ids, f"{one.margin:.2g}", one.answers])
    if not rows:
        return "\n".join(lines)
    header = ["engine", "request", "new token", "our id", "its id", "our lead", "answers"]
    return "\n\n".join(["\n".join(lines), filled("inference-ids", {}), table(header, rows)])


def _three(values: Percentiles | None, form: str, *, scale: float = 1.0) -> str:
    if values is None:
        return "unknown"
    return " / ".join(form.format(value * scale) for value in (values.p50, values.p95, values.p99))


CONCURRENCY, REPEATS = (1, 2, 4, 8, 16), 3
DEFAULT_ENGINES = (ONE, STATIC, CONTINUOUS)
VLLM_ENVIRONMENT = Path(".venv-vllm")


@dataclass(frozen=True, kw_only=True)
class InferenceOptions(SuiteOptions):
    """The command line."""

    checkpoint: Path = flag(Path, "DIR", default=TRAINED)
    """run folder, checkpoint or portable folder (default: %(default)s)"""
    concurrency: tuple[int, ...] = flag(
        value(
            lambda text: tuple(dict.fromkeys(map(int, text.split(",")))),
            accepts=lambda slots: min(slots) >= 1,
            must_be="a whole number of at least 1, or several with commas between them",
        ),
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
    device: str = device_flag("cpu or cuda")
    peers: bool = switch(
        "compare one request at a time with transformers and nanoGPT instead: the same as `decoding`, whose flags it "
        "takes"
    )
    """src/benchmark.py starts ``decoding`` if it is given."""


class Inference(Suite[InferenceOptions, Turn]):
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

        options, problems = self.options, Problems()
        if VLLM in options.engines and not _python_of(options.vllm).exists():
            problems.add(
                f"--vllm {options.vllm}: has no Python with vLLM: run `make vllm`, or leave vllm out of --engines"
            )
        try:
            trace = read_trace(options.trace)
            self._trace = replace(trace, requests=trace.requests[: options.requests or None])
        except UserError as error:
            problems.add(*error.problems)
        try:
            self._model = open_model_files(find_checkpoint(options.checkpoint, flag="--checkpoint")).config
        except UserError as error:
            problems.add(*error.problems)
        problems.raise_if_any()
        mistakes = self._trace.mistakes(positions=self._model.block_size)
        problems.add(*(f"--trace {options.trace}: {mistake}" for mistake in mistakes))
        problems.raise_if_any()
        self._kinds = tuple(dict.fromkeys(options.engines))
        self._turns = list(turn_order(self._kinds, options.concurrency, repeats=options.repeats))
        return len(self._turns)

    def begin(self) -> None:
        from dsgpt.inference.model_files import export  # noqa: PLC0415 - torch takes seconds

        options = self.options
        exported = self.folder / "exported"
        export(options.checkpoint, exported, form="hf", dtype="fp32", which="latest", console=Console(speaks=False))
        self._job = {
            "checkpoint": str(options.checkpoint.resolve()),
            "exported": str(exported.resolve()),
            "device": options.device,
            "threads": 0 if options.device == "cuda" else len(os.sched_getaffinity(0)),
            "slots": max(options.concurrency),
        }
        requests, names = len(self._trace.requests), ", ".join(self._kinds)
        self.console.say(f"engines {names}; {requests} requests a turn, {len(self._turns)} turns")

    def results(self) -> Iterator[Turn]:
        with Engines(self._kinds, self._job, self.folder, vllm_python=_python_of(self.options.vllm)) as self._engines:
            self._alone = self._engines.alone(self._trace, vocab_size=self._model.vocab_size)
            self._engines.warm_up(self._arrivals(1, gap=0.0), slots=max(self.options.concurrency))
            turns: list[Turn] = []
            shown: set[str] = set()
            for repeat, concurrency, kind in self._turns:
                requests = self._arrivals(concurrency)
                if turn := self._engines.turn(kind, requests, concurrency=concurrency, repeat=repeat):
                    turns.append(turn)
                    yield turn
                for name in self._engines.failures.keys() - shown:
                    self.console.say(f"{name}: failed: {self._engines.failures[name]}; the others go on")
                    shown.add(name)
            self._measured = [self._engine(name, turns) for name in self._kinds]  # processes explain differences

    def _arrivals(self, concurrency: int, *, gap: float | None = None) -> list[Any]:
        seconds = gap_sec(self._alone.mean_sec, concurrency) if gap is None else gap
        return self._trace.arriving(gap_sec=seconds, vocab_size=self._model.vocab_size)

    def _engine(self, name: str, turns: Sequence[Turn]) -> Engine:
        own = [turn for turn in turns if turn.engine == name]
        answers = [answer for turn in own for answer in turn.answers]
        other = {answer.number for answer in answers if answer.ids != self._alone.ids[answer.number]}
        margins = self._engines.margins([one for one in self._arrivals(1) if one.number in other], self._alone)
        by_slots = {slots: [turn for turn in own if turn.concurrency == slots] for slots in self.options.concurrency}
        facts = self._engines.facts.get(name, {})
        return Engine(
            name=name,
            version=facts.get("version"),
            load_sec=facts.get("load_sec"),
            same_ids=sum(answer.ids == self._alone.ids[answer.number] for answer in answers),
            answers=len(answers),
            differences=differences(answers, self._alone.ids, margins),
            by_concurrency={str(slots): load_of(turns) for slots, turns in by_slots.items() if turns},
            failure=self._engines.failures.get(name),
        )

    def line(self, result: Turn, *, count: str, left: str) -> str:
        speed = f"{result.tokens_per_sec:,.0f} tokens per second"
        return f"{count} repeat {result.repeat}, {result.concurrency} at once, {result.engine}: {speed}{left}"

    def record(self, results: Sequence[Turn]) -> Record:  # noqa: ARG002 - measured with the engines
        """The record as ``dsgpt.record.suites.read_concurrency`` reads it."""
        options, trace = self.options, self._trace
        return {
            "checkpoint": options.checkpoint.as_posix(),
            "model": self._model.as_dict(),
            "threads": self._job["threads"] or None,
            "trace_sha256": sha256_of(options.trace),
            "seed": trace.seed,
            "requests": len(trace.requests),
            "prompt_tokens": sum(one.prompt_tokens for one in trace.requests),
            "new_tokens": sum(one.new_tokens for one in trace.requests),
            "repeats": options.repeats,
            "alone_sec": self._alone.mean_sec,
            "gap_sec": {str(slots): gap_sec(self._alone.mean_sec, slots) for slots in options.concurrency},
            "engines": [asdict(engine) for engine in self._measured],
        }

    def failures(self, record: Record) -> list[str]:
        engines = record["engines"]
        other = [(one, one["answers"] - one["same_ids"]) for one in engines if one["same_ids"] < one["answers"]]
        return [
            *(f"{one['name']}: failed: {one['failure']}" for one in engines if one["failure"]),
            *(f"{one['name']}: {count} of {one['answers']} answers have other ids" for one, count in other),
        ]

    def finish(self, record: Record) -> None:
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


def _python_of(environment: Path) -> Path:
    """Interpreter of an environment; absolute, but not resolved: the link itself tells Python the environment."""
    return environment.absolute() / "bin" / "python"

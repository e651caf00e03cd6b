"""``.venv/bin/python src/benchmark.py inference``: waiting times and throughput when many ask at once."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from dsgpt.benchmarks.harness.command import SuiteCommand, SuiteOptions, record_head, run_suite
from dsgpt.benchmarks.harness.pages import Record, SuitePage, read_record
from dsgpt.benchmarks.inference.figures import Turn, differences, load_of, same_answers
from dsgpt.benchmarks.inference.page import inference_page, summary_lines
from dsgpt.benchmarks.inference.run_record import run_record_of, write_by_concurrency
from dsgpt.benchmarks.inference.trace import COMMITTED, Trace, read_trace
from dsgpt.benchmarks.inference.turns import Alone, Engines, Setting, gap_sec, turn_order
from dsgpt.benchmarks.inference.worker import CONTINUOUS, ONE, STATIC, VLLM
from dsgpt.common.errors import UserError
from dsgpt.common.files import sha256_of
from dsgpt.common.problems import Problems
from dsgpt.model.config import GPT2Config
from dsgpt.reports.concurrency import SCHEMA_VERSION, Engine
from dsgpt.telemetry.console import Console

PAGE = SuitePage(name="inference", of="many requests", text=inference_page, summary=summary_lines)
CONCURRENCY, REPEATS = (1, 2, 4, 8, 16), 3
DEFAULT_ENGINES = (ONE, STATIC, CONTINUOUS)
CHECKPOINT = Path("checkpoint/demo-zero1")
VLLM_ENVIRONMENT = Path(".venv-vllm")


@dataclass(frozen=True, kw_only=True)
class InferenceOptions(SuiteOptions):
    """The options of the command line."""

    checkpoint: Path
    """A run folder, a checkpoint or a portable folder."""
    concurrency: Sequence[int]
    """Requests that an engine works on at once, at most."""
    engines: Sequence[str]
    repeats: int
    """Turns of every engine at every concurrency."""
    requests: int
    """Of the trace, from its beginning; 0 for all."""
    trace: Path
    vllm: Path
    """The environment with vLLM."""
    device: str

    @property
    def whole(self) -> bool:
        """See ``SuiteOptions``."""
        selected = set(DEFAULT_ENGINES) <= set(self.engines) and set(CONCURRENCY) <= set(self.concurrency)
        return selected and not self.requests and self.trace == COMMITTED and self.repeats >= REPEATS


def run_inference(options: InferenceOptions, *, repository: Path) -> int:
    """Measure the engines, also for the record of the run; return 0 when every engine answered with our ids, else 1.

    Raises:
        UserError: the checkpoint, the trace or vLLM's environment is missing or unusable, ``one`` failed, or a process
            trains in the run's folder.
    """
    code = run_suite(_InferenceCommand(options), options, repository=repository)
    if file := run_record_of(options.checkpoint):
        write_by_concurrency(file, read_record(options.output, of=PAGE.of))
        print(f"by_concurrency in {file}")
    return code


class _InferenceCommand(SuiteCommand[Turn]):
    page: ClassVar[SuitePage] = PAGE
    unit: ClassVar[str] = "turn"

    def __init__(self, options: InferenceOptions) -> None:
        self._options = options
        self._kinds = tuple(dict.fromkeys(options.engines))
        self._turns = list(turn_order(self._kinds, options.concurrency, repeats=options.repeats))
        self._trace: Trace
        self._model: GPT2Config
        self._engines: Engines
        self._alone: Alone
        self._measured: list[Engine] = []

    def plan(self, console: Console) -> int:  # noqa: ARG002 - of the interface
        """Refuse what cannot be measured; see ``SuiteCommand``."""
        from dsgpt.checkpointing.selection import find_checkpoint, open_model_files  # noqa: PLC0415 - torch

        options, problems = self._options, Problems()
        python = _python_of(options.vllm)
        if VLLM in options.engines and not python.exists():
            problems.add(
                f"--vllm {options.vllm}: has no Python with vLLM: run `make vllm`, or leave vllm out of --engines"
            )
        try:
            self._trace = _selected(read_trace(options.trace), options.requests)
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
        return len(self._turns)

    def begin(self, folder: Path, console: Console) -> None:
        from dsgpt.exporting.export import export  # noqa: PLC0415 - torch takes seconds

        options = self._options
        exported = folder / "exported"
        quiet = Console(speaks=False)
        export(options.checkpoint, exported, form="hf", dtype="fp32", which="latest", console=quiet)
        self._setting = Setting(
            checkpoint=options.checkpoint.resolve(),
            exported=exported.resolve(),
            device=options.device,
            threads=0 if options.device == "cuda" else len(os.sched_getaffinity(0)),
            slots=max(options.concurrency),
            vllm_python=_python_of(options.vllm),
        )
        self._folder, self._console = folder, console
        requests, names = len(self._trace.requests), ", ".join(self._kinds)
        console.say(f"engines {names}; {requests} requests a turn, {len(self._turns)} turns")

    def results(self) -> Iterator[Turn]:
        with ExitStack() as held:
            self._engines = Engines(self._kinds, self._setting, self._folder)
            held.callback(self._engines.close)
            self._alone = self._engines.alone(self._trace, vocab_size=self._model.vocab_size)
            self._engines.warm_up(self._arrivals(1, gap=0.0), slots=self._setting.slots)
            turns: list[Turn] = []
            told: set[str] = set()
            for repeat, concurrency, kind in self._turns:
                requests = self._arrivals(concurrency)
                if turn := self._engines.turn(kind, requests, concurrency=concurrency, repeat=repeat):
                    turns.append(turn)
                    yield turn
                for name in self._engines.failures.keys() - told:
                    self._console.say(f"{name}: failed: {self._engines.failures[name]}; the others go on")
                    told.add(name)
            self._measured = [self._engine(name, turns) for name in self._kinds]  # processes explain differences

    def _arrivals(self, concurrency: int, *, gap: float | None = None) -> list[Any]:
        seconds = gap_sec(self._alone.mean_sec, concurrency) if gap is None else gap
        return self._trace.arriving(gap_sec=seconds, vocab_size=self._model.vocab_size)

    def _engine(self, name: str, turns: Sequence[Turn]) -> Engine:
        own = [turn for turn in turns if turn.engine == name]
        answers = [answer for turn in own for answer in turn.answers]
        other = {answer.number for answer in answers if list(answer.ids) != list(self._alone.ids[answer.number])}
        margins = self._engines.margins([one for one in self._arrivals(1) if one.number in other], self._alone)
        facts = self._engines.facts(name)
        return Engine(
            name=name,
            version=facts.get("version"),
            load_sec=facts.get("load_sec"),
            same_ids=same_answers(own, self._alone.ids),
            answers=len(answers),
            differences=differences(own, self._alone.ids, margins),
            by_concurrency={
                str(slots): load_of(found)
                for slots in self._options.concurrency
                if (found := [turn for turn in own if turn.concurrency == slots])
            },
            failure=self._engines.failures.get(name),
        )

    def line(self, result: Turn, *, count: str, left: str) -> str:
        speed = f"{result.tokens_per_sec:,.0f} tokens per second"
        return f"{count} repeat {result.repeat}, {result.concurrency} at once, {result.engine}: {speed}{left}"

    def record(self, results: Sequence[Turn], *, seconds: float) -> Record:  # noqa: ARG002 - measured with the engines
        """The record as ``reports.concurrency`` reads it."""
        options, trace = self._options, self._trace
        return record_head(SCHEMA_VERSION, device=options.device) | {
            "checkpoint": options.checkpoint.as_posix(),
            "model": self._model.as_dict(),
            "threads": self._setting.threads or None,
            "trace_sha256": sha256_of(options.trace),
            "seed": trace.seed,
            "requests": len(trace.requests),
            "prompt_tokens": sum(one.prompt_tokens for one in trace.requests),
            "new_tokens": sum(one.new_tokens for one in trace.requests),
            "repeats": options.repeats,
            "alone_sec": self._alone.mean_sec,
            "gap_sec": {str(slots): gap_sec(self._alone.mean_sec, slots) for slots in options.concurrency},
            "seconds": round(seconds, 1),
            "engines": [asdict(engine) for engine in self._measured],
        }

    def failures(self, results: Sequence[Turn], record: Record) -> list[str]:  # noqa: ARG002
        other = [
            f"{engine.name}: {engine.answers - engine.same_ids} of {engine.answers} answers have other ids"
            for engine in self._measured
            if engine.same_ids < engine.answers
        ]
        return [*(f"{engine.name}: failed: {engine.failure}" for engine in self._measured if engine.failure), *other]

    def closing_lines(self, failures: Sequence[str]) -> list[str]:
        return list(failures)


def _selected(trace: Trace, requests: int) -> Trace:
    return replace(trace, requests=trace.requests[:requests]) if requests else trace


def _python_of(environment: Path) -> Path:
    """Its interpreter; absolute, but not resolved: the link itself tells Python the environment."""
    return environment.absolute() / "bin" / "python"

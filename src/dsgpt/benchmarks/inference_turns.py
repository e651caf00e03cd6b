"""The turns of the engines: the arrivals, the processes, and the figures of their answers.

The trace: when requests arrive, how long their prompts are, and how many tokens each asks for. The committed one is
``trace.json`` beside this file; ``tests/benchmarks/make_trace.py`` draws it.
"""

import itertools
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from dsgpt.benchmarks import frame
from dsgpt.benchmarks.inference_worker import ONE, VLLM, Answer, Arrival
from dsgpt.benchmarks.launch import LineWorker, WorkerEnded
from dsgpt.common.errors import UserError
from dsgpt.common.json_files import JsonError, read_as
from dsgpt.record.suites import Difference, Load, Percentiles, Spread

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

    def mistakes(self, *, positions: int) -> list[str]:
        """Why a model with ``positions`` positions cannot answer it; empty if it can."""
        lines = []
        for number, one in enumerate(self.requests):
            if one.gap < 0 or not math.isfinite(one.gap) or one.prompt_tokens < 1 or one.new_tokens < 1:
                lines.append(f"request {number} needs a gap of at least 0, and at least 1 prompt and 1 new token")
            elif one.prompt_tokens + one.new_tokens > positions:
                lines.append(
                    f"request {number} has {one.prompt_tokens} and {one.new_tokens} tokens, and the model reads at "
                    f"most {positions}: give a trace of shorter requests"
                )
        return [*lines, *([] if self.requests else ["has no requests"])]

    def arriving(self, *, gap_sec: float, vocab_size: int) -> list[Arrival]:
        """The requests, with prompts of a vocabulary; they arrive ``gap_sec`` seconds apart in the mean."""
        # random ids: no two prompts begin alike, so that no engine can reuse what it computed for another
        stream, now, arrivals = random.Random(self.seed), 0.0, []
        for number, one in enumerate(self.requests):
            now += one.gap * gap_sec if number else 0.0
            prompt = [stream.randrange(vocab_size) for _ in range(one.prompt_tokens)]
            arrivals.append(Arrival(number=number, arrival=now, prompt=prompt, new_tokens=one.new_tokens))
        return arrivals


def read_trace(file: Path) -> Trace:
    """The trace in ``file``.

    Raises:
        UserError: it cannot be read as one.
    """
    try:
        return read_as(file, Trace)
    except JsonError as error:
        raise UserError(f"--trace {file}: cannot be read as a trace of requests: {error}") from error


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
        asked = sum(request.new_tokens for request in self.requests)
        return asked / (gap * len(arrivals)) if gap else None


def percentiles(values: list[float]) -> Percentiles:
    """Percentiles of ``values``, which has at least one."""
    return Percentiles(**frame.percentiles(values))


def load_of(turns: Sequence[Turn]) -> Load:
    """The figures of an engine at one concurrency; ``turns`` are its repeats, at least one."""
    pairs = [pair for turn in turns for pair in zip(turn.requests, turn.answers, strict=True)]
    latency = [answer.token_times[-1] - request.arrival for request, answer in pairs]
    rates = [len(answer.ids) / seconds for (_, answer), seconds in zip(pairs, latency, strict=True)]
    several = [answer.token_times for _, answer in pairs if len(answer.token_times) > 1]
    slowest = percentiles([-rate for rate in rates])  # of a speed, what so many reach at least
    return Load(
        requests=len(pairs),
        offered_tokens_per_sec=turns[0].offered_tokens_per_sec,
        tokens_per_sec=Spread(**frame.span([turn.tokens_per_sec for turn in turns])),
        ttft_sec=percentiles([answer.token_times[0] - request.arrival for request, answer in pairs]),
        time_per_token_sec=percentiles([(times[-1] - times[0]) / (len(times) - 1) for times in several])
        if several
        else None,
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
    return [
        Difference(
            request=number,
            position=place,
            ours=ours,
            theirs=theirs,
            margin=margins[number][min(place, len(margins[number]) - 1)],
            answers=count,
        )
        for (number, place, ours, theirs), count in sorted(places.items())
    ]


# All engines of a run: their processes, the arrivals that they share, and the order of their turns.

UTILISATION = 0.5
"""Share of the time that each slot works, if every request took as long as it takes alone. At 1 the queue of a single
slot would grow forever."""
WARM_UP_REQUESTS = 8
PACKAGES = Path(__file__).resolve().parents[2]
"""The folder that ``dsgpt`` is in: vLLM's environment does not have it installed."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Alone:
    """The trace, answered by this project one request at a time, without a queue."""

    ids: Mapping[int, list[int]]
    """Ids of each answer, by request."""
    mean_sec: float
    """Mean seconds of a request."""


class Engines:
    """The processes of all engines, which wait while it is another's turn. A context manager, which ends them.

    Args:
        kinds: the engines.
        job: what they share; see ``inference_worker.open_engine``.
        folder: for their files.
        vllm_python: the interpreter that has vLLM.

    Raises:
        UserError: ``one`` failed, which all are compared with; all methods raise it.
    """

    def __init__(self, kinds: Sequence[str], job: Mapping[str, Any], folder: Path, *, vllm_python: Path) -> None:
        self.failures: dict[str, str] = {}
        """Why engines stopped answering, one line each."""
        self.facts: dict[str, dict[str, Any]] = {}
        """Seconds that an engine took to load, and the version of its library; without those that never loaded."""
        variables = {"PYTHONPATH": str(PACKAGES), "HF_HUB_OFFLINE": "1"}
        with ExitStack() as resources:
            self._workers = {
                kind: resources.enter_context(
                    LineWorker(
                        "dsgpt.benchmarks.inference_worker",
                        {**job, "kind": kind},
                        folder / kind,
                        threads=job["threads"],
                        variables=variables,
                        python=vllm_python if kind == VLLM else Path(sys.executable),
                    )
                )
                for kind in dict.fromkeys((ONE, *kinds))
            }
            for kind in self._workers:
                if loaded := self._try(kind, LineWorker.read):
                    self.facts[kind] = loaded
            self._resources = resources.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def _try(self, kind: str, act: Callable[[LineWorker], T]) -> T | None:
        """The result of ``act`` for the engine; None if it fails, and if it failed before."""
        if kind in self.failures:
            return None
        try:
            return act(self._workers[kind])
        except WorkerEnded as error:
            if kind == ONE:
                raise UserError(f"the engine {kind} failed: {error}") from error
            self.failures[kind] = str(error)
            return None

    def _serve(self, kind: str, requests: Sequence[Arrival], *, slots: int) -> tuple[list[Answer], int | None] | None:
        """The answers in the order of ``requests``, and the peak of memory; None if the engine fails."""

        def serve(worker: LineWorker) -> dict[str, Any]:
            worker.send({"requests": [asdict(request) for request in requests], "slots": slots})
            return worker.read()

        if (answer := self._try(kind, serve)) is None:
            return None
        answers = {one["number"]: Answer(**one) for one in answer["answers"]}
        return [answers[request.number] for request in requests], answer["peak_bytes"]

    def alone(self, trace: Trace, *, vocab_size: int) -> Alone:
        """Answer the trace twice without gaps, one request at a time, and time the second time."""
        requests = trace.arriving(gap_sec=0.0, vocab_size=vocab_size)
        self._serve(ONE, requests[:WARM_UP_REQUESTS], slots=1)
        served = self._serve(ONE, requests, slots=1)
        assert served is not None  # its failure is an error
        seconds = sum(answer.token_times[-1] - answer.started for answer in served[0])
        return Alone(ids={answer.number: answer.ids for answer in served[0]}, mean_sec=seconds / len(served[0]))

    def margins(self, requests: Sequence[Arrival], alone: Alone) -> dict[int, list[float]]:
        """Lead of the likeliest id at each new token, for this project's model, by request."""
        if not requests:
            return {}
        texts = [{"prompt": request.prompt, "ids": alone.ids[request.number]} for request in requests]
        worker = self._workers[ONE]
        worker.send({"margins": texts})
        return dict(zip([request.number for request in requests], worker.read()["margins"], strict=True))

    def warm_up(self, requests: Sequence[Arrival], *, slots: int) -> None:
        """Let every engine answer a few requests that are not counted."""
        for kind in self._workers:
            self._serve(kind, requests[:WARM_UP_REQUESTS], slots=slots)

    def turn(self, kind: str, requests: Sequence[Arrival], *, concurrency: int, repeat: int) -> Turn | None:
        """Let the engine ``kind`` answer ``requests``; None if it fails, or failed before."""
        if (served := self._serve(kind, requests, slots=concurrency)) is None:
            return None
        answers, peak = served
        return Turn(
            engine=kind, concurrency=concurrency, repeat=repeat, requests=requests, answers=answers, peak_bytes=peak
        )


def turn_order(kinds: Sequence[str], concurrency: Sequence[int], *, repeats: int) -> Iterator[tuple[int, int, str]]:
    """Repeat (from 1), concurrency and engine of every turn.

    The engines of a concurrency take their turns one after another, and each time another is the first, so that a
    machine that becomes slower favours none.
    """
    rounds = list(itertools.product(range(1, repeats + 1), concurrency))
    for number, kind in frame.turns(kinds, rounds=len(rounds)):
        yield *rounds[number - 1], kind


def gap_sec(alone_sec: float, concurrency: int) -> float:
    """The mean seconds between two arrivals."""
    return alone_sec / (UTILISATION * concurrency)

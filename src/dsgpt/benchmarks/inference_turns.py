"""The turns of the engines: their processes, the arrivals, and the figures of their answers.

The trace: when requests arrive, how long their prompts are, and how many tokens each asks for. ``.venv/bin/python -m
dsgpt.benchmarks.inference_turns`` writes the committed one, ``trace.json`` beside this file.
"""

import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from dsgpt.benchmarks.inference_worker import ANSWER, ONE, VLLM, Answer, Request, as_words
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.common.json_files import JsonError, clipped_text, read_as
from dsgpt.record.schema import percentile
from dsgpt.record.suites import Difference, Load, Percentiles, Spread

# The process of an engine, seen from the command that measures it.

PACKAGES = Path(__file__).resolve().parents[2]
"""The folder that ``dsgpt`` is in: vLLM's environment does not have it installed."""
LONGEST_SEC, ENDING_SEC = 3600, 60
"""For an answer, and for the end of an engine; then it is killed."""


class EngineProcess:
    """An engine that waits, without using a core, until it is told to serve a turn.

    Args:
        python: the interpreter.
        job: see ``worker.open_engine``.
        folder: new, for the job and the engine's output.

    Raises:
        UserError: the process ended; the message has the last line that it printed. All methods raise it.
    """

    def __init__(self, python: Path, job: dict[str, Any], folder: Path) -> None:
        self._log = folder / "output.txt"
        self.peak_bytes: int | None = None
        folder.mkdir(parents=True)
        write_json_atomic(folder / "job.json", job)
        self._held = contextlib.ExitStack()
        output = self._held.enter_context(self._log.open("ab"))
        self._process = subprocess.Popen(
            [str(python), "-m", "dsgpt.benchmarks.inference_worker", str(folder / "job.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env=_environment(job["threads"]),
        )
        self.facts: dict[str, Any] = {}
        """Seconds to load, and the version of its library."""

    def ready(self) -> None:
        """Wait until it has loaded the model."""
        self.facts = self._read()

    def serve(self, requests: Sequence[Request], *, slots: int) -> list[Answer]:
        """Serve a turn; the answers in the order of ``requests``."""
        found = self._ask({"requests": as_words(requests), "slots": slots})
        self.peak_bytes = found["peak_bytes"]
        answers = {one["number"]: Answer(**one) for one in found["answers"]}
        return [answers[request.number] for request in requests]

    def margins(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """By how much the likeliest id leads, by this project's model, at each id that continues a prompt."""
        found: list[list[float]] = self._ask({"margins": [{"prompt": one, "ids": two} for one, two in texts]})[
            "margins"
        ]
        return found

    def _ask(self, turn: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ``_read`` says why it ended
            self._process.stdin.write(json.dumps(turn) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        watch = threading.Timer(LONGEST_SEC, self._process.kill)
        watch.start()
        try:
            for line in self._process.stdout:
                if line.startswith(ANSWER):
                    answer: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
                    return answer
        finally:
            watch.cancel()
        raise UserError(f"its process ended with {self._process.wait()}: {self._last_line()}")

    def _last_line(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().split("\n")
        return clipped_text(lines[-1], width=200) or "it printed nothing"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=ENDING_SEC)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._held.close()


def _environment(threads: int) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DS_", "OMP_", "MKL_"))}
    kept |= {"PYTHONPATH": str(PACKAGES), "HF_HUB_OFFLINE": "1"}
    return kept | ({"OMP_NUM_THREADS": str(threads)} if threads else {})


COMMITTED = Path(__file__).with_name("trace.json")
SEED = 20_261_122
REQUESTS = 64
PROMPT_TOKENS = (8, 32, 128)
"""Smallest, median and largest."""
NEW_TOKENS = (8, 40, 100)
_SIGMA = 0.8
"""Of the logarithm of a length: a few requests are several times as long as most, as in logs of real services."""


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
    """Also of the prompts' ids, which depend on the model's vocabulary and are not in the file."""
    requests: list[Traced]

    def mistakes(self, *, positions: int) -> list[str]:
        """Why a model with ``positions`` positions cannot answer it; empty if it can."""
        found = []
        for number, one in enumerate(self.requests):
            if one.gap < 0 or not math.isfinite(one.gap) or one.prompt_tokens < 1 or one.new_tokens < 1:
                found.append(f"request {number} needs a gap of at least 0, and at least 1 prompt and 1 new token")
            elif one.prompt_tokens + one.new_tokens > positions:
                found.append(
                    f"request {number} has {one.prompt_tokens} and {one.new_tokens} tokens, and the model reads at "
                    f"most {positions}: give a trace of shorter requests"
                )
        return [*found, *([] if self.requests else ["has no requests"])]

    def arriving(self, *, gap_sec: float, vocab_size: int) -> list[Request]:
        """The requests, with prompts of a vocabulary; they arrive ``gap_sec`` seconds apart in the mean."""
        prompts, now, found = self._prompts(vocab_size), 0.0, []
        for number, (one, prompt) in enumerate(zip(self.requests, prompts, strict=True)):
            now += one.gap * gap_sec if number else 0.0
            found.append(Request(number=number, arrival=now, prompt=prompt, new_tokens=one.new_tokens))
        return found

    def _prompts(self, vocab_size: int) -> list[list[int]]:
        """Random ids: no two prompts begin alike, so that no engine can reuse what it computed for another."""
        stream = random.Random(self.seed)
        return [[stream.randrange(vocab_size) for _ in range(one.prompt_tokens)] for one in self.requests]


def make_trace(
    *,
    seed: int = SEED,
    requests: int = REQUESTS,
    prompt_tokens: tuple[int, int, int] = PROMPT_TOKENS,
    new_tokens: tuple[int, int, int] = NEW_TOKENS,
) -> Trace:
    """A trace with Poisson arrivals (exponential gaps) and log-normal lengths.

    Args:
        seed: of all draws.
        requests: how many.
        prompt_tokens: smallest, median and largest length of a prompt.
        new_tokens: the same of the tokens asked for.
    """
    stream = random.Random(seed)
    return Trace(
        seed=seed,
        requests=[
            Traced(
                gap=round(stream.expovariate(1), 6),
                prompt_tokens=_length(stream, prompt_tokens),
                new_tokens=_length(stream, new_tokens),
            )
            for _ in range(requests)
        ],
    )


def _length(stream: random.Random, limits: Sequence[int]) -> int:
    smallest, median, largest = limits
    return min(largest, max(smallest, round(stream.lognormvariate(math.log(median), _SIGMA))))


def read_trace(file: Path) -> Trace:
    """The trace in ``file``.

    Raises:
        UserError: it cannot be read as one.
    """
    try:
        return read_as(file, Trace)
    except JsonError as error:
        raise UserError(f"--trace {file}: cannot be read as a trace of requests: {error}") from error


def write_trace(file: Path, trace: Trace) -> None:
    """Write ``trace`` to ``file``."""
    write_json_atomic(file, asdict(trace))


if __name__ == "__main__":
    write_trace(COMMITTED, make_trace())


# From answers to figures: waiting times, percentiles, throughput, and which ids differ.

SHARES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """An engine's answers to the whole trace, once."""

    engine: str
    concurrency: int
    repeat: int
    """From 1."""
    requests: Sequence[Request]
    answers: Sequence[Answer]
    """In the order of ``requests``."""
    peak_bytes: int | None

    @property
    def tokens(self) -> int:
        """New tokens of all answers."""
        return sum(len(answer.ids) for answer in self.answers)

    @property
    def tokens_per_sec(self) -> float:
        """From the first arrival to the last token."""
        return self.tokens / (max(answer.token_times[-1] for answer in self.answers) - self.requests[0].arrival)

    @property
    def offered_tokens_per_sec(self) -> float | None:
        """The tokens asked for, divided by the requests' mean gap times their number; None without a gap."""
        arrivals = [request.arrival for request in self.requests]
        gap = (arrivals[-1] - arrivals[0]) / max(1, len(arrivals) - 1)
        asked = sum(request.new_tokens for request in self.requests)
        return asked / (gap * len(arrivals)) if gap else None

    def each(self, figure: Callable[[Request, Answer], float | None]) -> list[float]:
        """A figure of every request that has it."""
        found = (figure(request, answer) for request, answer in zip(self.requests, self.answers, strict=True))
        return [value for value in found if value is not None]


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """What these shares of ``values`` do not exceed; None if there are none."""
    return Percentiles(**{key: _at(values, share) for key, share in SHARES.items()}) if values else None


def speeds(values: Sequence[float]) -> Percentiles:
    """What these shares of ``values`` reach at least."""
    return Percentiles(**{key: -_at([-value for value in values], share) for key, share in SHARES.items()})


def _at(values: Sequence[float], share: float) -> float:
    found = percentile(list(values), share)
    assert found is not None
    return found


def time_to_first_token(request: Request, answer: Answer) -> float:
    """Seconds from arrival."""
    return answer.token_times[0] - request.arrival


def time_per_token(_: Request, answer: Answer) -> float | None:
    """Mean seconds between two tokens; None with a single token."""
    steps = len(answer.token_times) - 1
    return (answer.token_times[-1] - answer.token_times[0]) / steps if steps else None


def latency(request: Request, answer: Answer) -> float:
    """Seconds from arrival to the last token."""
    return answer.token_times[-1] - request.arrival


def queue_time(request: Request, answer: Answer) -> float:
    """Seconds from arrival until the engine began."""
    return max(0.0, answer.started - request.arrival)


def request_speed(request: Request, answer: Answer) -> float:
    """New tokens per second of latency."""
    return len(answer.ids) / latency(request, answer)


def load_of(turns: Sequence[Turn]) -> Load:
    """The figures of an engine at one concurrency; ``turns`` are its repeats, at least one."""

    def pooled(figure: Callable[[Request, Answer], float | None]) -> list[float]:
        return [value for turn in turns for value in turn.each(figure)]

    def required(figure: Callable[[Request, Answer], float | None]) -> Percentiles:
        found = percentiles(pooled(figure))
        assert found is not None
        return found

    rates = [turn.tokens_per_sec for turn in turns]
    return Load(
        requests=sum(len(turn.requests) for turn in turns),
        offered_tokens_per_sec=turns[0].offered_tokens_per_sec,
        tokens_per_sec=Spread(
            median=statistics.median(rates), smallest=min(rates), largest=max(rates), values=list(rates)
        ),
        ttft_sec=required(time_to_first_token),
        time_per_token_sec=percentiles(pooled(time_per_token)),
        latency_sec=required(latency),
        queue_sec=required(queue_time),
        request_tokens_per_sec=speeds(pooled(request_speed)),
        peak_memory_bytes=max((turn.peak_bytes for turn in turns if turn.peak_bytes is not None), default=None),
    )


def same_answers(turns: Sequence[Turn], reference: Mapping[int, Sequence[int]]) -> int:
    """How many answers have the ids of ``reference``, which are by request."""
    return sum(list(answer.ids) == list(reference[answer.number]) for turn in turns for answer in turn.answers)


def differences(
    turns: Sequence[Turn], reference: Mapping[int, Sequence[int]], margins: Mapping[int, Sequence[float]]
) -> list[Difference]:
    """Where answers leave ``reference``: each place and id once, with the number of answers.

    Args:
        turns: of an engine.
        reference: ids by request.
        margins: of the reference's ids, by request; needed only for requests with a difference.
    """
    found: Counter[tuple[int, int, int, int]] = Counter()
    for answer in (answer for turn in turns for answer in turn.answers):
        ours = list(reference[answer.number])
        if answer.ids != ours:
            # an answer that stops early, or goes on, differs where one of the two has no id
            both = [*zip(ours, answer.ids, strict=False), (-1, -1)]
            place = next(place for place, (one, other) in enumerate(both) if one != other or one == -1)
            pair = [ids[place] if place < len(ids) else -1 for ids in (ours, answer.ids)]
            found[(answer.number, place, pair[0], pair[1])] += 1
    return [
        Difference(
            request=number,
            position=place,
            ours=ours,
            theirs=theirs,
            margin=margins[number][min(place, len(margins[number]) - 1)],
            answers=count,
        )
        for (number, place, ours, theirs), count in sorted(found.items())
    ]


# All engines of a run: their processes, the arrivals that they share, and the order of their turns.

UTILISATION = 0.5
"""Of each slot, if every request took as long as it takes alone. At 1 the queue of a single slot would grow forever."""
WARM_UP_REQUESTS = 8
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all engines of a run share."""

    checkpoint: Path
    exported: Path
    device: str
    threads: int
    """0 on a GPU."""
    slots: int
    """The most requests at a time."""
    vllm_python: Path

    def job(self, kind: str) -> dict[str, Any]:
        """What a process needs to be the engine ``kind``; see ``worker.open_engine``."""
        return {
            "kind": kind,
            "checkpoint": str(self.checkpoint),
            "exported": str(self.exported),
            "device": self.device,
            "slots": self.slots,
            "threads": self.threads,
        }


@dataclass(frozen=True, kw_only=True)
class Alone:
    """The trace, answered by this project one request at a time, without a queue."""

    ids: Mapping[int, Sequence[int]]
    """By request."""
    mean_sec: float
    """Of a request."""


class Engines:
    """The processes of all engines; they wait, without using a core, while it is another's turn.

    Args:
        kinds: the engines.
        setting: what they share.
        folder: for their files.

    Raises:
        UserError: ``one`` failed, which all are compared with; all methods raise it.
    """

    def __init__(self, kinds: Sequence[str], setting: Setting, folder: Path) -> None:
        with contextlib.ExitStack() as held:
            self._processes = {
                kind: held.enter_context(
                    EngineProcess(
                        setting.vllm_python if kind == VLLM else Path(sys.executable), setting.job(kind), folder / kind
                    )
                )
                for kind in dict.fromkeys((ONE, *kinds))
            }
            self.failures: dict[str, str] = {}
            """Why engines stopped answering, one line each."""
            for kind in self._processes:
                self._try(kind, EngineProcess.ready)
            self._held = held.pop_all()

    def _try(self, kind: str, act: Callable[[EngineProcess], T]) -> T | None:
        """What ``act`` gives for the engine; None if it fails, and if it failed before."""
        if kind in self.failures:
            return None
        try:
            return act(self._processes[kind])
        except UserError as error:
            if kind == ONE:
                raise UserError(f"the engine {kind} failed: {error}") from error
            self.failures[kind] = str(error)
            return None

    def facts(self, kind: str) -> dict[str, Any]:
        """Seconds that the engine ``kind`` took to load, and the version of its library; empty if it did not."""
        return self._processes[kind].facts

    def alone(self, trace: Trace, *, vocab_size: int) -> Alone:
        """Answer the trace twice without gaps, one request at a time, and time the second time."""
        requests = trace.arriving(gap_sec=0.0, vocab_size=vocab_size)
        one = self._processes[ONE]
        one.serve(requests[:WARM_UP_REQUESTS], slots=1)
        answers = one.serve(requests, slots=1)
        seconds = sum(answer.token_times[-1] - answer.started for answer in answers)
        return Alone(ids={answer.number: answer.ids for answer in answers}, mean_sec=seconds / len(answers))

    def margins(self, requests: Sequence[Request], alone: Alone) -> dict[int, list[float]]:
        """By request, by how much the likeliest id leads at each new token, for this project's model."""
        texts = [(request.prompt, alone.ids[request.number]) for request in requests]
        found = self._processes[ONE].margins(texts) if texts else []
        return {request.number: margins for request, margins in zip(requests, found, strict=True)}

    def warm_up(self, requests: Sequence[Request], *, slots: int) -> None:
        """Let every engine answer a few requests that are not counted."""
        for kind in self._processes:
            self._try(kind, lambda process: process.serve(requests[:WARM_UP_REQUESTS], slots=slots))

    def turn(self, kind: str, requests: Sequence[Request], *, concurrency: int, repeat: int) -> Turn | None:
        """Let the engine ``kind`` answer ``requests``; None if it fails, or failed before."""
        process = self._processes[kind]
        answers = self._try(kind, lambda process: process.serve(requests, slots=concurrency))
        if answers is None:
            return None
        return Turn(
            engine=kind,
            concurrency=concurrency,
            repeat=repeat,
            requests=requests,
            answers=answers,
            peak_bytes=process.peak_bytes,
        )

    def close(self) -> None:
        """End all processes."""
        self._held.close()


def turn_order(kinds: Sequence[str], concurrency: Sequence[int], *, repeats: int) -> Iterator[tuple[int, int, str]]:
    """Repeat (from 1), concurrency and engine of every turn.

    The engines of a concurrency take their turns one after another, and each time another is the first, so that a
    machine that becomes slower favours none.
    """
    first = 0
    for repeat in range(1, repeats + 1):
        for slots in concurrency:
            for place in range(len(kinds)):
                yield repeat, slots, kinds[(first + place) % len(kinds)]
            first += 1


def gap_sec(alone_sec: float, concurrency: int) -> float:
    """The mean seconds between two arrivals."""
    return alone_sec / (UTILISATION * concurrency)

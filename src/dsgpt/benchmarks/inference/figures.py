"""From answers to figures: waiting times, percentiles, throughput, and which ids differ."""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dsgpt.benchmarks.inference.protocol import Answer, Request
from dsgpt.reports.concurrency import Difference, Load, Percentiles
from dsgpt.reports.sweeps import Spread
from dsgpt.telemetry.record import percentile

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

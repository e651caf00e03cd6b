"""The trace: when requests arrive, how long their prompts are, and how many tokens each asks for.

``.venv/bin/python -m dsgpt.benchmarks.inference.trace`` writes the committed one, ``trace.json`` beside this file.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dsgpt.benchmarks.inference.protocol import Request
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.common.json_files import JsonError, read_as

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

"""Draws traces of requests for ``benchmark.py inference``; as a script, it writes the committed one."""

import math
import random
from dataclasses import asdict

from dsgpt.benchmarks.inference import COMMITTED, Trace, Traced
from dsgpt.common.files import write_json_atomic

SEED = 20_261_122
REQUESTS = 64
PROMPT_TOKENS = (8, 32, 128)
"""Smallest, median and largest."""
NEW_TOKENS = (8, 40, 100)
_SIGMA = 0.8
"""Deviation of the logarithm of a length: a few requests are several times as long as most, as in logs of real
services."""


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

    def length(smallest: int, median: int, largest: int) -> int:
        return min(largest, max(smallest, round(stream.lognormvariate(math.log(median), _SIGMA))))

    traced = []
    for _ in range(requests):
        gap = round(stream.expovariate(1), 6)
        traced.append(Traced(gap=gap, prompt_tokens=length(*prompt_tokens), new_tokens=length(*new_tokens)))
    return Trace(seed=seed, requests=traced)


if __name__ == "__main__":
    write_json_atomic(COMMITTED, asdict(make_trace()))

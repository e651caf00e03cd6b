"""How many sequences a server accepts at a time, and how many requests of a key."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator

from dsgpt.common.json_files import clipped
from dsgpt.serving.errors import ApiError
from dsgpt.serving.metrics import Metrics
from dsgpt.serving.options import Key, Limits

LONGEST_WAIT_SEC = 60
MINUTE_SEC = 60
_WEIGHT = 0.1
"""Of the newest sequence in the mean time of a sequence."""


class Gate:
    """Counts the sequences that are decoded or wait, and refuses those that find no place.

    Args:
        limits: the places.
        metrics: shows how many are taken.
    """

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self._batch, self._places, self._metrics = limits.batch, limits.batch + limits.queue, metrics
        self._taken = 0
        self._admitted: dict[str, deque[float]] = {}
        self._mean_sec = 1.0

    def admit(self, key: Key | None) -> None:
        """Count a request of ``key``.

        Raises:
            ApiError: the key had all its requests of the last minute.
        """
        if key is None or key.per_minute is None:
            return
        past, now = self._admitted.setdefault(key.name, deque(maxlen=key.per_minute)), time.monotonic()
        if len(past) == key.per_minute and (wait := past[0] + MINUTE_SEC - now) > 0:
            message = f"the key {key.name!r} may send {key.per_minute} requests a minute: repeat the request later"
            raise ApiError(429, message, code="rate_limit_exceeded", headers={"retry-after": str(math.ceil(wait))})
        past.append(now)

    @contextlib.contextmanager
    def places(self, count: int, *, prompts: int = 1) -> Iterator[None]:
        """A context that holds ``count`` places, for as many completions of ``prompts`` prompts.

        Raises:
            ApiError: there are never so many places, or not now.
        """
        if count > self._places:
            several = f" ({prompts:,} prompts, {count // prompts} of each)" if prompts > 1 else ""
            message = f"the request asks for {clipped(count)} completions{several}, and the server takes {self._places}"
            param = "n" if prompts == 1 else "prompt"
            raise ApiError(400, f"{message} at a time: ask for fewer", param=param, code="invalid_value")
        if self._taken + count > self._places:
            wait = math.ceil(self._mean_sec * max(1.0, self._taken / self._batch))
            raise ApiError(
                429,
                f"the server is busy: {self._taken} of {self._places} places are taken; repeat the request later",
                code="rate_limit_exceeded",
                headers={"retry-after": str(min(max(wait, 1), LONGEST_WAIT_SEC))},
            )
        self._take(count)
        try:
            yield
        finally:
            self._take(-count)

    def took(self, seconds: float) -> None:
        """Note how long a sequence was decoded, for the times that refused clients are told to wait."""
        self._mean_sec += _WEIGHT * (seconds - self._mean_sec)

    def _take(self, count: int) -> None:
        self._taken += count
        self._metrics.open.set(self._taken)

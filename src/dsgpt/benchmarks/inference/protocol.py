"""What every engine is asked and what it answers. Needs only the standard library: vLLM's Python reads it, too."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

clock = time.perf_counter
"""Seconds of the system's monotonic clock: the same in all processes of a machine."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request of a turn. All its new tokens are generated: an end of text does not end it."""

    number: int
    """In the trace, from 0."""
    arrival: float
    """Seconds from the beginning of the turn."""
    prompt: list[int]
    new_tokens: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answered request. Times are seconds from the beginning of the turn."""

    number: int
    started: float
    """When the engine began to work on it; until then it was in a queue."""
    token_times: list[float]
    """When each new token was there."""
    ids: list[int]
    """The new tokens."""


class Engine(Protocol):
    """Answers the requests of a turn."""

    def serve(self, requests: Sequence[Request], *, slots: int) -> list[Answer]:
        """Answer ``requests``, sorted by arrival, none before it arrives, and at most ``slots`` of them at a time."""
        ...

    def close(self) -> None:
        """End what the engine runs."""
        ...


def as_words(items: Sequence[Request] | Sequence[Answer]) -> list[dict[str, Any]]:
    """``items`` for JSON."""
    return [asdict(item) for item in items]

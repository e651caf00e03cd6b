"""Engines of this project: one request at a time, or as many as wait, decoded together until the last ends."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from dsgpt.benchmarks.inference.protocol import Answer, Request, clock


class Generator(Protocol):
    """Greedy decoding; see ``ours.OwnModel``."""

    positions: int
    """The most tokens of the longest prompt of a batch and its new ones."""

    def generate(self, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> Iterator[list[int]]:
        """Yield the next id of every prompt, ``new_tokens`` times."""
        ...


class BatchEngine:
    """Answers the requests that wait together, and no other until all of these are answered.

    Args:
        model: decodes.
        largest: requests of a batch at most.
    """

    def __init__(self, model: Generator, *, largest: int) -> None:
        self._model, self._largest = model, largest

    def serve(self, requests: Sequence[Request], *, slots: int) -> list[Answer]:
        """See ``protocol.Engine``."""
        waiting, answers, began = deque(requests), [], clock()
        most = min(slots, self._largest)
        while waiting:
            time.sleep(max(0.0, waiting[0].arrival - (clock() - began)))
            batch = [waiting.popleft()]
            while waiting and len(batch) < most and waiting[0].arrival <= clock() - began:
                if not self._fits([*batch, waiting[0]]):
                    break
                batch.append(waiting.popleft())
            answers += self._answer(batch, began)
        return answers

    def _fits(self, batch: Sequence[Request]) -> bool:
        """Whether the longest prompt leaves room for the most new tokens: all rows of a batch grow together."""
        longest = max(len(request.prompt) for request in batch)
        return longest + max(request.new_tokens for request in batch) <= self._model.positions

    def _answer(self, batch: Sequence[Request], began: float) -> list[Answer]:
        """Decode until the longest request has its tokens; what the others would get beyond theirs is dropped."""
        started = clock() - began
        longest = max(request.new_tokens for request in batch)
        times: list[float] = []
        steps: list[list[int]] = []
        for step in self._model.generate([request.prompt for request in batch], new_tokens=longest):
            times.append(clock() - began)
            steps.append(step)
        return [
            Answer(
                number=request.number,
                started=started,
                token_times=times[: request.new_tokens],
                ids=[step[row] for step in steps[: request.new_tokens]],
            )
            for row, request in enumerate(batch)
        ]

    def close(self) -> None:
        """Nothing runs between turns."""

"""All engines of a run: their processes, the arrivals that they share, and the order of their turns."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dsgpt.benchmarks.inference.figures import Turn
from dsgpt.benchmarks.inference.process import EngineProcess
from dsgpt.benchmarks.inference.protocol import Request
from dsgpt.benchmarks.inference.trace import Trace
from dsgpt.benchmarks.inference.worker import ONE, VLLM
from dsgpt.common.errors import UserError

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

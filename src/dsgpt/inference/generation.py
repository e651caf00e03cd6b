"""Ids in, ids out, and text in, text out: decoding, sampling, likely next ids, and the latency of generation."""

import copy
import itertools
import os
import shutil
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dsgpt.common.errors import Problems, UserError
from dsgpt.formats.tokenizer_files import reason_of
from dsgpt.inference.commands import BATCH_SIZE, GenerateRequest, Sampling
from dsgpt.inference.decoder import Decoder, Prompts
from dsgpt.inference.model_files import device_for, load
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2, random_stream
from dsgpt.record.schema import GENERATED_TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

Show = Callable[[str], None]
"""Gets a text piece by piece."""

# Choosing the next id from logits. Every sequence has a random stream of its own, whatever else is in its batch.


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution of the next id, (B, V), from ``logits``, (B, V) in fp32."""
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(dim=1), logits.shape[1]).float()
    logits = (logits - logits.amax(dim=1, keepdim=True)) / sampling.temperature  # at most 0, so nothing overflows
    count = min(sampling.top_k or logits.shape[1], logits.shape[1])
    if count < logits.shape[1] or sampling.top_p < 1:
        likeliest = logits.topk(count).values  # (B, k), falling
        if sampling.top_p < 1:
            before = likeliest.softmax(dim=1).cumsum(dim=1) - likeliest.softmax(dim=1)
            likeliest = likeliest.masked_fill(before >= sampling.top_p, float("inf"))
        logits = logits.masked_fill(logits < likeliest.amin(dim=1, keepdim=True), float("-inf"))
    shares = logits.softmax(dim=1)
    if sampling.min_p > 0:
        shares = shares.masked_fill(shares < sampling.min_p * shares.amax(dim=1, keepdim=True), 0.0)
        shares = shares / shares.sum(dim=1, keepdim=True)
    return shares


def draw(shares: Tensor, numbers: Sequence[float]) -> Tensor:
    """The ids, (B,), at which the running sum of each row of ``shares``, (B, V), passes its number in [0, 1).

    In fp64 and in the order of ids, so that another batch, which rounds logits differently, draws the same.
    """
    sums = shares.double().cumsum(dim=1)  # (B, V)
    total = sums[:, -1:]
    drawn = torch.tensor(numbers, dtype=torch.float64, device=sums.device)[:, None] * total  # (B, 1)
    below = torch.nextafter(total, torch.zeros_like(total))  # a product that rounds up to the sum has no id
    return torch.searchsorted(sums, torch.minimum(drawn, below), right=True)[:, 0]


Streams = Sequence[torch.Generator]
"""The random stream of each sequence, on the CPU, so that devices draw alike."""


class Chooser:
    """Chooses the next id of every sequence of a batch.

    Args:
        sampling: how.
        prompts: the ids that each sequence starts with.
        generators: the random stream of each sequence, on the CPU, so that devices draw alike.
    """

    def __init__(self, sampling: Sampling, *, prompts: Prompts, generators: Streams = ()) -> None:
        self._sampling, self._prompts, self._generators = sampling, prompts, generators
        self._seen: Tensor | None = None
        """Whether each sequence has each id, (B, V); None until logits give the number of ids, or without a penalty."""

    def choose(self, logits: Tensor) -> Tensor:
        """The next ids, (B,), from ``logits``, (B, V) in fp32; V for a row that has a NaN."""
        logits = self._penalized(logits)
        if self._sampling.temperature == 0:
            largest = logits.max(dim=1)  # the first of equal ones; argmax takes three times as long on CPUs
            ids = largest.indices.masked_fill(largest.values.isnan(), logits.shape[1])
        else:
            numbers = [float(torch.rand(1, dtype=torch.float64, generator=each)) for each in self._generators]
            ids = draw(probabilities(logits, self._sampling), numbers)
        if self._seen is not None:
            self._seen.scatter_(1, ids[:, None].clamp(max=logits.shape[1] - 1), True)
        return ids

    def distribution(self, logits: Tensor) -> Tensor:
        """The probabilities, (B, V), with which ``choose`` would draw from ``logits``."""
        return probabilities(self._penalized(logits), self._sampling)

    def _penalized(self, logits: Tensor) -> Tensor:
        if (penalty := self._sampling.repetition_penalty) == 1:
            return logits
        if self._seen is None:
            self._seen = torch.zeros_like(logits, dtype=torch.bool)
            for row, prompt in zip(self._seen, self._prompts, strict=True):
                row[torch.tensor(prompt, device=row.device)] = True
        return torch.where(self._seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


# Ids in, ids out: decodes batches, greedily or by sampling.

GREEDY = Sampling()


def generate_batch(
    decoder: Decoder, prompts: Prompts, *, new_tokens: int, sampling: Sampling = GREEDY, generators: Streams = ()
) -> Iterator[list[int]]:
    """Yield the next id of every sequence, ``new_tokens`` times.

    Args:
        decoder: the model.
        prompts: the ids that each sequence starts with, at least one each.
        new_tokens: ids to generate; with the longest prompt they must fit the model's positions.
        sampling: how ids are chosen.
        generators: a random stream for each prompt, on the CPU; only needed above temperature 0.

    Raises:
        ValueError: prompts and new ids do not fit the model's positions.
        UserError: no id can be drawn, because logits are not finite.
    """
    sequences = decoder.begin(prompts, new_tokens=new_tokens)
    chooser = Chooser(sampling, prompts=prompts, generators=generators)
    logits = sequences.read_prompts()
    for left in reversed(range(new_tokens)):
        ids = chooser.choose(logits)
        following = ids.tolist()  # waits for the device
        if max(following) >= decoder.config.vocab_size:
            raise UserError("the model's logits are NaN or infinite, though its weights are finite: it is unusable")
        yield following
        if left:
            logits = sequences.append(ids)


def generate(decoder: Decoder, prompt: Sequence[int], *, new_tokens: int) -> Iterator[int]:
    """Yield the ``new_tokens`` likeliest ids after ``prompt``, one at a time.

    Raises:
        ValueError: they do not fit the model's positions.
    """
    for (following,) in generate_batch(decoder, [prompt], new_tokens=new_tokens):
        yield following


# Which ids are likeliest to follow a text, as the model says and as sampling draws them.


class Candidate(NamedTuple):
    """An id that may follow."""

    id: int
    probability: float
    """The model's: softmax of its logits."""
    drawn: float
    """The probability with which it is drawn; 0 if sampling leaves it out."""


def likeliest(decoder: Decoder, ids: Sequence[int], *, count: int, sampling: Sampling) -> list[Candidate]:
    """The ``count`` ids that the model finds likeliest after ``ids``, the likeliest first.

    Raises:
        ValueError: there are no ``ids``, or they leave no position for one more.
    """
    logits = decoder.begin([ids], new_tokens=1).read_prompts()  # (1, V)
    shares, drawn = logits.softmax(dim=1)[0], Chooser(sampling, prompts=[ids]).distribution(logits)[0]  # (V,)
    values, chosen = shares.topk(min(count, len(shares)))
    return list(map(Candidate, chosen.tolist(), values.tolist(), drawn[chosen].tolist()))


MAX_PROMPT_TOKENS = 16
REPETITIONS = 15
TOTAL_SEC, WARM_UP_SEC = 10.0, 1.0
"""Bounds on the whole measurement and on its warm-up; the generation of one token is never interrupted."""


def measure_latency(model: GPT2, ids: Tensor) -> dict[str, Any] | None:
    """Generate up to 100 tokens after the start of ``ids`` and time it; the median of up to 15 repetitions.

    Args:
        model: whole, in the precision it trained in, in evaluation mode.
        ids: validation ids on the model's device, (n,).

    Returns:
        The ``inference`` block of the record, times in seconds; None where there is no prompt, or no position after it.
    """
    positions, started = model.config.block_size, time.perf_counter()
    prompt = ids[: min(MAX_PROMPT_TOKENS, positions // 2)]
    new_tokens = min(GENERATED_TOKENS, positions - prompt.numel())
    if prompt.numel() == 0:
        return None
    decoder, start = Decoder(model), prompt.tolist()
    times = [time.perf_counter()]
    for _ in generate(decoder, start, new_tokens=new_tokens):
        times.append(time.perf_counter())
        if len(times) > 2 and times[-1] - times[0] > WARM_UP_SEC:
            break
    first = min(1, len(times) - 2)  # the first token loads kernels and reads the prompt
    token_sec = max((times[-1] - times[first]) / (len(times) - 1 - first), 1e-9)
    left = TOTAL_SEC - (time.perf_counter() - started)
    new_tokens = max(1, min(new_tokens, int(left / token_sec)))
    seconds: list[float] = []
    while not seconds or (len(seconds) < REPETITIONS and time.perf_counter() - started + max(seconds) < TOTAL_SEC):
        began = time.perf_counter()
        for _ in generate(decoder, start, new_tokens=new_tokens):
            pass  # fetches each id from the device as soon as it is generated, as an application does
        seconds.append(time.perf_counter() - began)
    latency = statistics.median(seconds)
    sizes = {"prompt_tokens": prompt.numel(), "new_tokens": new_tokens, "batch_size": 1, "repetitions": len(seconds)}
    latencies = {"latency_sec": latency, "latency_min_sec": min(seconds), "latency_max_sec": max(seconds)}
    return {**sizes, **latencies, "tokens_per_sec": new_tokens / latency}


# Text in, text out, with the model and tokenizer of a checkpoint.

INCOMPLETE = "\ufffd"
"""Text that a tokenizer decodes from bytes that are not a whole character yet."""


class Continuation:
    """The text of a sequence while its ids arrive; it ends before an id of ``ends`` or a ``stop`` text."""

    def __init__(self, tokenizer: "Tokenizer", *, stop: Sequence[str] = (), ends: Collection[int | None] = ()) -> None:
        self._tokenizer, self._stop, self._ends = tokenizer, stop, ends
        self._from, self._decoded = 0, 0
        """The ids that are decoded again, because decoders look back, and the first id without text."""
        self._shown = 0
        self.ids: list[int] = []
        """Ids that were added, without the one that ended the text."""
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
        uncertain = 0
        if not (last or self.ended):  # the end of the text may be the start of a stop text
            sizes = (size for word in self._stop for size in range(1, len(word)) if self.text.endswith(word[:size]))
            uncertain = max(sizes, default=0)
        end = max(self._shown, len(self.text) - uncertain)
        piece, self._shown = self.text[self._shown : end], end
        return piece

    def _extend(self, *, whole: bool) -> None:
        """Decode the ids that have no text yet; with ``whole``, only if they end with a whole character."""
        before = decoded(self.ids[self._from : self._decoded], self._tokenizer)
        after = decoded(self.ids[self._from :], self._tokenizer)
        if whole and after.endswith(INCOMPLETE):
            return
        self.text += after[len(before) :]
        self._from, self._decoded = self._decoded, len(self.ids)

    def _cut_at_stop(self) -> None:
        """End the text before the first ``stop`` text in it."""
        if places := [place for word in self._stop if (place := self.text.find(word)) >= 0]:
            self.text, self.ended = self.text[: min(places)], "stop"


@dataclass(frozen=True, kw_only=True)
class Text:
    """A finished text."""

    prompt: str
    added: str
    ended: str
    """``end of text``, ``stop``, ``length`` (of the request), ``context`` (the model's), or ``interrupted``."""
    ids: tuple[int, ...]
    """Generated ids without an end-of-text id; after ``stop``, some have no text in ``added``."""

    def __str__(self) -> str:
        return self.prompt + self.added


class Writer:
    """A model that continues texts as a request says.

    Args:
        request: what is asked for.

    Raises:
        UserError: numbers that make no sense, no usable checkpoint, no tokenizer in it, or a device that cannot compute
            in the request's precision.
    """

    def __init__(self, request: GenerateRequest) -> None:
        problems = Problems()
        request.check(problems)
        device = device_for(request.device, precision=request.precision, problems=problems)
        if request.compile and device.type == "cpu" and not (shutil.which("g++") or os.environ.get("CXX")):
            problems.add("--compile needs a C++ compiler: install g++, or leave it out")
        problems.raise_if_any()
        loaded = load(request.checkpoint, which=request.which, device=device, precision=request.precision)
        self._request = request
        self._model: GPT2 | None = loaded.model
        self._decoder: Decoder | None = None
        self.tokenizer, self.config = loaded.needed_tokenizer(), loaded.model.config
        self.ends = frozenset((self.tokenizer.eos_token_id, *loaded.stored.ends))
        """Ids that end a text."""

    def asked(self, request: GenerateRequest) -> "Writer":
        """This model, once it is arranged, for another request of its checkpoint, device and precision.

        Unless the model is compiled, several such writers may generate at once: decoding does not change it.

        Raises:
            UserError: numbers that make no sense.
        """
        problems = Problems()
        request.check(problems)
        problems.raise_if_any()
        writer = copy.copy(self)
        writer._request = request
        return writer

    def decoder(self, *, batch_size: int) -> Decoder:
        """The model, which the first call arranges for batches of this size; weights are not kept twice."""
        if self._decoder is None:
            assert self._model is not None  # until the decoder has it
            request, model, self._model = self._request, self._model, None
            self._decoder = Decoder(model, batch_size=batch_size, quantize=request.quantize, compiled=request.compile)
        return self._decoder

    def texts(
        self, prompts: Sequence[str], *, show: Show | None = None, stopped: Callable[[], bool] = lambda: False
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
            with problems.collect():
                encoded.append(encode_prompt(prompt, self.tokenizer, self.config))
        problems.raise_if_any()
        count = self._request.num_samples
        wanted = ((prompt, ids) for prompt, ids in zip(prompts, encoded, strict=True) for _ in range(count))
        size = 1 if show else min(self._request.batch_size or BATCH_SIZE, len(prompts) * count)
        for number in itertools.count(step=size):
            if stopped() or not (chosen := list(itertools.islice(wanted, size))):
                return
            yield from self._batch(chosen, number=number, show=show or (lambda _: None), stopped=stopped)

    def _batch(
        self, chosen: list[tuple[str, list[int]]], *, number: int, show: Show, stopped: Callable[[], bool]
    ) -> Iterator[Text]:
        """Generate the texts after the ``chosen`` prompts together, the first of which is text ``number`` of all."""
        request = self._request
        limits = [min(request.max_new_tokens, self.config.block_size - len(ids)) for _, ids in chosen]
        continuations = [Continuation(self.tokenizer, stop=request.stop, ends=self.ends) for _ in chosen]
        decoder, prompts = self.decoder(batch_size=len(chosen)), [ids for _, ids in chosen]
        streams = [random_stream(request.seed, number + row) for row in range(len(chosen))]
        steps = generate_batch(decoder, prompts, new_tokens=max(limits), sampling=request.sampling, generators=streams)
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
            full = "context" if limit < request.max_new_tokens else "length"
            ended = continuation.ended or (full if count >= limit else "interrupted")
            yield Text(prompt=prompt, added=continuation.text, ended=ended, ids=tuple(continuation.ids))


def encoded(text: str, tokenizer: "Tokenizer", *, what: str, **words: bool) -> list[int]:
    """The ids of ``text``, which is called ``what`` in messages, without special tokens around them.

    Raises:
        UserError: the tokenizer cannot encode it.
    """
    try:
        return list(tokenizer.encode(text, add_special_tokens=False, **words))
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise UserError(f"{what}: the tokenizer cannot encode it ({reason_of(error)})") from error


def decoded(ids: list[int], tokenizer: "Tokenizer") -> str:
    """The text of ``ids``, as it is."""
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def encode_prompt(prompt: str, tokenizer: "Tokenizer", config: GPT2Config) -> list[int]:
    """The ids of the prompt: at least one, all in the model's vocabulary, with a position left for one more.

    Raises:
        UserError: the tokenizer or the model cannot read it.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError("--prompt is not valid UTF-8 text") from error
    ids = encoded(prompt, tokenizer, what=f"--prompt {prompt!r}")
    if not ids and tokenizer.eos_token_id is None:
        raise UserError("--prompt is empty, and this tokenizer has no end-of-text token to start from: give a prompt")
    ids = ids or [tokenizer.eos_token_id]
    if max(ids) >= config.vocab_size:
        trained = f"the model was trained with a vocabulary of {config.vocab_size}"
        raise UserError(f"--prompt {prompt!r}: its largest id is {max(ids)}, but {trained}: use another prompt")
    if len(ids) >= config.block_size:
        most = config.block_size - 1
        raise UserError(f"--prompt has {len(ids)} tokens, and the model reads at most {most}: shorten it")
    return ids

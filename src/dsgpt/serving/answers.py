"""The answers to a request for completions, in OpenAI's form."""

import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsgpt.serving.requests import Prompt
from dsgpt.serving.text import UNFINISHED, TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dsgpt.serving.engine import Sequence
    from dsgpt.serving.scoring import Scorer


@dataclass(kw_only=True)
class Choice:
    """One completion of a request."""

    index: int
    prompt: Prompt
    sequence: "Sequence | None"
    """What decodes it; None if no token is asked for."""
    text: TextStream
    ends: frozenset[int]
    """Tokens that end it and are no text."""
    taken: int = 0
    """Tokens whose text was taken."""
    written: int = 0
    """Tokens that count: those, and one of ``ends``."""
    whole: str = ""
    """The text so far."""
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None
    ids: list[int] = field(default_factory=list)
    """Its tokens so far, at its end without one of ``ends``."""

    def take(self) -> str:
        """The text that became certain since the last call; sets ``finish_reason`` at the end."""
        sequence = self.sequence
        finished = sequence is None or sequence.finished
        known = [] if sequence is None else sequence.ids
        ended = finished and bool(known) and known[-1] in self.ends
        text, new = known[: len(known) - ended], ""
        for token in text[self.taken :]:
            new += self.text.add([token])
            self.taken += 1
            if self.text.stopped:  # the tokens behind it, which may have come at the same time, do not count
                ended = False
                break
        else:
            new += self.text.add([], last=finished)
        self.ids, self.written = text[: self.taken], self.taken + ended
        self.whole += new
        if self.text.stopped or ended:
            self.finish_reason = "stop"
        elif finished:
            self.finish_reason = "length"
        return new


class Answer:
    """What all parts of an answer share.

    Args:
        model: its name.
        choices: the completions.
        prompts: what they continue.
    """

    def __init__(self, model: str, choices: list[Choice], prompts: list[Prompt]) -> None:
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._choices, self._prompts = choices, prompts

    def usage(self) -> dict[str, int]:
        """Tokens read and generated so far: end-of-text included, and none behind a stop sequence."""
        read = sum(len(prompt.ids) for prompt in self._prompts)
        written = sum(choice.written for choice in self._choices)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def whole(self, *, echo: bool) -> dict[str, Any]:
        """The answer as one object."""
        choices = [
            _choice(choice, (choice.prompt.text if echo else "") + choice.whole, choice.finish_reason)
            for choice in self._choices
        ]
        return {**self._head, "choices": choices, "usage": self.usage()}

    def chunk(self, choice: Choice, text: str, *, finish_reason: str | None) -> dict[str, Any]:
        """A part of a streamed answer."""
        return {**self._head, "choices": [_choice(choice, text, finish_reason)]}

    def usage_chunk(self) -> dict[str, Any]:
        """The part of a streamed answer that has only its usage."""
        return {**self._head, "choices": [], "usage": self.usage()}


def _choice(choice: Choice, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"text": text, "index": choice.index, "logprobs": choice.logprobs, "finish_reason": finish_reason}


def add_logprobs(
    choice: Choice, *, top: int, echo: bool, scorer: "Scorer", tokenizer: "PreTrainedTokenizerBase"
) -> None:
    """Give a finished choice its ``logprobs``: of its tokens, and with ``echo`` those of the prompt.

    The log probabilities are the model's own, before temperature and ``top_p``. The first token of a sequence has none.
    ``top_logprobs`` have the token itself beside the ``top`` likeliest ones, as OpenAI's and vLLM's.
    """
    before = choice.prompt.ids
    first = 0 if echo and choice.prompt.text else len(before)  # an empty prompt is an end-of-text that has no text
    ids = before + choice.ids
    scores: list[Any] = list(scorer.score(ids, first=max(first, 1), top=top))
    scores = [None] * (first == 0) + scores
    length = len(choice.whole) + (len(choice.prompt.text) if echo else 0)
    offsets = [len(str(tokenizer.decode(ids[first:end])).rstrip(UNFINISHED)) for end in range(first, len(ids))]
    shown = [place for place, offset in enumerate(offsets) if offset < length]  # the others are behind a stop sequence
    names = _Names(tokenizer)
    choice.logprobs = {
        "tokens": [names.of(ids[first + place]) for place in shown],
        "token_logprobs": [None if scores[place] is None else scores[place][0] for place in shown],
        "top_logprobs": [
            None
            if scores[place] is None
            else {
                names.of(token): value for token, value in [*scores[place][1], (ids[first + place], scores[place][0])]
            }
            for place in shown
        ]
        if top
        else None,
        "text_offset": [offsets[place] for place in shown],
    }


class _Names:
    """The texts of single tokens; a token that is a part of a character is ``token_id:N``, as in vLLM."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer

    def of(self, token: int) -> str:
        text = str(self._tokenizer.decode([token]))
        return f"token_id:{token}" if UNFINISHED in text else text

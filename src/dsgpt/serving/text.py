"""The text of a completion, token by token: never half a character, and never a part of a stop sequence."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"
"""What a tokenizer decodes the first bytes of a character to."""


class TextStream:
    """Decodes ids that arrive one after the other.

    Only the last ids are decoded again, because a decoder of byte-level tokens needs no others.

    Args:
        tokenizer: of the model.
        stops: texts before which the completion ends.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids: list[int] = []
        self._start = self._read = 0  # ids before _start are not decoded again; the text of those before _read is out
        self._held = ""
        self.stopped = False
        """Whether a stop sequence was found; then no more text comes."""

    def add(self, ids: Sequence[int], *, last: bool = False) -> str:
        """The text that is certain after ``ids``.

        Args:
            ids: the next ones.
            last: no more ids follow, so that all text is certain.
        """
        self._ids += ids
        if self.stopped:
            return ""
        known = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        new = ""
        if last or (len(text) > len(known) and not text.endswith(UNFINISHED)):
            new = text[len(known) :]
            self._start, self._read = self._read, len(self._ids)
        return self._without_stops(new, last=last)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))

    def _without_stops(self, new: str, *, last: bool) -> str:
        text = self._held + new
        found = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``stop``."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)

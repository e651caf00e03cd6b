"""The text of a sequence while its ids arrive, and Ctrl-C while it is made."""

import signal
from collections.abc import Collection, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# The text of one sequence while its ids arrive: what is certain of it, and where it ends.

_INCOMPLETE = "\ufffd"
"""What a decoder writes for bytes that are not a whole character yet."""


class Continuation:
    """Text after a prompt, which ends before the tokenizer's end-of-text, an id of ``ends`` or a ``stop`` text."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", *, stop: Sequence[str] = (), ends: Collection[int] = ()
    ) -> None:
        self._tokenizer, self._stop, self._ends = tokenizer, stop, ends
        self._ids: list[int] = []
        self._from, self._decoded = 0, 0
        """The ids that are decoded again, because decoders look back, and the first id without text."""
        self._shown = 0
        self.text = ""
        self.ended = ""
        """Why the text ended: ``end of text``, or ``stop``; empty before."""

    @property
    def ids(self) -> list[int]:
        """That were added, without the one that ended the text."""
        return list(self._ids)

    def add(self, following: int) -> None:
        """Add the next id; nothing is added to a text that ended."""
        if self.ended:
            return
        if following == self._tokenizer.eos_token_id or following in self._ends:
            self._extend(whole=False)
            self.ended = "end of text"
            return
        self._ids.append(following)
        self._extend(whole=True)
        self._cut_at_stop()

    def finish(self) -> None:
        """No more ids come: keep what is there, with a mark for a character that is not whole."""
        if not self.ended:
            self._extend(whole=False)
            self._cut_at_stop()

    def news(self, *, last: bool = False) -> str:
        """Text since the last call that no later id can change; all of it if nothing follows."""
        held = 0 if last or self.ended else self._held_back()
        end = max(self._shown, len(self.text) - held)
        piece, self._shown = self.text[self._shown : end], end
        return piece

    def _extend(self, *, whole: bool) -> None:
        """Decode the ids that have no text yet; with ``whole``, only if they end with a whole character."""
        before = self._decode(self._ids[self._from : self._decoded])
        after = self._decode(self._ids[self._from :])
        if whole and after.endswith(_INCOMPLETE):
            return
        self.text += after[len(before) :]
        self._from, self._decoded = self._decoded, len(self._ids)

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # a list only for a batch
        return text

    def _cut_at_stop(self) -> None:
        """End the text before the first ``stop`` text in it."""
        found = [place for word in self._stop if (place := self.text.find(word)) >= 0]
        if found:
            self.text, self.ended = self.text[: min(found)], "stop"

    def _held_back(self) -> int:
        """Characters at the end of the text that may be the start of a ``stop`` text."""
        lengths = (
            size for word in self._stop for size in range(len(word) - 1, 0, -1) if self.text.endswith(word[:size])
        )
        return max(lengths, default=0)


# Ctrl-C as a request that a loop looks for, so that what it has made is not lost.


class CtrlC:
    """A context manager: inside, the first Ctrl-C sets ``asked``, and a second one raises ``KeyboardInterrupt``."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> "CtrlC":
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

"""Engines that turn texts into ids: the reference, Hugging Face's ``tokenizers``; and gigatoken, the fast one.

Both give the same ids for every text. gigatoken is used for byte-level BPE with GPT-2's pattern, because equality was
proven there (``src/benchmark.py tokens``). The pattern asks whether a character is a letter, a number or a space, and
the libraries carry tables of different versions of Unicode. A character's class never changes once it is assigned. So
only texts with a character that this Python's older table does not know can differ: the reference encodes those.

tiktoken is not used. It merges any pair whose sum is in the vocabulary, not the pairs that the vocabulary lists. So its
ids are equal only for some vocabularies, and it is slower than gigatoken.
"""

import functools
import importlib.util
import json
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from dsgpt.data.vocabulary import Vocabulary

FAST = "gigatoken"
_MOST_GROWN = 300 << 20
"""Bytes by which a process may grow before gigatoken's cache of words, which only grows, is dropped."""


def is_gpt2_kind(state: dict[str, Any]) -> bool:
    """Whether a tokenizer splits by GPT-2's pattern and then merges bytes, with nothing before, between or after.

    Args:
        state: the contents of its ``tokenizer.json``.
    """
    splitter, model = state["pre_tokenizer"] or {}, state["model"]
    plain = not any(model.get(key) for key in ("dropout", "byte_fallback", "fuse_unk", "ignore_merges"))
    plain &= not any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix"))
    return bool(
        splitter.get("type") == "ByteLevel"
        and splitter["use_regex"]
        and not splitter["add_prefix_space"]
        and state["normalizer"] is None
        and all(token["special"] for token in state["added_tokens"])
        and model["type"] == "BPE"
        and plain
    )


class Reference:
    """The ``tokenizers`` library: on all cores, unless ``TOKENIZERS_PARALLELISM`` is false."""

    name = "tokenizers"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.cuts = is_gpt2_kind(vocabulary.state)
        """Whether the ids of a text are those of its ``pieces``, as GPT-2's pattern allows."""
        if vocabulary.special:  # a cut must not go through a special token
            named = vocabulary.state["added_tokens"]
            self.cuts &= not any(one["lstrip"] or one["rstrip"] or re.search(r"\s", one["content"]) for one in named)

    def encode(self, texts: Sequence[bytes]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """All ids of ``texts`` in UTF-8, one text after the other; and how many each has, shape (texts,)."""
        encode = self._vocabulary.tokenizer.encode_batch_fast
        encodings = encode([text.decode() for text in texts], add_special_tokens=False)
        return _joined([np.array(encoding.ids, dtype=np.uint32) for encoding in encodings])


def _joined(parts: list[NDArray[np.uint32]]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    return np.concatenate(parts), np.array([len(part) for part in parts], dtype=np.int64)


@functools.cache
def _unassigned(plane: int) -> NDArray[np.bool_]:
    """Whether this Python's table of Unicode lacks a code point of a plane, shape (0x10000,)."""
    return np.array([unicodedata.category(chr(code)) == "Cn" for code in range(plane << 16, plane + 1 << 16)])


def is_disputed(text: bytes) -> bool:
    """Whether ``text``, in UTF-8, has a character that tables of Unicode may class differently.

    Characters below U+0378 are all known: their first byte is below 0xCD. The others are looked up.
    """
    if text.isascii():
        return False
    units = np.frombuffer(text, np.uint8)
    firsts = np.flatnonzero(units >= 0xCD)
    if not len(firsts):
        return False
    padded = np.append(units[firsts[0] :], np.zeros(3, np.uint8))
    firsts -= firsts[0]
    one, two, three, four = (padded[firsts + offset].astype(np.uint32) for offset in range(4))
    codes = (one & 0x1F) << 6 | two & 0x3F
    codes = np.where(one >= 0xE0, (one & 0x0F) << 12 | (two & 0x3F) << 6 | three & 0x3F, codes)
    high = (one & 0x07) << 18 | (two & 0x3F) << 12 | (three & 0x3F) << 6 | four & 0x3F
    codes = np.where(one >= 0xF0, high, codes)
    planes = range(int(codes.max() >> 16) + 1)
    return any(_unassigned(plane)[codes[codes >> 16 == plane] & 0xFFFF].any() for plane in planes)


class Gigatoken(Reference):
    """gigatoken, on one core; texts that are disputed, or name a special token that counts as one, go to the reference.

    Args:
        vocabulary: of GPT-2's kind.
    """

    name = FAST

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        specials = [re.escape(token["content"].encode()) for token in vocabulary.state["added_tokens"]]
        self._special = re.compile(b"|".join(specials)) if vocabulary.special and specials else None
        self._tokenizer: Any = None
        self._process = psutil.Process()

    def encode(self, texts: Sequence[bytes]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """As ``Reference`` says."""
        if self._tokenizer is None:
            import gigatoken  # noqa: PLC0415 - its time is not lost where nothing is encoded

            plain = json.dumps(self._vocabulary.state | {"added_tokens": []})  # so it takes their names for text
            self._tokenizer = gigatoken.Tokenizer.from_json(plain).backend
            self._loaded_at = self._process.memory_info().rss
        reference = super().encode
        parts = [
            reference([text])[0]
            if is_disputed(text) or (self._special is not None and self._special.search(text))
            else self._tokenizer.encode(text)
            for text in texts
        ]
        if self._process.memory_info().rss - self._loaded_at > _MOST_GROWN:
            self._tokenizer = None
        return _joined(parts)


def has_fast() -> bool:
    """Whether gigatoken is installed."""
    return importlib.util.find_spec(FAST) is not None


def open_engine(vocabulary: Vocabulary) -> Reference:
    """The fastest engine that is installed and has the reference's ids for this vocabulary."""
    reference = Reference(vocabulary)
    return Gigatoken(vocabulary) if reference.cuts and has_fast() else reference

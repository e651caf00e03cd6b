"""The fast engine has the ids of Hugging Face's library, on every text."""

import json
import unicodedata
from pathlib import Path

import pytest

from dsgpt.benchmarks.tokens import adversarial, differing, neighbourhoods
from dsgpt.data import engine
from dsgpt.data.engine import Gigatoken, Reference, is_disputed, is_gpt2_kind, open_engine
from dsgpt.data.vocabulary import Vocabulary, open_vocabulary


@pytest.fixture(scope="module")
def vocabulary(prepared: Path) -> Vocabulary:
    return open_vocabulary(prepared / "tokenizer")


def same_ids(vocabulary: Vocabulary, texts: list[str]) -> None:
    (ours, our_counts), (theirs, counts) = (
        kind(vocabulary).encode([text.encode() for text in texts]) for kind in (Gigatoken, Reference)
    )
    assert our_counts.tolist() == counts.tolist()
    assert ours.tolist() == theirs.tolist()


def test_adversarial_documents(vocabulary):
    same_ids(vocabulary, [adversarial(number) for number in range(20_000)])


@pytest.mark.long
def test_every_code_point_that_is_classed_differently(vocabulary):
    """There are some, so the rule is needed; and each goes to the reference, whatever stands beside it."""
    found = differing(0x33500)
    assert found["count"] > 4000 and "U+323B0-U+33479" in found["ranges"]
    assert found["not_disputed"] == 0
    ends = [[int(end[2:], 16) for end in each.split("-")] for each in found["ranges"]]
    codes = [code for first, last in ends for code in range(first, last + 1)]
    assert len(codes) == found["count"]
    same_ids(vocabulary, ["x\n".join(neighbourhoods(chr(code))) for code in codes])


KNOWN = ["", "plain", "naïve “x”", "日本語", "\U0001f600\U00020000", "\ue000"]


def test_a_text_is_disputed_only_for_newer_characters():
    assert not any(is_disputed(text.encode()) for text in KNOWN)
    assert all(is_disputed(text.encode()) for text in ("\u0378", "a\U000323b0", "\U0001f600\U0010ffff"))
    for code in (*range(0x80, 0xD800, 7), *range(0xE000, 0x110000, 101)):
        assert is_disputed(f"é日{chr(code)}".encode()) == (unicodedata.category(chr(code)) == "Cn")


def test_the_engine_is_the_fast_one_only_for_its_kind(vocabulary, monkeypatch):
    assert open_engine(vocabulary).name == "gigatoken"
    state = json.loads(vocabulary.tokenizer.to_str())
    assert is_gpt2_kind(state)
    for change in (
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": state["pre_tokenizer"] | {"add_prefix_space": True}},
        {"model": state["model"] | {"ignore_merges": True}},
        {"added_tokens": [state["added_tokens"][0] | {"special": False}]},
    ):
        assert not is_gpt2_kind(state | change)
    monkeypatch.setattr(engine, "has_fast", lambda: False)
    assert open_engine(vocabulary).name == "tokenizers"


def test_memory_is_given_back(vocabulary, monkeypatch):
    fast = Gigatoken(vocabulary)
    fast.encode([b"a text"])
    first = fast._tokenizer
    fast.encode([b"a text"])
    assert fast._tokenizer is first is not None
    monkeypatch.setattr(engine, "_MOST_GROWN", -(1 << 40))
    fast.encode([b"a text"])
    assert fast._tokenizer is not first
    same_ids(vocabulary, ["a text"])

"""Text is shown when it is certain: whole characters that belong to no stop text."""

from pathlib import Path

import pytest
from small_run import END_OF_TEXT, write_tokenizer

from dsgpt.formats.tokenizer_files import open_tokenizer
from dsgpt.inference.sample import Continuation


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    """A token is a byte."""
    folder = Path(tmp_path_factory.mktemp("tokenizer")) / "tokenizer"
    write_tokenizer(folder)
    return open_tokenizer(folder, what="it")


def pieces_of(tokenizer, ids: list[int], **settings) -> tuple[list[str], Continuation]:
    """What is shown after each id and at the end."""
    continuation = Continuation(tokenizer, ends={END_OF_TEXT}, **settings)
    pieces = []
    for following in ids:
        continuation.add(following)
        pieces.append(continuation.news())
    continuation.finish()
    return [*pieces, continuation.news(last=True)], continuation


def test_a_character_is_shown_when_it_is_whole(tokenizer):
    ids = tokenizer.encode("aé日b")
    pieces, continuation = pieces_of(tokenizer, ids)
    assert pieces == ["a", "", "é", "", "", "日", "b", ""]
    assert continuation.text == "aé日b"


def test_half_a_character_at_the_end_is_marked(tokenizer):
    pieces, _ = pieces_of(tokenizer, tokenizer.encode("a日")[:-1])
    assert pieces == ["a", "", "", "\ufffd"]


def test_bytes_that_are_no_character_do_not_stop_the_text(tokenizer):
    ids = [*tokenizer.encode("日")[:1], *tokenizer.encode("abc")]
    pieces, continuation = pieces_of(tokenizer, ids)
    assert continuation.text == "".join(pieces) == "\ufffdabc"


def test_the_end_of_text_ends_it(tokenizer):
    pieces, continuation = pieces_of(tokenizer, [*tokenizer.encode("ab"), END_OF_TEXT, *tokenizer.encode("cd")])
    assert ("".join(pieces), continuation.ended) == ("ab", "end of text")


@pytest.mark.parametrize(
    ("text", "stop", "shown", "ended"),
    [
        ("one two three", [" two"], "one", "stop"),
        ("one two three", ["three", "two"], "one ", "stop"),
        ("xab", ["b", "ab"], "x", "stop"),
        ("one t", [" two"], "one t", ""),
        ("oneone two", ["one t"], "one", "stop"),
        ("日本", ["本"], "日", "stop"),
    ],
)
def test_a_stop_text_is_not_shown(tokenizer, text, stop, shown, ended):
    """Nor is any part of it, before it is certain that the rest does not follow."""
    pieces, continuation = pieces_of(tokenizer, tokenizer.encode(text), stop=stop)
    assert ("".join(pieces), continuation.text, continuation.ended) == (shown, shown, ended)
    so_far = ""
    for piece in pieces:
        so_far += piece
        assert shown.startswith(so_far)

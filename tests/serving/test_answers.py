"""A completion's text, tokens and end follow from its ids alone, however many of them arrive at a time."""

import asyncio
from pathlib import Path

import pytest
from small_run import END_OF_TEXT, write_tokenizer

from dsgpt.formats.tokenizer_files import open_tokenizer
from dsgpt.inference.sample import Continuation
from dsgpt.inference.server.completions import Answer, Choice, add_logprobs
from dsgpt.inference.server.engine import Sequence
from dsgpt.inference.server.requests import Prompt


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    """A token is a byte."""
    folder = Path(tmp_path_factory.mktemp("tokenizer")) / "tokenizer"
    write_tokenizer(folder)
    return open_tokenizer(folder, what="it")


def answered(
    tokenizer, ids: list[int], *, at_a_time: int, stops: tuple[str, ...] = ()
) -> tuple[Choice, list[str], int]:
    """The finished choice, its pieces, and the tokens that its usage counts."""
    sequence = Sequence("0", asyncio.Event(), 0.0)
    prompt = Prompt(ids=tokenizer.encode("ab"), text="ab")
    choice = Choice(
        index=0, prompt=prompt, sequence=sequence, text=Continuation(tokenizer, stop=stops, ends={END_OF_TEXT})
    )
    pieces = []
    for end in range(at_a_time, len(ids) + at_a_time, at_a_time):
        sequence.ids, sequence.finished = ids[:end], end >= len(ids)
        pieces.append(choice.take())
        if choice.finish_reason:
            break
    usage = Answer("m", [choice], [prompt]).usage()
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens"] == 2
    return choice, pieces, usage["completion_tokens"]


@pytest.mark.parametrize("at_a_time", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "end", "stops", "whole", "reason", "tokens"),
    [
        ("one two", False, (), "one two", "length", 7),
        ("one two", True, (), "one two", "stop", 8),
        ("one two", True, ("e t",), "on", "stop", 5),
        ("one two", False, ("wo", "o"), "", "stop", 1),
        ("one tw", False, ("two",), "one tw", "length", 6),
        ("日本語", False, ("本",), "日", "stop", 6),
        ("a日", True, ("never",), "a日", "stop", 5),
    ],
)
def test_text_reason_and_usage_are_those_of_the_ids(tokenizer, at_a_time, text, end, stops, whole, reason, tokens):
    """End-of-text counts as a token and is no text; what arrives behind a stop sequence does not count."""
    ids = [*tokenizer.encode(text), *([END_OF_TEXT] if end else [])]
    choice, pieces, counted = answered(tokenizer, ids, at_a_time=at_a_time, stops=stops)
    assert (choice.text.text, "".join(pieces), choice.finish_reason, counted) == (whole, whole, reason, tokens)
    assert all(whole.startswith("".join(pieces[:end])) for end in range(len(pieces)))


class CountingScorer:
    """Scores the token at place i with -i, and names two others."""

    def __init__(self, others: list[int]) -> None:
        self._others = others

    def score(self, ids, *, first, top):
        best = [(token, -0.5 - number) for number, token in enumerate(self._others)][:top]
        return [(-float(place), best) for place in range(first, len(ids))]


@pytest.mark.parametrize("at_a_time", [1, 100])
def test_log_probabilities_stand_beside_their_tokens(tokenizer, at_a_time):
    choice, _, _ = answered(tokenizer, tokenizer.encode("xé y"), at_a_time=at_a_time, stops=(" y",))
    scorer, half = CountingScorer(tokenizer.encode("vw")), [f"token_id:{token}" for token in tokenizer.encode("é")]
    add_logprobs(choice, top=2, echo=True, scorer=scorer, tokenizer=tokenizer)
    assert choice.logprobs == {
        "tokens": ["a", "b", "x", *half],
        "token_logprobs": [None, -1, -2, -3, -4],
        "top_logprobs": [
            None,
            *({"v": -0.5, "w": -1.5, name: -1.0 - place} for place, name in enumerate(["b", "x", *half])),
        ],
        "text_offset": [0, 1, 2, 3, 3],
    }
    add_logprobs(choice, top=0, echo=False, scorer=scorer, tokenizer=tokenizer)
    assert choice.logprobs == {
        "tokens": ["x", *half],
        "token_logprobs": [-2, -3, -4],
        "top_logprobs": None,
        "text_offset": [0, 1, 1],
    }

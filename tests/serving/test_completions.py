"""A server answers the real ``openai`` client as OpenAI's interface says, with the text of our own generator."""

import doctest
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch
from running_server import BATCH, MODEL, POSITIONS, Server, within
from small_run import REPOSITORY

from dsgpt.inference.loading import load

PROMPTS = ["def ", "x", "import os\n", "  return é", "a" * 60, "日本", "\n\n", "if True:"]
NEW = 40


@pytest.fixture(scope="module")
def own(run_dir):
    """Our own model and tokenizer."""
    loaded = load(run_dir, which="latest", device=torch.device("cpu"), precision="fp32")
    return loaded.model, loaded.tokenizer


def greedy(own, prompt: str, new: int = NEW) -> list[int]:
    model, tokenizer = own
    before = tokenizer.encode(prompt, add_special_tokens=False)
    ids = list(before)
    with torch.inference_mode():
        while len(ids) < len(before) + new:
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(before) :]


def named(tokenizer, token: int) -> str:
    text = tokenizer.decode([token])
    return f"token_id:{token}" if "\ufffd" in text else text


def test_greedy_ids_and_text_are_those_of_the_generator_alone_and_together(server: Server, own):
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda prompt: server.complete(prompt, max_tokens=NEW, logprobs=0), PROMPTS))
    for prompt, answer in zip(PROMPTS, together, strict=True):
        expected, (choice,) = greedy(own, prompt), answer.choices
        assert choice.logprobs.tokens == [named(own[1], token) for token in expected]
        assert choice.text == own[1].decode(expected)
        assert (choice.finish_reason, answer.usage.completion_tokens) == ("length", NEW)
        assert answer.usage.prompt_tokens == len(own[1].encode(prompt))
    alone = server.complete(PROMPTS[0], max_tokens=NEW)
    assert alone.choices[0].text == together[0].choices[0].text
    assert alone.id != together[0].id


def test_the_sessions_of_the_page_are_what_the_client_sees(server: Server, capsys):
    """With this server's address and model."""
    page = (REPOSITORY / "docs" / "serving.md").read_text(encoding="utf-8")
    example, session = (
        block.replace("http://127.0.0.1:8000", server.url).replace("demo-zero1", MODEL)
        for block in re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    )
    names: dict[str, Any] = {}
    exec(example, names)
    assert capsys.readouterr().out == server.complete("def main(", max_tokens=32).choices[0].text
    test = doctest.DocTestParser().get_doctest(session, names, "docs/serving.md", None, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test)
    assert (runner.failures, runner.tries) == (0, 15), capsys.readouterr().out


def test_a_list_of_prompts_as_text_or_ids(server: Server, own):
    ids = [own[1].encode(prompt) for prompt in PROMPTS[:3]]
    texts = [own[1].decode(greedy(own, prompt, 8)) for prompt in PROMPTS[:3]]
    for prompt in (PROMPTS[:3], ids):
        answer = server.complete(prompt, n=2)
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert answer.usage.prompt_tokens == sum(map(len, ids))  # each prompt once
        assert [choice.text for choice in answer.choices] == [text for text in texts for _ in range(2)]
    assert server.complete(ids[0]).choices[0].text == texts[0]
    assert server.complete("").usage.prompt_tokens == 1


def test_a_stream_has_the_whole_answers_text_and_ends_with_its_usage(server: Server, own):
    whole = server.complete(PROMPTS[:4], max_tokens=NEW, echo=True)
    parts = list(
        server.complete(PROMPTS[:4], max_tokens=NEW, echo=True, stream=True, stream_options={"include_usage": True})
    )
    texts, reasons = dict.fromkeys(range(4), ""), {}
    for part in parts[:-1]:
        (choice,) = part.choices
        texts[choice.index] += choice.text
        if choice.finish_reason:
            assert choice.index not in reasons
            reasons[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert all(texts[index].startswith(prompt) for index, prompt in enumerate(PROMPTS[:4]))
    assert reasons == dict.fromkeys(range(4), "length")
    assert len(parts) > 20
    assert (parts[-1].choices, parts[-1].usage) == ([], whole.usage)
    assert {part.id for part in parts} == {parts[0].id}


def test_a_stop_sequence_ends_the_text_before_it_also_across_tokens(server: Server, own):
    text = server.complete(max_tokens=100).choices[0].text
    place = next(place for place in range(2, 90) if "\ufffd" not in text[place : place + 3])
    stop = text[place : place + 3]
    expected = text[: text.index(stop)]
    for stops in (stop, ["never this", stop]):
        answer = server.complete(max_tokens=100, stop=stops)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
        assert answer.usage.completion_tokens == len(own[1].encode(expected + stop))
        streamed = list(server.complete(max_tokens=100, stop=stops, stream=True))
        assert "".join(part.choices[0].text for part in streamed) == expected
        assert streamed[-1].choices[0].finish_reason == "stop"
    scored = server.complete(max_tokens=100, stop=stop, logprobs=1).choices[0].logprobs
    assert all(offset < len(expected) for offset in scored.text_offset)


def test_logprobs_are_the_models(server: Server, own):
    model, tokenizer = own
    answer = server.complete("def ", max_tokens=12, temperature=1.0, n=3, logprobs=3, echo=True)
    before = tokenizer.encode("def ")
    assert len({choice.text for choice in answer.choices}) > 1  # it samples
    for choice in answer.choices:
        known = {named(tokenizer, token): token for token in range(257)}
        ids = [known[name] for name in choice.logprobs.tokens]
        assert ids[: len(before)] == before
        with torch.inference_mode():
            logs = model(torch.tensor([ids]))[0].log_softmax(-1)
        expected = [logs[place, token].item() for place, token in enumerate(ids[1:])]
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
        for place, best in enumerate(choice.logprobs.top_logprobs[1:]):
            likeliest = {named(tokenizer, token): logs[place, token].item() for token in logs[place].topk(3).indices}
            drawn = {choice.logprobs.tokens[place + 1]: expected[place]}
            assert best == pytest.approx(likeliest | drawn, abs=1e-4)
    empty = server.complete("", max_tokens=6, echo=True, logprobs=0).choices[0]
    assert (empty.text, len(empty.logprobs.tokens)) == (tokenizer.decode(greedy(own, "<|endoftext|>", 6)), 6)
    assert None not in empty.logprobs.token_logprobs
    scored = server.complete("def ", max_tokens=0, echo=True, logprobs=1)
    assert (scored.choices[0].text, scored.usage.completion_tokens) == ("def ", 0)
    assert scored.choices[0].logprobs.token_logprobs[1:] == pytest.approx(expected[: len(before) - 1], abs=1e-4)


def test_logprobs_stay_the_same_while_other_sequences_are_decoded(server: Server):
    def score() -> list[float]:
        return server.complete("def main", max_tokens=0, echo=True, logprobs=0).choices[0].logprobs.token_logprobs

    alone = score()
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(server.complete, max_tokens=100, n=2, temperature=float(kind)) for kind in range(2)]
        while not all(other.done() for other in others):
            assert score() == alone
    assert score() == alone


def test_a_lower_temperature_and_top_p_are_nearer_to_the_likeliest_token(server: Server, own):
    """At the first position: shares of 128 draws, and the likeliest tokens that hold a third of the probability."""
    model, tokenizer = own
    with torch.inference_mode():
        probabilities = model(torch.tensor([tokenizer.encode("def ")]))[0, -1].softmax(-1)
    sorted_ids = probabilities.argsort(descending=True).tolist()
    nucleus = set()
    while sum(probabilities[token].item() for token in nucleus) < 1 / 3:
        nucleus.add(sorted_ids[len(nucleus)])
    drawn = set()
    for _ in range(4):
        answer = server.complete(max_tokens=1, n=32, temperature=1.0, top_p=1 / 3, logprobs=0)
        drawn |= {choice.logprobs.tokens[0] for choice in answer.choices if choice.logprobs.tokens}
    assert drawn <= {named(tokenizer, token) for token in nucleus}
    assert len(drawn) > 10
    for temperature in (1e-9, 2e-4):  # the second is sampled
        cold = server.complete(max_tokens=4, n=4, temperature=temperature)
        assert {choice.text for choice in cold.choices} == {tokenizer.decode(greedy(own, "def ", 4))}
    narrow = server.complete(max_tokens=4, n=4, temperature=1.0, top_p=1e-6)
    assert {choice.text for choice in narrow.choices} == {tokenizer.decode(greedy(own, "def ", 4))}


def test_models_health_and_metrics(server: Server):
    (model,) = server.openai.models.list().data
    assert (model.id, model.max_model_len, server.openai.models.retrieve(MODEL).id) == (MODEL, POSITIONS, MODEL)
    assert re.fullmatch("[0-9a-f]{32}", server.complete()._request_id)
    with pytest.raises(openai.NotFoundError, match="a base model without a chat template: use /v1/completions"):
        server.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
    kinds = [f'dsgpt_tokens_total{{kind="{kind}"}}' for kind in ("prompt", "completion")]
    times = [f"dsgpt_{name}_seconds" for name in ("request", "first_token", "queue")]
    lines = [*kinds, *(f"{name}_{part}" for part in ("count", "sum") for name in times)]
    before = [server.metric(line) for line in lines]
    server.complete(n=2 * BATCH, max_tokens=40)  # half of them wait until the others have all their tokens
    within(lambda: server.metric(f"{times[0]}_count") > before[2])  # it is counted after the client has its answer
    after = [server.metric(line) for line in lines]
    prompt, completion, *counts, request, first_token, queue = (b - a for a, b in zip(before, after, strict=True))
    assert (prompt, completion, counts) == (4, 2 * BATCH * 40, [1, 2 * BATCH, 2 * BATCH])
    assert 0 < queue < first_token < 2 * BATCH * request
    assert server.metric("dsgpt_open_sequences") == 0

"""Completions: the interface, answers beside the engine, and sampling."""

import asyncio
import doctest
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest
import torch
from running_server import BATCH, MODEL, POSITIONS, Server, within
from small_run import END_OF_TEXT, REPOSITORY, write_tokenizer

from dsgpt.formats.tokenizer_files import open_tokenizer
from dsgpt.inference.loading import load
from dsgpt.inference.sample import Continuation
from dsgpt.inference.server.completions import SMALL_BODY, Answer, Choice, Completions, Gate, Metrics, add_logprobs
from dsgpt.inference.server.engine import Engine, Sampler, Scorer, Sequence, open_served
from dsgpt.inference.server.options import Key, Limits
from dsgpt.inference.server.requests import ApiError, Prompt, Sampling, read_request
from dsgpt.inference.server.server import make_app

# A server answers the real `openai` client as OpenAI's interface says, with the text of our own generator.


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


# A completion's text, tokens and end follow from its ids alone, however many of them arrive at a time.


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


# Tokens are drawn as the request says, repeatably with a seed; logits that are not finite end one request alone.


LIMITS = Limits(batch=2, queue=2, new_tokens=None, body_bytes=1000, request_sec=60, stall_sec=60)


def drawn(rows: list[list[float]], settings: list[Sampling]) -> tuple[list[int], list[str]]:
    """The token of each row of logits, each of another position, and the rows that failed."""
    failed: list[str] = []
    sampler = Sampler(failed.append)
    states = [
        SimpleNamespace(
            request_id=f"{row}", initial_tokens=[0] * row, generated_tokens=[], logit_processor_kwargs={"sampling": one}
        )
        for row, one in enumerate(settings)
    ]
    sampler.prepare_tensor_args(
        [SimpleNamespace(state=state, has_new_token=True) for state in states], torch.empty(0, 1)
    )
    return sampler(torch.empty(0), torch.tensor(rows), torch.empty(0, 1)).argmax(-1).tolist(), failed


SHARES = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().tolist()


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, {0, 1, 2, 3}),
        ({"seed": "0"}, {0, 1, 2, 3}),  # each at another position
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 1}, {1}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.65}, {1, 3}),
        ({"top_p": 0.75}, {1, 2, 3}),
        ({"top_p": 1e-6}, {1}),
        ({"top_k": 3, "top_p": 0.75}, {1, 3}),  # of the three that are left, the first two hold 0.78
        ({"min_p": 0.45}, {1, 2, 3}),
        ({"min_p": 1.0}, {1}),
        ({"temperature": 1e-4}, {1}),
    ],
)
def test_only_the_allowed_tokens_are_drawn(settings, tokens):
    """By 400 sequences, beside a greedy one and one with bad logits; no temperature overflows."""
    beside = [Sampling(), *[Sampling(**{"temperature": 1.0} | settings)] * 400, Sampling(temperature=1.0)]
    for logits, expected in ((SHARES, tokens), ([38e37 * logit / 10 for logit in SHARES], {1})):
        found, failed = drawn([logits] * 401 + [[torch.nan] * 4], beside)
        assert (found[0], set(found[1:-1]), failed) == (1, expected, ["401"])


def test_shares_of_drawn_tokens_are_the_models():
    for more in ({}, {"top_k": 4}):
        tokens, _ = drawn([SHARES] * 4000, [Sampling(temperature=1.0, seed="7", **more)] * 4000)
        shares = torch.tensor(tokens).bincount() / 4000
        assert shares.tolist() == pytest.approx(torch.tensor(SHARES).exp().tolist(), abs=0.03)


def test_a_seed_repeats_an_answer_alone_and_beside_others(server: Server):
    def ask(seed: int | None, **fields: Any) -> list[str]:
        answer = server.complete("def ", max_tokens=30, temperature=1.0, seed=seed, **fields)
        return [choice.text for choice in answer.choices]

    alone, filtered = ask(3, n=2), ask(3, extra_body={"top_k": 20, "min_p": 0.01})
    assert alone[0] != alone[1] and alone[:1] != ask(4) != ask(None) != ask(None)
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(ask, seed, top_p=0.5, n=2) for seed in (None, 3, 4, None)]
        assert ask(3, n=2) == alone
        assert ask(3) == alone[:1]
        assert ask(3, extra_body={"top_k": 20, "min_p": 0.01}) == filtered
    assert {len(other.result()) for other in others} == {2}


def test_stop_token_ids_end_a_completion_before_their_token(server: Server):
    ids = [ord(character) for character in "0123456789"]  # of this tokenizer, not their bytes
    text = server.complete(max_tokens=100).choices[0]
    scored = server.complete(max_tokens=100, logprobs=0).choices[0].logprobs.tokens
    assert text.finish_reason == "length"
    for stop in range(257):
        answer = server.complete(max_tokens=100, extra_body={"stop_token_ids": [stop, *ids], "ignore_eos": True})
        if answer.choices[0].finish_reason == "stop":
            break
    written = answer.usage.completion_tokens
    assert text.text.startswith(answer.choices[0].text) and written < 100
    stopped = server.complete(max_tokens=100, logprobs=0, extra_body={"stop_token_ids": [stop, *ids]}).choices[0]
    assert stopped.logprobs.tokens == scored[: written - 1]  # the last one ended it


def test_ends_of_a_completion():
    def ends(**fields: Any) -> frozenset[int]:
        return read_request(json.dumps({"model": MODEL} | fields).encode()).ends(frozenset({256}))

    assert (ends(), ends(ignore_eos=True), ends(stop_token_ids=[5])) == ({256}, set(), {5, 256})
    assert ends(stop_token_ids=[256], ignore_eos=True) == {256}


def in_process(
    run_dir, *questions: dict[str, Any], scale: float = 1.0, during: Any = None, limits: Limits = LIMITS
) -> list[httpx2.Response]:
    """The answers of a model whose last layer is scaled, one after the other, and the server's health."""
    served, metrics = open_served(run_dir, which="latest", name=MODEL, device_kind="cpu"), Metrics()
    with torch.no_grad():
        served.model.transformer.ln_f.weight.mul_(scale)
        served.model.transformer.ln_f.bias.mul_(scale)
    engine = Engine(served.model, batch=2)
    completions = Completions(
        served=served,
        engine=engine,
        scorer=Scorer(served.model),
        limits=limits,
        metrics=metrics,
        gate=Gate(limits, metrics),
    )
    transport = httpx2.ASGITransport(app=make_app(completions, keys=[], loopback="127.0.0.2"))

    async def ask() -> list[httpx2.Response]:
        engine.start()
        try:
            async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.2") as client:
                asked = [client.post("/v1/completions", json={"model": MODEL, "prompt": "x"} | q) for q in questions]
                answers = await asyncio.gather(*asked) if during else [await one for one in asked]
                return [*answers, await client.get("/health")]
        finally:
            await asyncio.to_thread(engine.close)

    return asyncio.run(ask())


def test_logits_that_are_not_finite_fail_their_request_and_not_the_server(run_dir):
    """With huge logits a low temperature overflowed; with infinite ones nothing can be answered, and nothing ends."""
    cold, greedy = {"temperature": 0.0001, "top_p": 0.9}, {"temperature": 0}
    *answers, health = in_process(run_dir, cold, greedy, cold | {"seed": 1}, scale=1e36)
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert (texts[0], texts[2], health.status_code) == (texts[1], texts[1], 200)
    scored = {"max_tokens": 0, "echo": True, "logprobs": 1, "prompt": "xyz"}
    *answers, health = in_process(run_dir, cold, greedy, scored, cold, scale=torch.inf)
    assert [answer.status_code for answer in answers] == [500] * 4
    assert {answer.json()["error"]["message"] for answer in answers} == {
        "the model failed to answer (its logits are not finite)"
    }
    assert health.status_code == 200


def test_a_request_is_read_beside_the_event_loop(run_dir, monkeypatch):
    """Each reading waits until the loop has accepted another request."""
    arrived = threading.Semaphore(0)

    async def body(*_: object, **__: object) -> bytes:
        arrived.release()
        await asyncio.sleep(0)
        return b""

    def reads(_: bytes) -> None:
        assert arrived.acquire(timeout=20)
        raise ApiError(400, "read")

    monkeypatch.setattr("dsgpt.inference.server.completions.read_body", body)
    monkeypatch.setattr("dsgpt.inference.server.completions.read_request", reads)
    *answers, _ = in_process(run_dir, {}, {}, during=True)
    assert [answer.json()["error"]["message"] for answer in answers] == ["read", "read"]


def test_a_small_request_is_read_while_large_ones_are(run_dir, monkeypatch):
    """The large one is read until the small one, which came later, has been read."""
    small_one = threading.Event()

    def reads(data: bytes) -> None:
        assert len(data) < SMALL_BODY or small_one.wait(timeout=60)
        if len(data) < SMALL_BODY:
            small_one.set()
        raise ApiError(400, "read")

    monkeypatch.setattr("dsgpt.inference.server.completions.read_request", reads)
    large = {"prompt": "x" * SMALL_BODY}
    *answers, _ = in_process(run_dir, large, {}, during=True, limits=replace(LIMITS, body_bytes=2 * SMALL_BODY))
    assert [answer.json()["error"]["message"] for answer in answers] == ["read", "read"]


def test_one_of_several_keys_has_at_most_half_of_the_places():
    """So one request with a large ``n`` leaves the others their places."""
    gate, ann, bob = Gate(replace(LIMITS, batch=3), Metrics(), keys=2), *(Key(name=name, secret="") for name in "ab")
    with pytest.raises(ApiError, match="asks for 4 completions, and the server takes 3 of the key 'a' at a time"):
        gate.places(4, key=ann).__enter__()
    with gate.places(3, key=ann):
        with pytest.raises(ApiError, match="busy: 3 of 3 places of the key 'a' are taken"):
            gate.places(1, key=ann).__enter__()
        with gate.places(2, key=bob), pytest.raises(ApiError, match="the server is busy: 5 of 5 places are taken"):
            gate.places(1, key=bob).__enter__()
    with Gate(LIMITS, Metrics()).places(4, key=ann):
        pass

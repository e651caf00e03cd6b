"""Completions in this process: texts and usage from ids, requests, keys, sampling, and answers beside the engine."""

import asyncio
import json
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx2
import openai
import pytest
import torch
from small_run import END_OF_TEXT

from dsgpt.common.errors import UserError
from dsgpt.formats.tokenizer_files import open_tokenizer
from dsgpt.inference.commands import Key, Limits, ServeOptions, keys_of
from dsgpt.inference.generation import Continuation
from dsgpt.inference.server.completions import SMALL_BODY, Choice, Completions, Gate, Metrics, usage_of
from dsgpt.inference.server.engine import Sampler, Sequence, open_served
from dsgpt.inference.server.requests import ApiError, CompletionRequest, Drawing, Prompt, new_tokens_of, read_request
from dsgpt.inference.server.server import http_config, make_app

MODEL, POSITIONS = "tiny", 128
KEY = "0123456789abcdef"
LIMITS = Limits(batch=2, queue=2, new_tokens=None, body_bytes=1000, request_sec=60, stall_sec=60)

# What a server needs before it starts; ``tests/goldens/refusals.txt`` has the keys, addresses and models that are none.


def test_a_file_of_keys_that_others_may_write_is_refused(tmp_path, capsys):
    file = tmp_path / "key"
    file.write_text(f"ann {KEY}\n\nbob {KEY}X 60\n")
    for mode in (0o600, 0o444, 0o640, 0o620, 0o606):
        file.chmod(mode)
        if mode & 0o022:
            with pytest.raises(UserError, match=f"so choose the keys: chmod go-w {file}$"):
                keys_of(ServeOptions(checkpoint=tmp_path, api_key_file=file))
        else:
            keys = keys_of(ServeOptions(checkpoint=tmp_path, api_key_file=file))
            assert keys == [Key(name="ann", secret=KEY), Key(name="bob", secret=f"{KEY}X", per_minute=60)]
            assert KEY not in repr(keys)
        warned = f"warning: --api_key_file {file}: other users may read the keys: chmod go-r {file}\n"
        assert capsys.readouterr().err == (warned if mode in (0o444, 0o640) else "")


def test_a_connection_is_kept_longer_than_clients_and_load_balancers_keep_it():
    """Otherwise a request that is sent while the server closes its connection has no answer."""
    clients = httpx2.Limits().keepalive_expiry, openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry
    assert http_config(None, connections=1).timeout_keep_alive > max(*clients, 60)


# Requests, and how much of them is computed.


def test_the_servers_own_limit_of_tokens_and_what_ends_a_completion():
    """A request may ask for as many; one that does not say how many gets no more."""

    def asked(**fields: Any) -> CompletionRequest:
        return read_request(json.dumps({"model": MODEL} | fields).encode())

    def allowed(max_tokens: int | None, limit: int | None, prompt_tokens: int = 1) -> int:
        prompts, limits = [Prompt(ids=[0] * prompt_tokens, text="")], replace(LIMITS, new_tokens=limit)
        return new_tokens_of(asked(max_tokens=max_tokens), prompts, positions=POSITIONS, limits=limits)

    assert (allowed(10, 10), allowed(None, 10), allowed(None, 10, POSITIONS - 3)) == (10, 10, 3)
    assert (allowed(11, None), allowed(None, None)) == (11, 16)
    with pytest.raises(ApiError, match=r"^max_tokens must be at most 10 here$"):
        allowed(11, 10)
    fields = ({}, {"ignore_eos": True}, {"stop_token_ids": [5]}, {"stop_token_ids": [256], "ignore_eos": True})
    assert [asked(**each).ends(frozenset({256})) for each in fields] == [{256}, set(), {5, 256}, {256}]


# A completion's text, tokens and end follow from its ids alone, however many of them arrive at a time.


@pytest.fixture(scope="module")
def tokenizer(checkpoint_with_tokenizer: Path):
    """A token is a byte."""
    return open_tokenizer(checkpoint_with_tokenizer / "tokenizer", what="it")


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
    usage = usage_of([choice], [prompt])
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens"] == 2
    return choice, pieces, usage["completion_tokens"]


@pytest.mark.parametrize(
    ("text", "end", "stops", "whole", "reason", "tokens"),
    [
        ("one two", True, (), "one two", "stop", 8),
        ("one two", True, ("e t",), "on", "stop", 5),
        ("one two", False, ("wo", "o"), "", "stop", 1),
        ("one tw", False, ("two",), "one tw", "length", 6),
        ("日本語", False, ("本",), "日", "stop", 6),
        ("one two three", False, ("three", "two"), "one ", "stop", 7),
        ("xab", False, ("b", "ab"), "x", "stop", 3),
        ("one t", False, (" two",), "one t", "length", 5),
        ("oneone two", False, ("one t",), "one", "stop", 8),
    ],
)
def test_text_reason_and_usage_are_those_of_the_ids(tokenizer, text, end, stops, whole, reason, tokens):
    """End-of-text counts as a token and is no text; what arrives behind a stop sequence does not count."""
    ids = [*tokenizer.encode(text), *([END_OF_TEXT] if end else [])]
    for at_a_time in (1, 2, 3, 100):
        choice, pieces, counted = answered(tokenizer, ids, at_a_time=at_a_time, stops=stops)
        assert (choice.text.text, "".join(pieces), choice.finish_reason, counted) == (whole, whole, reason, tokens)
        assert all(whole.startswith("".join(pieces[:end])) for end in range(len(pieces)))


def test_a_character_is_shown_when_it_is_whole(tokenizer):
    """Half a one at the end is marked, and bytes that are no character do not stop the text."""
    for texts, shown in (
        ([("aé日b", 7)], ["a", "", "é", "", "", "日", "b"]),
        ([("a日", 3)], ["a", "", "\ufffd"]),
        ([("日", 1), ("abc", 3)], ["", "\ufffda", "b", "c"]),
    ):
        ids = [token for text, count in texts for token in tokenizer.encode(text)[:count]]
        choice, pieces, _ = answered(tokenizer, ids, at_a_time=1)
        assert (pieces, choice.text.text) == (shown, "".join(shown))


# Tokens are drawn as the request says, repeatably with a seed; logits that are not finite end one request alone.


SHARES = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
WAYS = [
    (Drawing(temperature=1.0), {0, 1, 2, 3}),
    (Drawing(temperature=1.0, seed="0"), {0, 1, 2, 3}),  # each at another position
    (Drawing(temperature=1.0, top_k=2), {1, 3}),
    (Drawing(temperature=1.0, top_k=3, top_p=0.75), {1, 3}),  # of the three that are left, the first two hold 0.78
    (Drawing(temperature=1.0, min_p=0.45), {1, 2, 3}),
    (Drawing(temperature=1e-4), {1}),
    (Drawing(), {1}),
]


def test_only_the_allowed_tokens_are_drawn():
    """By 400 sequences of each setting, in turns, beside one with bad logits. ``test_decoder.py`` has the shares."""
    settings, failed = [drawing for drawing, _ in WAYS] * 400, []
    states = [
        SimpleNamespace(request_id=row, initial_tokens=[0] * row, generated_tokens=[], logit_processor_kwargs=each)
        for row, each in enumerate({"sampling": drawing} for drawing in [*settings, settings[0]])
    ]
    sampler = Sampler(failed.append)
    sampler.prepare_tensor_args([SimpleNamespace(state=state, has_new_token=True) for state in states], None)
    for logits, expected in ((SHARES, [tokens for _, tokens in WAYS]), (SHARES * 38e36, [{1}] * len(WAYS))):
        scores = torch.stack([logits] * len(settings) + [torch.full((4,), torch.nan)])
        drawn = sampler(None, scores, None).argmax(-1).tolist()[:-1]
        assert [set(drawn[way :: len(WAYS)]) for way in range(len(WAYS))] == expected
    assert failed == [len(settings)] * 2


def served(checkpoint: Path, *, limits: Limits = LIMITS, scale: float = 1.0) -> Completions:
    """The endpoint of a model whose last layer is scaled."""
    opened = open_served(ServeOptions(checkpoint=checkpoint, model_name=MODEL, device="cpu"))
    with torch.no_grad():
        opened.model.transformer.ln_f.weight.mul_(scale)
        opened.model.transformer.ln_f.bias.mul_(scale)
    return Completions(opened, limits)


def application(completions: Completions) -> Any:
    return make_app(completions, keys=[], loopback="127.0.0.2")


def answers_of(completions: Completions, *questions: dict[str, Any], together: bool = False) -> list[httpx2.Response]:
    """The answers, and the server's health."""
    transport = httpx2.ASGITransport(app=application(completions))

    async def ask() -> list[httpx2.Response]:
        completions.engine.start()
        try:
            async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.2") as client:
                asked = [client.post("/v1/completions", json={"model": MODEL, "prompt": "x"} | q) for q in questions]
                answers = await asyncio.gather(*asked) if together else [await one for one in asked]
                return [*answers, await client.get("/health")]
        finally:
            await asyncio.to_thread(completions.engine.close)

    return asyncio.run(ask())


def test_logits_that_are_not_finite_fail_their_request_and_not_the_server(checkpoint_with_tokenizer):
    """With huge logits a low temperature overflowed; with infinite ones nothing can be answered, and nothing ends."""
    cold, greedy = {"temperature": 0.0001, "top_p": 0.9, "max_tokens": 9}, {"temperature": 0, "max_tokens": 9}
    completions = served(checkpoint_with_tokenizer, scale=1e36)
    *answers, health = answers_of(completions, cold, greedy, cold | {"seed": 1})
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert (texts[0], texts[2], health.status_code) == (texts[1], texts[1], 200)
    scored = {"max_tokens": 0, "echo": True, "logprobs": 1, "prompt": "xyz"}
    completions = served(checkpoint_with_tokenizer, scale=torch.inf)
    *answers, health = answers_of(completions, cold, greedy, scored, cold)
    messages = [(answer.status_code, answer.json()["error"]["message"]) for answer in answers]
    assert messages == [(500, "the model failed to answer (its logits are not finite)")] * 4
    assert health.status_code == 200


def test_a_small_request_is_read_while_large_ones_are(checkpoint_with_tokenizer, monkeypatch):
    """The large one is read until the small one, which came later, has been read."""
    small_one = threading.Event()

    def reads(data: bytes) -> None:
        assert len(data) < SMALL_BODY or small_one.wait(timeout=60)
        if len(data) < SMALL_BODY:
            small_one.set()
        raise ApiError(400, "read")

    monkeypatch.setattr("dsgpt.inference.server.requests.read_request", reads)
    completions = served(checkpoint_with_tokenizer, limits=replace(LIMITS, body_bytes=2 * SMALL_BODY))
    *answers, _ = answers_of(completions, {"prompt": "x" * SMALL_BODY}, {}, together=True)
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
    gate, waits = Gate(LIMITS, Metrics()), []  # refused clients are told to wait longer when sequences take longer
    for seconds in (0.01, 5.0, 500.0):
        for _ in range(100):
            gate.took(seconds)
        with gate.places(4, key=ann), pytest.raises(ApiError) as caught, gate.places(1):
            pass
        waits.append(int(caught.value.headers["retry-after"]))
    assert waits == [1, 10, 60]


def test_an_answer_that_takes_too_long_and_an_engine_that_fails(checkpoint_with_tokenizer, monkeypatch):
    """No machine is too fast for a limit of a millisecond."""
    completions = served(checkpoint_with_tokenizer, limits=replace(LIMITS, request_sec=0.001))
    transport = httpx2.ASGITransport(app=application(completions), raise_app_exceptions=False)
    engine, registry = completions.engine, completions.metrics.registry

    async def ask() -> tuple[httpx2.Response, ...]:
        engine.start()
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.2") as client:
            values = {"model": MODEL, "prompt": "x", "max_tokens": 15}
            ask_for_text = partial(client.post, "/v1/completions", json=values)
            late = await ask_for_text()
            completions.limits = LIMITS
            with monkeypatch.context() as patch:
                patch.setattr(engine, "submit", Mock(side_effect=RuntimeError))
                unexpected = await ask_for_text()
            monkeypatch.setattr(engine, "_receive", lambda _: None)  # no token arrives before the engine ends
            begun = asyncio.create_task(ask_for_text())
            while not (engine._open or begun.done()):
                await asyncio.sleep(0.001)
            await asyncio.to_thread(engine.close)
            return late, unexpected, await begun, await ask_for_text(), await client.get("/health")

    *answers, health = asyncio.run(ask())
    errors = [(answer.status_code, answer.json()["error"]["code"]) for answer in answers]
    assert errors == [(504, "timeout"), (500, "internal_error"), (500, "engine_failed"), (503, "engine_failed")]
    assert answers[0].headers["x-should-retry"] == "false"
    assert (health.status_code, health.json()) == (503, {"status": "failed"})
    statuses = [{"status": status} for status in ("504", "500", "503", "200")]
    assert [registry.get_sample_value("dsgpt_requests_total", each) for each in statuses] == [1, 2, 1, None]
    assert registry.get_sample_value("dsgpt_open_sequences") == 0

"""Tokens are drawn as the request says, repeatably with a seed; logits that are not finite end one request alone."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import torch
from running_server import MODEL, Server

from dsgpt.inference.server.completions import Completions, Gate, Metrics
from dsgpt.inference.server.engine import Engine, Sampler, Scorer, open_served
from dsgpt.inference.server.options import Limits
from dsgpt.inference.server.requests import ApiError, Sampling, read_request
from dsgpt.inference.server.server import make_app

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


def in_process(run_dir, *questions: dict[str, Any], scale: float = 1.0, during: Any = None) -> list[httpx2.Response]:
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
        limits=LIMITS,
        metrics=metrics,
        gate=Gate(LIMITS, metrics),
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

"""Completions in this process: texts and usage from ids, requests, keys, sampling, and answers beside the engine."""

import asyncio
import json
import threading
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest
import torch
from harmful_tokenizers import bring_code, seal
from small_run import END_OF_TEXT, write_tokenizer

from dsgpt.common.errors import UserError
from dsgpt.formats.tokenizer_files import open_tokenizer
from dsgpt.inference.commands import Key, Limits, ServeOptions, keys_of
from dsgpt.inference.generation import Continuation
from dsgpt.inference.server.completions import SMALL_BODY, Answer, Choice, Completions, Gate, Metrics, add_logprobs
from dsgpt.inference.server.engine import Engine, Sampler, Scorer, Sequence, open_served
from dsgpt.inference.server.requests import ApiError, Drawing, Prompt, new_tokens_of, read_prompts, read_request
from dsgpt.inference.server.server import http_config, make_app, serve

MODEL, POSITIONS = "tiny", 128
KEY = "0123456789abcdef"
LIMITS = Limits(batch=2, queue=2, new_tokens=None, body_bytes=1000, request_sec=60, stall_sec=60)

# What a server needs before it starts; it is not open to others without a key.


def refusal(checkpoint: Path, **changes: Any) -> str:
    flags = {"which": "latest", "model_name": None, "host": "127.0.0.1", "port": 0, "api_key_file": None}
    with pytest.raises(UserError) as caught:
        serve(ServeOptions(**{"checkpoint": checkpoint, "device": "cpu", "limits": LIMITS} | flags | changes))
    (line,) = caught.value.problems
    assert "\n" not in line
    return line


def test_without_a_key_no_other_machine_is_answered(tmp_path, monkeypatch):
    monkeypatch.delenv("DSGPT_API_KEY", raising=False)
    for host in ("::", "192.0.2.1"):  # ``tests/goldens/refusals.txt`` has 0.0.0.0, and keys that are none
        assert refusal(tmp_path, host=host) == (
            f"--host {host}: other machines can reach it, so requests need a key: put one into DSGPT_API_KEY or a file "
            "for --api_key_file, or use --host 127.0.0.1"
        )


def test_a_file_of_keys_that_others_may_write_is_refused(tmp_path, capsys):
    file = _key(tmp_path)
    for mode in (0o600, 0o444, 0o640, 0o620, 0o606):
        file.chmod(mode)
        if mode & 0o022:
            assert refusal(tmp_path, api_key_file=file).endswith(f"so choose the keys: chmod go-w {file}")
        else:
            (key,) = keys_of(ServeOptions(checkpoint=tmp_path, api_key_file=file))
            assert key == Key(name="DSGPT_API_KEY", secret=KEY)
        warned = f"warning: --api_key_file {file}: other users may read the keys: chmod go-r {file}\n"
        assert capsys.readouterr().err == (warned if mode in (0o444, 0o640) else "")


@pytest.mark.parametrize(
    ("lines", "problems"),
    [
        (["ann 0123456789abcdef", "", "bob 0123456789abcdeX 60"], []),
        ([KEY, KEY], ["line 1: write NAME KEY", "line 2: write NAME KEY"]),
        ([f"ann/bob {KEY}"], ["key: write NAME KEY"]),
        (["", " "], ["a key has at least 16 ASCII characters"]),
    ],
)
def test_every_bad_line_of_a_file_of_keys_is_named(tmp_path, lines, problems):
    (tmp_path / "key").write_text("\n".join(lines) + "\n")
    (tmp_path / "key").chmod(0o600)
    options = ServeOptions(checkpoint=tmp_path, api_key_file=tmp_path / "key")
    if problems:
        with pytest.raises(UserError) as caught:
            keys_of(options)
        assert len(caught.value.problems) == len(problems)
        for line, expected in zip(caught.value.problems, problems, strict=True):
            assert expected in line and not any(word in line for word in ("short", KEY))
    else:
        assert [(key.name, key.per_minute) for key in keys_of(options)] == [("ann", None), ("bob", 60)]
        assert KEY not in repr(keys_of(options))


def test_what_cannot_be_served_is_refused_in_one_line(tmp_path):
    assert refusal(tmp_path).startswith(f"--checkpoint {tmp_path}: holds no checkpoint; ")
    assert refusal(tmp_path, host="no.such.host.invalid").startswith("--host no.such.host.invalid: is not an address")
    assert "cannot be opened" in refusal(tmp_path, host="192.0.2.1", api_key_file=_key(tmp_path))


def _key(folder: Path) -> Path:
    (folder / "key").write_text(f"{KEY}\n")
    (folder / "key").chmod(0o600)
    return folder / "key"


def test_a_connection_is_kept_longer_than_clients_and_load_balancers_keep_it():
    """Otherwise a request that is sent while the server closes its connection has no answer."""
    clients = httpx2.Limits().keepalive_expiry, openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry
    assert http_config(None, connections=1).timeout_keep_alive > max(*clients, 60)


def test_code_of_a_tokenizer_never_runs(checkpoint, tmp_path):
    marker = bring_code(checkpoint / "tokenizer", marker=tmp_path / "ran")
    seal(checkpoint)
    assert "asks for its own code (auto_map), which is never run" in refusal(checkpoint)
    assert not marker.exists()


# Requests, and how much of them is computed.


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL} | fields).encode()


def test_the_servers_own_limit_of_tokens():
    """A request may ask for as many; one that does not say how many gets no more."""
    limits = Limits(batch=1, queue=1, new_tokens=10, body_bytes=1, request_sec=1, stall_sec=1)

    def allowed(max_tokens: int | None, limits: Limits, prompt_tokens: int = 1) -> int:
        request, prompts = read_request(body(max_tokens=max_tokens)), [Prompt(ids=[0] * prompt_tokens, text="")]
        return new_tokens_of(request, prompts, positions=POSITIONS, limits=limits)

    assert (allowed(10, limits), allowed(None, limits), allowed(None, limits, POSITIONS - 3)) == (10, 10, 3)
    assert (allowed(11, replace(limits, new_tokens=None)), allowed(None, replace(limits, new_tokens=None))) == (11, 16)
    with pytest.raises(ApiError, match=r"^max_tokens must be at most 10 here$") as caught:
        allowed(11, limits)
    assert (caught.value.status, caught.value.param) == (400, "max_tokens")


@dataclass
class Counting:
    """Stands for a tokenizer; its tokens have ``width`` characters, and it knows how many it was given."""

    width: int
    given: int = 0
    eos_token_id = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.given += len(text)
        return [0] * (len(text) // self.width)


@pytest.mark.parametrize(("width", "refused"), [(1, True), (7, True), (20, False)])
def test_of_a_text_that_is_far_too_long_only_the_beginning_is_encoded(width, refused):
    tokenizer, text = Counting(width), "x" * 18 * POSITIONS
    request = read_request(body(prompt=text))
    if refused:
        with pytest.raises(ApiError, match="far longer: shorten it"):
            read_prompts(request, tokenizer, vocabulary=1, positions=POSITIONS)
        assert tokenizer.given == 16 * POSITIONS
    else:
        (prompt,) = read_prompts(request, tokenizer, vocabulary=1, positions=POSITIONS)
        assert (len(prompt.ids), prompt.text) == (18 * POSITIONS // width, text)


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
        ("one two three", False, (" two",), "one", "stop", 7),
        ("one two three", False, ("three", "two"), "one ", "stop", 7),
        ("xab", False, ("b", "ab"), "x", "stop", 3),
        ("one t", False, (" two",), "one t", "length", 5),
        ("oneone two", False, ("one t",), "one", "stop", 8),
    ],
)
def test_text_reason_and_usage_are_those_of_the_ids(tokenizer, at_a_time, text, end, stops, whole, reason, tokens):
    """End-of-text counts as a token and is no text; what arrives behind a stop sequence does not count."""
    ids = [*tokenizer.encode(text), *([END_OF_TEXT] if end else [])]
    choice, pieces, counted = answered(tokenizer, ids, at_a_time=at_a_time, stops=stops)
    assert (choice.text.text, "".join(pieces), choice.finish_reason, counted) == (whole, whole, reason, tokens)
    assert all(whole.startswith("".join(pieces[:end])) for end in range(len(pieces)))


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        ([("aé日b", 7)], ["a", "", "é", "", "", "日", "b"]),
        ([("a日", 3)], ["a", "", "\ufffd"]),
        ([("日", 1), ("abc", 3)], ["", "\ufffda", "b", "c"]),
    ],
)
def test_a_character_is_shown_when_it_is_whole(tokenizer, texts, shown):
    """Half a one at the end is marked, and bytes that are no character do not stop the text."""
    ids = [token for text, count in texts for token in tokenizer.encode(text)[:count]]
    choice, pieces, _ = answered(tokenizer, ids, at_a_time=1)
    assert (pieces, choice.text.text) == (shown, "".join(shown))


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


def drawn(rows: list[list[float]], settings: list[Drawing]) -> tuple[list[int], list[str]]:
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
    beside = [Drawing(), *[Drawing(**{"temperature": 1.0} | settings)] * 400, Drawing(temperature=1.0)]
    for logits, expected in ((SHARES, tokens), ([38e37 * logit / 10 for logit in SHARES], {1})):
        found, failed = drawn([logits] * 401 + [[torch.nan] * 4], beside)
        assert (found[0], set(found[1:-1]), failed) == (1, expected, ["401"])


def test_shares_of_drawn_tokens_are_the_models():
    for more in ({}, {"top_k": 4}):
        tokens, _ = drawn([SHARES] * 4000, [Drawing(temperature=1.0, seed="7", **more)] * 4000)
        shares = torch.tensor(tokens).bincount() / 4000
        assert shares.tolist() == pytest.approx(torch.tensor(SHARES).exp().tolist(), abs=0.03)


def test_ends_of_a_completion():
    def ends(**fields: Any) -> frozenset[int]:
        return read_request(body(**fields)).ends(frozenset({256}))

    assert (ends(), ends(ignore_eos=True), ends(stop_token_ids=[5])) == ({256}, set(), {5, 256})
    assert ends(stop_token_ids=[256], ignore_eos=True) == {256}


def served(checkpoint: Path, *, limits: Limits = LIMITS, scale: float = 1.0) -> Completions:
    """The endpoint of a model whose last layer is scaled."""
    opened, metrics = open_served(checkpoint, which="latest", name=MODEL, device_kind="cpu"), Metrics()
    with torch.no_grad():
        opened.model.transformer.ln_f.weight.mul_(scale)
        opened.model.transformer.ln_f.bias.mul_(scale)
    engine, scorer, gate = Engine(opened.model, batch=2), Scorer(opened.model), Gate(limits, metrics)
    return Completions(served=opened, engine=engine, scorer=scorer, limits=limits, metrics=metrics, gate=gate)


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

    monkeypatch.setattr("dsgpt.inference.server.completions.read_request", reads)
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
    with Gate(LIMITS, Metrics()).places(4, key=ann):
        pass


def test_refused_clients_are_told_to_wait_longer_when_sequences_take_longer():
    gate, waits = Gate(LIMITS, Metrics()), []
    for seconds in (0.01, 5.0, 500.0):
        for _ in range(100):
            gate.took(seconds)
        with gate.places(4), pytest.raises(ApiError) as caught, gate.places(1):
            pass
        waits.append(int(caught.value.headers["retry-after"]))
    assert waits == [1, 10, 60]


def test_an_answer_that_takes_too_long_and_an_engine_that_fails(checkpoint_with_tokenizer, monkeypatch):
    """No machine is too fast for a limit of a millisecond."""
    completions = served(checkpoint_with_tokenizer, limits=replace(LIMITS, request_sec=0.001))
    transport = httpx2.ASGITransport(app=application(completions), raise_app_exceptions=False)
    engine, registry = completions.engine, completions.metrics.registry

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError

    async def ask() -> tuple[httpx2.Response, ...]:
        engine.start()
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.2") as client:
            values = {"model": MODEL, "prompt": "x", "max_tokens": 15}
            ask_for_text = partial(client.post, "/v1/completions", json=values)
            late = await ask_for_text()
            transport.app = application(replace(completions, limits=LIMITS))
            with monkeypatch.context() as patch:
                patch.setattr(engine, "submit", broken)
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

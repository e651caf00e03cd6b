"""Decoding with a key-value cache gives what the whole forward pass gives."""

import pytest
import torch

from dsgpt.inference import latency
from dsgpt.inference.decode import Cache, generate
from dsgpt.inference.latency import measure_latency
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2

VOCABULARY = 101


def random_model(block_size: int = 24) -> GPT2:
    config = GPT2Config(n_layer=3, n_head=4, n_embd=32, block_size=block_size, vocab_size=VOCABULARY, dropout=0.5)
    model = GPT2(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


MODEL = random_model()
PROMPT = torch.tensor([5, 100, 0, 17, 42])


@torch.inference_mode()
@pytest.mark.parametrize("prompt_length", [1, 5, 23, 24])
def test_cached_logits_are_those_of_the_whole_pass(prompt_length):
    ids = torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(2))
    whole = MODEL(ids)
    cache = Cache(MODEL.config, batch_size=2, dtype=torch.float32, device=torch.device("cpu"))
    parts = [MODEL(ids[:, :prompt_length], cache=cache)]
    parts += [MODEL(ids[:, at : at + 1], cache=cache) for at in range(prompt_length, 24)]
    assert cache.length == 24
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def uncached_greedy(model: GPT2, prompt: torch.Tensor, new_tokens: int) -> list[int]:
    ids = prompt[None]
    for _ in range(new_tokens):
        ids = torch.cat([ids, model(ids)[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    return ids[0, prompt.numel() :].tolist()


@pytest.mark.parametrize(("prompt_length", "new_tokens"), [(1, 23), (5, 19), (5, 1), (23, 1)])
def test_greedy_ids_are_those_without_a_cache(prompt_length, new_tokens):
    prompt = torch.arange(prompt_length) * 7 % VOCABULARY
    found = list(generate(MODEL, prompt, new_tokens=new_tokens))
    assert found == uncached_greedy(MODEL, prompt, new_tokens)


def test_padded_ids_are_never_sampled():
    model = random_model()
    with torch.no_grad():
        model.wte.weight[VOCABULARY:] = model.wte.weight[3] * 100
    ids = list(generate(model, PROMPT, new_tokens=19, temperature=50.0, generator=torch.Generator().manual_seed(0)))
    assert max(ids) < VOCABULARY
    assert len(set(ids)) > 5  # nearly uniform at this temperature


def test_sampling_follows_the_seed():
    def draw(seed: int) -> list[int]:
        return list(generate(MODEL, PROMPT, new_tokens=19, temperature=2.0, generator=torch.manual_seed(seed)))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@torch.inference_mode()
def test_top_k_draws_from_the_likeliest():
    likeliest = set(MODEL(PROMPT[None])[0, -1].topk(3).indices.tolist())
    generator = torch.Generator().manual_seed(0)
    drawn = [
        next(generate(MODEL, PROMPT, new_tokens=1, temperature=100.0, top_k=3, generator=generator)) for _ in range(60)
    ]
    assert set(drawn) == likeliest
    one = list(generate(MODEL, PROMPT, new_tokens=9, temperature=5.0, top_k=1, generator=generator))
    assert one == uncached_greedy(MODEL, PROMPT, 9)


@pytest.mark.parametrize(("prompt", "new_tokens"), [(torch.tensor([], dtype=torch.long), 1), (PROMPT, 20)])
def test_more_tokens_than_positions_are_refused(prompt, new_tokens):
    with pytest.raises(ValueError, match="do not fit into 24 positions"):
        list(generate(MODEL, prompt, new_tokens=new_tokens))


@pytest.mark.parametrize(
    ("positions", "prompt_tokens", "new_tokens"),
    [(2, 1, 1), (24, 12, 12), (40, 16, 24), (116, 16, 100), (200, 16, 100)],
)
def test_latency_counts_what_it_generated(positions, prompt_tokens, new_tokens):
    found = measure_latency(random_model(positions), torch.arange(64) % VOCABULARY)
    assert (found["prompt_tokens"], found["new_tokens"]) == (prompt_tokens, new_tokens)
    assert 0 < found["latency_min_sec"] <= found["latency_sec"] <= found["latency_max_sec"]
    assert found["tokens_per_sec"] == pytest.approx(new_tokens / found["latency_sec"])


@pytest.mark.parametrize(
    ("first_sec", "token_sec", "new_tokens", "repetitions"),
    [(0.0, 0.001, 100, 15), (3.0, 0.005, 100, 13), (0.0, 0.03, 100, 2), (0.0, 0.2, 44, 1), (0.0, 30.0, 1, 1)],
)
def test_slow_models_repeat_less_and_generate_fewer_tokens(monkeypatch, first_sec, token_sec, new_tokens, repetitions):
    """``first_sec``: of the very first token, which loads kernels; it says nothing about the others."""
    now, first = [0.0], [first_sec]

    def slowly(_model, _prompt, *, new_tokens):
        for _ in range(new_tokens):
            now[0] += token_sec + first[0]
            first[0] = 0.0
            yield 0

    monkeypatch.setattr(latency, "generate", slowly)
    monkeypatch.setattr(latency.time, "perf_counter", lambda: now[0])
    found = measure_latency(random_model(200), torch.arange(64) % VOCABULARY)
    assert (found["new_tokens"], found["repetitions"]) == (new_tokens, repetitions)
    assert found["latency_sec"] == pytest.approx(new_tokens * token_sec)
    assert now[0] <= max(latency.TOTAL_SEC, 3 * token_sec)


def test_one_position_has_no_latency():
    assert measure_latency(random_model(1), torch.arange(64)) is None

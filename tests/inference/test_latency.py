"""How the time of generation is measured at the end of a run."""

import pytest
import torch
from random_models import VOCABULARY, random_model

from dsgpt.inference import generation as latency
from dsgpt.inference.generation import measure_latency


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

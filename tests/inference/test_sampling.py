"""Sampling draws from the distribution that transformers defines, with a random stream for every text."""

import pytest
import torch
from random_models import VOCABULARY, random_model, random_prompts

from dsgpt.inference.commands import Sampling
from dsgpt.inference.decoder import Decoder
from dsgpt.inference.generation import Chooser, generate_batch, probabilities, random_stream

MODEL = random_model()
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.02},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1e-40},
]


def random_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(5)) * 3


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_distribution_is_that_of_transformers(settings):
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = {
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    logits = random_logits(50)
    expected = logits.double()
    for name, value in settings.items():
        expected = warpers[name](value)(None, expected)
    found = probabilities(logits, Sampling(**settings))
    torch.testing.assert_close(found.double(), expected.softmax(dim=1), atol=1e-6, rtol=1e-4)


def test_repetitions_are_penalized_as_in_transformers():
    """Ids of the prompt and of the text so far, the latter after they were chosen."""
    from transformers import RepetitionPenaltyLogitsProcessor

    prompts = [[1, 2, 3], [9]]
    chooser = Chooser(
        Sampling(repetition_penalty=1.5), prompts=prompts, generators=(), vocab_size=VOCABULARY,
        device=torch.device("cpu"),
    )  # fmt: skip
    logits, texts = random_logits(2), [list(prompt) for prompt in prompts]
    logits[1] -= 12  # all of them negative
    for _ in range(20):
        expected = [
            int(RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([text]), row[None]).argmax())
            for text, row in zip(texts, logits, strict=True)
        ]
        found = chooser.choose(logits).tolist()
        assert found == expected
        for text, following in zip(texts, found, strict=True):
            text.append(following)
    assert len(set(texts[0])) > 6


def test_a_prompt_penalizes_its_own_text_only():
    chooser = Chooser(
        Sampling(repetition_penalty=1.5), prompts=[[1], [2]], generators=(), vocab_size=3, device=torch.device("cpu")
    )
    assert chooser.choose(torch.tensor([[0.0, 5.0, 4.0]] * 2)).tolist() == [2, 1]


def draws(settings: dict, count: int) -> torch.Tensor:
    """How often each id was drawn, (V,), from the same logits with ``count`` streams."""
    generators = [random_stream(1, number) for number in range(count)]
    chooser = Chooser(
        Sampling(**settings), prompts=[[0]] * count, generators=generators, vocab_size=VOCABULARY,
        device=torch.device("cpu"),
    )  # fmt: skip
    return torch.bincount(chooser.choose(random_logits(1).expand(count, -1)), minlength=VOCABULARY)


@pytest.mark.parametrize("settings", SETTINGS[:5], ids=str)
def test_draws_follow_the_distribution(settings):
    """Chi-square over 20,000 draws, ids of fewer than 5 expected draws as one.

    The bound is the mean plus 5 standard deviations: a temperature that is 10% off exceeds it. Ids of probability 0
    are never drawn.
    """
    count = 20_000
    expected = probabilities(random_logits(1), Sampling(**settings))[0].double() * count
    found = draws(settings, count).double()
    assert found[expected == 0].sum() == 0
    often = expected >= 5
    pairs = [*zip(found[often], expected[often], strict=True)]
    if expected[~often].sum() > 5:
        pairs.append((found[~often].sum(), expected[~often].sum()))
    statistic = sum((f - e) ** 2 / e for f, e in pairs)
    freedom = len(pairs) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def texts(batch_size: int, *, seed: int = 1) -> list[list[int]]:
    """Sampled ids after 12 prompts of mixed length, in batches of ``batch_size``."""
    prompts, decoder, found = random_prompts(12, longest=8), Decoder(MODEL, batch_size=batch_size), []
    for first in range(0, 12, batch_size):
        batch = prompts[first : first + batch_size]
        generators = [random_stream(seed, first + row) for row in range(len(batch))]
        steps = generate_batch(
            decoder, batch, new_tokens=16, sampling=Sampling(temperature=1.0, top_k=50), generators=generators
        )
        found += [list(ids) for ids in zip(*steps, strict=True)]
    return found


def test_the_seed_decides_the_ids_at_any_batch_size():
    alone = texts(1)
    assert texts(5) == alone
    assert texts(12) == alone
    assert texts(12, seed=2) != alone


def test_padded_ids_are_never_sampled():
    model = random_model()
    with torch.no_grad():
        model.wte.weight[VOCABULARY:] = model.wte.weight[3] * 100
    steps = generate_batch(
        Decoder(model), [[5]], new_tokens=19, sampling=Sampling(temperature=50.0), generators=[random_stream(0, 0)]
    )
    ids = [following for (following,) in steps]
    assert max(ids) < VOCABULARY
    assert len(set(ids)) > 5  # nearly uniform at this temperature

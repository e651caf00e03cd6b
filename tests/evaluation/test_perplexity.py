"""Windows predict every token once, and perplexity is what transformers computes."""

import math

import pytest
import torch

from dsgpt.inference.evaluate import Prediction, predict, windows_of
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2, initialize

CONFIG = GPT2Config(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=40)


@pytest.fixture(scope="module")
def model() -> GPT2:
    model = GPT2(CONFIG)
    initialize(model, config=CONFIG, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # predictions that depend on what comes before
    return model.eval()


IDS = torch.randint(0, 40, (60,), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("targets", "length", "stride", "expected"),
    [
        (48, 16, 16, [(0, 16, 16), (16, 32, 16), (32, 48, 16)]),
        (20, 16, 16, [(0, 16, 16), (4, 20, 4)]),
        (20, 16, 3, [(0, 16, 16), (3, 19, 3), (4, 20, 1)]),
        (5, 16, 4, [(0, 5, 5)]),
    ],
)
def test_windows(targets, length, stride, expected):
    windows = windows_of(targets, length=length, stride=stride)
    assert [(window.start, window.end, window.counted) for window in windows] == expected
    assert sum(window.counted for window in windows) == targets


@torch.inference_mode()
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(("length", "stride"), [(16, 16), (16, 5), (8, 1)])
def test_every_token_is_predicted_once_from_what_its_window_has_before_it(model, length, stride, batch_size):
    """Compared with one pass for each token."""
    nats, end = 0.0, 0
    for target in range(1, len(IDS)):
        if target > end:  # the next window
            end = min(len(IDS) - 1, end + (stride if end else length))
        before = IDS[max(0, end - length) : target]
        nats -= float(model(before[None])[0, -1].log_softmax(dim=0)[IDS[target]])
    found = predict(model, IDS, length=length, stride=stride, batch_size=batch_size)
    assert (found.tokens, found.windows) == (59, len(windows_of(59, length=length, stride=stride)))
    assert found.nats == pytest.approx(nats, rel=1e-5)


def test_the_figures_of_a_prediction():
    even = Prediction(nats=100 * math.log(4), tokens=100, windows=1)  # two bits for each token
    assert even.perplexity == pytest.approx(4)
    assert even.bits_per_byte(50) == pytest.approx(4)
    assert Prediction(nats=1e6, tokens=10, windows=1).perplexity == math.inf

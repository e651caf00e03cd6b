"""The time until a training reaches a loss."""

import pytest
from stand_in_nanogpt import STAND_IN

from dsgpt.benchmarks import time_to_loss
from dsgpt.benchmarks.speed_work import NANOGPT
from dsgpt.benchmarks.time_to_loss import DEFAULTS, Defaults, seconds_to, share_of, train_peer

CURVE = [(10.0, 6.0), (20.0, 5.0), (30.0, 4.0)]


@pytest.mark.parametrize(("loss", "seconds"), [(5.0, 20.0), (4.5, 25.0), (4.0, 30.0), (6.5, 10.0), (3.9, None)])
def test_the_loss_is_reached_on_a_line_between_two_validations(loss, seconds):
    found = seconds_to(CURVE, loss)
    assert found is None if seconds is None else found == pytest.approx(seconds)


def test_the_share_is_that_of_the_same_round():
    assert share_of(CURVE, [(25.0, 7.0), (50.0, 4.5)]) == pytest.approx(25 / 50)
    assert share_of(CURVE, [(50.0, 3.0)]) is None


def test_rates_are_those_of_nanogpts_schedule():
    nanogpt, steps = DEFAULTS[NANOGPT], 500
    assert nanogpt.rate(0, steps=steps) == 1e-3 / 101
    assert nanogpt.rate(100, steps=steps) == 1e-3
    assert nanogpt.rate(300, steps=steps) == pytest.approx(1e-4 + 0.5 * 9e-4)
    assert nanogpt.rate(500, steps=steps) == pytest.approx(1e-4)


def test_a_peer_learns(corpus, tmp_path, monkeypatch):
    """The stand-in predicts each id from the one before, which a table can learn."""
    (tmp_path / "model.py").write_text(STAND_IN, encoding="utf-8")
    monkeypatch.setattr(time_to_loss, "TOKENS", 12 * 128 * 6)
    monkeypatch.setattr(time_to_loss, "VALIDATION_WINDOWS", 3)
    monkeypatch.setattr(time_to_loss, "VOCABULARY", 300)
    fast = Defaults(batch=12, lr=0.1, beta2=0.99, weight_decay=0.0, warm_up_steps=0)
    monkeypatch.setitem(DEFAULTS, NANOGPT, fast)
    files = {"train": str(corpus.train), "val": str(corpus.val), "peer": str(tmp_path)}
    job = {"device": "cpu", "threads": 1, **files}
    curve = train_peer(job)
    assert len(curve) == 6
    assert [seconds for seconds, _ in curve] == sorted(seconds for seconds, _ in curve)
    assert curve[-1][1] < curve[0][1] - 0.1

"""The time until a training reaches a loss."""

import math
from dataclasses import fields

import pytest
from stand_in_nanogpt import STAND_IN

from dsgpt.benchmarks.speed import time_to_loss
from dsgpt.benchmarks.speed.time_to_loss import DEFAULTS, Defaults, seconds_to, train_peer
from dsgpt.benchmarks.speed.workloads import HUGGING_FACE, NANOGPT

CURVE = [(10.0, 6.0), (20.0, 5.0), (30.0, 4.0)]


@pytest.mark.parametrize(("loss", "seconds"), [(5.0, 20.0), (4.5, 25.0), (4.0, 30.0), (6.5, 10.0), (3.9, math.inf)])
def test_the_loss_is_reached_on_a_line_between_two_validations(loss, seconds):
    assert seconds_to(CURVE, loss) == pytest.approx(seconds)


def test_a_repetition_that_misses_its_own_end_by_the_last_digits_has_reached_it():
    assert seconds_to(CURVE, 3.9995) == 30.0


def test_rates_are_those_of_nanogpts_and_transformers_schedules():
    nanogpt, steps = DEFAULTS[NANOGPT], 500
    assert nanogpt.rate(0, steps=steps) == 1e-3 / 101
    assert nanogpt.rate(100, steps=steps) == 1e-3
    assert nanogpt.rate(300, steps=steps) == pytest.approx(1e-4 + 0.5 * 9e-4)
    assert nanogpt.rate(500, steps=steps) == pytest.approx(1e-4)
    trainer = DEFAULTS[HUGGING_FACE]
    assert [trainer.rate(step, steps=4) for step in range(5)] == pytest.approx([5e-5, 3.75e-5, 2.5e-5, 1.25e-5, 0])


def test_transformers_defaults_are_still_these():
    from transformers import TrainingArguments

    found, ours = {field.name: field.default for field in fields(TrainingArguments)}, DEFAULTS[HUGGING_FACE]
    assert found["per_device_train_batch_size"] == ours.batch
    assert [found[name] for name in ("learning_rate", "weight_decay", "adam_beta2")] == [
        *(ours.lr, ours.weight_decay, ours.beta2)
    ]
    assert [found[name] for name in ("lr_scheduler_type", "warmup_steps", "max_grad_norm")] == [ours.decay, 0, 1.0]
    assert TrainingArguments.default_optim == "adamw_torch_fused"


def test_a_peer_learns(corpus, tmp_path, monkeypatch):
    """The stand-in predicts each id from the one before, which a table can learn."""
    (tmp_path / "model.py").write_text(STAND_IN, encoding="utf-8")
    monkeypatch.setattr(time_to_loss, "TOKENS", 12 * 128 * 6)
    monkeypatch.setattr(time_to_loss, "VALIDATION_WINDOWS", 3)
    monkeypatch.setattr(time_to_loss, "VOCABULARY", 300)
    fast = Defaults(batch=12, lr=0.1, beta2=0.99, weight_decay=0.0, warm_up_steps=0, decay="cosine")
    monkeypatch.setitem(DEFAULTS, NANOGPT, fast)
    job = {"kind": NANOGPT, "device": "cpu", "threads": 1, "data": str(corpus.train.parent), "peer": str(tmp_path)}
    curve = train_peer(job)
    assert len(curve) == 6
    assert [seconds for seconds, _ in curve] == sorted(seconds for seconds, _ in curve)
    assert curve[-1][1] < curve[0][1] - 0.3

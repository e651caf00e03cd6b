"""fp16 under plain PyTorch. The command line refuses fp16 on CPU, where it is slow, but the arithmetic is the same."""

import itertools
from dataclasses import replace
from random import Random

import pytest
import torch
from training_runs import SHAPE, write_recipe

from dsgpt.cli import parse_arguments
from dsgpt.config import RunConfig, resolve
from dsgpt.errors import NonFiniteError
from dsgpt.recipe import LossScaling
from dsgpt.strategies.baseline import Baseline
from dsgpt.strategies.loss_scale import LossScale
from dsgpt.topology import read_topology
from dsgpt.training.loop import training_batches

CPU = torch.device("cpu")
DYNAMIC = LossScaling()


def configured(corpus, tmp_path, *, precision: str, scaling: LossScaling = DYNAMIC) -> RunConfig:
    recipe = write_recipe(tmp_path / "recipe.json")
    flags = ["--run_type", "baseline", *corpus.flags(), *SHAPE, "--seq_length", "32", "--max_train_steps", "12"]
    options, problems = parse_arguments([*flags, "--deepspeed_config", str(recipe), "--device", "cpu"])
    config = resolve(options, topology=read_topology({}), problems=problems)
    return replace(config, precision=precision, recipe=replace(config.recipe, loss_scaling=scaling))


def losses(config: RunConfig) -> list[float]:
    strategy = Baseline(config, CPU)
    batches = training_batches(config, first_step=0)
    results = [strategy.train_step(batches, step) for step in range(1, 13)]
    assert not any(bool(result.skipped) for result in results)
    return [float(result.loss) for result in results]


def test_fp16_trains_what_fp32_trains(corpus, tmp_path):
    exact = losses(configured(corpus, tmp_path, precision="fp32"))
    scaled = losses(configured(corpus, tmp_path, precision="fp16"))
    assert scaled == pytest.approx(exact, abs=1e-2)
    assert scaled[-1] < scaled[0] - 0.2
    assert scaled != exact


def test_a_fixed_scale_stays(corpus, tmp_path):
    scaling = LossScaling(loss_scale=128.0, loss_scale_window=2)
    strategy = Baseline(configured(corpus, tmp_path, precision="fp16", scaling=scaling), CPU)
    batches = training_batches(configured(corpus, tmp_path, precision="fp16"), first_step=0)
    for step in range(1, 9):
        strategy.train_step(batches, step)
    assert strategy._scale.factor == 128.0


def test_an_overflow_skips_the_step_and_lowers_the_scale(corpus, tmp_path):
    config = configured(corpus, tmp_path, precision="fp16", scaling=LossScaling(initial_scale_power=32, hysteresis=1))
    strategy = Baseline(config, CPU)
    before = {name: state.weight.clone() for name, state in strategy.iter_state()}
    batches = itertools.cycle(training_batches(config, first_step=0))
    result = strategy.train_step(batches, 5)
    assert bool(result.skipped)
    assert strategy._scale.factor == 2.0**31
    assert all(torch.equal(state.weight, before[name]) for name, state in strategy.iter_state())
    while bool(strategy.train_step(batches, 5).skipped):
        assert strategy._scale.factor > 1
    assert any(not torch.equal(state.weight, before[name]) for name, state in strategy.iter_state())


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("consecutive", [False, True])
def test_the_scale_moves_as_deepspeeds_does(hysteresis, consecutive, monkeypatch):
    """Against DeepSpeed's own scaler, over a seeded sequence of overflows."""
    from deepspeed.runtime.fp16 import loss_scaler

    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)  # it asks only to decide who logs
    scaling = LossScaling(
        initial_scale_power=8, loss_scale_window=3, hysteresis=hysteresis, consecutive_hysteresis=consecutive
    )
    ours = LossScale(scaling)
    theirs = loss_scaler.DynamicLossScaler(
        init_scale=2**8, scale_window=3, min_scale=1, delayed_shift=hysteresis, consecutive_hysteresis=consecutive
    )
    random = Random(hysteresis)
    for _ in range(200):
        overflow = random.random() < 0.25 and ours.factor > 1
        ours.update(overflow=overflow)
        theirs.update_scale(overflow)
        assert ours.factor == theirs.cur_scale
        resumed = LossScale(scaling)
        resumed.take_up(ours.state())
        assert resumed.state() == ours.state()


def test_an_overflow_at_the_smallest_scale_ends_the_run():
    scale = LossScale(LossScaling(initial_scale_power=0, hysteresis=1))
    with pytest.raises(NonFiniteError, match="smallest loss scale, 1"):
        scale.update(overflow=True)

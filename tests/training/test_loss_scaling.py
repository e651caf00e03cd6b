"""fp16 under plain PyTorch. The command line refuses fp16 on CPU, where it is slow, but the arithmetic is the same."""

from dataclasses import replace

import pytest
import torch
from training_runs import SHAPE, write_recipe

from dsgpt.cli import parse_arguments
from dsgpt.config import RunConfig, resolve
from dsgpt.recipe import LossScaling
from dsgpt.strategies.baseline import Baseline
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
    assert strategy._scaler.get_scale() == pytest.approx(128.0, rel=1e-6)


def test_an_overflow_skips_the_step_and_lowers_the_scale(corpus, tmp_path):
    config = configured(corpus, tmp_path, precision="fp16", scaling=LossScaling(initial_scale_power=32))
    strategy = Baseline(config, CPU)
    before = {name: state.weight.clone() for name, state in strategy.iter_state()}
    batches = training_batches(config, first_step=0)
    result = strategy.train_step(batches, 5)
    assert bool(result.skipped)
    assert strategy._scaler.get_scale() == 2.0**31
    assert all(torch.equal(state.weight, before[name]) for name, state in strategy.iter_state())
    taken = [strategy.train_step(batches, 5) for _ in range(11)] + [
        strategy.train_step(training_batches(config, first_step=0), 5) for _ in range(12)
    ]
    assert not bool(taken[-1].skipped)
    assert any(not torch.equal(state.weight, before[name]) for name, state in strategy.iter_state())

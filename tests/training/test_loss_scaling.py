"""fp16 under plain PyTorch. The command line refuses fp16 on CPU, where it is slow, but the arithmetic is the same."""

import itertools
import json
import sys
from dataclasses import asdict, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_ranks import run_script
from training_runs import SHAPE, data_flags, finished, resolved, write_optimizer_recipe

from dsgpt.common.errors import NonFiniteError
from dsgpt.config.recipe_blocks import Fp16, LossScaling, ZeroRecipe
from dsgpt.config.run_config import RunConfig
from dsgpt.machine.device import joined
from dsgpt.machine.launcher import exit_rank
from dsgpt.machine.topology import Topology, read_topology
from dsgpt.strategies.base import MOST_SKIPS, LossScale, Strategy
from dsgpt.strategies.pytorch import Baseline
from dsgpt.training.trainer import training_batches

CPU = torch.device("cpu")
FLAGS = [*SHAPE, "--seq_length", "32", "--device", "cpu"]
SMALL_SGD = {"type": "SGD", "params": {"lr": 0.3}}


def test_an_overflow_skips_the_step_and_lowers_the_scale(corpus, tmp_path):
    recipe = write_optimizer_recipe(tmp_path / "recipe.json")
    config = resolved([*data_flags(corpus), *FLAGS, "--run_type", "baseline", "--deepspeed_config", recipe])
    fp16 = Fp16(**asdict(LossScaling(initial_scale_power=32, hysteresis=1)))
    config = replace(config, precision="fp16", recipe=replace(config.recipe, fp16=fp16))
    strategy = Baseline(config, CPU)
    before = {name: state.weight.clone() for name, state in strategy.shards().states}
    batches = itertools.cycle(training_batches(config, first_step=0))
    result = strategy.train_step(batches, 5)
    assert bool(result.skipped)
    assert strategy._scale.factor == 2.0**31
    Strategy.load_state(resumed := Baseline(config, CPU), SimpleNamespace(counters=strategy.counters()))
    assert resumed._scale.state() == strategy._scale.state()
    assert all(torch.equal(state.weight, before[name]) for name, state in strategy.shards().states)
    while bool(strategy.train_step(batches, 5).skipped):
        assert strategy._scale.factor > 1
    assert any(not torch.equal(state.weight, before[name]) for name, state in strategy.shards().states)


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("consecutive", [False, True])
def test_the_scale_moves_as_deepspeeds_does(hysteresis, consecutive, monkeypatch):
    """Against DeepSpeed's own scaler, over a seeded sequence of overflows."""
    from deepspeed.runtime.fp16 import loss_scaler

    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)  # it only decides which rank logs
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
        resumed.restore(ours.state())
        assert resumed.state() == ours.state()


def test_every_stage_scales_as_the_baseline_does(corpus, tmp_path):
    """SGD without clipping shows a gradient of the wrong scale at once; the window of 3 doubles the scale on the way.

    The block is not enabled, because a CPU refuses it; ``main`` turns it on.
    """
    scaling = {"enabled": False, "initial_scale_power": 8, "loss_scale_window": 3}
    recipe = write_optimizer_recipe(tmp_path / "recipe.json", optimizer=SMALL_SGD, clipping=0, fp16=scaling)
    staged = {"optimizer": SMALL_SGD, "clipping": 0, "fp16": scaling, "pipeline": {"stages": 2}}
    pipeline = write_optimizer_recipe(tmp_path / "pipeline.json", **staged)
    words = [*data_flags(corpus), *FLAGS, "--micro_batch_size_per_gpu", 2, "--enforce_global_batch_size"]
    done = run_script(__file__, [*words, recipe, pipeline, 12], ranks=4)
    finished(done)
    runs = json.loads(done.stdout.splitlines()[-1])
    expected, exact = runs.pop("baseline"), runs.pop("fp32")
    assert [loss for loss, *_ in expected] == pytest.approx([loss for loss, *_ in exact], abs=1e-2)
    assert expected != exact
    assert [(skipped, scale) for *_, skipped, scale in expected][2:4] == [(False, 2.0**8), (False, 2.0**9)]
    assert expected[-1][0] < expected[0][0] - 0.1
    for name, actual in runs.items():
        for step, (one, two) in enumerate(zip(expected, actual, strict=True), start=1):
            assert two[0] == pytest.approx(one[0], abs=2e-3), f"{name}, step {step}"
            assert two[1] == pytest.approx(one[1], rel=5e-3), f"{name}, step {step}"
            assert two[2:] == one[2:], f"{name}, step {step}"


def test_a_scale_that_cannot_be_lowered_ends_the_run():
    dynamic, fixed = LossScale(LossScaling(initial_scale_power=0, hysteresis=1)), LossScale(LossScaling(loss_scale=9.0))
    with pytest.raises(NonFiniteError, match="smallest loss scale, 1"):
        dynamic.update(overflow=True)
    for _ in range(MOST_SKIPS - 1):
        fixed.update(overflow=True)
    with pytest.raises(NonFiniteError, match="fixed loss scale"):
        fixed.update(overflow=True)
    assert fixed.factor == 9.0


def of_stage(flags: list[str], topology: Topology, *, stage: int) -> RunConfig:
    config = resolved(flags, topology)
    raw = {**config.recipe.raw, "zero_optimization": {"stage": stage}}
    return replace(
        config, precision="fp16", recipe=replace(config.recipe, raw=raw, zero_optimization=ZeroRecipe(stage=stage))
    )


def trained(config: RunConfig, strategy: Any, steps: int) -> list[tuple[float, float, bool, float]]:
    """Loss, norm, whether the step was skipped, and the scale after it."""
    batches, lines = training_batches(config, first_step=0), []
    for step in range(1, steps + 1):
        result = strategy.train_step(batches, step)
        lines.append((float(result.loss), float(result.grad_norm), bool(result.skipped), strategy._scale.factor))
    return lines


def main() -> None:
    """Train in fp16 on CPU ranks: the baseline, then DeepSpeed at every stage and as a pipeline, in one process group.

    The arguments are flags of ``src/gpt2.py``, two recipes, the second of a pipeline, and the number of steps; rank 0
    prints JSON. The command line and DeepSpeed both refuse fp16 on a CPU, where it is slow. This stands in for the GPU
    that says yes; all arithmetic is the real one.
    """
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    from dsgpt.strategies.deepspeed.pipeline import PipelineParallel
    from dsgpt.strategies.deepspeed.zero import Zero

    torch.set_num_threads(1)
    CPU_Accelerator.is_fp16_supported = lambda _: True
    CPU_Accelerator.supported_dtypes = lambda _: [torch.float, torch.half, torch.bfloat16]
    *flags, plain, staged = sys.argv[1:-1]
    steps, topology, flags = int(sys.argv[-1]), read_topology(), [*flags, "--deepspeed_config"]
    alone = of_stage(["--run_type", "baseline", *flags, plain], read_topology({}), stage=0)
    runs = {"baseline": trained(alone, Baseline(alone, CPU), steps)}
    exact = replace(alone, precision="fp32")
    runs["fp32"] = trained(exact, Baseline(exact, CPU), steps)
    with joined(topology, CPU):
        for stage in range(4):
            config = of_stage(["--run_type", "optimized", *flags, plain], topology, stage=stage)
            runs[f"zero{stage}"] = trained(config, Zero(config, CPU), steps)
        config = of_stage(["--run_type", "optimized", *flags, staged], topology, stage=1)
        runs["pipeline"] = trained(config, PipelineParallel(config, CPU), steps)
    if topology.is_main:
        print(json.dumps(runs))


if __name__ == "__main__":
    main()
    exit_rank(0)

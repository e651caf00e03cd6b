"""Whole runs of ``src/gpt2.py`` against the baseline's, where the parity suite (``benchmarks.parity``) does not look.

It compares every strategy with plain PyTorch on several ranks, step by step, but starts its own processes and trains no
run to its end; and its bounds for bf16 are those of several ranks.
"""

import pytest
import torch
from safetensors.torch import load_file
from training_runs import ADAMW, SGD, assert_same_training, finished, train, write_recipe

STEPS = ("--max_train_steps", "20", "--eval_every", "10", "--max_val_steps", "3", "--steps_per_print", "20")
LOSS, NORM = 2e-4, 1e-4


def test_one_process_without_a_launcher_equals_the_baseline(corpus, tmp_path):
    """Losses, norms and rates of every step, validations, and the weights of the last checkpoint."""
    recipe = write_recipe(tmp_path / "recipe.json", optimizer=SGD, clipping=0.3)
    accumulation = ("--grad_accum_steps", "2")
    finished(train(tmp_path / "baseline", corpus, recipe, *STEPS, *accumulation))
    finished(train(tmp_path / "zero1", corpus, recipe, *STEPS, *accumulation, ranks=1))
    assert_same_training(tmp_path / "baseline", tmp_path / "zero1", loss=LOSS, norm=NORM)
    assert_same_weights(tmp_path / "baseline", tmp_path / "zero1")


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_bf16_means_the_same(corpus, tmp_path, tmp_path_factory, stage):
    """Adam in bf16; stage 0 is where DeepSpeed takes a step on zero gradients before the first."""
    recipe = write_recipe(tmp_path / "recipe.json", stage=stage, bf16={"enabled": True})
    reference = tmp_path_factory.getbasetemp() / "bf16-baseline"
    if not reference.exists():
        finished(train(reference, corpus, recipe, *STEPS, "--grad_accum_steps", "1"))
    run = tmp_path / f"zero{stage}"
    finished(train(run, corpus, recipe, *STEPS, "--grad_accum_steps", "1", ranks=1))
    # One rank and one micro batch leave little to round differently, so this is far tighter than bf16 itself.
    assert_same_training(reference, run, loss=2e-3, norm=2e-2)


def test_offload_without_a_compiler_equals_the_baseline(corpus, tmp_path):
    """With torch's AdamW instead of DeepSpeed's, on two ranks."""
    adamw = {"type": "AdamW", "params": {**ADAMW["params"], "torch_adam": True}}
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    recipe = write_recipe(tmp_path / "recipe.json", optimizer=adamw, zero_optimization=offload)
    accumulation = ("--grad_accum_steps", "2")
    finished(train(tmp_path / "baseline", corpus, recipe, *STEPS, *accumulation))
    finished(train(tmp_path / "offload", corpus, recipe, *STEPS, *accumulation, ranks=2))
    assert_same_training(tmp_path / "baseline", tmp_path / "offload", loss=LOSS, norm=NORM)
    assert_same_weights(tmp_path / "baseline", tmp_path / "offload")


def assert_same_weights(reference, run):
    """The exported weights agree within 1e-3 relative, parameter by parameter."""
    (one,), (two,) = reference.glob("step-*/model.safetensors"), run.glob("step-*/model.safetensors")
    expected, actual = load_file(one), load_file(two)
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        assert torch.linalg.vector_norm(actual[name] - value) <= 1e-3 * torch.linalg.vector_norm(value), name

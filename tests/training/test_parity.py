"""DeepSpeed trains the same model as plain PyTorch: same learning rate, loss and gradient norm at every step."""

import pytest
import torch
from safetensors.torch import load_file
from training_runs import ADAMW, SGD, assert_same_training, finished, read_lines, train, write_recipe

STEPS = ("--max_train_steps", "20", "--eval_every", "10", "--max_val_steps", "3", "--steps_per_print", "20")
LOSS, NORM = 2e-4, 1e-4
OPTIMIZERS = {"adamw": (ADAMW, 1.0), "sgd": (SGD, 0.3)}


@pytest.fixture(scope="module")
def baselines(tmp_path_factory, corpus):
    """A baseline run and its recipe per (optimizer, accumulation), trained when first asked for."""
    folder = tmp_path_factory.mktemp("baselines")
    made = {}

    def get(optimizer: str, accumulation: int):
        if (optimizer, accumulation) not in made:
            kind, clipping = OPTIMIZERS[optimizer]
            name = f"{optimizer}-{accumulation}"
            recipe = write_recipe(folder / f"{name}.json", optimizer=kind, clipping=clipping)
            finished(train(folder / name, corpus, recipe, *STEPS, "--grad_accum_steps", str(accumulation)))
            made[optimizer, accumulation] = (folder / name, recipe)
        return made[optimizer, accumulation]

    return get


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2])
def test_zero1_equals_the_baseline(baselines, corpus, tmp_path, optimizer, accumulation, ranks):
    reference, recipe = baselines(optimizer, accumulation)
    run = tmp_path / "zero1"
    finished(train(run, corpus, recipe, *STEPS, "--grad_accum_steps", str(accumulation), ranks=ranks))
    assert len(read_lines(run)) == 20
    assert_same_training(reference, run, loss=LOSS, norm=NORM)
    assert_same_weights(reference, run)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_other_stages_equal_the_baseline(baselines, corpus, tmp_path, stage):
    reference, _ = baselines("sgd", 2)
    recipe = write_recipe(tmp_path / "recipe.json", optimizer=SGD, clipping=0.3, stage=stage)
    run = tmp_path / f"zero{stage}"
    finished(train(run, corpus, recipe, *STEPS, "--grad_accum_steps", "2", ranks=2))
    assert_same_training(reference, run, loss=LOSS, norm=NORM)
    assert_same_weights(reference, run)


def test_clipping_is_active_in_the_sgd_runs(baselines):
    """Without this, the SGD cells would not tell a wrong clipping norm from a right one."""
    norms = [line["grad_norm"] for line in read_lines(baselines("sgd", 1)[0])]
    assert min(norms) > 0.3


def test_accumulation_does_not_change_the_baseline(baselines):
    assert_same_training(baselines("adamw", 1)[0], baselines("adamw", 4)[0], loss=LOSS, norm=NORM)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
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


def test_offload_to_the_cpu_equals_the_baseline(baselines, corpus, tmp_path):
    """With torch's AdamW, which needs no compiler."""
    reference, _ = baselines("adamw", 2)
    adamw = {"type": "AdamW", "params": {**ADAMW["params"], "torch_adam": True}}
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    recipe = write_recipe(tmp_path / "recipe.json", optimizer=adamw, zero_optimization=offload)
    run = tmp_path / "offload"
    finished(train(run, corpus, recipe, *STEPS, "--grad_accum_steps", "2", ranks=2))
    assert_same_training(reference, run, loss=LOSS, norm=NORM)


def assert_same_weights(reference, run):
    """The exported weights agree within 1e-3 relative, parameter by parameter."""
    (one,), (two,) = reference.glob("step-*/model.safetensors"), run.glob("step-*/model.safetensors")
    expected, actual = load_file(one), load_file(two)
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        assert torch.linalg.vector_norm(actual[name] - value) <= 1e-3 * torch.linalg.vector_norm(value), name

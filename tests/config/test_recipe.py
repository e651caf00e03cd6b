"""A recipe is read as DeepSpeed reads it, and a written recipe can be read again."""

import json
from dataclasses import replace

import pytest
from pydantic import ValidationError
from recipe_files import SHIPPED, understood
from small_run import RECIPE, write_recipe

from dsgpt.config.recipe import RecipeSettings
from dsgpt.config.recipe_blocks import Bf16, DdpRecipe, FsdpRecipe, OptimizerRecipe, SchedulerRecipe, ZeroRecipe
from dsgpt.machine.topology import ParallelSizes


def test_each_written_key_is_read(file):
    recipe = understood(write_recipe(file))
    assert recipe.optimizer == OptimizerRecipe(type="AdamW", lr=0.001, betas=(0.9, 0.95), weight_decay=0.1)
    assert recipe.scheduler == SchedulerRecipe(type="WarmupCosineLR", warmup_num_steps=2, warmup_type="linear")
    assert (recipe.train_batch_size, recipe.zero_stage, recipe.gradient_clipping) == (8, 1, 1.0)
    assert (recipe.precision, recipe.offload_optimizer, recipe.offload_param) == (None, "none", "none")
    assert recipe.raw == RECIPE
    assert recipe.deepspeed_only == ("zero_optimization",)


def test_the_smallest_recipe_takes_deepspeeds_defaults(file):
    recipe = understood(write_recipe(file, {"optimizer": {"type": "SGD", "params": {"lr": 1}}}))
    assert recipe.optimizer == OptimizerRecipe(type="SGD", lr=1.0)
    assert (recipe.scheduler, recipe.gradient_clipping, recipe.zero_stage) == (None, 1.0, 0)


def test_offload_to_nvme_and_zero_plus_plus(file):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}}
    recipe = understood(write_recipe(file, zero_optimization=zero, aio={"block_size": 2**20, "queue_depth": 8}))
    assert (recipe.offload_optimizer, recipe.offload_param) == ("cpu", "nvme")
    assert recipe.nvme_blocks == ("offload_param",)
    assert not recipe.zero_plus_plus
    keys = ({"zero_hpz_partition_size": 2}, {"zero_quantized_weights": True}, {"zero_quantized_gradients": True})
    for key in keys:
        assert understood(write_recipe(file, zero_optimization={"stage": 3, **key})).zero_plus_plus


@pytest.mark.parametrize(
    ("blocks", "precision"),
    [
        ({}, None),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, "fp16"),
        ({"bf16": {"enabled": False}}, "fp32"),
        ({"fp16": {}}, "fp32"),
    ],
)
def test_precision_by_block(file, blocks, precision):
    assert understood(write_recipe(file, RECIPE, **blocks)).precision == precision


def test_deepspeeds_float_sizes_and_device_none_are_accepted(file):
    zero = {"stage": 2, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "none"}}
    assert understood(write_recipe(file, RECIPE, zero_optimization=zero)).zero_stage == 2


def test_how_the_model_is_split(file):
    recipe = understood(
        write_recipe(file, tensor_parallel={"autotp_size": 2}, pipeline={"stages": 4, "partition": "uniform"})
    )
    assert recipe.parallel == ParallelSizes(tensor=2, pipeline=4)
    assert recipe.pipeline.partition == "uniform"
    assert recipe.deepspeed_only == ("zero_optimization", "tensor_parallel", "pipeline")


def test_the_block_of_the_torch_strategies(file):
    ours = {"ddp": {"bucket_cap_mb": 1, "gradient_as_bucket_view": False}, "fsdp": {"reshard_after_forward": False}}
    recipe = understood(write_recipe(file, dsgpt=ours))
    assert recipe.dsgpt.ddp == DdpRecipe(bucket_cap_mb=1, gradient_as_bucket_view=False)
    assert recipe.dsgpt.fsdp == FsdpRecipe(reshard_after_forward=False)
    assert understood(write_recipe(file)).dsgpt.ddp == DdpRecipe()


def test_activation_checkpointing_by_its_block(file):
    assert understood(write_recipe(file, activation_checkpointing={})).activation_checkpointing
    assert not understood(write_recipe(file)).activation_checkpointing


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_written_recipe_is_read_as_the_same_recipe(file, path):
    recipe = understood(path)
    written = recipe.as_json()
    assert "path" not in written
    again = understood(write_recipe(file, written))
    assert replace(again, path=recipe.path, sha256=recipe.sha256, raw=recipe.raw) == recipe
    assert len(json.dumps(written)) < len(json.dumps(recipe.raw))


def test_a_recipe_made_in_python_is_checked_and_written_in_deepspeeds_form():
    optimizer = OptimizerRecipe(type="SGD", lr=0.1, momentum=0.9)
    made = RecipeSettings(optimizer=optimizer, zero_optimization=ZeroRecipe(stage=2), bf16=Bf16())
    assert made.as_json() == {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "bf16": {},
        "zero_optimization": {"stage": 2},
    }
    with pytest.raises(ValidationError, match="must be a number of at least 0, not -1"):
        OptimizerRecipe(type="AdamW", lr=-1)

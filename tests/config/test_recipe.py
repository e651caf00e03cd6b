"""A recipe is read as DeepSpeed reads it; a written recipe can be read again; every mistake is a line."""

import json
import re
from typing import Any

import pytest
from pydantic import ValidationError
from recipe_files import changed, problems_of, understood
from small_run import RECIPE, REPOSITORY, write_recipe

from dsgpt.common.errors import Problems
from dsgpt.config.recipe import Recipe, read_recipe
from dsgpt.config.recipe_blocks import DdpRecipe, FsdpRecipe, OptimizerRecipe, SchedulerRecipe
from dsgpt.machine.topology import ParallelSizes
from dsgpt.model.config import PRESETS

# A recipe is read as DeepSpeed reads it, and a written recipe can be read again.


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


def test_a_recipe_made_in_python_is_checked():
    with pytest.raises(ValidationError, match="must be a number of at least 0, not -1"):
        OptimizerRecipe(type="AdamW", lr=-1)


# Every mistake in a recipe is reported, in one line, with its place and what is allowed.


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"a": 1,}', "is not valid JSON: Illegal trailing comma before end of object: line 1 column 8 (char 7)"),
        ("", "is not valid JSON: Expecting value: line 1 column 1 (char 0)"),
        ('{"lr": NaN}', "is not valid JSON: NaN is not a JSON number"),
        ('{"lr": -Infinity}', "is not valid JSON: -Infinity is not a JSON number"),
        ('{"a": {"lr": 1, "lr": 2}}', 'is not valid JSON: the key "lr" is given twice: keep one of them'),
    ],
)
def test_not_json(file, text, line):
    (found,) = problems_of(write_recipe(file, text))
    assert found == line or "trailing comma" in line  # Python 3.13's words; earlier versions differ
    assert found.startswith("is not valid JSON: ")


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"\x80{}", b"[" * 200_000, b'{"a": ' + b"1" * 5000 + b"}"])
def test_data_that_is_not_text(file, data):
    file.write_bytes(data)
    (found,) = problems_of(file)
    assert found.startswith("is not valid JSON: ")


def test_a_byte_order_mark_is_accepted(file):
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(RECIPE).encode())
    assert problems_of(file) == []


def test_numbers_beyond_floats_are_refused(file):
    text = json.dumps(RECIPE).replace('"gradient_clipping": 1.0', '"gradient_clipping": 1e999')
    assert problems_of(write_recipe(file, text)) == ["is not valid JSON: 1e999 is too large for a number"]


def test_a_recipe_of_many_unknown_keys_is_refused_at_once(file):
    """20,000 once took 12 s: each line was compared with all previous ones, and each key with all known ones."""
    found = problems_of(write_recipe(file, RECIPE, **{f"key_{number}": number for number in range(20_000)}))
    assert len(found) == 21
    assert found[0].startswith("key_0 is not a known key")
    assert found[-1] == f"{file} has 19,980 more unknown keys"


@pytest.mark.parametrize(("key", "reason"), Recipe.REFUSED.items())
def test_refused_keys_are_reported_with_the_reason(file, key, reason):
    assert problems_of(write_recipe(file, RECIPE, **{key: {}})) == [f"{key} is not supported: {reason}"]


@pytest.mark.parametrize(
    "place",
    [
        ("train_batch_size",),
        ("optimizer", "params", "lr"),
        ("scheduler", "params", "total_num_steps"),
        ("zero_optimization", "reduce_bucket_size"),
        ("fp16", "enabled"),
        ("aio", "block_size"),
    ],
)
def test_auto_is_refused_in_every_place(file, place):
    found = problems_of(write_recipe(file, changed(*place, to="auto")))
    assert f'{": ".join(place)} is "auto": write the value, or leave the key out for its default' in found


def test_an_unknown_key_hides_no_mistake_between_blocks(file):
    wrong = {
        "fp16": {"enabled": True, "foo": 1},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "overlap_com": True, "offload_param": {"device": "cpu", "foo": 1}},
    }
    found = problems_of(write_recipe(file, RECIPE, **wrong))
    for part in ("fp16: foo", "overlap_com", "offload_param: foo", "both enabled", "needs ZeRO stage 3"):
        assert sum(part in line for line in found) == 1, (part, found)
    assert len(found) == 5


# `ds_configs/sizes`: one recipe for each size, and what the page says about them.


FOLDER = REPOSITORY / "ds_configs"
TUNED = {"train_batch_size", "lr", "betas", "weight_decay", "warmup_num_steps", "cos_min_ratio"}


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def differences(one: Any, two: Any, key: str = "") -> set[str]:
    """The keys at which two recipes differ."""
    if isinstance(one, dict) and isinstance(two, dict):
        return {name for key in one.keys() | two.keys() for name in differences(one.get(key), two.get(key), key)}
    return {key} if one != two else set()


def test_every_size_has_a_recipe():
    assert {path.stem for path in (FOLDER / "sizes").iterdir()} == set(PRESETS)


@pytest.mark.parametrize("size", PRESETS)
def test_it_is_zero1_with_other_settings(size):
    assert differences(read("zero1.json"), read(f"sizes/{size}.json")) <= TUNED
    problems = Problems()
    assert read_recipe(FOLDER / "sizes" / f"{size}.json", problems).zero_stage == 1
    problems.raise_if_any()


@pytest.mark.parametrize("size", PRESETS)
def test_the_page_has_its_settings(size):
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `sizes/{size}.json` \|(.*)\|$", page, flags=re.MULTILINE)[1]
    recipe = read(f"sizes/{size}.json")
    optimizer, schedule = recipe["optimizer"]["params"], recipe["scheduler"]["params"]
    figures = (
        *(recipe["train_batch_size"], optimizer["lr"], schedule["warmup_num_steps"]),
        *(optimizer["betas"][1], schedule["cos_min_ratio"]),
    )
    assert [cell.strip() for cell in row.split("|")][:5] == [f"{figure:g}" for figure in figures]

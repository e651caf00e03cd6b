"""The recipe file: every value that is wrong is told, in one line, with its place and what is allowed."""

import copy
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from small_run import RECIPE, REPOSITORY, command_line, write_data, write_recipe

from dsgpt.common.errors import UserError
from dsgpt.common.problems import Problems
from dsgpt.config import compatibility
from dsgpt.config.recipe import Recipe, RecipeSettings, read_recipe
from dsgpt.config.recipe_blocks import (
    Bf16,
    DdpRecipe,
    Fp16,
    FsdpRecipe,
    OffloadOptimizer,
    OffloadParam,
    OptimizerRecipe,
    SchedulerRecipe,
    ZeroRecipe,
)
from dsgpt.config.request import parse_arguments
from dsgpt.config.run_config import RunConfig, resolve
from dsgpt.runtime.topology import ParallelSizes, read_topology
from dsgpt.strategies.deepspeed.setup import engine_config

SHIPPED = sorted((REPOSITORY / "ds_configs").glob("*.json"))


def changed(*place: str, to: Any) -> dict[str, Any]:
    """``RECIPE`` with the value at ``place`` replaced."""
    recipe = copy.deepcopy(RECIPE)
    block = recipe
    for key in place[:-1]:
        block = block.setdefault(key, {})
    block[place[-1]] = to
    return recipe


def problems_of(path: Path) -> list[str]:
    problems = Problems()
    read_recipe(path, problems)
    try:
        problems.raise_if_any()
    except UserError as error:
        assert not any("\n" in line for line in error.problems)
        return [line.removeprefix("--deepspeed_config ").removeprefix(f"{path}: ") for line in error.problems]
    return []


def understood(path: Path) -> Recipe:
    problems = Problems()
    recipe = read_recipe(path, problems)
    problems.raise_if_any()
    assert recipe is not None
    return recipe


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "recipe.json"


def test_what_is_written_is_what_is_understood(file):
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


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"a": 1,}', "is not valid JSON: Illegal trailing comma before end of object: line 1 column 8 (char 7)"),
        ("", "is not valid JSON: Expecting value: line 1 column 1 (char 0)"),
        ('{"lr": NaN}', "is not valid JSON: NaN is no JSON number"),
        ('{"lr": -Infinity}', "is not valid JSON: -Infinity is no JSON number"),
        ('{"a": {"lr": 1, "lr": 2}}', 'is not valid JSON: the key "lr" is given twice: keep one of them'),
    ],
)
def test_not_json(file, text, line):
    (found,) = problems_of(write_recipe(file, text))
    assert found == line or "trailing comma" in line  # Python 3.13 says it in these words, earlier ones in others
    assert found.startswith("is not valid JSON: ")


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"\x80{}", b"[" * 200_000, b'{"a": ' + b"1" * 5000 + b"}"])
def test_not_even_text(file, data):
    file.write_bytes(data)
    (found,) = problems_of(file)
    assert found.startswith("is not valid JSON: ")


def test_a_byte_order_mark_is_no_fault(file):
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(RECIPE).encode())
    assert problems_of(file) == []


def test_missing_files(tmp_path):
    (line,) = problems_of(tmp_path / "none.json")
    assert line == "cannot be read (No such file or directory); recipes are in ds_configs/"
    (line,) = problems_of(tmp_path)
    assert line == "cannot be read (Is a directory); recipes are in ds_configs/"


@pytest.mark.parametrize("value", [[], [5], "text", 5, None, True])
def test_something_else_than_an_object(file, value):
    found = problems_of(write_recipe(file, json.dumps(value)))
    assert found == [f"must be an object in braces, not {value!r}"]


NUMBER, ADAM, SGD = "must be a number", ("optimizer", "params"), {"type": "SGD", "params": {"lr": 0.1}}
MISTAKES = [
    (("train_batch_siez",), 8, "train_batch_siez is no known key (did you mean train_batch_size?)"),
    (("xyz",), 8, "xyz is no known key"),
    (("optimizer", "parms"), {}, "optimizer: parms is no known key (did you mean params?)"),
    ((*ADAM, "learning_rate"), 1, "optimizer: params: learning_rate is no known key"),
    ((*ADAM, "momentum"), 0.9, "optimizer: params: momentum is no known key"),
    (("scheduler", "params", "warmup_steps"), 1, "scheduler: params: warmup_steps is no known key (did you mean "),
    (("zero_optimization", "round_robin_gradients"), True, "zero_optimization: round_robin_gradients is not supp"),
    (("zero_optimization", "overlap_com"), True, "zero_optimization: overlap_com is no known key (did you mean "),
    (("bf16", "enable"), True, "bf16: enable is no known key (did you mean enabled?)"),
    (("dsgpt", "bucket"), 1, "dsgpt: bucket is no known key"),
    (("train_batch_size",), 0, "train_batch_size must be a whole number of at least 1, not 0"),
    (("train_batch_size",), True, "train_batch_size must be a whole number of at least 1, not True"),
    (("train_batch_size",), 8.5, "train_batch_size must be a whole number of at least 1, not 8.5"),
    (("train_batch_size",), "8", "train_batch_size must be a whole number of at least 1, not '8'"),
    (("train_micro_batch_size_per_gpu",), -1, "train_micro_batch_size_per_gpu must be a whole number of at least 1"),
    (
        ("gradient_accumulation_steps",),
        [2],
        "gradient_accumulation_steps must be a whole number of at least 1, not [2]",
    ),
    (("steps_per_print",), 0, "steps_per_print must be a whole number of at least 1, not 0"),
    (("gradient_clipping",), -1, f"gradient_clipping {NUMBER} of at least 0, not -1"),
    (("gradient_clipping",), True, f"gradient_clipping {NUMBER} of at least 0, not True"),
    (("optimizer",), None, "optimizer must be an object in braces, not None"),
    (("optimizer",), {"type": "AdamW"}, "optimizer: params: lr is missing"),
    (("optimizer", "type"), "Adamw", "optimizer: type must be one of AdamW, SGD, not 'Adamw' (did you mean AdamW?)"),
    (("optimizer", "type"), ["AdamW"], "optimizer: type must be one of AdamW, SGD, not ['AdamW']"),
    (("optimizer", "type"), {}, "optimizer: type must be one of AdamW, SGD, not {}"),
    (("optimizer", "params"), {}, "optimizer: params: lr is missing"),
    (("optimizer", "params"), [], "optimizer: params must be an object in braces, not []"),
    ((*ADAM, "lr"), -0.1, f"optimizer: params: lr {NUMBER} of at least 0, not -0.1"),
    ((*ADAM, "lr"), "1e-4", f"optimizer: params: lr {NUMBER} of at least 0, not '1e-4'"),
    ((*ADAM, "lr"), 10**400, f"optimizer: params: lr {NUMBER} of at least 0, not 1000"),
    ((*ADAM, "eps"), False, f"optimizer: params: eps {NUMBER} of at least 0, not False"),
    ((*ADAM, "weight_decay"), {}, f"optimizer: params: weight_decay {NUMBER} of at least 0, not {{}}"),
    ((*ADAM, "betas"), 0.9, "optimizer: params: betas must be two numbers of at least 0 and below 1, not 0.9"),
    ((*ADAM, "betas"), [0.9], "optimizer: params: betas must be two numbers of at least 0 and below 1, not [0.9]"),
    (
        (*ADAM, "betas"),
        [0.9, 1],
        "optimizer: params: betas must be two numbers of at least 0 and below 1, not [0.9, 1]",
    ),
    ((*ADAM, "betas"), [False, 0.9], "optimizer: params: betas must be two numbers of at least 0 and below 1"),
    ((*ADAM, "torch_adam"), 1, "optimizer: params: torch_adam must be true or false, not 1"),
    (
        ("optimizer",),
        {"type": "SGD", "params": {"lr": 1, "momentum": 2}},
        "optimizer: params: momentum must be a number ",
    ),
    (
        ("optimizer",),
        {"type": "SGD", "params": {"lr": 1, "nesterov": True}},
        "optimizer: params: nesterov needs a momentum above 0",
    ),
    (("scheduler",), [], "scheduler must be an object in braces, not []"),
    (("scheduler",), {}, "scheduler: type is missing; one of WarmupLR, WarmupDecayLR, WarmupCosineLR"),
    (
        ("scheduler", "type"),
        "OneCycle",
        "scheduler: type must be one of WarmupLR, WarmupDecayLR, WarmupCosineLR, not 'On",
    ),
    (
        ("scheduler", "type"),
        "WarmupCosine",
        "scheduler: type must be one of WarmupLR, WarmupDecayLR, WarmupCosineLR, not",
    ),
    (
        ("scheduler", "type"),
        ["WarmupLR"],
        "scheduler: type must be one of WarmupLR, WarmupDecayLR, WarmupCosineLR, not [",
    ),
    (("scheduler", "params"), None, "scheduler: params must be an object in braces, not None"),
    (
        ("scheduler", "params", "warmup_num_steps"),
        0,
        "scheduler: params: warmup_num_steps must be a whole number of at ",
    ),
    (
        ("scheduler", "params", "total_num_steps"),
        1.5,
        "scheduler: params: total_num_steps must be a whole number of at l",
    ),
    (("scheduler", "params", "warmup_type"), "cubic", "scheduler: params: warmup_type must be one of log, linear, not"),
    (("scheduler", "params", "warmup_type"), {}, "scheduler: params: warmup_type must be one of log, linear, not {}"),
    (
        ("scheduler", "params", "cos_min_ratio"),
        1.5,
        "scheduler: params: cos_min_ratio must be a number from 0 to 1, not",
    ),
    (("scheduler", "params", "warmup_max_lr"), 1, "scheduler: params: warmup_max_lr is no known key"),
    (("bf16",), True, "bf16 must be an object in braces, not True"),
    (("bf16",), {"enabled": "yes"}, "bf16: enabled must be true or false, not 'yes'"),
    (("bf16",), {"enabled": 1}, "bf16: enabled must be true or false, not 1"),
    (("fp16",), {"enabled": True, "loss_scale": -1}, "fp16: loss_scale must be a number of at least 0, not -1"),
    (("fp16",), {"initial_scale_power": 40}, "fp16: initial_scale_power must be a whole number from 0 to 32, not 40"),
    (("fp16",), {"min_loss_scale": 0.5}, "fp16: min_loss_scale must be a whole number of at least 1, not 0.5"),
    (("zero_optimization",), 2, "zero_optimization must be an object in braces, not 2"),
    (("zero_optimization", "stage"), 4, "zero_optimization: stage must be a whole number from 0 to 3, not 4"),
    (("zero_optimization", "stage"), True, "zero_optimization: stage must be a whole number from 0 to 3, not True"),
    (("zero_optimization", "overlap_comm"), "yes", "zero_optimization: overlap_comm must be true or false, not 'yes'"),
    (
        ("zero_optimization", "reduce_bucket_size"),
        -1,
        "zero_optimization: reduce_bucket_size must be a whole number of ",
    ),
    (
        ("zero_optimization", "reduce_bucket_size"),
        0.5,
        "zero_optimization: reduce_bucket_size must be a whole number of",
    ),
    (
        ("zero_optimization",),
        {"stage": 0, "offload_optimizer": {"device": "cpu"}},
        "zero_optimization: offload_optimizer needs ZeRO stage 1, 2 or 3",
    ),
    (
        ("zero_optimization",),
        {"stage": 2, "offload_param": {"device": "cpu"}},
        "zero_optimization: offload_param needs ZeRO stage 3",
    ),
    (
        ("zero_optimization", "offload_optimizer"),
        "cpu",
        "zero_optimization: offload_optimizer must be an object in braces",
    ),
    (
        ("zero_optimization", "offload_optimizer"),
        {"device": "gpu"},
        "zero_optimization: offload_optimizer: device must be one of none, cpu, nvme, not 'gpu'",
    ),
    (
        ("zero_optimization", "offload_optimizer"),
        {"device": "cpu", "pin_memory": 1},
        "zero_optimization: offload_optimizer: pin_memory must be true or false, not 1",
    ),
    (
        ("zero_optimization", "offload_optimizer"),
        {"devices": "cpu"},
        "zero_optimization: offload_optimizer: devices is no",
    ),
    (
        ("zero_optimization",),
        {"stage": 2, "offload_optimizer": {"device": "nvme"}},
        "zero_optimization: offload_optimizer to nvme needs ZeRO stage 3; at stages 1 and 2 take device cpu",
    ),
    (
        ("zero_optimization",),
        {"stage": 2, "zero_quantized_weights": True},
        "zero_optimization: zero_quantized_weights needs ZeRO stage 3",
    ),
    (
        ("zero_optimization",),
        {"stage": 2, "zero_quantized_gradients": True},
        "zero_optimization: zero_quantized_gradients needs ZeRO stage 3",
    ),
    (
        ("zero_optimization",),
        {"stage": 1, "zero_hpz_partition_size": 2},
        "zero_optimization: zero_hpz_partition_size needs ZeRO stage 3",
    ),
    (
        ("zero_optimization",),
        {"stage": 3, "zero_hpz_partition_size": 0},
        "zero_optimization: zero_hpz_partition_size must be a whole number of at least 1, not 0",
    ),
    (
        ("zero_optimization",),
        {"stage": 3, "zero_quantized_weights": 1},
        "zero_optimization: zero_quantized_weights must be true or false, not 1",
    ),
    (("aio",), {"block_size": 8192}, "aio means nothing without offload to nvme: leave it out"),
    (("dump_state",), "yes", "dump_state must be true or false, not 'yes'"),
    (
        ("zero_optimization",),
        {"stage": 1, "reduce_bucket_size": 0},
        "zero_optimization: reduce_bucket_size must be a whole number of at least 1, not 0",
    ),
]


@pytest.mark.parametrize(("place", "value", "line"), MISTAKES)
def test_each_mistake_is_one_line_with_its_place(file, place, value, line):
    (found,) = problems_of(write_recipe(file, changed(*place, to=value)))
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("aio", "line"),
    [
        ({"block_size": 1000}, "aio: block_size must be a multiple of 4096 bytes, not 1000"),
        ({"block_size": 0}, "aio: block_size must be a multiple of 4096 bytes, not 0"),
        ({"block_size": "big"}, "aio: block_size must be a multiple of 4096 bytes, not 'big'"),
        ({"queue_depth": 0}, "aio: queue_depth must be a whole number of at least 1, not 0"),
        ({"use_gds": True}, "aio: use_gds is not supported: reading past the CPU needs a driver"),
        ({"thread_count": 1}, "aio: thread_count is no known key"),
        ({"single_submit": "no"}, "aio: single_submit must be true or false, not 'no'"),
    ],
)
def test_mistakes_in_how_files_are_swapped(file, aio, line):
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme"}}
    (found,) = problems_of(write_recipe(file, zero_optimization=zero, aio=aio))
    assert found.startswith(line)


def test_offload_to_nvme_and_zero_plus_plus(file):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}}
    recipe = understood(write_recipe(file, zero_optimization=zero, aio={"block_size": 2**20, "queue_depth": 8}))
    assert (recipe.offload_optimizer, recipe.offload_param) == ("cpu", "nvme")
    assert recipe.nvme_blocks == ("offload_param",)
    assert not recipe.zero_plus_plus
    keys = ({"zero_hpz_partition_size": 2}, {"zero_quantized_weights": True}, {"zero_quantized_gradients": True})
    for key in keys:
        assert understood(write_recipe(file, zero_optimization={"stage": 3, **key})).zero_plus_plus


def test_an_optimizer_is_needed(file):
    (line,) = problems_of(write_recipe(file, {"train_batch_size": 8}))
    assert line == 'optimizer is missing; for example {"type": "AdamW", "params": {"lr": 0.0006}}'


def test_numbers_beyond_floats_are_refused(file):
    text = json.dumps(RECIPE).replace('"gradient_clipping": 1.0', '"gradient_clipping": 1e999')
    assert problems_of(write_recipe(file, text)) == ["is not valid JSON: 1e999 is too large for a number"]


def test_a_recipe_of_many_unknown_keys_is_refused_at_once(file):
    """20,000 took 12 s: each line was compared with all before it, and each key with all that are known."""
    found = problems_of(write_recipe(file, RECIPE, **{f"key_{number}": number for number in range(20_000)}))
    assert len(found) == 21
    assert found[0].startswith("key_0 is no known key")
    assert found[-1] == f"{file} has 19,980 more keys that are not known"


@pytest.mark.parametrize(("key", "cure"), Recipe.REFUSED.items())
def test_refused_keys_say_why(file, key, cure):
    assert problems_of(write_recipe(file, RECIPE, **{key: {}})) == [f"{key} is not supported: {cure}"]


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
def test_auto_is_refused_wherever_it_stands(file, place):
    found = problems_of(write_recipe(file, changed(*place, to="auto")))
    line = f'{": ".join([str(file), *place])} is "auto": write the value, or leave the key out for its default'
    assert line.removeprefix(f"{file}: ") in found


def test_both_precisions(file):
    both = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
    assert problems_of(write_recipe(file, RECIPE, **both)) == ["fp16 and bf16 are both enabled; keep one"]


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


def test_deepspeeds_own_habits_are_understood(file):
    zero = {"stage": 2, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "none"}}
    assert understood(write_recipe(file, RECIPE, zero_optimization=zero)).zero_stage == 2


def test_all_mistakes_are_told_together(file):
    wrong = {
        "train_batch_size": "many",
        "optimizer": {"type": "Lion", "params": {"lr": 1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}},
        "gradient_clipping": -1,
        "fp16": {"enabled": 3},
        "zero_optimization": {"stage": 9},
        "amp": {},
        "speed": 11,
    }
    found = problems_of(write_recipe(file, wrong))
    for word in ("many", "Lion", "cubic", "gradient_clipping", "fp16: enabled", "stage", "amp", "speed"):
        assert sum(word in line for line in found) == 1, word
    assert len(found) == 8


def resolved(folder: Path, recipe: Path, **flags: Any) -> RunConfig:
    options, problems = parse_arguments(command_line(folder, deepspeed_config=recipe, run_type="optimized", **flags))
    return resolve(options, topology=read_topology({}), problems=problems)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def test_recipes_ship_for_every_stage():
    stages = {"zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "zero3_nvme", "zeropp"}
    assert {path.stem for path in SHIPPED} >= stages | {"tensor", "sequence", "pipeline", "3d"}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("tensor", ParallelSizes(tensor=2)),
        ("sequence", ParallelSizes(sequence=2)),
        ("pipeline", ParallelSizes(pipeline=2)),
        ("3d", ParallelSizes(pipeline=2, tensor=2)),
    ],
)
def test_shipped_recipes_split_in_two_in_each_dimension(name, sizes):
    assert understood(REPOSITORY / "ds_configs" / f"{name}.json").parallel == sizes
    for stage in range(4):
        assert understood(REPOSITORY / "ds_configs" / f"zero{stage}.json").zero_stage == stage


def test_shipped_recipes_describe_the_same_training():
    recipes = [understood(path) for path in SHIPPED]
    for recipe in recipes:
        assert recipe.optimizer == recipes[0].optimizer
        assert recipe.scheduler == recipes[0].scheduler
        assert recipe.gradient_clipping == recipes[0].gradient_clipping
        assert recipe.train_batch_size == recipes[0].train_batch_size
        assert (recipe.precision, recipe.train_micro_batch_size_per_gpu, recipe.gradient_accumulation_steps) == (
            None,
            None,
            None,
        )
        assert '"auto"' not in recipe.path.read_text()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("path", [path for path in SHIPPED if "zero" in path.stem], ids=lambda path: path.stem)
def test_deepspeed_accepts_what_its_engine_is_given(data, monkeypatch, path, precision):
    from deepspeed.runtime.config import DeepSpeedConfig

    for lacking in ("_check_nvme", "_check_zero_plus_plus"):  # to be understood, a recipe needs no drive and no GPUs
        monkeypatch.setattr(compatibility, lacking, lambda request, problems: None)
    config = resolved(data, path, precision=precision, grad_accum_steps=2)
    theirs = DeepSpeedConfig(engine_config(config))
    ours = understood(path)
    assert theirs.zero_optimization_stage == ours.zero_stage
    assert theirs.gradient_clipping == ours.gradient_clipping
    sizes = (theirs.train_batch_size, theirs.train_micro_batch_size_per_gpu, theirs.gradient_accumulation_steps)
    assert sizes == (ours.train_batch_size, ours.train_batch_size // 2, 2)
    assert theirs.bfloat16_config.enabled == (precision == "bf16")
    assert not theirs.float16_config.enabled
    assert theirs.optimizer_name is None  # the optimizer is ours


OURS_ALONE = {"overlap_comm", "buffer_count", "buffer_size", "offload_optimizer", "offload_param"}
"""Keys whose default strategies replace by one that fits the run."""


def deepspeeds(model: type) -> dict[str, Any]:
    """The default of every key of a schema of DeepSpeed's, by each of its names."""
    return {name: each.get_default() for key, each in model.model_fields.items() for name in (key, each.alias) if name}


def schemas() -> list[tuple[type, type]]:
    """Our blocks and DeepSpeed's."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero import config as zero
    from deepspeed.runtime.zero import offload_config as offload

    return [
        (ZeroRecipe, zero.DeepSpeedZeroConfig),
        (OffloadOptimizer, offload.DeepSpeedZeroOffloadOptimizerConfig),
        (OffloadParam, offload.DeepSpeedZeroOffloadParamConfig),
        (Bf16, DeepSpeedBF16Config),
        (Fp16, DeepSpeedFP16Config),
    ]


def test_every_key_and_its_default_is_deepspeeds():
    for ours, theirs in schemas():
        defaults = deepspeeds(theirs)
        for each in fields(ours):
            assert each.name in defaults
            if each.name not in OURS_ALONE:
                assert defaults[each.name] == each.default, (ours, each.name)


def takes(model: type, key: str, value: Any, **others: Any) -> bool:
    try:
        model(**others | {key: value})
    except ValidationError:
        return False
    return True


def test_kinds_of_values_are_deepspeeds():
    """What we take, DeepSpeed's schema takes; what is of another kind, both refuse."""
    wrong = {bool: "so-so", int: -1, str: 5}
    for ours, theirs in schemas()[:3]:
        needed = {"stage": 3} if ours is ZeroRecipe else {}
        for each in fields(ours):
            taken = [value for value in (True, 1, 5e8, "cpu", "/tmp") if takes(ours, each.name, value, **needed)]
            assert taken or each.name in {"offload_optimizer", "offload_param"}
            assert all(takes(theirs, each.name, value, **needed) for value in taken), each.name
            if type(each.default) in wrong:
                assert not takes(ours, each.name, wrong[type(each.default)])
                assert not takes(theirs, each.name, wrong[type(each.default)])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_is_written_is_read_again(file, path):
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


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_scheduler_params_are_deepspeeds(kind):
    import inspect

    from deepspeed.runtime import lr_schedules

    theirs = set(inspect.signature(getattr(lr_schedules, kind)).parameters)
    assert theirs - {"optimizer", "last_batch_iteration"} == set(SchedulerRecipe.PARAMS[kind])


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


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"tensor_parallel": {"autotp_size": 0}}, "tensor_parallel: autotp_size must be a whole number of at least 1"),
        (
            {"tensor_parallel": {"tp_size": 2}},
            "tensor_parallel: tp_size is not supported: how GPT-2's layers are split",
        ),
        ({"pipeline": {"stages": "two"}}, "pipeline: stages must be a whole number of at least 1, not 'two'"),
        ({"pipeline": {"partition": "best"}}, 'pipeline: partition must be "parameters", "uniform", or "type:"'),
        ({"pipeline": {"partition": "type:transformer"}}, "such as \"type:block\"; not 'type:transformer'"),
        ({"pipeline": {"partition": "type:(block"}}, "PositionEmbedding, StageBlock, LayerNorm matches"),
        ({"sequence_parallel_size": 0.5}, "sequence_parallel_size must be a whole number of at least 1, not 0.5"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "cpu_checkpointing is not supported"),
        ({"dsgpt": {"ddp": {"bucket_cap_mb": 0}}}, "dsgpt: ddp: bucket_cap_mb must be a number above 0, not 0"),
        ({"dsgpt": {"fsdp": {"reduce_dtype": "fp64"}}}, "reduce_dtype must be one of fp32, low, not 'fp64'"),
        ({"dsgpt": {"fdsp": {}}}, "dsgpt: fdsp is no known key (did you mean fsdp?)"),
    ],
)
def test_mistakes_in_how_to_split(file, changes, line):
    (found,) = problems_of(write_recipe(file, **changes))
    assert line in found

"""Every mistake in a recipe is reported, in one line, with its place and what is allowed."""

import json

import pytest
from recipe_files import changed, problems_of
from small_run import RECIPE, write_recipe

from dsgpt.config.recipe import Recipe


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
    (("optimizer",), {}, "optimizer: type is missing; one of AdamW, SGD"),
    (("optimizer", "type"), None, "optimizer: type must be one of AdamW, SGD, not None"),
    ((*ADAM, "lr"), None, f"optimizer: params: lr {NUMBER} of at least 0, not None"),
    (("scheduler",), None, "scheduler is null: write the value, or leave the key out for its default"),
    (("bf16",), {"check_grad_overflow": 1}, "bf16: check_grad_overflow must be true or false, not 1"),
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
    (found, *others) = problems_of(write_recipe(file, changed(*place, to=value)))
    assert found.startswith(line)
    assert not others or value == {}  # what else is missing


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

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


def test_missing_files(tmp_path, snapshot):
    assert [problems_of(tmp_path / "none.json"), problems_of(tmp_path)] == snapshot


@pytest.mark.parametrize("value", [[], [5], "text", 5, None, True])
def test_a_value_other_than_an_object(file, value):
    found = problems_of(write_recipe(file, json.dumps(value)))
    assert found == [f"must be an object in braces, not {value!r}"]


ADAM, SCHEDULE, ZERO = ("optimizer", "params"), ("scheduler", "params"), "zero_optimization"
VALUES = {
    ("train_batch_siez",): [8],
    ("xyz",): [8],
    ("train_batch_size",): [0, True, 8.5, "8"],
    ("train_micro_batch_size_per_gpu",): [-1],
    ("gradient_accumulation_steps",): [[2]],
    ("steps_per_print",): [0],
    ("gradient_clipping",): [-1, True],
    ("optimizer",): [
        None,
        {},
        {"type": "AdamW"},
        {"type": "SGD", "params": {"lr": 1, "momentum": 2}},
        {"type": "SGD", "params": {"lr": 1, "nesterov": True}},
    ],
    ("optimizer", "parms"): [{}],
    ("optimizer", "type"): ["Adamw", ["AdamW"], {}, None],
    ("optimizer", "params"): [{}, []],
    (*ADAM, "learning_rate"): [1],
    (*ADAM, "momentum"): [0.9],
    (*ADAM, "lr"): [None, -0.1, "1e-4", 10**400],
    (*ADAM, "eps"): [False],
    (*ADAM, "weight_decay"): [{}],
    (*ADAM, "betas"): [0.9, [0.9], [0.9, 1], [False, 0.9]],
    (*ADAM, "torch_adam"): [1],
    ("scheduler",): [None, [], {}],
    ("scheduler", "type"): ["OneCycle", "WarmupCosine", ["WarmupLR"]],
    ("scheduler", "params"): [None],
    (*SCHEDULE, "warmup_steps"): [1],
    (*SCHEDULE, "warmup_num_steps"): [0],
    (*SCHEDULE, "total_num_steps"): [1.5],
    (*SCHEDULE, "warmup_type"): ["cubic", {}],
    (*SCHEDULE, "cos_min_ratio"): [1.5],
    (*SCHEDULE, "warmup_max_lr"): [1],
    ("bf16",): [True, {"enabled": "yes"}, {"enabled": 1}, {"check_grad_overflow": 1}],
    ("bf16", "enable"): [True],
    ("fp16",): [{"enabled": True, "loss_scale": -1}, {"initial_scale_power": 40}, {"min_loss_scale": 0.5}],
    (ZERO,): [
        2,
        {"stage": 0, "offload_optimizer": {"device": "cpu"}},
        {"stage": 2, "offload_param": {"device": "cpu"}},
        {"stage": 2, "offload_optimizer": {"device": "nvme"}},
        {"stage": 2, "zero_quantized_weights": True},
        {"stage": 2, "zero_quantized_gradients": True},
        {"stage": 1, "zero_hpz_partition_size": 2},
        {"stage": 3, "zero_hpz_partition_size": 0},
        {"stage": 3, "zero_quantized_weights": 1},
        {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": 5}},
    ],
    (ZERO, "stage"): [4, True],
    (ZERO, "overlap_comm"): ["yes"],
    (ZERO, "overlap_com"): [True],
    (ZERO, "round_robin_gradients"): [True],
    (ZERO, "reduce_bucket_size"): [-1, 0, 0.5],
    (ZERO, "offload_optimizer"): ["cpu", {"device": "gpu"}, {"device": "cpu", "pin_memory": 1}, {"devices": "cpu"}],
    ("aio",): [{"block_size": 8192}],
    ("dump_state",): ["yes"],
    ("tensor_parallel",): [{"autotp_size": 0}, {"tp_size": 2}],
    ("pipeline",): [
        {"stages": "two"},
        {"partition": "best"},
        {"partition": "type:transformer"},
        {"partition": "type:(block"},
        {"partition": "type:block:2"},
    ],
    ("sequence_parallel_size",): [0.5],
    ("activation_checkpointing",): [{"cpu_checkpointing": True}],
    ("dsgpt",): [{"ddp": {"bucket_cap_mb": 0}}, {"fsdp": {"reduce_dtype": "fp64"}}, {"fdsp": {}}, {"bucket": 1}],
}
"""Wrong values for each place in a recipe."""
FILE_SWAPPING = [
    {"block_size": 1000},
    {"block_size": 0},
    {"block_size": "big"},
    {"queue_depth": 0},
    {"use_gds": True},
    {"thread_count": 1},
    {"single_submit": "no"},
]


def test_each_mistake_is_reported_in_one_line_with_its_place(file, snapshot):
    found = {}
    for place, values in VALUES.items():
        for value in values:
            lines = problems_of(write_recipe(file, changed(*place, to=value)))
            assert all(line.startswith(place[0]) for line in lines), (place, value)
            assert len(lines) == 1 or (value == {} and lines), (place, value)  # {} may lack several required keys
            found[f"{': '.join(place)} = {json.dumps(value)[:80]}"] = lines
    assert found == snapshot


def test_each_mistake_in_the_swapping_of_files_is_reported_in_one_line(file, snapshot):
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme"}}
    found = {}
    for aio in FILE_SWAPPING:
        (found[json.dumps(aio)],) = problems_of(write_recipe(file, zero_optimization=zero, aio=aio))
    assert found == snapshot


def test_an_optimizer_is_required(file, snapshot):
    assert problems_of(write_recipe(file, {"train_batch_size": 8})) == snapshot


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


def test_both_precisions(file, snapshot):
    both = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
    assert problems_of(write_recipe(file, RECIPE, **both)) == snapshot


def test_all_mistakes_are_reported_together(file):
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

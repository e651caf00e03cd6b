"""Equal work: what is compared, what every flag and key means for it, and equal loss."""

import copy
from collections.abc import Callable
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from chart_records import WITHOUT_SHAPE, Asked, flat_record, record, run_of, step_lines, without, write_run
from small_run import SEQUENCE, TOKENS, random_ids, write_tokens

from dsgpt.config.inputs import InitFrom
from dsgpt.config.options import LATER_FACTS, TRAINING_FACTS, WORK_FACTS, ChangesTraining, ExecutionOnly, Options
from dsgpt.config.recipe import Recipe
from dsgpt.config.recipe_blocks import (
    ActivationCheckpointing,
    AioRecipe,
    Block,
    OffloadOptimizer,
    OffloadParam,
    ZeroRecipe,
)
from dsgpt.config.run_config import RunConfig
from dsgpt.model.config import SHAPE_FLAGS, GPT2Config
from dsgpt.record.equal_work import (
    equal_loss_line,
    inference_stamps,
    judge,
    largest_gap,
    machine_line,
    partial_stamps,
    setup_stamps,
    work_stamps,
)
from dsgpt.record.runs import Run, read_run
from dsgpt.training import run_description

# The verdict: every fact alone decides it, and what is unknown is never taken as equal.


WORK = {
    "training_config__global_batch_size": (32, "global batch 8 vs 32"),
    "training_config__seq_len": (64, "sequence length 32 vs 64"),
    "data__train_sha256": ("c" * 64, "train data aaaaaaaaaa… vs cccccccccc…"),
    "data__val_sha256": ("c" * 64, "validation data bbbbbbbbbb… vs cccccccccc…"),
    "training_config__val_windows": (4, "validation windows 16 vs 4"),
    "training_config__model__n_layer": (3, "model n_layer 2 vs 3"),
    "training_config__model__n_head": (4, "model n_head 2 vs 4"),
    "training_config__model__n_embd": (128, "model n_embd 64 vs 128"),
    "training_config__model__block_size": (64, "model block_size 32 vs 64"),
    "training_config__model__vocab_size": (512, "model vocab_size 256 vs 512"),
    "training_config__model__dropout": (0.1, "model dropout 0 vs 0.1"),
    "summary__optimizer_steps": (10, "optimizer steps 40 vs 10"),
    "summary__tokens_processed_global": (2560, "tokens 10,240 vs 2,560"),
    "training_config__precision": ("bf16", "precision fp32 vs bf16"),
}
RECIPE = {
    "training_config__optimizer": ("SGD", "optimizer type AdamW vs SGD"),
    "training_config__optimizer_params": (
        {"type": "AdamW", "lr": 0.001, "betas": [0.9, 0.999], "momentum": None, "torch_adam": True},
        "optimizer settings betas [0.9, 0.95] vs [0.9, 0.999]",
    ),
    "training_config__lr": (0.002, "learning rate 0.001 vs 0.002"),
    "training_config__scheduler": (
        {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 8}},
        "scheduler params warmup_num_steps 4 vs 8",
    ),
    "training_config__gradient_clipping": (0.5, "gradient clipping 1 vs 0.5"),
    "training_config__seed": (8, "seed 7 vs 8"),
}


@pytest.fixture
def read(tmp_path):
    """Write a record (and step lines) under a name and read it back."""

    def read_record(name, values, lines=None):
        return read_run(write_run(tmp_path / name, values, lines=lines), name=name)

    return read_record


def test_equal_records_did_the_same_work(read):
    verdict = judge([read("a", record()), read("b", record(training_config__strategy="zero1"))])
    assert verdict.line() == "same work: yes"
    assert work_stamps(verdict) == []


@pytest.mark.parametrize("path", WORK)
def test_each_fact_of_the_work_alone_makes_it_unequal(read, path):
    other, text = WORK[path]
    verdict = judge([read("a", record()), read("b", record(**{path: other}))])
    assert verdict.line() == f"same work: no ({text})"
    assert work_stamps(verdict) == [f"NOT EQUAL WORK: {text}"]


@pytest.mark.parametrize("path", RECIPE)
def test_each_fact_of_the_recipe_alone_makes_it_another_training(read, path):
    other, text = RECIPE[path]
    verdict = judge([read("a", record()), read("b", record(**{path: other}))])
    assert verdict.line() == f"same work: no ({text})"
    assert work_stamps(verdict) == [f"NOT THE SAME TRAINING: {text}"]


@pytest.mark.parametrize("missing", ["null", "absent"])
@pytest.mark.parametrize("on_both", [True, False])
@pytest.mark.parametrize("path", [*WORK, *RECIPE])
def test_each_fact_missing_alone_makes_it_unknown(read, path, on_both, missing):
    values = record(**{path: None}) if missing == "null" else without(record(), path)
    if path.startswith("summary__"):
        values["epochs"] = []  # else the steps and tokens are known from there
    later = on_both and path in {"training_config__val_windows", "training_config__optimizer_params"}
    verdict = judge([read("a", copy.deepcopy(values) if on_both else record()), read("b", values)])
    assert verdict.answer == ("yes" if later else "unknown")
    fact = (WORK | RECIPE)[path][1].split()[0]
    assert all(fact in facts[0] and len(facts) <= 2 for facts in verdict.unknown.values())
    assert set(verdict.unknown) == (set() if later else {"a", "b"} if on_both else {"b"})
    assert [stamp.split(":")[0] for stamp in work_stamps(verdict)] == ([] if later else ["WORK NOT VERIFIED"])


def test_facts_that_no_run_recorded_are_compared_only_if_every_version_records_them(read, snapshot):
    bare = without(without(record(), "training_config__val_windows"), "training_config__optimizer_params")
    assert judge([read("a", bare), read("b", bare)]).answer == "yes"
    assert judge([read("old", flat_record()), read("b", bare)]).line() == snapshot


@pytest.mark.parametrize("others", ["resumed too", "never resumed"])
def test_changes_at_resume_are_unknown_if_no_run_recorded_them(read, others):
    """One of the two may have resumed with other data, or with Zero++."""
    resumed = record(resumed_from="step-00000030")
    other = record(resumed_from="step-00000010") if others == "resumed too" else without(record(), "resumed_from")
    verdict = judge([read("a", resumed), read("b", other)])
    assert verdict.answer == "unknown"
    assert verdict.unknown["a"] == ("quantized communication", "changed at resume")


def test_seeds_that_are_equal_as_floats_differ(read, snapshot):
    runs = [read(str(seed), record(training_config__seed=seed)) for seed in (2**53, 2**53 + 1)]
    assert judge(runs).line() == snapshot


def test_a_seed_that_is_not_a_whole_number_is_unknown(read, snapshot):
    runs = [read(name, record(training_config__seed=7.5)) for name in "ab"]
    assert judge(runs).line() == snapshot


def test_a_known_difference_outweighs_the_unknown(read, snapshot):
    verdict = judge([read("a", record()), read("b", record(training_config__seq_len=64, data__val_sha256=None))])
    assert verdict.line() == snapshot


def test_steps_and_tokens_are_summed_from_epochs_where_the_summary_lacks_them(read):
    values = record(summary__optimizer_steps=None, summary__tokens_processed_global=None)
    assert judge([read("a", record()), read("b", values)]).answer == "yes"


def test_a_null_setting_against_a_number_is_unknown_not_equal(read, snapshot):
    open_ended = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": None}}
    verdict = judge([read("a", record()), read("b", record(training_config__scheduler=open_ended))])
    assert verdict.line() == snapshot


def test_two_others_may_differ_though_the_baseline_recorded_nothing(read):
    runs = [
        read("old", flat_record()),
        read("b", record(training_config__global_batch_size=8)),
        read("c", record(training_config__global_batch_size=16)),
    ]
    verdict = judge(runs)
    assert verdict.answer == "no"
    assert verdict.differences[0].text(verdict.names) == "global batch unknown vs 8 (b), 16 (c)"


def test_a_model_without_any_size_is_named_once(read, snapshot):
    verdict = judge([read("a", record()), read("b", without(record(), "training_config__model"))])
    assert verdict.line() == snapshot


def test_values_that_look_alike_when_shortened_are_shown_whole(read):
    a, b = "d" * 63 + "1", "d" * 63 + "2"
    verdict = judge([read("a", record(data__train_sha256=a)), read("b", record(data__train_sha256=b))])
    assert a in verdict.line() and b in verdict.line()


def test_one_run_has_nothing_to_compare_with(read, snapshot):
    verdict = judge([read("a", record())])
    assert verdict.line() == snapshot
    assert work_stamps(verdict) == []


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_a_run_that_did_not_end_is_stamped(read, status, snapshot):
    runs = [read("a", record()), read("b", record(status=status))]
    assert partial_stamps(runs) == snapshot
    assert partial_stamps(runs[:1]) == []


def test_inference_of_other_lengths_is_stamped(read, snapshot):
    runs = [read("a", record()), read("b", record(inference__new_tokens=100)), read("old", flat_record())]
    assert inference_stamps(runs) == snapshot
    assert inference_stamps(runs[:1]) == []


def test_other_hardware_is_stamped_and_unknown_hardware_is_not(read, snapshot):
    a, b = read("a", record()), read("b", record(hardware__cpu_name="Other CPU"))
    assert setup_stamps([a, b]) == snapshot
    old = read("old", flat_record())
    assert setup_stamps([a, old]) == []
    assert machine_line([a, old]).startswith(
        "machine: Fixture CPU, 2 cores (instruction sets: not recorded) (not recorded by old)"
    )


def test_equal_names_with_other_instruction_sets_are_other_hardware(read):
    """Clouds call many CPUs by one name."""
    old, new = read("old", record()), read("new", record(hardware__instruction_sets="AVX2"))
    assert setup_stamps([old, new]) == []
    assert machine_line([new]).startswith("machine: Fixture CPU, 2 cores (instruction sets: AVX2)")
    (stamp,) = setup_stamps([new, read("amx", record(hardware__instruction_sets="AVX2, AMX"))])
    assert stamp.endswith("amx: Fixture CPU, 2 cores (instruction sets: AVX2, AMX)")


@pytest.mark.parametrize(("share", "stamps"), [(0.05, 0), (0.37, 1), (None, 0)])
def test_a_busy_machine_is_stamped(read, share, stamps):
    segment = {"first_step": 1, "last_step": 40, "cpu_share_of_others": share}
    found = [line for line in setup_stamps([read("a", record(segments=[segment]))]) if "BUSY" in line]
    assert len(found) == stamps
    assert all("other processes used 37% of the CPUs during this measurement" in line for line in found)


@pytest.mark.parametrize(
    ("shift", "precision", "answer"),
    [(0.015, "fp32", "yes"), (0.03, "fp32", "no"), (0.03, "bf16", "yes"), (0.06, "bf16", "no")],
)
def test_equal_loss_is_judged_by_a_tolerance_that_the_line_names(read, shift, precision, answer):
    values = record(training_config__precision=precision)
    a, b = read("a", values, step_lines()), read("b", values, step_lines(shift=shift))
    line = equal_loss_line(a, b)
    assert line.startswith(
        f"equal loss: {answer} (b against a: largest difference per step {shift:.2g} in training loss"
    )
    assert f"tolerance {0.02 if precision == 'fp32' else 0.05}" in line


def test_one_bad_step_is_found_and_decides(read, snapshot):
    lines = step_lines()
    spoiled = copy.deepcopy(lines)
    next(line for line in spoiled if line["step"] == 23)["loss"] += 0.5
    assert equal_loss_line(read("a", record(), lines), read("b", record(), spoiled)) == snapshot


def test_equal_loss_is_not_claimed_for_unequal_work(read, snapshot):
    a, b = read("a", record(), step_lines()), read("b", record(training_config__seq_len=64), step_lines())
    assert equal_loss_line(a, b) == snapshot


def test_equal_loss_needs_common_steps(read, snapshot):
    a, old = read("a", record(), step_lines()), read("old", flat_record())
    assert equal_loss_line(a, old) == snapshot


def test_equal_loss_of_unknown_work_is_labelled(read, snapshot):
    a, b = read("a", record(), step_lines()), read("b", record(data__val_sha256=None), step_lines())
    assert equal_loss_line(a, b) == snapshot


def test_largest_gap_looks_at_common_steps_only():
    assert largest_gap({1: 5.0, 2: 4.0, 3: 3.0}, {2: 4.25, 3: 3.0, 4: 9.0}) == (0.25, 2)
    assert largest_gap({1: 5.0}, {2: 5.0}) == (None, None)


# For each option, recipe key and model field, two runs that differ only in it.


Pair = tuple[Asked, Asked]


def flag(name: str, value: Any, *, before: Any = None, **both: Any) -> Pair:
    """Two values of a flag: ``before``, None for its default, and ``value``. ``both`` are flags of both runs."""
    first = both if before is None else both | {name: before}
    return Asked(flags=first), Asked(flags=both | {name: value})


def key(place: str, before: Any, after: Any, *, flags: Any = None, **both: Any) -> Pair:
    """Two values in the JSON; ``before`` is None for a missing key. ``both`` are fields of ``Asked`` of both runs."""
    shared = both.pop("recipe", {})
    first = shared if before is None else shared | {place: before}
    return (
        Asked(recipe=first, flags=flags or {}, **both),
        Asked(recipe=shared | {place: after}, flags=flags or {}, **both),
    )


def settings(block: str, params: dict[str, Any], other: dict[str, Any], *, kind: str, **both: Any) -> Pair:
    """Two values of the ``params`` of an optimizer or a scheduler."""
    one, two = ({f"{block}.type": kind, f"{block}.params": each} for each in (params, other))
    return Asked(recipe=one, **both), Asked(recipe=two, **both)


def schedule(kind: str = "WarmupLR", **change: Any) -> Pair:
    before = {"warmup_num_steps": 2, "warmup_type": "linear"}
    return settings("scheduler", before, before | change, kind=kind)


def optimizer(kind: str = "AdamW", before: dict[str, Any] | None = None, **change: Any) -> Pair:
    first = {"lr": 0.001} | (before or {})
    return settings("optimizer", first, first | change, kind=kind)


OPTIMIZED = {"run_type": "optimized"}
ZERO_3 = {"zero_optimization.stage": 3}
TO_CPU = ZERO_3 | {"optimizer.params.torch_adam": True, "zero_optimization.offload_optimizer.device": "cpu",
                   "zero_optimization.offload_param.device": "cpu"}  # fmt: skip
TO_NVME = {place: "nvme" if value == "cpu" else value for place, value in TO_CPU.items()}
DYNAMIC = {"fp16.enabled": True}


def in_fp16(config: RunConfig) -> RunConfig:
    """``config`` in fp16, which ``resolve`` refuses on a CPU."""
    return replace(config, precision="fp16")


def zero(name: str, before: Any, after: Any, *, stage: int = 1) -> Pair:
    shared = {"zero_optimization.stage": stage}
    return key(f"zero_optimization.{name}", before, after, flags=OPTIMIZED, recipe=shared, ranks=2)


def offload(block: str, name: str, before: Any, after: Any) -> Pair:
    place = f"zero_optimization.{block}.{name}"
    return key(place, before, after, flags=OPTIMIZED, recipe=TO_CPU, ranks=2, elsewhere=True)


def quantized(what: str) -> Pair:
    """Zero++ on or off, which needs GPUs."""
    place = f"zero_optimization.zero_quantized_{what}"
    return key(place, None, True, flags=OPTIMIZED, recipe=ZERO_3, ranks=2, elsewhere=True)


def scaling(name: str, before: Any, after: Any) -> Pair:
    return key(f"fp16.{name}", before, after, recipe=DYNAMIC, elsewhere=True, adapt=in_fp16)


def aio(name: str, before: Any, after: Any) -> Pair:
    return key(f"aio.{name}", before, after, flags=OPTIMIZED, recipe=TO_NVME, ranks=2, elsewhere=True)


def split(place: str, sizes: int = 2) -> Pair:
    one = Asked(flags=OPTIMIZED, ranks=sizes)
    return one, replace(one, recipe={place: sizes})


def as_options(**changes: Any) -> Pair:
    """Options set after the checks: they need a compiler, or an existing run in the folder."""
    return Asked(), Asked(adapt=lambda config: replace(config, options=replace(config.options, **changes)))


def published(config: RunConfig) -> RunConfig:
    """``config`` with initial weights as a resumed run recorded them."""
    shape = {name: value for name, value in config.model.as_dict().items() if name != "dropout"}
    return replace(config, init_from=InitFrom(given="somebody/gpt2", shape=shape, sha256="5" * 64))


CHANGE = {"step": 1, "name": "optimizer", "before": {"lr": 0.1}, "after": {"lr": 0.001}}
SPLITS = {
    "tensor_parallel.autotp_size": split("tensor_parallel.autotp_size"),
    "pipeline.stages": split("pipeline.stages"),
    "recipe.sequence_parallel_size": split("sequence_parallel_size"),
}


def _two_values(key: Field, *numbers: int) -> tuple[Any, Any]:
    named = {"device": ("none", "cpu"), "nvme_path": ("/a", "/b"), "block_size": (4096, 8192)}
    return named.get(key.name) or ((False, True) if isinstance(key.default, bool) else numbers)


CHANGED: dict[str, Pair] = {
    **{f"--{each.name}": flag(each.name, each.default is False or 3) for each in fields(Options)},  # if no other fits
    "--run_type": (Asked(), Asked(flags={"run_type": "ddp"}, ranks=2)),
    "--checkpoint_path": (Asked(), Asked(adapt=lambda config: replace(config, run_dir=config.run_dir / "deeper"))),
    "--deepspeed_config": (Asked(), Asked(recipe_name="another.json")),
    "--model_size": flag("model_size", "tiny", before="demo", seq_length=SEQUENCE, **WITHOUT_SHAPE),
    "--init_from": (Asked(), Asked(adapt=published)),
    "--num_heads": flag("num_heads", 4),
    "--embedding_size": flag("embedding_size", 32),
    "--max_position_embeddings": flag("max_position_embeddings", 32, seq_length=SEQUENCE),
    "--vocab_size": flag("vocab_size", 300),
    "--dropout": flag("dropout", 0.1),
    "--seq_length": flag("seq_length", 8),
    "--epochs": flag("epochs", 2, max_train_steps=None),
    "--max_val_steps": flag("max_val_steps", 1),
    "--global_batch_size": flag("global_batch_size", 4),
    "--micro_batch_size_per_gpu": flag("micro_batch_size_per_gpu", 2),
    "--grad_accum_steps": flag("grad_accum_steps", 4),
    "--precision": flag("precision", "bf16"),
    "--device": flag("device", "auto"),
    "--compile": as_options(compile=True),
    "--save_mode": flag("save_mode", "async"),
    "--on_save_failure": flag("on_save_failure", "continue"),
    "--track": flag("track", "csv"),
    "--resume": as_options(resume=True),
    "--allow_changed": (Asked(), Asked(changes=[CHANGE])),
    "--overwrite": as_options(overwrite=True),
    "--plan": flag("plan", Path("plan.json")),
    "--on_event": flag("on_event", "true"),
    "--stall_timeout": flag("stall_timeout", 90.0),
    "--spot_notice": flag("spot_notice", "aws"),
    "model.dropout": flag("dropout", 0.1),
    "recipe.path": (Asked(), Asked(recipe_name="another.json")),
    "recipe.sha256": (Asked(), Asked(indent=2)),
    "recipe.raw": key("dump_state", None, False),
    "recipe.gradient_clipping": key("gradient_clipping", 1.0, 0.5),
    "recipe.train_batch_size": key("train_batch_size", 8, 4),
    "recipe.train_micro_batch_size_per_gpu": key("train_micro_batch_size_per_gpu", None, 2),
    "recipe.gradient_accumulation_steps": key("gradient_accumulation_steps", None, 4),
    "recipe.steps_per_print": key("steps_per_print", None, 3),
    "pipeline.partition": key("pipeline.partition", None, "uniform", flags=OPTIMIZED,
                                     recipe={"pipeline.stages": 2}, ranks=2),
    "recipe.zero_allow_untested_optimizer": key("zero_allow_untested_optimizer", None, True, flags=OPTIMIZED),
    "recipe.zero_force_ds_cpu_optimizer": key("zero_force_ds_cpu_optimizer", None, False, flags=OPTIMIZED),
    "recipe.wall_clock_breakdown": key("wall_clock_breakdown", None, True, flags=OPTIMIZED),
    "recipe.memory_breakdown": key("memory_breakdown", None, True, flags=OPTIMIZED),
    "recipe.dump_state": key("dump_state", None, True, flags=OPTIMIZED),
    **SPLITS,
    "optimizer.type": (*settings("optimizer", {"lr": 0.1}, {"lr": 0.1}, kind="AdamW")[:1],
                       *settings("optimizer", {"lr": 0.1}, {"lr": 0.1}, kind="SGD")[:1]),
    "optimizer.lr": optimizer(lr=0.002),
    "optimizer.betas": optimizer(betas=[0.8, 0.9]),
    "optimizer.eps": optimizer(eps=1e-6),
    "optimizer.weight_decay": optimizer(weight_decay=0.1),
    "optimizer.momentum": optimizer("SGD", momentum=0.9),
    "optimizer.nesterov": optimizer("SGD", before={"momentum": 0.9}, nesterov=True),
    "optimizer.torch_adam": optimizer(torch_adam=True),
    "scheduler.type": (schedule("WarmupLR")[0], schedule("WarmupCosineLR")[0]),
    "scheduler.total_num_steps": schedule("WarmupDecayLR", total_num_steps=5),
    "scheduler.warmup_num_steps": schedule(warmup_num_steps=3),
    "scheduler.warmup_type": schedule(warmup_type="log"),
    "scheduler.warmup_min_lr": schedule(warmup_min_lr=0.0005),
    "scheduler.warmup_max_lr": (schedule(warmup_max_lr=0.002)[1], schedule(warmup_max_lr=0.004)[1]),
    "scheduler.warmup_min_ratio": schedule("WarmupCosineLR", warmup_min_ratio=0.1),
    "scheduler.cos_min_ratio": schedule("WarmupCosineLR", cos_min_ratio=0.1),
    "bf16.enabled": key("bf16.enabled", False, True, flags={"precision": "auto", "device": "cpu"}),
    "bf16.check_grad_overflow": key("bf16.check_grad_overflow", None, False, recipe={"bf16.enabled": True},
                                    flags=OPTIMIZED | {"precision": "bf16"}),
    "bf16.immediate_grad_update": key("bf16.immediate_grad_update", None, True, recipe={"bf16.enabled": True},
                                      flags=OPTIMIZED | {"precision": "bf16"}),
    "fp16.enabled": (Asked(), Asked(recipe=DYNAMIC, elsewhere=True, adapt=in_fp16)),
    "fp16.loss_scale": scaling("loss_scale", None, 1024.0),
    "fp16.initial_scale_power": scaling("initial_scale_power", None, 8),
    "fp16.loss_scale_window": scaling("loss_scale_window", None, 100),
    "fp16.hysteresis": scaling("hysteresis", None, 3),
    "fp16.consecutive_hysteresis": scaling("consecutive_hysteresis", None, True),
    "fp16.min_loss_scale": scaling("min_loss_scale", None, 2),
    "ddp.bucket_cap_mb": key("dsgpt.ddp.bucket_cap_mb", None, 1.0, flags={"run_type": "ddp"}, ranks=2),
    "ddp.gradient_as_bucket_view": key("dsgpt.ddp.gradient_as_bucket_view", None, False, flags={"run_type": "ddp"},
                                       ranks=2),
    "fsdp.reshard_after_forward": key("dsgpt.fsdp.reshard_after_forward", None, False, flags={"run_type": "fsdp"},
                                      ranks=2),
    "fsdp.cpu_offload": key("dsgpt.fsdp.cpu_offload", None, True, flags={"run_type": "fsdp"}, ranks=2),
    "fsdp.reduce_dtype": key("dsgpt.fsdp.reduce_dtype", None, "low", ranks=2,
                             flags={"run_type": "fsdp", "precision": "bf16"}),
    "zero_optimization.stage": zero("stage", 1, 3),
    **{f"zero_optimization.{each.name}": zero(each.name, *_two_values(each, 10_000, 20_000))
       for each in fields(ZeroRecipe) if each.name not in {"stage", "offload_optimizer", "offload_param"}},
    "zero_optimization.zero_hpz_partition_size": key("zero_optimization.zero_hpz_partition_size", None, 2,
                                                     flags=OPTIMIZED, recipe=ZERO_3, ranks=2, elsewhere=True),
    "zero_optimization.zero_quantized_weights": quantized("weights"),
    "zero_optimization.zero_quantized_gradients": quantized("gradients"),
    **{f"{block}.{each.name}": offload(block, each.name, *_two_values(each, 2, 3))
       for block, record in (("offload_optimizer", OffloadOptimizer), ("offload_param", OffloadParam))
       for each in fields(record)},
    **{f"aio.{each.name}": aio(each.name, *_two_values(each, 2, 3)) for each in fields(AioRecipe)},
    **{f"activation_checkpointing.{each.name}": key(f"activation_checkpointing.{each.name}", None, False)
       for each in fields(ActivationCheckpointing)},
}  # fmt: skip
"""For each name, two runs that differ only in it."""
CHANGED |= {f"model.{name}": CHANGED[flag] for name, flag in SHAPE_FLAGS.items()}


# Everything that changes the training counts: tested on two records for each option, recipe key and model field.


def _declared() -> dict[str, ChangesTraining | ExecutionOnly | None]:
    """What every flag, every key of a recipe and every field of the model declares; names as in ``CHANGED``."""
    found = {f"--{each.name}": each.metadata["work"] for each in fields(Options)}
    found |= {f"model.{each.name}": ChangesTraining(f"model {each.name}") for each in fields(GPT2Config)}
    return found | _keys(Recipe, "recipe")


def _keys(block: type[Block], name: str) -> dict[str, ChangesTraining | ExecutionOnly | None]:
    found: dict[str, ChangesTraining | ExecutionOnly | None] = {}
    hints = get_type_hints(block, include_extras=True)
    for key, hint in ((each.name, hints[each.name]) for each in fields(block)):
        kinds = [kind for kind in (hint, *_parts(hint)) if isinstance(kind, type) and issubclass(kind, Block)]
        if kinds:
            found |= _keys(kinds[0], key)
        else:
            own = [each for each in _parts(hint) if isinstance(each, ChangesTraining | ExecutionOnly)]
            found[f"{name}.{key}"] = own[0] if own else block.WORK
    return found


def _parts(hint: Any) -> list[Any]:
    """Everything that a hint is made of."""
    parts = [*get_args(hint), *getattr(hint, "__metadata__", ())]
    return [each for one in parts for each in (one, *_parts(one))]


DECLARED = _declared()
CHANGES = {name: work.facts for name, work in DECLARED.items() if isinstance(work, ChangesTraining)}
EXECUTION_ONLY = [name for name, work in DECLARED.items() if isinstance(work, ExecutionOnly)]


def test_every_flag_and_key_declares_what_it_means_for_equal_work():
    assert DECLARED.keys() == CHANGES.keys() | {*EXECUTION_ONLY}
    assert {fact for facts in CHANGES.values() for fact in facts} <= {*WORK_FACTS, *TRAINING_FACTS}
    assert len(DECLARED) > 150
    assert {"--dropout", "fsdp.reduce_dtype", "offload_param.buffer_size", "aio.block_size"} < DECLARED.keys()


@pytest.fixture(autouse=True)
def _known_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking git would take longer than the rest of these tests."""
    monkeypatch.setattr(run_description, "git_commit", lambda: "0" * 40)


def pair(folder: Path, name: str) -> list[Run]:
    one, other = CHANGED[name]
    assert one != other
    return [run_of(folder / "a", one, name="a"), run_of(folder / "b", other, name="b")]


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - {"--train_data_path", "--val_data_path"}))
def test_a_difference_that_counts_is_other_work(tmp_path, name):
    verdict = judge(pair(tmp_path, name))
    assert verdict.answer == "no"
    assert any(difference.fact.startswith(CHANGES[name]) for difference in verdict.differences), verdict.line()


@pytest.mark.parametrize("name", sorted(EXECUTION_ONLY))
def test_a_harmless_difference_is_the_same_work(tmp_path, name):
    assert judge(pair(tmp_path, name)).line() == "same work: yes"


@pytest.mark.parametrize("name", ["train", "val"])
def test_other_data_counts(tmp_path, name):
    other = write_tokens(tmp_path / "other.bin", random_ids(TOKENS, seed=9))
    asked = Asked(), Asked(flags={f"{name}_data_path": other})
    verdict = judge([run_of(tmp_path / side, each, name=side) for side, each in zip("ab", asked, strict=True)])
    assert verdict.answer == "no"
    assert {difference.fact for difference in verdict.differences} >= {CHANGES[f"--{name}_data_path"][0]}


def test_ids_of_another_width_are_other_data(tmp_path):
    """The same bytes, and so the same sha256, read as half as many ids."""
    ids = random_ids(2 * TOKENS - 1)
    ids[1::2] = 0
    narrow = write_tokens(tmp_path / "narrow" / "train.bin", ids[:-1])
    wide = write_tokens(tmp_path / "wide" / "train.bin", ids[:-1], dtype="uint32", tokens=TOKENS - 1)
    asked = [Asked(flags={"train_data_path": path}) for path in (narrow, wide)]
    verdict = judge([run_of(tmp_path / side, each, name=side) for side, each in zip("ab", asked, strict=True)])
    assert verdict.line() == f"same work: no (tokens in the train file {2 * TOKENS - 2:,} vs {TOKENS - 1:,})"


def test_a_decay_to_the_end_of_the_run_is_as_long_as_the_run(tmp_path):
    """One run stopped after the number of steps that the other had in all."""

    def stopped(record: dict[str, Any]) -> None:
        record["summary"].update(optimizer_steps=2, tokens_processed_global=2 * 8 * SEQUENCE)

    whole = run_of(tmp_path / "a", Asked(), name="a")
    part = run_of(tmp_path / "b", Asked(flags={"max_train_steps": 4}), name="b", change=stopped)
    assert judge([whole, part]).line() == "same work: no (scheduler total_num_steps 2 vs 4)"


@pytest.mark.parametrize("fact", sorted(LATER_FACTS))
def test_a_fact_that_one_record_lacks_is_unknown(tmp_path, fact):
    """Records of an earlier version lack it. If both lack it, it is not compared, except between resumed runs."""
    places: dict[str, Callable[[dict[str, Any]], Any]] = {
        "tokens in the train file": lambda record: record["data"].pop("train_tokens"),
        "tokens in the validation file": lambda record: record["data"].pop("val_tokens"),
        "validation windows": lambda record: record["training_config"].pop("val_windows"),
        "optimizer settings": lambda record: record["training_config"].pop("optimizer_params"),
        "initial weights": lambda record: record["training_config"].pop("init_from"),
        "loss scaling": lambda record: record["training_config"].pop("loss_scaling"),
        "quantized communication": lambda record: (
            record.pop("segments"),
            record["training_config"].pop("quantized_weights"),
            record["deepspeed_config"].pop("given"),
        ),
        "changed at resume": lambda record: (record.pop("changed_at_resume"), record.update(resumed_from="step-1")),
    }
    fp16 = Asked(recipe=DYNAMIC, elsewhere=True, adapt=in_fp16)  # other precisions have no loss scaling
    new = run_of(tmp_path / "new", fp16, name="new")
    old = run_of(tmp_path / "old", fp16, name="old", change=places[fact])
    assert judge([new, old]).line() == f"same work: unknown (old did not record {fact})"
    assert judge([old, old]).answer == ("unknown" if fact == "changed at resume" else "yes")


@pytest.mark.parametrize("other", ["quantized", "plain"])
def test_facts_that_an_earlier_version_recorded_elsewhere_are_found(tmp_path, other):
    """Zero++ is in the JSON as given; the precision shows whether the loss was scaled; no resume, no changes at one."""

    def earlier(record: dict[str, Any]) -> None:
        for key in ("loss_scaling", "quantized_weights", "quantized_gradients"):
            del record["training_config"][key]
        del record["changed_at_resume"], record["segments"]

    first, second = quantized("weights")
    new, old = (first, second) if other == "quantized" else (first, first)
    verdict = judge([run_of(tmp_path / "a", new, name="a"), run_of(tmp_path / "b", old, name="b", change=earlier)])
    expected = "no (quantized communication none vs weights)" if old is second else "yes"
    assert verdict.line() == f"same work: {expected}"

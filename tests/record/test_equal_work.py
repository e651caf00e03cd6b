"""Equal work: what is compared, what every flag and key means for it, and equal loss."""

from collections.abc import Callable
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from chart_records import Asked, flat_record, record, run_of, step_lines, without, write_run
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
from dsgpt.record.equal_work import equal_loss_line, inference_stamps, judge, machine_line, stamps, work_stamps
from dsgpt.record.runs import Run, read_run
from dsgpt.training import run_description

# The verdict: every fact alone decides it, and what is unknown is never taken as equal.


WORK: dict[str, Any] = {
    "training_config__global_batch_size": 32,
    "training_config__seq_len": 64,
    "data__train_sha256": "c" * 64,
    "data__val_sha256": "c" * 64,
    "training_config__val_windows": 4,
    **{f"training_config__model__{name}": 512 for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")},
    "training_config__model__dropout": 0.1,
    "summary__optimizer_steps": 10,
    "summary__tokens_processed_global": 2560,
    "training_config__precision": "bf16",
}
RECIPE: dict[str, Any] = {
    "training_config__optimizer": "SGD",
    "training_config__optimizer_params": {"betas": [0.9, 0.999], "momentum": None, "torch_adam": True},
    "training_config__lr": 0.002,
    "training_config__scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 8}},
    "training_config__gradient_clipping": 0.5,
    "training_config__seed": 8,
}
"""Places in a record, and values that the fixture's does not have."""
NO_SEED, BARE = record(training_config__seed=7.5), without(record(), "training_config__val_windows")
BAD_STEP = [{**line, "loss": 9.0} if line["step"] == 23 else line for line in step_lines()]
SAID: dict[str, tuple[Any, ...]] = {
    "equal work": (record(), record(training_config__strategy="zero1")),
    "other work": (record(), record(**WORK)),
    "another recipe": (record(), record(**RECIPE)),
    "values that look alike when they are shortened": (record(), record(data__train_sha256="a" * 63 + "b")),
    "seeds that are equal as floats": tuple(record(training_config__seed=2**53 + more) for more in (0, 1)),
    "seeds that are no whole numbers": (NO_SEED, NO_SEED),
    "a known difference and an unknown fact": (record(), record(training_config__seq_len=64, data__val_sha256=None)),
    "a null setting against a number": (
        record(),
        record(training_config__scheduler={"type": "WarmupCosineLR", "params": {"warmup_num_steps": None}}),
    ),
    "two others differ, and the baseline is of the older generation": (
        flat_record(),
        record(training_config__global_batch_size=8),
        record(training_config__global_batch_size=16),
    ),
    "a model without any size": (record(), without(record(), "training_config__model")),
    "the older generation, and later facts that no run recorded": (flat_record(), BARE),
    "one run": (record(),),
    "runs that did not end": tuple(record(status=status) for status in ("running", "interrupted", "failed")),
    "inference of other lengths": (record(), record(inference__new_tokens=100), flat_record()),
    "other hardware": (record(), record(hardware__cpu_name="Other CPU")),
    "clouds call many CPUs by one name": (
        record(hardware__instruction_sets="AVX2"),
        record(hardware__instruction_sets="AVX2, AMX"),
    ),
    "instruction sets that one run did not record": (record(), record(hardware__instruction_sets="AVX2")),
    "busy and idle machines": tuple(
        record(segments=[{"first_step": 1, "last_step": 40, "cpu_share_of_others": share}]) for share in (0.37, 0.05)
    ),
    "one bad step": (record(), (record(), BAD_STEP)),
    "no common step": (record(), (record(), [{"step": 50, "loss": 4.0}, {"step": 50, "val_loss": 4.0}])),
    "losses nearly equal in fp32": (record(), (record(), step_lines(shift=0.015))),
    "losses that differ in fp32": (record(), (record(), step_lines(shift=0.03))),
    **{
        f"losses that differ by {shift} in bf16": (
            record(training_config__precision="bf16"),
            (record(training_config__precision="bf16"), step_lines(shift=shift)),
        )
        for shift in (0.03, 0.06)
    },
}
"""Records, and the lines of their steps if they are others than ``step_lines``."""


@pytest.fixture
def read(tmp_path):
    """Write records (and step lines) and read them back; the runs are called a, b and so on."""

    def read_records(*given):
        both = [each if isinstance(each, tuple) else (each, step_lines()) for each in given]
        paths = [write_run(tmp_path / name, *each[:1], lines=each[1]) for name, each in zip("abc", both, strict=False)]
        return [read_run(path, name=path.parent.name) for path in paths]

    return read_records


@pytest.mark.parametrize("case", SAID)
def test_what_is_said_of_runs(read, case, snapshot):
    runs = read(*SAID[case])
    said = [judge(runs).line(), *work_stamps(judge(runs)), *inference_stamps(runs), *stamps(runs), machine_line(runs)]
    said += [equal_loss_line(runs[0], other) for other in runs[1:]]
    assert "\n".join(said) == snapshot


@pytest.mark.parametrize("path", [*WORK, *RECIPE])
def test_each_fact_decides_alone_and_is_unknown_where_it_is_missing(read, path):
    assert judge(read(record(), record(**{path: (WORK | RECIPE)[path]}))).answer == "no"
    for values in (record(**{path: None}), without(record(), path)):
        if path.startswith("summary__"):
            assert judge(read(record(), values)).answer == "yes"  # it is known from the epochs
            values["epochs"] = []
        assert judge(read(record(), values)).answer == "unknown"
        later = path in {"training_config__val_windows", "training_config__optimizer_params"}
        assert judge(read(values, values)).answer == ("yes" if later else "unknown")


@pytest.mark.parametrize("others", ["resumed too", "never resumed"])
def test_changes_at_resume_are_unknown_if_no_run_recorded_them(read, others):
    """One of the two may have resumed with other data, or with Zero++."""
    resumed = record(resumed_from="step-00000030")
    other = record(resumed_from="step-00000010") if others == "resumed too" else without(record(), "resumed_from")
    verdict = judge(read(resumed, other))
    assert verdict.answer == "unknown"
    assert verdict.unknown["a"] == ("quantized communication", "changed at resume")


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


def split(place: str) -> Pair:
    return Asked(flags=OPTIMIZED, ranks=2), Asked(flags=OPTIMIZED, ranks=2, recipe={place: 2})


def as_options(**changes: Any) -> Pair:
    """Options set after the checks: they need a compiler, a GPU, or an existing run in the folder."""
    return Asked(), Asked(adapt=lambda config: replace(config, options=replace(config.options, **changes)))


def of_recipe(**changes: Any) -> Pair:
    """What a recipe is called, and its text."""
    return Asked(), Asked(adapt=lambda config: replace(config, recipe=replace(config.recipe, **changes)))


def published(config: RunConfig) -> RunConfig:
    """``config`` with initial weights as a resumed run recorded them."""
    shape = {name: value for name, value in config.model.as_dict().items() if name != "dropout"}
    return replace(config, init_from=InitFrom(given="somebody/gpt2", shape=shape, sha256="5" * 64))


CHANGE = {"step": 1, "name": "optimizer", "before": {"lr": 0.1}, "after": {"lr": 0.001}}


def _two_values(key: Field, *numbers: int) -> tuple[Any, Any]:
    named = {"device": ("none", "cpu"), "nvme_path": ("/a", "/b"), "block_size": (4096, 8192)}
    return named.get(key.name) or ((False, True) if isinstance(key.default, bool) else numbers)


FLAGS: dict[str, Any] = {
    "num_heads": 4, "embedding_size": 32, "vocab_size": 300, "dropout": 0.1, "mask_documents": True, "seq_length": 8,
    "max_val_steps": 1, "global_batch_size": 4, "micro_batch_size_per_gpu": 2, "grad_accum_steps": 4,
    "precision": "bf16", "device": "auto", "save_mode": "async", "on_save_failure": "continue", "track": "csv",
    "plan": Path("plan.json"), "on_event": "true", "stall_timeout": 90.0, "spot_notice": "aws",
}  # fmt: skip
"""Values that are no default. Of other flags 3 is one, and of switches that they are given."""
CHANGED: dict[str, Pair] = {
    **{f"--{each.name}": flag(each.name, FLAGS.get(each.name, each.default is False or 3)) for each in fields(Options)},
    **{f"--{name}": as_options(**{name: True}) for name in ("compile", "cuda_graphs", "resume", "overwrite")},
    "--run_type": (Asked(), Asked(flags={"run_type": "ddp"}, ranks=2)),
    "--checkpoint_path": (Asked(), Asked(adapt=lambda config: replace(config, run_dir=config.run_dir / "deeper"))),
    "--deepspeed_config": as_options(deepspeed_config=Path("another.json")),
    "--model_size": flag("model_size", "tiny", before="demo", seq_length=SEQUENCE, num_layers=None, num_heads=None,
                         embedding_size=None, max_position_embeddings=None),
    "--init_from": (Asked(), Asked(adapt=published)),
    "--max_position_embeddings": flag("max_position_embeddings", 32, seq_length=SEQUENCE),
    "--epochs": flag("epochs", 2, max_train_steps=None),
    "--allow_changed": (Asked(), Asked(changes=[CHANGE])),
    "model.dropout": flag("dropout", 0.1),
    "recipe.path": of_recipe(path=Path("another.json")),
    "recipe.sha256": of_recipe(sha256="5" * 64),
    "recipe.raw": key("dump_state", None, False),
    **{f"recipe.{name}": key(name, before, after) for name, (before, after) in {
        "gradient_clipping": (1.0, 0.5), "train_batch_size": (8, 4), "train_micro_batch_size_per_gpu": (None, 2),
        "gradient_accumulation_steps": (None, 4), "steps_per_print": (None, 3)}.items()},
    "pipeline.partition": key("pipeline.partition", None, "uniform", flags=OPTIMIZED,
                                     recipe={"pipeline.stages": 2}, ranks=2),
    **{f"recipe.{name}": key(name, None, name != "zero_force_ds_cpu_optimizer", flags=OPTIMIZED) for name in (
        "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "wall_clock_breakdown", "memory_breakdown",
        "dump_state")},
    "tensor_parallel.autotp_size": split("tensor_parallel.autotp_size"),
    "pipeline.stages": split("pipeline.stages"),
    "recipe.sequence_parallel_size": split("sequence_parallel_size"),
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
    **{f"fp16.{name}": scaling(name, None, value) for name, value in {
        "loss_scale": 1024.0, "initial_scale_power": 8, "loss_scale_window": 100, "hysteresis": 3,
        "consecutive_hysteresis": True, "min_loss_scale": 2}.items()},
    "ddp.bucket_cap_mb": key("dsgpt.ddp.bucket_cap_mb", None, 1.0, flags={"run_type": "ddp"}, ranks=2),
    "ddp.gradient_as_bucket_view": key("dsgpt.ddp.gradient_as_bucket_view", None, False, flags={"run_type": "ddp"},
                                       ranks=2),
    "fsdp.reshard_after_forward": key("dsgpt.fsdp.reshard_after_forward", None, False, flags={"run_type": "fsdp"},
                                      ranks=2),
    "fsdp.cpu_offload": key("dsgpt.fsdp.cpu_offload", None, True, flags={"run_type": "fsdp"}, ranks=2),
    "fsdp.accumulation": key("dsgpt.fsdp.accumulation", None, "sharded", flags={"run_type": "fsdp"}, ranks=2),
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
    return [each for one in [*get_args(hint), *getattr(hint, "__metadata__", ())] for each in (one, *_parts(one))]


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


def runs(folder: Path, *asked: Asked) -> list[Run]:
    """The runs a and b, which are asked for otherwise."""
    assert asked[0] != asked[1]
    return [run_of(folder / name, each, name=name) for name, each in zip("ab", asked, strict=True)]


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - {"--train_data_path", "--val_data_path"}))
def test_a_difference_that_counts_is_other_work(tmp_path, name):
    verdict = judge(runs(tmp_path, *CHANGED[name]))
    assert verdict.answer == "no"
    assert any(difference.fact.startswith(CHANGES[name]) for difference in verdict.differences), verdict.line()


@pytest.mark.parametrize("name", sorted(EXECUTION_ONLY))
def test_a_harmless_difference_is_the_same_work(tmp_path, name):
    assert judge(runs(tmp_path, *CHANGED[name])).line() == "same work: yes"


@pytest.mark.parametrize("name", ["train", "val"])
def test_other_data_counts(tmp_path, name):
    other = write_tokens(tmp_path / "other.bin", random_ids(TOKENS, seed=9))
    verdict = judge(runs(tmp_path, Asked(), Asked(flags={f"{name}_data_path": other})))
    assert verdict.answer == "no"
    assert {difference.fact for difference in verdict.differences} >= {CHANGES[f"--{name}_data_path"][0]}


def test_ids_of_another_width_are_other_data(tmp_path):
    """The same bytes, and so the same sha256, read as half as many ids."""
    ids = random_ids(2 * TOKENS - 1)
    ids[1::2] = 0
    narrow = write_tokens(tmp_path / "narrow" / "train.bin", ids[:-1])
    wide = write_tokens(tmp_path / "wide" / "train.bin", ids[:-1], dtype="uint32", tokens=TOKENS - 1)
    verdict = judge(runs(tmp_path, *(Asked(flags={"train_data_path": path}) for path in (narrow, wide))))
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
        ),
        "changed at resume": lambda record: (record.pop("changed_at_resume"), record.update(resumed_from="step-1")),
    }
    fp16 = Asked(recipe=DYNAMIC, elsewhere=True, adapt=in_fp16)  # other precisions have no loss scaling
    new = run_of(tmp_path / "new", fp16, name="new")
    old = run_of(tmp_path / "old", fp16, name="old", change=places[fact])
    assert judge([new, old]).line() == f"same work: unknown (old did not record {fact})"
    assert judge([old, old]).answer == ("unknown" if fact == "changed at resume" else "yes")

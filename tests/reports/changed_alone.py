"""For each option, recipe key and model field, two runs that differ only in it."""

from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

from real_records import WITHOUT_SHAPE, Asked
from small_run import SEQUENCE

from dsgpt.config.inputs import InitFrom
from dsgpt.config.recipe_blocks import ActivationCheckpointing, AioRecipe, OffloadOptimizer, OffloadParam, ZeroRecipe
from dsgpt.config.run_config import RunConfig

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
    "--run_type": (Asked(), Asked(flags={"run_type": "ddp"}, ranks=2)),
    "--checkpoint_path": (Asked(), Asked(adapt=lambda config: replace(config, run_dir=config.run_dir / "deeper"))),
    "--deepspeed_config": (Asked(), Asked(recipe_name="another.json")),
    "--model_size": flag("model_size", "tiny", before="demo", seq_length=SEQUENCE, **WITHOUT_SHAPE),
    "--init_from": (Asked(), Asked(adapt=published)),
    "--num_layers": flag("num_layers", 3),
    "--num_heads": flag("num_heads", 4),
    "--embedding_size": flag("embedding_size", 32),
    "--max_position_embeddings": flag("max_position_embeddings", 32, seq_length=SEQUENCE),
    "--vocab_size": flag("vocab_size", 300),
    "--dropout": flag("dropout", 0.1),
    "--seq_length": flag("seq_length", 8),
    "--epochs": flag("epochs", 2, max_train_steps=None),
    "--max_train_steps": flag("max_train_steps", 3),
    "--max_val_steps": flag("max_val_steps", 1),
    "--global_batch_size": flag("global_batch_size", 4),
    "--micro_batch_size_per_gpu": flag("micro_batch_size_per_gpu", 2),
    "--grad_accum_steps": flag("grad_accum_steps", 4),
    "--enforce_global_batch_size": flag("enforce_global_batch_size", True),
    "--precision": flag("precision", "bf16"),
    "--device": flag("device", "auto"),
    "--threads_per_device": flag("threads_per_device", 2),
    "--num_workers": flag("num_workers", 1),
    "--compile": as_options(compile=True),
    "--activation_checkpointing": flag("activation_checkpointing", True),
    "--steps_per_print": flag("steps_per_print", 1),
    "--monitor_every": flag("monitor_every", 0.0),
    "--profile_comm": flag("profile_comm", 2),
    "--profile": flag("profile", 2),
    "--eval_every": flag("eval_every", 1),
    "--save_every": flag("save_every", 1),
    "--keep_checkpoints": flag("keep_checkpoints", 5),
    "--save_mode": flag("save_mode", "async"),
    "--on_save_failure": flag("on_save_failure", "continue"),
    "--track": flag("track", "csv"),
    "--seed": flag("seed", 7),
    "--resume": as_options(resume=True),
    "--allow_changed": (Asked(), Asked(changes=[CHANGE])),
    "--overwrite": as_options(overwrite=True),
    "--verify_data": flag("verify_data", True),
    "--no_inference": flag("no_inference", True),
    "--dry_run": flag("dry_run", True),
    "--max_hours": flag("max_hours", 1.0),
    "--max_cost": flag("max_cost", 1.0),
    "--price_per_gpu_hour": flag("price_per_gpu_hour", 1.0),
    "--plan": flag("plan", Path("plan.json")),
    "--on_event": flag("on_event", "true"),
    "--local_rank": flag("local_rank", 0),
    "model.n_layer": flag("num_layers", 3),
    "model.n_head": flag("num_heads", 4),
    "model.n_embd": flag("embedding_size", 32),
    "model.block_size": flag("max_position_embeddings", 32, seq_length=SEQUENCE),
    "model.vocab_size": flag("vocab_size", 300),
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

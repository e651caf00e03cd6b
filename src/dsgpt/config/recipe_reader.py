"""Reads and checks a recipe file, DeepSpeed's own JSON with our optional ``dsgpt`` block, whole before it complains."""

import hashlib
import re
from pathlib import Path
from typing import Any

from dsgpt.common.json_files import JsonError, clipped, parse_json, read_bytes
from dsgpt.common.problems import Problems, Section, is_number
from dsgpt.config import recipe_keys as keys
from dsgpt.config.recipe import (
    DEFAULT_GRADIENT_CLIPPING,
    DdpRecipe,
    FsdpRecipe,
    LossScaling,
    OptimizerRecipe,
    Recipe,
    SchedulerRecipe,
)
from dsgpt.config.recipe_zero import read_zero
from dsgpt.runtime.topology import ParallelSizes

_MAX_BYTES = 1 << 20


def read_recipe(path: Path, problems: Problems) -> Recipe | None:
    """Read and check a recipe; mistakes go to ``problems``, and None comes back where no recipe can be made of it."""
    try:
        data = read_bytes(path, max_bytes=_MAX_BYTES)
    except JsonError as error:
        problems.add(f"--deepspeed_config {path}: cannot be read ({error}); recipes are in ds_configs/")
        return None
    try:
        raw = parse_json(data)
    except JsonError as error:
        problems.add(f"--deepspeed_config {path}: is not valid JSON: {error}")
        return None
    if not isinstance(raw, dict):
        problems.add(f"--deepspeed_config {path}: must be an object in braces, not {clipped(raw)}")
        return None
    top = Section(raw, place=str(path), problems=problems)
    top.check_keys(keys.SHARED_KEYS | keys.DEEPSPEED_KEYS.keys() | set(keys.PARALLEL_KEYS), refused=keys.REFUSED_KEYS)
    top.check_kinds(keys.DEEPSPEED_KEYS)
    _refuse_auto(raw, str(path), problems)
    optimizer = _read_optimizer(top)
    parallel, partition = _read_parallel(top)
    ddp, fsdp = _read_torch_strategies(top)
    rest = {
        "scheduler": _read_scheduler(top),
        "gradient_clipping": top.number("gradient_clipping", DEFAULT_GRADIENT_CLIPPING, low=0),
        "precision": _read_precision(top),
        "loss_scaling": _read_loss_scaling(top),
        "train_batch_size": top.whole("train_batch_size", None, low=1),
        "micro_batch_size": top.whole("train_micro_batch_size_per_gpu", None, low=1),
        "gradient_accumulation_steps": top.whole("gradient_accumulation_steps", None, low=1),
        "steps_per_print": top.whole("steps_per_print", None, low=1),
        "activation_checkpointing": _read_activation_checkpointing(top),
        "parallel": parallel,
        "pipeline_partition": partition,
        **read_zero(top),
    }
    if optimizer is None:
        return None
    return Recipe(
        path=path,
        sha256=hashlib.sha256(data).hexdigest(),
        raw=raw,
        optimizer=optimizer,
        ddp=ddp,
        fsdp=fsdp,
        deepspeed_only=tuple(key for key in top.values if key in keys.DEEPSPEED_KEYS or key in keys.PARALLEL_KEYS),
        **rest,
    )


def _refuse_auto(value: Any, place: str, problems: Problems) -> None:
    """``"auto"`` is filled in by other trainers; here every value has one meaning."""
    if value == "auto":
        problems.add(f'{place} is "auto": write the value, or leave the key out for its default')
    elif isinstance(value, dict):
        for key, inner in value.items():
            _refuse_auto(inner, f"{place}: {key}", problems)


def _read_optimizer(top: Section) -> OptimizerRecipe | None:
    block = top.section("optimizer")
    if "optimizer" not in top.values:
        top.complain("optimizer", 'is missing; for example {"type": "AdamW", "params": {"lr": 0.0006}}')
    if block is None:
        return None
    block.check_keys({"type", "params"})
    kind = block.choice("type", None, keys.OPTIMIZER_PARAMS)
    params = block.section("params")
    if kind is None or params is None:
        if not {"type", "params"} <= set(block.values):
            block.complain("", 'needs "type" (AdamW or SGD) and "params" with at least "lr"')
        return None
    params.check_keys(keys.OPTIMIZER_PARAMS[kind])
    lr = params.number("lr", None, low=0)
    momentum, nesterov = params.number("momentum", 0.0, low=0, high=1), params.boolean("nesterov", False)
    if nesterov and not momentum:
        params.complain("nesterov", "needs a momentum above 0")
    if "lr" not in params.values:
        params.complain("lr", "is missing")
    if lr is None:
        return None
    return OptimizerRecipe(
        type=kind,
        lr=lr,
        betas=_read_betas(params),
        eps=params.number("eps", 1e-8, low=0),
        weight_decay=params.number("weight_decay", 0.0, low=0),
        momentum=momentum,
        nesterov=nesterov,
        torch_adam=params.boolean("torch_adam", False),
    )


def _read_betas(params: Section) -> tuple[float, float]:
    betas = params.values.get("betas", [0.9, 0.999])
    if not isinstance(betas, list) or len(betas) != 2 or not all(is_number(b) and 0 <= b < 1 for b in betas):
        params.complain("betas", f"must be two numbers of at least 0 and below 1, not {betas!r}")
        return (0.9, 0.999)
    return (float(betas[0]), float(betas[1]))


def _read_scheduler(top: Section) -> SchedulerRecipe | None:
    block = top.section("scheduler")
    if block is None:
        return None
    block.check_keys({"type", "params"})
    kind = block.choice("type", None, keys.SCHEDULER_PARAMS)
    if kind is None:
        if "type" not in block.values:
            block.complain("type", f"is missing; one of {', '.join(keys.SCHEDULER_PARAMS)}")
        return None
    params = block.section("params") or Section({}, place=block.place, problems=Problems())
    params.check_keys(keys.SCHEDULER_PARAMS[kind])
    return SchedulerRecipe(
        type=kind,
        total_num_steps=params.whole("total_num_steps", None, low=1),
        warmup_num_steps=params.whole("warmup_num_steps", 1000, low=1),
        warmup_type=params.choice("warmup_type", "log", ("log", "linear")),
        warmup_min_lr=params.number("warmup_min_lr", 0.0, low=0),
        warmup_max_lr=params.number("warmup_max_lr", None, low=0),
        warmup_min_ratio=params.number("warmup_min_ratio", 0.0, low=0, high=1),
        cos_min_ratio=params.number("cos_min_ratio", 0.0001, low=0, high=1),
    )


def _read_precision(top: Section) -> str | None:
    enabled: dict[str, bool] = {}
    for name, known in keys.PRECISION_KEYS.items():
        block = top.section(name)
        if block is not None:
            block.check_keys(known)
            enabled[name] = block.boolean("enabled", False)
    if all(enabled.values()) and len(enabled) > 1:
        top.complain("fp16", "and bf16 are both enabled; keep one")
    chosen = [name for name, on in enabled.items() if on]
    return chosen[0] if chosen else ("fp32" if enabled else None)


def _read_loss_scaling(top: Section) -> LossScaling:
    block = top.section("fp16")
    if block is None:
        return LossScaling()
    return LossScaling(
        loss_scale=block.number("loss_scale", 0.0, low=0),
        initial_scale_power=block.whole("initial_scale_power", 16, low=0, high=32),
        loss_scale_window=block.whole("loss_scale_window", 1000, low=1),
        hysteresis=block.whole("hysteresis", 2, low=1),
        consecutive_hysteresis=block.boolean("consecutive_hysteresis", False),
        min_loss_scale=block.whole("min_loss_scale", 1, low=1),
    )


def _read_parallel(top: Section) -> tuple[ParallelSizes, str]:
    """How the model is split, and how a pipeline deals its layers to stages."""
    sizes, partition = {"sequence": top.whole("sequence_parallel_size", 1, low=1)}, "parameters"
    if (tensor := top.section("tensor_parallel")) is not None:
        tensor.check_keys({"autotp_size"}, refused=keys.REFUSED_TENSOR_KEYS)
        sizes["tensor"] = tensor.whole("autotp_size", 1, low=1)
    if (pipeline := top.section("pipeline")) is not None:
        pipeline.check_keys({"stages", "partition"}, refused=keys.REFUSED_PIPELINE_KEYS)
        sizes["pipeline"] = pipeline.whole("stages", 1, low=1)
        given = pipeline.values.get("partition", partition)
        if isinstance(given, str) and _deals_layers(given):
            partition = given
        else:
            layers = ", ".join(keys.PIPELINE_LAYERS)
            pipeline.complain(
                "partition",
                f'must be "parameters", "uniform", or "type:" and a pattern that one of {layers} matches, such as '
                f'"type:block"; not {given!r}',
            )
    return ParallelSizes(**sizes), partition


def _deals_layers(partition: str) -> bool:
    """Whether DeepSpeed can deal layers to stages so; of a pattern it reads what stands before a second colon."""
    kind, _, pattern = partition.partition(":")
    if kind != "type" or ":" in pattern:
        return partition in {"parameters", "uniform"}
    try:
        return any(re.search(pattern, name, re.IGNORECASE) for name in keys.PIPELINE_LAYERS)
    except re.error:
        return False


def _read_activation_checkpointing(top: Section) -> bool:
    """The block's presence asks for it; what DeepSpeed can do besides is not built here."""
    block = top.section("activation_checkpointing")
    if block is None:
        return False
    block.check_keys(keys.ACTIVATION_CHECKPOINTING_KEYS)
    for name in keys.ACTIVATION_CHECKPOINTING_KEYS & block.values.keys():
        if block.values[name] is not False:
            block.complain(name, "is not supported; blocks are recomputed whole, so leave it out or set it to false")
    return True


def _read_torch_strategies(top: Section) -> tuple[DdpRecipe, FsdpRecipe]:
    """The ``dsgpt`` block: what DeepSpeed's schema has no words for."""
    ours = top.section("dsgpt") or Section({}, place=f"{top.place}: dsgpt", problems=Problems())
    ours.check_keys({"ddp", "fsdp"})
    ddp, fsdp = ours.section("ddp"), ours.section("fsdp")
    ddp_recipe, fsdp_recipe = DdpRecipe(), FsdpRecipe()
    if ddp is not None:
        ddp.check_keys({"bucket_cap_mb", "gradient_as_bucket_view"})
        bucket = ddp.number("bucket_cap_mb", ddp_recipe.bucket_cap_mb, low=0)
        if bucket == 0:
            ddp.complain("bucket_cap_mb", "must be above 0")
        ddp_recipe = DdpRecipe(
            bucket_cap_mb=bucket, gradient_as_bucket_view=ddp.boolean("gradient_as_bucket_view", True)
        )
    if fsdp is not None:
        fsdp.check_keys({"reshard_after_forward", "reduce_dtype", "cpu_offload"})
        fsdp_recipe = FsdpRecipe(
            reshard_after_forward=fsdp.boolean("reshard_after_forward", True),
            reduce_dtype=fsdp.choice("reduce_dtype", "fp32", ("fp32", "low")),
            cpu_offload=fsdp.boolean("cpu_offload", False),
        )
    return ddp_recipe, fsdp_recipe

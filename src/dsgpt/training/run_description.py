"""The settings of a run: as the console prints them, as the record repeats them, and those a resumed run must match."""

import shlex
import socket
import sys
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from dsgpt.common.text import counted
from dsgpt.config.run_config import RunConfig
from dsgpt.data.token_file import TokenFile
from dsgpt.machine.device import describe_hardware, software_versions
from dsgpt.planner.memory import STEP, peak_memory, worst_peak
from dsgpt.planner.setup import Setup
from dsgpt.planner.strategies import largest_model_state, most_sent_bytes
from dsgpt.record.provenance import git_commit
from dsgpt.strategies.deepspeed.setup import engine_config

CHANGES_KEY = "changed_at_resume"
"""Key of the record: what changed at resumes, as ``RunState.changes``."""
EXECUTED_BY = "executed by"
"""The name of a change of strategy or ranks, which needs no ``--allow_changed``."""

CHANGEABLE = {
    "data": ("train data", "validation data", "validation windows"),
    "recipe": ("optimizer", "schedule", "gradient clipping", "loss scaling", "total steps"),
}
"""What ``--allow_changed`` may name, and which of ``settings_to_match`` may then differ.

Model, seed, sequence length and global batch never change, because they define the samples of a step, nor do the
optimizer's type and the precision, because they define its state. Launcher, strategy, ranks, micro batch and
accumulation may always change.
"""


def plan_lines(config: RunConfig) -> list[str]:
    """Topology, batch split, model and length of the run, as the console prints them."""
    topology, batch, model = config.topology, config.batch, config.model
    threads = f", {counted(config.threads_per_device, 'CPU thread')} each" if config.threads_per_device else ""
    ranks, noun = batch.data_parallel_size, "data rank" if topology.sizes.ranks_per_copy > 1 else "rank"
    per_epoch = config.order.steps_per_epoch
    clipping = config.recipe.gradient_clipping
    return [
        f"strategy    {config.strategy_name} ({config.recipe.path}), started by {topology.launcher}",
        f"topology    {topology.world_size} x {config.device}{threads}, {_split(config)}; precision {config.precision}",
        f"batch       {batch.global_batch_size} sequences = {batch.micro_batch_size} micro x "
        f"{batch.gradient_accumulation_steps} accumulation x {counted(ranks, noun)}",
        f"model       {config.model_size}: {model.parameter_count():,} parameters, {model.n_layer} layers, "
        f"{model.n_head} heads, width {model.n_embd}, vocabulary {model.vocab_size:,} ({model.padded_vocab_size:,} "
        "with padding)",
        f"optimizer   {config.recipe.optimizer.type}, lr {config.recipe.optimizer.lr:g}, "
        f"{config.recipe.scheduler.type if config.recipe.scheduler else 'constant'}, "
        f"gradient clipping {f'at {clipping:g}' if clipping else 'off'}",
        f"data        {config.train.tokens:,} tokens in {config.order.windows:,} windows of {config.seq_length}, "
        f"validation on {config.val_windows:,} windows",
        f"length      {config.total_steps:,} optimizer steps of {config.tokens_per_step:,} tokens "
        f"({config.total_steps / per_epoch:.2f} epochs of {per_epoch:,} steps)",
        f"state       {_state_line(config)}",
        f"run folder  {config.run_dir}",
        *([f"tracking    {', '.join(dict.fromkeys(config.options.track))}"] if config.options.track else []),
        *([f"start       from the weights of {config.init_from.given}"] if config.init_from else []),
        *(f"note        {notice}" for notice in config.notices),
    ]


def setup_of(config: RunConfig) -> Setup:
    """The settings from which ``dsgpt.planner`` makes its predictions."""
    return Setup(
        run_type=config.run_type,
        model=config.model,
        recipe=config.recipe,
        world_size=config.topology.world_size,
        precision=config.precision,
        micro_batch_size=config.batch.micro_batch_size,
        gradient_accumulation_steps=config.batch.gradient_accumulation_steps,
        seq_length=config.seq_length,
        activation_checkpointing=config.activation_checkpointing,
    )


def predicted_peak_memory(config: RunConfig) -> dict[str, Any] | None:
    """The predicted peak of tensor memory in a step, of rank 0 and of the rank that needs most; None for Zero++."""
    if _has_no_formula(config):
        return None
    setup = setup_of(config)
    first = peak_memory(setup, device=config.device, among=STEP)
    rank, worst = worst_peak(setup, device=config.device, among=STEP)
    return {"rank0": first.as_dict(), "worst": {"rank": rank, **worst.as_dict()}}


def _has_no_formula(config: RunConfig) -> bool:
    return config.run_type == "optimized" and config.recipe.zero_plus_plus


def _state_line(config: RunConfig) -> str:
    """Bytes that a rank will hold and send, by the formulas."""
    if _has_no_formula(config):
        return "not known for Zero++"
    setup = setup_of(config)
    state, sent = largest_model_state(setup), most_sent_bytes(setup)
    _, peak = worst_peak(setup, device=config.device, among=STEP)
    elsewhere = f", {state.on_device / 1e6:,.1f} MB of it on the device" if state.off_device else ""
    return (
        f"{state.total / 1e6:,.1f} MB of weights, gradients and optimizer per rank{elsewhere}; "
        f"{peak.total / 1e6:,.1f} MB at the peak of a step, with activations and buffers; "
        f"each step a rank sends {sent / 1e6:,.1f} MB"
    )


def _split(config: RunConfig) -> str:
    """``all data parallel``, or ``pipeline 2 x tensor 2 x data 2``."""
    sizes = config.topology.sizes
    if sizes.ranks_per_copy == 1:
        return "all data parallel"
    return f"{sizes} x data {config.topology.data_parallel_size}"


def describe_run(
    config: RunConfig,
    *,
    hashes: dict[str, str | None],
    resumed_from: str | None,
    changes: Sequence[dict[str, Any]],
    run_id: str | None,
) -> dict[str, Any]:
    """The part of the record that does not change while this process trains.

    Args:
        config: the run.
        hashes: sha256 of ``train`` and ``val``, and of the published ``initial weights``, None where there are none.
        resumed_from: name of the checkpoint; None for a fresh start.
        changes: what changed at resumes.
        run_id: that of the run to resume; None for a new run.
    """
    return {
        "run_id": run_id or uuid.uuid4().hex,
        "timestamp_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "resumed_from": resumed_from,
        CHANGES_KEY: list(changes),
        "git_commit": git_commit(),
        "command_line": shlex.join(sys.argv),
        "env": {**software_versions(), "allowed_faults": ", ".join(config.allowed_faults) or None},
        "host": socket.gethostname(),
        "hardware": {
            **describe_hardware(config.device),
            "world_size": config.topology.world_size,
            "local_world_size": config.topology.local_world_size,
            "threads_per_device": config.threads_per_device,
            "launcher": config.topology.launcher,
        },
        "data": {**_data_file("train", config.train, hashes), **_data_file("val", config.val, hashes)},
        "training_config": _training_config(config, hashes),
        "deepspeed_config": {
            "path": str(config.recipe.path),
            "sha256": config.recipe.sha256,
            "given": config.recipe.raw,
            "resolved": engine_config(config) if config.run_type == "optimized" else None,
        },
    }


def _data_file(name: str, file: TokenFile, hashes: dict[str, str | None]) -> dict[str, Any]:
    return {
        f"{name}_path": str(file.path),
        f"{name}_sha256": hashes[name],
        f"{name}_size_bytes": file.size_bytes,
        f"{name}_tokens": file.tokens,
        f"{name}_source": file.sidecar.source,
    }


def _training_config(config: RunConfig, hashes: dict[str, str | None]) -> dict[str, Any]:
    options, recipe, batch = config.options, config.recipe, config.batch
    return {
        "run_type": config.run_type,
        "strategy": config.strategy_name,
        "model_name": "gpt2",
        "model_size": config.model_size,
        "model": config.model.as_dict(),
        "parameters": config.model.parameter_count(),
        "init_from": {"source": config.init_from.given, "sha256": hashes["initial weights"]}
        if config.init_from
        else None,
        "seq_len": config.seq_length,
        "epochs": config.epochs,
        "max_train_steps": options.max_train_steps,
        "total_steps": config.total_steps,
        "steps_per_epoch": config.order.steps_per_epoch,
        "val_windows": config.val_windows,
        "micro_batch_size_per_gpu": batch.micro_batch_size,
        "grad_accum_steps": batch.gradient_accumulation_steps,
        "global_batch_size": batch.global_batch_size,
        "lr": recipe.optimizer.lr,
        "optimizer": recipe.optimizer.type,
        "optimizer_params": asdict(recipe.optimizer),
        "scheduler": asdict(recipe.scheduler) if recipe.scheduler else {"type": "constant"},
        "gradient_clipping": recipe.gradient_clipping,
        "precision": config.precision,
        "loss_scaling": _loss_scaling(config),
        **_quantized(config),
        "zero_stage": recipe.zero_stage if config.run_type == "optimized" else None,
        "deepspeed_enabled": config.run_type == "optimized",
        "data_parallel_size": batch.data_parallel_size,
        "tensor_parallel_size": config.topology.sizes.tensor,
        "pipeline_parallel_size": config.topology.sizes.pipeline,
        "sequence_parallel_size": config.topology.sizes.sequence,
        "offload_optimizer": recipe.offload_optimizer if config.run_type == "optimized" else None,
        "offload_param": recipe.offload_param if config.run_type == "optimized" else None,
        "seed": options.seed,
        "eval_every": options.eval_every,
        "compile": options.compile,
        "activation_checkpointing": config.activation_checkpointing,
    }


def _loss_scaling(config: RunConfig) -> dict[str, Any]:
    """The keys of the ``fp16`` block that have an effect; a fixed scale disables the keys of dynamic scaling."""
    if config.precision != "fp16":
        return {"type": "none"}
    rules = asdict(config.recipe.loss_scaling)
    fixed = rules.pop("loss_scale")
    return {"type": "fixed", "loss_scale": fixed} if fixed else {"type": "dynamic", **rules}


def _quantized(config: RunConfig) -> dict[str, bool]:
    """Whether Zero++ quantizes what it sends; false in runs without DeepSpeed."""
    recipe, acts = config.recipe, config.run_type == "optimized"
    return {
        "quantized_weights": acts and recipe.zero_optimization.zero_quantized_weights,
        "quantized_gradients": acts and recipe.zero_optimization.zero_quantized_gradients,
    }


def settings_to_match(config: RunConfig, *, hashes: dict[str, str | None]) -> dict[str, Any]:
    """Settings that a resumed run must match, by the name that an error message gives them."""
    recipe = config.recipe
    settings = {**asdict(recipe.optimizer), "betas": list(recipe.optimizer.betas)}
    settings.pop("torch_adam")  # torch's code and DeepSpeed's compute the same update
    return {
        "model": config.model.as_dict(),
        "initial weights": hashes.get("initial weights"),
        "train data": hashes["train"],
        "validation data": hashes["val"],
        "seed": config.options.seed,
        "sequence length": config.seq_length,
        "global batch": config.batch.global_batch_size,
        "validation windows": config.val_windows,
        "total steps": config.total_steps,
        "optimizer type": settings.pop("type"),
        "optimizer": settings,
        "schedule": asdict(recipe.scheduler) if recipe.scheduler else None,
        "gradient clipping": recipe.gradient_clipping,
        "precision": config.precision,
        "loss scaling": asdict(recipe.loss_scaling) if config.precision == "fp16" else None,
    }

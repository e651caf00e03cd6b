"""The description of a run: its data, checked, and its settings.

The settings are printed on the console, repeated in the record, and compared when a run is resumed.
"""

import json
import logging
import shlex
import socket
import sys
import uuid
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dsgpt.common.errors import Problems, UserError
from dsgpt.common.files import sha256_of
from dsgpt.common.text import counted
from dsgpt.config.run_config import RunConfig
from dsgpt.data.data_set import DataSet
from dsgpt.data.token_file import TokenFile, TokenFileError, sidecar_path
from dsgpt.formats.tokenizer_files import fault_of, model_folder, other_meaning, token_ids
from dsgpt.machine.console import Progress
from dsgpt.machine.device import describe_hardware, software_versions
from dsgpt.planner.formulas import STEP, largest_model_state, most_sent_bytes, peak_memory, worst_peak
from dsgpt.planner.setup import Setup
from dsgpt.record.provenance import git_commit, sources_sha256
from dsgpt.strategies.deepspeed.setup import engine_config
from dsgpt.training.run_folder import ResumePoint

logger = logging.getLogger(__name__)

CHANGES_KEY = "changed_at_resume"
"""Key of the record: what changed at resumes, as ``RunState.changes``."""

# What the run trains on: checks of the data files, and of the published weights to start from.

TOKENIZER_FOLDER = "tokenizer"
"""Folder next to the token files; data preparation writes the tokenizer there."""


def data_tokenizer(file: TokenFile) -> tuple[Path | None, str]:
    """The folder of the tokenizer that made ``file``; None if the sidecar names none.

    Returns:
        The folder, and an empty message. If the tokenizer that the sidecar names is missing or a different one is
        there: None, and a message that says why the file must not be trained on.
    """
    folder, facts = file.path.parent / TOKENIZER_FOLDER, file.sidecar.tokenizer
    if facts is None:
        return None, ""
    vocabulary, fault = folder / "tokenizer.json", ""
    try:
        if not folder.is_dir() and not folder.is_symlink():
            fault = f"{folder}: is missing"
        elif reason := fault_of(folder):
            fault = f"{folder}: {reason}"
        elif not any(folder.iterdir()):
            fault = f"{folder}: is empty"
        elif facts.sha256 is not None:  # else made by another tool, or without a tokenizer.json
            if not vocabulary.is_file():
                fault = f"{vocabulary}: is missing"
            elif sha256_of(vocabulary) != facts.sha256:
                fault = f"{vocabulary}: is not the tokenizer that made {file.path.name}"
    except OSError as error:
        fault = f"{error.filename}: cannot be read ({error.strerror})"
    if not fault:
        return folder, ""
    sidecar = sidecar_path(file.path).name
    return None, (
        f"{fault}; the trained model could not read or write text: copy the folder {TOKENIZER_FOLDER}/ that was made "
        f'with {file.path.name} to {file.path.parent}, or set "tokenizer" to null in {sidecar} to train without one'
    )


def data_hash(file: TokenFile, *, verify: bool, problems: Problems) -> str | None:
    """The sha256 that identifies the file in records: the sidecar's, or computed if that is missing or in doubt.

    Args:
        file: the token file.
        verify: always read the whole file, and also compare its largest id with the sidecar's vocabulary size.
        problems: receives what differs from the sidecar; if the hash differs, None is returned.
    """
    doubt = file.doubt()
    if file.sidecar.sha256 and not doubt and not verify:
        return file.sidecar.sha256
    computed, what = None, f"hashing {file.path.name}"
    with closing(Progress(total=file.size_bytes, what=what, unit="B")) as progress:
        try:
            computed = file.verified_sha256(progress.advance)
        except TokenFileError as error:
            problems.add(str(error))
    if doubt and computed:
        logger.info(f"{doubt}: hashed again; the sha256 is that of its sidecar")
    vocabulary = file.sidecar.vocab_size
    if verify and vocabulary is not None and (largest := file.largest_id()) >= vocabulary:
        problems.add(f"{file.path}: its largest id is {largest}, but its sidecar says a vocabulary of {vocabulary}")
    return computed


def data_hashes(config: RunConfig) -> dict[str, str | None]:
    """The sha256 of ``train`` and ``val``, and of each of their files by its path.

    Raises:
        UserError: a file is not what its sidecar says.
    """
    problems, verify = Problems(), config.options.verify_data
    files = {str(file.path): file for data in (config.train, config.val) for file in data.files}
    hashes = {name: data_hash(file, verify=verify, problems=problems) for name, file in files.items()}
    problems.raise_if_any()  # else a changed file is reported again, as different from the checkpoint's

    def of_file(file: TokenFile) -> str | None:
        return hashes[str(file.path)]

    return {**hashes, "train": config.train.sha256(of_file, mixed=True), "val": config.val.sha256(of_file, mixed=False)}


def initial_weights_hash(config: RunConfig) -> str | None:
    """The sha256 of the published weights that the run starts or started from; None for random ones."""
    if config.init_from is None:
        return None
    if config.init_from.sha256:
        return config.init_from.sha256
    weights = config.init_from.weights(config.model)
    with closing(Progress(total=weights.bytes, what="hashing the initial weights", unit="B")) as progress:
        return weights.sha256(progress.advance)


def check_tokenizer(config: RunConfig, problems: Problems) -> str:
    """Compare the data's tokenizer with that of the published weights: each id must mean the same in both.

    Args:
        config: the run.
        problems: receives a difference.

    Returns:
        What could not be checked; empty if everything was.
    """
    if (source := config.init_from) is None or source.sha256:
        return ""
    data, _ = data_tokenizer(config.train.files[0])
    try:
        theirs = token_ids(model_folder(source.given, weights=False))
        ours = token_ids(data) if data else None
    except UserError as error:
        problems.add(*error.problems)
        return ""
    if theirs is None or ours is None:
        lacking = source.given if theirs is None else config.train.path
        return f"--init_from: {lacking} has no tokenizer: not checked whether an id means the same to weights and data"
    if (different := other_meaning(ours, theirs)) is not None:
        problems.add(
            f"--init_from {source.given}: its tokenizer did not make {config.train.path}, where id {ours[different]} "
            f"is {different!r}: prepare the text with it (data_prep/preprocess.py --tokenizer {source.given})"
        )
    return ""


# The settings of the run.


def plan_lines(config: RunConfig) -> list[str]:
    """Topology, batch split, model and length of the run, as the console prints them."""
    topology, batch, model = config.topology, config.batch, config.model
    threads = f", {counted(config.threads_per_device, 'CPU thread')} each" if config.threads_per_device else ""
    ranks, noun, split = batch.data_parallel_size, "rank", "all data parallel"
    if topology.sizes.ranks_per_copy > 1:
        noun, split = "data rank", f"{topology.sizes} x data {topology.data_parallel_size}"
    state = "not known for Zero++"
    if predicted := predicted_peak_memory(config):
        setup = setup_of(config)
        state_bytes, sent = largest_model_state(setup), most_sent_bytes(setup)
        elsewhere = f", {state_bytes.on_device / 1e6:,.1f} MB of it on the device" if state_bytes.off_device else ""
        state = (
            f"{state_bytes.total / 1e6:,.1f} MB of weights, gradients and optimizer per rank{elsewhere}; "
            f"{predicted['worst']['total'] / 1e6:,.1f} MB at the peak of a step, with activations and buffers; "
            f"each step a rank sends {sent / 1e6:,.1f} MB"
        )
    samples, sizes = config.total_steps * batch.global_batch_size, config.train.windows(config.seq_length)
    mixture = [
        f"mixture     {share:.2%} {name}: {samples * share / windows:.3g} epochs of {windows:,} windows"
        for (name, share), windows in zip(config.train.shares().items(), sizes, strict=True)
        if len(sizes) > 1
    ]
    per_epoch, clipping = config.order.steps_per_epoch, config.recipe.gradient_clipping
    return [
        f"strategy    {config.strategy_name} ({config.recipe.path}), started by {topology.launcher}",
        f"topology    {topology.world_size} x {config.device}{threads}, {split}; precision {config.precision}",
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
        *mixture,
        f"length      {config.total_steps:,} optimizer steps of {config.tokens_per_step:,} tokens "
        f"({config.total_steps / per_epoch:.2f} epochs of {per_epoch:,} steps)",
        f"state       {state}",
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
        compiled=config.options.compile,
        pad_logits=config.options.pad_logits,
        attended=config.attended_length,
    )


def predicted_peak_memory(config: RunConfig) -> dict[str, Any] | None:
    """The predicted peak of tensor memory in a step, of rank 0 and of the rank that needs most; None for Zero++."""
    if config.run_type == "optimized" and config.recipe.zero_plus_plus:
        return None
    setup = setup_of(config)
    first = peak_memory(setup, device=config.device, among=STEP)
    rank, worst = worst_peak(setup, device=config.device, among=STEP)
    return {"rank0": first.as_dict(), "worst": {"rank": rank, **worst.as_dict()}}


FROM_CONFIG = ("run_type", "model_size", "epochs", "total_steps", "val_windows", "precision", "attended_length")
FROM_OPTIONS = ("max_train_steps", "mask_documents", "eval_every", "compile", "pad_logits", "exact", "cuda_graphs")
FROM_RECIPE = ("zero_stage", "offload_optimizer", "offload_param")
"""Keys of the record's ``training_config`` that have the names of fields; those of the recipe only DeepSpeed knows."""


def describe_run(config: RunConfig, start: ResumePoint, *, hashes: dict[str, str | None]) -> dict[str, Any]:
    """The part of the record that does not change while this process trains.

    Args:
        config: the run.
        start: where it begins.
        hashes: of ``data_hashes``, and of the published ``initial weights``, None where there are none.
    """
    options, recipe, batch, source = config.options, config.recipe, config.batch, config.init_from
    optimized, zero = config.run_type == "optimized", recipe.zero_optimization
    loss_scaling: dict[str, Any] = {"type": "none"}
    if config.precision == "fp16":  # a fixed scale disables the keys of dynamic scaling
        rules = asdict(recipe.loss_scaling)
        fixed = rules.pop("loss_scale")
        loss_scaling = {"type": "fixed", "loss_scale": fixed} if fixed else {"type": "dynamic", **rules}
    return {
        "run_id": start.run_id or uuid.uuid4().hex,
        "timestamp_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "resumed_from": start.checkpoint and start.checkpoint.name,
        CHANGES_KEY: list(start.changes),
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
        "data": {**_data_facts(config.train, "train", hashes), **_data_facts(config.val, "val", hashes)},
        "training_config": {
            **{name: getattr(config, name) for name in FROM_CONFIG},
            **{name: getattr(options, name) for name in FROM_OPTIONS},
            "strategy": config.strategy_name,
            "model_name": "gpt2",
            "model": config.model.as_dict(),
            "parameters": config.model.parameter_count(),
            "init_from": source and {"source": source.given, "sha256": hashes["initial weights"]},
            "seed": options.seed,
            "seq_len": config.seq_length,
            "steps_per_epoch": config.order.steps_per_epoch,
            "micro_batch_size_per_gpu": batch.micro_batch_size,
            "grad_accum_steps": batch.gradient_accumulation_steps,
            "global_batch_size": batch.global_batch_size,
            "lr": recipe.optimizer.lr,
            "optimizer": recipe.optimizer.type,
            "optimizer_params": asdict(recipe.optimizer),
            "scheduler": asdict(recipe.scheduler) if recipe.scheduler else {"type": "constant"},
            "gradient_clipping": recipe.gradient_clipping,
            "loss_scaling": loss_scaling,
            "quantized_weights": optimized and zero.zero_quantized_weights,
            "quantized_gradients": optimized and zero.zero_quantized_gradients,
            "deepspeed_enabled": optimized,
            "data_parallel_size": batch.data_parallel_size,
            "activation_checkpointing": config.activation_checkpointing,
            **{f"{way}_parallel_size": size for way, size in asdict(config.topology.sizes).items()},
            **{name: getattr(recipe, name) if optimized else None for name in FROM_RECIPE},
        },
        "deepspeed_config": {
            "path": str(recipe.path),
            "sha256": recipe.sha256,
            "given": recipe.raw,
            "resolved": engine_config(config) if optimized else None,
        },
    }


def _data_facts(data: DataSet, name: str, hashes: Mapping[str, str | None]) -> dict[str, Any]:
    """The entries of the record's ``data``; ``NAME_sources`` is there only for several files."""
    facts: dict[str, Any] = {
        "path": str(data.path),
        "sha256": hashes[name],
        "size_bytes": sum(file.size_bytes for file in data.files),
        "tokens": data.tokens,
        "source": "; ".join(dict.fromkeys(file.sidecar.source for file in data.files if file.sidecar.source)) or None,
    }
    if len(data.files) > 1:
        facts["sources"] = [
            {
                "name": source.name,
                **({"share": data.shares()[source.name], "most_epochs": source.most_epochs} if name == "train" else {}),
                "files": [
                    {"path": path, "sha256": hashes.get(path), "size_bytes": file.size_bytes, "tokens": file.tokens}
                    for file in source.files
                    for path in [str(file.path)]
                ],
            }
            for source in data.sources
        ]
    return {f"{name}_{key}": value for key, value in facts.items()}


def facts_to_match(config: RunConfig, *, hashes: Mapping[str, str | None]) -> dict[str, str]:
    """What all machines of a run must have alike, by the name that an error gives it. Paths may differ."""
    own = {"local_rank", "spot_notice"}  # each machine waits for a notice of its own
    flags = {f"--{name}": value for name, value in vars(config.options).items() if name not in own}
    facts = {name: value for name, value in flags.items() if not isinstance(value, Path)}
    facts |= {f"the recipe's {key}": value for key, value in config.recipe.raw.items()}
    facts |= {f"sha256 of {name}": hashes[name] for name in ("train", "val")}
    facts |= {"end of masked documents": config.end_of_text}  # sidecars of the same data may differ
    facts |= {"hash of dsgpt's code": sources_sha256()[:12], "precision": config.precision}
    return {name: json.dumps(value, default=str, sort_keys=True) for name, value in facts.items()}


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
        "end of masked documents": config.end_of_text,  # checkpoints of earlier versions lack it
        "exact sums": config.options.exact or None,  # and this
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

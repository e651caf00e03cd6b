"""What every DeepSpeed strategy needs before its engine exists: the library, its configuration, and the optimizer."""

import contextlib
import copy
import io
import logging
import os
import warnings
from typing import Any

import torch
from torch import nn

from dsgpt.config.compatibility import nvme_paths
from dsgpt.config.recipe import DEEPSPEED_KEYS, Recipe
from dsgpt.config.run_config import RunConfig
from dsgpt.optimization.optimizer import build_optimizer, parameter_groups
from dsgpt.strategies.deepspeed.compiled_ops import load_ops


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for ``device``, silence it, and attach it to the existing process group."""
    os.environ["DS_ACCELERATOR"] = device.type
    if device.type == "cuda":
        os.environ["LOCAL_RANK"] = str(device.index)  # from which DeepSpeed takes the number of the GPU
    import deepspeed  # noqa: PLC0415 - reads DS_ACCELERATOR when imported
    import deepspeed.ops  # noqa: PLC0415

    _import_muon_uncompiled()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed 0.19.8 calls a collective by a name that torch 2.13 deprecates; users cannot change that.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.", category=FutureWarning)
    # The shared-memory all-reduce for CPU is compiled at first use, which needs a compiler and 25 s; gloo works too.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "nccl" if device.type == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    return deepspeed


def _import_muon_uncompiled() -> None:
    """Import Muon, which no recipe may name, without compiling it.

    Every ZeRO engine imports it to check whether its optimizer is Muon. Its kernels are decorated with
    ``torch.compile``, which imports all of Inductor at that moment: 628 modules, about 2 s in every rank.
    """
    from deepspeed.runtime import compiler  # noqa: PLC0415

    compiled = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401, PLC0415
    finally:
        compiler.compile = compiled


def quietly() -> contextlib.AbstractContextManager[Any]:
    """A context that drops what DeepSpeed prints without a logger: memory in use, layouts, names of keys it loads."""
    return contextlib.redirect_stdout(io.StringIO())


def engine_config(config: RunConfig) -> dict[str, Any]:
    """The JSON that DeepSpeed gets: the recipe's DeepSpeed keys, and resolved values for everything else."""
    recipe, batch = config.recipe, config.batch
    ds_config = {key: copy.deepcopy(recipe.raw[key]) for key in DEEPSPEED_KEYS if key in recipe.raw}
    ds_config.update(
        train_batch_size=batch.global_batch_size,
        train_micro_batch_size_per_gpu=batch.micro_batch_size,
        gradient_accumulation_steps=batch.gradient_accumulation_steps,
        gradient_clipping=recipe.gradient_clipping,
        zero_allow_untested_optimizer=True,  # SGD, which the parity tests compare with plain PyTorch
        steps_per_print=None,
    )
    if config.topology.sizes.pipeline > 1 and recipe.zero_stage == 0:
        ds_config["gradient_clipping"] = 0.0  # ``PipelineParallel`` clips, by the norm of all stages
    if config.precision == "bf16":
        ds_config["bf16"] = {**recipe.raw.get("bf16", {}), "enabled": True}
    if config.precision == "fp16":
        ds_config["fp16"] = {"enabled": True, "loss_scale": 1}  # fixed; ``_set_loss_scale`` replaces it
    if config.precision != "fp32" and recipe.zero_stage > 0:
        ds_config["data_types"] = {"grad_accum_dtype": "fp32"}
    if config.topology.sizes.tensor > 1 and config.topology.sizes.pipeline == 1:
        ds_config["tensor_parallel"] = _autotp_block(config.topology.sizes.tensor)
    if recipe.offload_optimizer != "none" and not recipe.uses_deepspeed_adam:
        ds_config["zero_force_ds_cpu_optimizer"] = False
    if recipe.zero_stage > 0:
        # DeepSpeed's default at stage 3 is true, which has had races on GPUs. Parity has not been shown there.
        ds_config["zero_optimization"].setdefault("overlap_comm", False)
        bucket = recipe.zero_optimization.bucket_elements(config.model.padded_parameter_count())
        ds_config["zero_optimization"]["reduce_bucket_size"] = bucket
    if recipe.zero_stage == 1 and config.topology.world_size == 1:
        # A single rank sends nothing, so its gradients need not be copied to a bucket first.
        ds_config["zero_optimization"].setdefault("contiguous_gradients", False)
    elif recipe.zero_stage == 1 and recipe.zero_optimization.use_multi_rank_bucket_allreduce:
        # DeepSpeed all-reduces whole buckets here either way. So it does it in place, without cutting and copying them.
        ds_config["zero_optimization"].setdefault("reduce_scatter", False)
    _complete_swapping(ds_config, config)
    return ds_config


def _complete_swapping(ds_config: dict[str, Any], config: RunConfig) -> None:
    """Add what offload to nvme needs: this run's folder, and buffers of a size that fits this model."""
    for name, folder in nvme_paths(config.recipe, config.run_dir).items():
        block = ds_config["zero_optimization"][name]
        block["nvme_path"] = str(folder)
        if name == "offload_param":  # by default five pinned buffers of 100 million elements; larger parts fail
            part = -(-config.model.largest_parameter() // config.topology.world_size)
            block.setdefault("buffer_size", part)
        else:
            block["buffer_count"] = config.recipe.zero_optimization.offload_optimizer.swap_buffers


def _autotp_block(size: int) -> dict[str, Any]:
    """The layers that DeepSpeed has to split over ``size`` tensor ranks, as ``tensor_layout`` describes."""
    layers = [
        {"patterns": [r".*\.attn\.qkv\.weight$"], "partition_type": "column", "shape": [3, -1]},
        {"patterns": [r".*\.mlp\.fc\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.proj\.weight$"], "partition_type": "row"},
    ]
    return {"autotp_size": size, "partition_config": {"use_default_specs": False, "layer_specs": layers}}


def build_deepspeed_optimizer(parameters: dict[str, nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimizer over ``parameters`` (canonical name to parameter), for ``deepspeed.initialize``."""
    groups = parameter_groups(parameters, recipe.optimizer)
    if not recipe.uses_deepspeed_adam:
        # The stages of a pipeline have the tied embedding at different places of their flat buffers. All must round
        # its update alike.
        return build_optimizer(groups, recipe.optimizer, fused=recipe.pipeline.stages == 1)
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: PLC0415

    load_ops("CPUAdamBuilder")
    optimizer = recipe.optimizer
    adam: torch.optim.Optimizer = DeepSpeedCPUAdam(
        groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, adamw_mode=True
    )
    return adam


def repeat_counting(optimizer: Any, *, steps: int) -> None:
    """Advance the counter inside DeepSpeed's CPU Adam to that of a loaded checkpoint; leave other optimizers alone.

    It keeps beta^t as a product that it multiplies by beta in each step, in C++ (``cpu_adam.h``, ``IncrementStep``). A
    new process would compute the power instead, which rounds differently: a resumed run would not be the same bit for
    bit.

    Args:
        optimizer: from ``deepspeed.initialize``.
        steps: the number of steps that the checkpoint's optimizer has taken.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: PLC0415

    adam = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(adam, DeepSpeedCPUAdam):
        return
    group, nothing = adam.param_groups[0], torch.empty(0)
    for step in range(1, steps + 1):
        adam.ds_opt_adam.adam_update(
            adam.opt_id, step, 0.0, *group["betas"], group["eps"], 0.0, True, nothing, nothing, nothing, nothing
        )

"""Builds the strategy of a run; the only module that knows all of them."""

import importlib

import torch

from dsgpt.config.run_config import RunConfig
from dsgpt.strategies.base import Strategy


def build_strategy(config: RunConfig, device: torch.device) -> Strategy:
    """The strategy of ``config``, its model initialised.

    Only its own module is imported, because DeepSpeed takes seconds.
    """
    module, name = _place(config)
    strategy: Strategy = getattr(importlib.import_module(f"dsgpt.strategies.{module}"), name)(config, device)
    return strategy


def _place(config: RunConfig) -> tuple[str, str]:
    """Module and class of the strategy."""
    if config.run_type != "optimized":
        names = {"baseline": "Baseline", "ddp": "Ddp", "fsdp": "Fsdp"}
        return f"pytorch.{config.run_type}", names[config.run_type]
    sizes = config.topology.sizes
    if sizes.pipeline > 1:
        return "deepspeed.pipeline", "PipelineParallel"
    if sizes.sequence > 1:
        return "deepspeed.sequence", "SequenceParallel"
    if sizes.tensor > 1:
        return "deepspeed.tensor", "TensorParallel"
    if config.recipe.nvme_blocks:
        return "deepspeed.zero", "ZeroNvme"
    return "deepspeed.zero", "Zero"

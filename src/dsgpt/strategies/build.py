"""From a run's configuration to the strategy that executes it; the one place that knows them all."""

import importlib

import torch

from dsgpt.config.run_config import RunConfig
from dsgpt.strategies.base import Strategy


def build_strategy(config: RunConfig, device: torch.device) -> Strategy:
    """The strategy of ``config``, its model initialised; imports only it: DeepSpeed takes seconds."""
    module, name = _place(config)
    return getattr(importlib.import_module(f"dsgpt.strategies.{module}"), name)(config, device)


def _place(config: RunConfig) -> tuple[str, str]:
    """Module and class of the strategy."""
    if config.run_type != "optimized":
        names = {"baseline": "Baseline", "ddp": "Ddp", "fsdp": "Fsdp"}
        return f"pytorch.{config.run_type}", names[config.run_type]
    sizes = config.topology.sizes
    if sizes.pipeline > 1:
        return "deepspeed.pipeline", "Pipeline"
    if sizes.sequence > 1:
        return "deepspeed.sequence", "Sequence"
    if sizes.tensor > 1:
        return "deepspeed.tensor", "Tensor"
    if config.recipe.nvme_blocks:
        return "deepspeed.zero_nvme", "ZeroNvme"
    return "deepspeed.zero", "Zero"

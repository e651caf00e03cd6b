"""From a run's configuration to the strategy that executes it; the one place that knows them all."""

import torch

from dsgpt.config import RunConfig
from dsgpt.strategies.base import Strategy


def build_strategy(config: RunConfig, device: torch.device) -> Strategy:
    """The strategy of ``config``, its model initialised; imports DeepSpeed only for the strategies that need it."""
    if config.run_type == "baseline":
        from dsgpt.strategies.baseline import Baseline  # noqa: PLC0415

        return Baseline(config, device)
    from dsgpt.strategies.zero import Zero  # noqa: PLC0415 - importing DeepSpeed takes seconds

    return Zero(config, device)

"""The baseline: one process, plain PyTorch. Every other strategy is compared with it."""

import torch

from dsgpt.config.run_config import RunConfig
from dsgpt.model.gpt2 import GPT2
from dsgpt.strategies.initial_weights import DTYPES, initialize_whole
from dsgpt.strategies.pytorch.master_weights import MasterWeights
from dsgpt.strategies.pytorch.torch_strategy import TorchStrategy


class Baseline(TorchStrategy):
    """Plain PyTorch on one device."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        model = whole_model(config, device)
        super().__init__(config, device, model=model, weights=MasterWeights(model, DTYPES[config.precision]))
        if config.options.compile:
            self.model.compile()


def whole_model(config: RunConfig, device: torch.device) -> GPT2:
    """The whole model on ``device`` in fp32, with its initial weights."""
    model = GPT2(config.model, activation_checkpointing=config.activation_checkpointing)
    initialize_whole(model, config)
    return model.to(device)

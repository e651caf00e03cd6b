"""The baseline: one process, plain PyTorch. What every other strategy is compared with."""

from pathlib import Path

import torch

from dsgpt.checkpointing.writing import save_object
from dsgpt.config import RunConfig
from dsgpt.model.gpt2 import GPT2
from dsgpt.strategies.initial_weights import initialize_whole
from dsgpt.strategies.master_weights import DTYPES, MasterWeights
from dsgpt.strategies.torch_strategy import TorchStrategy

_STATE_FILE = "baseline.pt"


class Baseline(TorchStrategy):
    """Plain PyTorch on one device."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        model = whole_model(config, device)
        super().__init__(config, device, model=model, weights=MasterWeights(model, DTYPES[config.precision]))
        if config.options.compile:
            self.model.compile()

    def save(self, folder: Path) -> None:
        """See ``Strategy``."""
        save_object(self._state(), folder / _STATE_FILE)

    def load(self, folder: Path) -> None:
        """See ``Strategy``."""
        self._take_up(folder / _STATE_FILE, self._device)


def whole_model(config: RunConfig, device: torch.device) -> GPT2:
    """The whole model on ``device`` in fp32, with its initial weights."""
    model = GPT2(config.model, activation_checkpointing=config.activation_checkpointing)
    initialize_whole(model, config)
    return model.to(device)

"""A plain model for inference, from the weights of a run."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dsgpt.checkpointing.selection import ModelFiles, open_weights
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2


def build_model(
    config: GPT2Config, weights: Mapping[str, Tensor], *, device: torch.device, dtype: torch.dtype = torch.float32
) -> GPT2:
    """The model in evaluation mode, with ``weights``, every weight whole on the CPU by its canonical name."""
    with torch.device("meta"):
        model = GPT2(config)
    model.load_state_dict({**weights, "lm_head.weight": weights["wte.weight"]}, assign=True)
    model.lm_head.weight = model.wte.weight
    return model.to(device=device, dtype=dtype).eval()


def load_model(files: ModelFiles, device: torch.device) -> GPT2:
    """The model of a checkpoint of any strategy, in fp32.

    Raises:
        UserError: its weights are not those of its shape.
    """
    weights = {name: stored.read() for name, stored in open_weights(files).items()}
    return build_model(files.config, weights, device=device)

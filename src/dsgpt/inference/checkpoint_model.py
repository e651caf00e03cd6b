"""From the files of a checkpoint to a model that can speak."""

import torch

from dsgpt.checkpointing.selection import ModelFiles, open_weights
from dsgpt.model.gpt2 import GPT2


def load_model(files: ModelFiles, device: torch.device) -> GPT2:
    """The model of a checkpoint of any strategy, fp32, in evaluation mode.

    Raises:
        UserError: its weights are not those of its shape.
    """
    weights = {name: stored.read() for name, stored in open_weights(files).items()}
    with torch.device("meta"):
        model = GPT2(files.config)
    model.load_state_dict({**weights, "lm_head.weight": weights["wte.weight"]}, assign=True)
    model.lm_head.weight = model.wte.weight
    return model.to(device=device, dtype=torch.float32).eval()

"""From the files of a checkpoint to a model that can speak."""

import torch
from safetensors.torch import load_file

from dsgpt.checkpointing.selection import ModelFiles
from dsgpt.model.gpt2 import GPT2


def load_model(files: ModelFiles, device: torch.device) -> GPT2:
    """The model of a checkpoint of any strategy, fp32, in evaluation mode."""
    weights = load_file(files.weights)
    with torch.device("meta"):
        model = GPT2(files.config)
    model.load_state_dict({**weights, "lm_head.weight": weights["wte.weight"]}, assign=True)
    model.lm_head.weight = model.wte.weight
    return model.to(device=device, dtype=torch.float32).eval()

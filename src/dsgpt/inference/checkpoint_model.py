"""From a run folder or checkpoint to a model that can speak."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from dsgpt.checkpointing import store
from dsgpt.errors import UserError
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2


def find_checkpoint(path: Path) -> Path:
    """``path`` itself if it is a checkpoint, else the newest one of the run folder ``path``.

    Raises:
        UserError: there is none.
    """
    if (path / store.MANIFEST).exists():
        return path
    found = store.checkpoints(path) if path.is_dir() else []
    if not found:
        raise UserError(f"--checkpoint {path}: holds no checkpoint; name a run folder such as checkpoint/demo-zero1")
    return found[0]


def load_model(checkpoint: Path, device: torch.device) -> GPT2:
    """The model of a checkpoint of any strategy, fp32, in evaluation mode; its files are verified first.

    Raises:
        UserError: a file is missing or damaged.
    """
    store.read_manifest(checkpoint)
    config = GPT2Config(**json.loads((checkpoint / store.MODEL).read_text(encoding="utf-8")))
    weights = load_file(checkpoint / store.WEIGHTS)
    with torch.device("meta"):
        model = GPT2(config)
    model.load_state_dict({**weights, "lm_head.weight": weights["wte.weight"]}, assign=True)
    model.lm_head.weight = model.wte.weight
    return model.to(device).eval()

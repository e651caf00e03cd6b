"""The random streams of every rank, so that a resumed run draws the dropout masks that it would have drawn."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from dsgpt.checkpointing.writing import save_tensors


def save_random_state(folder: Path, *, rank: int, device: torch.device) -> None:
    """Write this rank's random state, of CPU and GPU.

    Raises:
        OSError: it could not be written.
    """
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    save_tensors(state, _file(folder, rank))


def load_random_state(folder: Path, *, rank: int, device: torch.device) -> None:
    """Continue this rank's random streams where ``save_random_state`` saw them."""
    state = load_file(_file(folder, rank))
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"random-{rank:05d}.safetensors"

"""The random state of every rank, so that a resumed run draws the same dropout masks as an uninterrupted one."""

from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import load_file

from dsgpt.checkpointing.writing import save_tensors
from dsgpt.common.errors import UserError
from dsgpt.formats.tensor_files import open_safetensors


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
    """Set this rank's random state to what ``save_random_state`` wrote."""
    state = load_file(_file(folder, rank))
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def check_random_states(folder: Path, *, named: Collection[str], ranks: int, device: str) -> None:
    """Check that ``load_random_state`` will find its file on every rank.

    Args:
        folder: of the checkpoint.
        named: the files that its manifest names.
        ranks: how many.
        device: ``cpu`` or ``cuda``.

    Raises:
        UserError: a file is missing, or does not hold random states.
    """
    wanted = {"cpu": torch.get_rng_state().shape} | ({"cuda": None} if device == "cuda" else {})
    for rank in range(ranks):
        file = _file(folder, rank)
        if file.name not in named:
            raise UserError(f"{folder}: its manifest does not name {file.name}: the checkpoint is incomplete")
        found = open_safetensors(file)
        for name, shape in wanted.items():
            value = found[name].read() if name in found else torch.empty(0)
            if value.dtype != torch.uint8 or (shape is not None and value.shape != shape):
                raise UserError(f"{file}: holds no random state ({name}) of this version of PyTorch")


def _file(folder: Path, rank: int) -> Path:
    return folder / f"random-{rank:05d}.safetensors"

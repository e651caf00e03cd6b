"""A checkpoint in DeepSpeed's own layout, as ZeRO-2 on one rank would have saved it, for DeepSpeed's own tools.

    latest                                                      names the folder below
    global_step200/mp_rank_00_model_states.pt                   the weights by name, and the order of the flat groups
    global_step200/zero_pp_rank_0_mp_rank_00_optim_states.pt    master weights and moments, each group one flat tensor

Keys are those of ``DeepSpeedEngine`` and ``DeepSpeedZeroOptimizer`` in ``LAYOUT_VERSION``; DeepSpeed is not imported.
Its files are pickles: this module writes them, and no code here reads them.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dsgpt.checkpointing.manifest import parse_manifest, read_manifest
from dsgpt.checkpointing.training_state import COUNTERS, MOMENTS, StateReader
from dsgpt.checkpointing.writing import save_pickled
from dsgpt.common.files import sync_directory
from dsgpt.formats.tensor_files import StoredTensor
from dsgpt.optimization.optimizer import decays

LAYOUT_VERSION = "0.19.8"
"""The version of DeepSpeed that has these keys."""
_ZERO_STAGE = 2
_MODEL_FILE = "mp_rank_00_model_states.pt"
_OPTIMIZER_FILE = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
_EMBEDDING, _HEAD = "wte.weight", "lm_head.weight"
"""One tensor under two names. The second is written as a copy, among the buffers. DeepSpeed would list it under
``shared_params``, but then its script gives both names the same memory, which ``--safe_serialization`` refuses."""

Moments = Mapping[str, Mapping[str, StoredTensor]]
"""By the name of the moment, such as ``exp_avg``, then by canonical name."""


def open_moments(checkpoint: Path | None) -> tuple[Moments, int | None]:
    """The moments of a checkpoint, none read yet, and the number of steps that changed the weights; None if unknown.

    Args:
        checkpoint: verified except for the two files that hold these; None or weights alone give no moments.

    Raises:
        UserError: one of the two files is missing or damaged.
    """
    if checkpoint is None or COUNTERS not in parse_manifest(checkpoint).files:
        return {}, None
    read_manifest(checkpoint, only=lambda name: name in (MOMENTS, COUNTERS))
    state = StateReader(checkpoint)
    return state.stored_moments(), state.counters.optimizer_steps


def bytes_needed(tensors: Mapping[str, StoredTensor], moments: Moments) -> tuple[int, int]:
    """Bytes that ``write_deepspeed`` reads, and bytes that it needs on the drive while it writes."""
    weights = sum(tensor.bytes for tensor in tensors.values())
    read = weights + sum(tensor.bytes for values in moments.values() for tensor in values.values())
    # Both files hold the weights, and one the embedding twice. Flat copies of everything exist for a while.
    return read, weights + tensors[_EMBEDDING].bytes + 2 * read


def write_deepspeed(
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    moments: Moments,
    *,
    step: int,
    optimizer_steps: int | None,
    progress: Callable[[int], None],
) -> None:
    """Write the layout into ``folder``.

    Args:
        folder: has none of the names above yet.
        tensors: every weight in fp32 by canonical name, in the model's order.
        moments: as ``open_moments`` gives them.
        step: of the run, for the folder's name.
        optimizer_steps: the steps that changed the weights; None if unknown.
        progress: called with the bytes read since its last call.

    Raises:
        OSError: the file system refuses.
    """
    tag = f"global_step{step}"
    inner = folder / tag
    inner.mkdir()
    groups = [[name for name in tensors if decays(name)], [name for name in tensors if not decays(name)]]

    def flat(values: Mapping[str, StoredTensor], names: Iterable[str]) -> Tensor:
        return _flattened(inner / "flat", [values[name] for name in names], progress)

    masters = [flat(tensors, names) for names in groups]
    slices = [_slices(tensors, names) for names in groups]
    skipped = 0 if optimizer_steps is None else step - optimizer_steps
    save_pickled(_model_states(tensors, masters, slices, step=step, skipped=skipped), inner / _MODEL_FILE)
    states = [{key: flat(values, names) for key, values in moments.items()} for names in groups]
    if optimizer_steps is not None and "exp_avg" in moments:  # only Adam counts its steps
        states = [{"step": torch.tensor(float(optimizer_steps))} | state for state in states]
    save_pickled(_optimizer_states(masters, slices, states), inner / _OPTIMIZER_FILE)
    sync_directory(inner)
    (folder / "latest").write_text(tag, encoding="utf-8")


def _flattened(scratch: Path, tensors: Iterable[StoredTensor], progress: Callable[[int], None]) -> Tensor:
    """All ``tensors`` flat and end to end, mapped from a deleted file: at most one of them is in memory at a time.

    The system frees the file's space when the tensor is freed.
    """
    with scratch.open("xb") as file:
        for stored in tensors:
            file.write(stored.read().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            progress(stored.bytes)
    size = scratch.stat().st_size // torch.float32.itemsize
    mapped = torch.from_file(str(scratch), shared=False, size=size, dtype=torch.float32)
    scratch.unlink()
    return mapped


def _slices(tensors: Mapping[str, StoredTensor], names: Iterable[str]) -> dict[str, SimpleNamespace]:
    """The position of each parameter in its flat group: the two attributes of DeepSpeed's ``fragment_address``."""
    start, found = 0, {}
    for name in names:
        numel = torch.Size(tensors[name].shape).numel()
        found[name] = SimpleNamespace(numel=numel, start=start)
        start += numel
    return found


def _model_states(
    tensors: Mapping[str, StoredTensor],
    masters: list[Tensor],
    slices: list[dict[str, SimpleNamespace]],
    *,
    step: int,
    skipped: int,
) -> dict[str, Any]:
    shapes = [{name: torch.Size(tensors[name].shape) for name in group} for group in slices]
    views = {
        name: master.narrow(0, place.start, place.numel).view(tensors[name].shape)
        for master, group in zip(masters, slices, strict=True)
        for name, place in group.items()
    }
    return {
        "module": {name: views[name] for name in tensors} | {_HEAD: views[_EMBEDDING].clone()},
        "buffer_names": [_HEAD],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": {},
        "shared_params": {},
        "frozen_param_fragments": {},
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": skipped,
        "global_steps": step,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": _ZERO_STAGE}},
        "ds_version": LAYOUT_VERSION,
    }


def _optimizer_states(
    masters: list[Tensor],
    slices: list[dict[str, SimpleNamespace]],
    states: list[dict[str, Tensor]],
) -> dict[str, Any]:
    base = {
        "state": {number: state for number, state in enumerate(states) if state},
        "param_groups": [{"params": [number]} for number in range(len(masters))],
    }
    ours = {
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": masters,
        "zero_stage": _ZERO_STAGE,
        "group_paddings": [0] * len(masters),
        "param_alignment_paddings": [[0] * len(group) for group in slices],
        "partition_count": [1] * len(masters),
        "ds_version": LAYOUT_VERSION,
        "param_slice_mappings": slices,
    }
    return {"optimizer_state_dict": ours, "ds_config": {}, "ds_version": LAYOUT_VERSION}

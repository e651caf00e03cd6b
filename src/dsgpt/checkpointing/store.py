"""Checkpoints of a run folder: complete or absent, newest first, verified before anything in them is read.

    step-00000200/
        the strategy's own files     what ``Strategy.save`` wrote
        model.safetensors            every weight whole, fp32, under its canonical name
        model.json                   the shape of the model
        run_state.json               where the run stands
        random-00000.safetensors     random state, one file per rank
        tokenizer/                   where the data has one
        manifest.json                every file above with size and sha256; written last

A checkpoint is written in a hidden folder beside, made durable, and renamed.
"""

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dsgpt.errors import UserError
from dsgpt.files import sync_directory, write_atomic, write_json_atomic
from dsgpt.process_group import barrier

LATEST = "latest"
MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
MODEL = "model.json"
TOKENIZER = "tokenizer"
STEP_FOLDER = re.compile(r"step-\d{8}")
PARTIAL_FOLDER = re.compile(r"\.partial-step-\d{8}(\.old)?")
"""A checkpoint that is being written or, with ``.old``, removed."""
_RUN_STATE = "run_state.json"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run stands; everything else follows from its configuration."""

    step: int
    """Optimizer steps done."""
    samples_seen: int
    """Sequences consumed: ``step`` times the global batch."""
    best_val_loss: float | None
    epochs: list[dict[str, Any]]
    """Records of the finished epochs."""
    wall_time_sec: float | None = None
    """Since the run started, stops between processes not counted."""
    last_train_loss: float | None = None
    last_val_loss: float | None = None


def folder_name(step: int) -> str:
    """``step-00000200`` for 200."""
    return f"step-{step:08d}"


def partial_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is written before it is published."""
    return run_dir / f".partial-{folder_name(step)}"


def begin(run_dir: Path, step: int, *, is_main: bool) -> Path:
    """Make the empty folder that all ranks write into; collective."""
    folder = partial_folder(run_dir, step)
    if is_main:
        remove(folder)
        folder.mkdir(parents=True)
    barrier()
    return folder


def publish(
    run_dir: Path,
    folder: Path,
    *,
    state: RunState,
    about: dict[str, Any],
    keep: int,
) -> Path:
    """Turn the complete ``folder`` into the newest checkpoint, and remove the oldest beyond ``keep``; main rank only.

    Args:
        run_dir: the run.
        folder: from ``begin``, every file of every rank in it.
        state: where the run stands.
        about: strategy, topology, versions and whatever must agree at a resume.
        keep: checkpoints to keep, this one included.
    """
    write_json_atomic(folder / _RUN_STATE, asdict(state))
    paths = sorted(folder.rglob("*"))
    manifest = {
        **about,
        "step": state.step,
        "files": {
            path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": _sync_and_hash(path)}
            for path in paths
            if path.is_file()
        },
    }
    for path in paths:
        if path.is_dir():
            sync_directory(path)
    write_json_atomic(folder / MANIFEST, manifest)
    final = run_dir / folder_name(state.step)
    discard(final)
    folder.rename(final)
    sync_directory(run_dir)
    write_atomic(run_dir / LATEST, f"{final.name}\n".encode())
    for old in checkpoints(run_dir)[keep:]:
        discard(old)
    return final


def remove(path: Path) -> None:
    """Remove a file or a folder, if there is one; of a link the link alone, never what it points to."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def set_aside(checkpoint: Path) -> Path:
    """Take a checkpoint out of the run in one step; what is left to remove comes back. Links are left as they are."""
    if checkpoint.is_symlink() or not checkpoint.is_dir():
        return checkpoint
    aside = checkpoint.with_name(f".partial-{checkpoint.name}.old")
    remove(aside)
    return checkpoint.rename(aside)


def discard(checkpoint: Path) -> None:
    """Remove a checkpoint; a kill in between leaves no folder that has its name but not its files."""
    remove(set_aside(checkpoint))


def _sync_and_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:  # fsync needs no more, and a copied file may be read-only
        while block := file.read(1 << 22):
            digest.update(block)
        os.fsync(file.fileno())
    return digest.hexdigest()


def checkpoints(run_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, newest first."""
    found = (path.parent for path in run_dir.glob(f"step-*/{MANIFEST}"))
    return sorted((path for path in found if STEP_FOLDER.fullmatch(path.name)), reverse=True)


def parse_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest as it stands, no file compared with it.

    Raises:
        UserError: it cannot be read, or is no manifest.
    """
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        for name, facts in manifest["files"].items():
            _ = facts["size"], facts["sha256"]
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(f"{name} is outside of the checkpoint")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: is no readable manifest ({error})") from error
    return manifest


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest, after every file in it was compared with its size and hash.

    Raises:
        UserError: a file is missing, of another size, or damaged; the message names it.
    """
    manifest = parse_manifest(checkpoint)
    for name, facts in manifest["files"].items():
        file = checkpoint / name
        if not file.is_file() or file.stat().st_size != facts["size"] or _hash(file) != facts["sha256"]:
            raise UserError(f"{file}: is damaged: it is missing or differs from what {MANIFEST} says")
    return manifest


def fixed_in(manifest: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """What the run of ``checkpoint`` must not change when it goes on.

    Raises:
        UserError: the manifest does not say it.
    """
    fixed = manifest.get("fixed")
    if not isinstance(fixed, dict):
        raise UserError(f"{checkpoint / MANIFEST}: is no readable manifest (it does not say what made the checkpoint)")
    return fixed


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_run_state(checkpoint: Path) -> RunState:
    """Where the run stood."""
    return RunState(**json.loads((checkpoint / _RUN_STATE).read_text(encoding="utf-8")))


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file with the permissions of any other new file; the library makes it private."""
    save_file(tensors, path)
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def save_random_state(folder: Path, *, rank: int, device: torch.device) -> None:
    """Write this rank's random state, of CPU and GPU."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    save_tensors(state, folder / f"random-{rank:05d}.safetensors")


def load_random_state(folder: Path, *, rank: int, device: torch.device) -> None:
    """Continue this rank's random streams where ``save_random_state`` saw them."""
    state = load_file(folder / f"random-{rank:05d}.safetensors")
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)

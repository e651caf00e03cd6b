"""The run folder: whether a run may start in it, go on in it, or has finished there."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgpt.checkpointing import store
from dsgpt.config import RunConfig
from dsgpt.errors import UserError
from dsgpt.problems import Problems
from dsgpt.telemetry.record import COMPLETE_FILE, RECORD_FILE, STEPS_FILE

CONFIG_FILE = "config.json"
LOG_FILE = "train.log"
_OURS = (
    RECORD_FILE,
    STEPS_FILE,
    CONFIG_FILE,
    LOG_FILE,
    COMPLETE_FILE,
    store.LATEST,
    "zero_to_fp32.py",
    "zero_to_torch.py",
)


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a run begins."""

    checkpoint: Path | None
    """Where it goes on from; None for a fresh start."""
    finished: bool
    """Nothing is left to do."""
    message: str
    """The same in words; empty for an ordinary fresh start."""


def plan_start(config: RunConfig, problems: Problems) -> Start:
    """Look at the folder, change nothing; what forbids the run goes to ``problems``."""
    run_dir, options = config.run_dir, config.options
    _check_writable(run_dir, problems)
    fresh = Start(checkpoint=None, finished=False, message="")
    if not run_dir.is_dir():
        return fresh
    found = _existing(run_dir)
    if not found or options.overwrite:
        return fresh
    if not options.resume:
        problems.add(
            f"--checkpoint_path {run_dir}: holds a run already ({found[0].name}): add --resume to go on with it, "
            "--overwrite to delete it, or name another folder"
        )
        return fresh
    available = store.checkpoints(run_dir)
    if (run_dir / COMPLETE_FILE).exists():
        return Start(
            checkpoint=available[0] if available else None,
            finished=True,
            message=f"{run_dir} holds a finished run; nothing to do",
        )
    if not available:
        message = f"--resume: {run_dir} holds no checkpoint yet; starting fresh"
        return Start(checkpoint=None, finished=False, message=message)
    return Start(checkpoint=available[0], finished=False, message=f"resuming from {available[0]}")


def check_resumable(config: RunConfig, start: Start, *, fixed: dict[str, Any], problems: Problems) -> None:
    """Hold the checkpoint's files against its manifest, and what it was trained with against this run.

    Raises:
        UserError: a file of the checkpoint is damaged.
    """
    if start.checkpoint is None or start.finished:
        return
    saved = store.read_manifest(start.checkpoint)["fixed"]
    for name, value in fixed.items():
        if saved.get(name) != value:
            problems.add(
                f"--resume: {name} is {value} but the checkpoint in {config.run_dir} was made with {saved.get(name)}: "
                "repeat the original command, or start a new run in another folder"
            )


def open_run_folder(run_dir: Path, start: Start) -> None:
    """Make the folder, and remove what an earlier process left there: for a fresh start its run, else half a save.

    Raises:
        UserError: the system does not let this user make the folder.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--checkpoint_path {run_dir}: cannot be made ({error.strerror}): name another folder"
        ) from error
    resumed = start.checkpoint is not None
    for path in _partial(run_dir) if resumed else _existing(run_dir):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _existing(run_dir: Path) -> list[Path]:
    """Files and folders of a run in ``run_dir``."""
    named = [run_dir / name for name in _OURS if (run_dir / name).exists()]
    return named + sorted(run_dir.glob("step-[0-9]*")) + _partial(run_dir)


def _partial(run_dir: Path) -> list[Path]:
    """Checkpoints whose writing was cut short."""
    return sorted(run_dir.glob(".partial-step-[0-9]*"))


def _check_writable(run_dir: Path, problems: Problems) -> None:
    place = run_dir
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        problems.add(f"--checkpoint_path {run_dir}: {place} is a file, not a folder: name another folder")
    elif not os.access(place, os.W_OK | os.X_OK):
        problems.add(f"--checkpoint_path {run_dir}: no permission to write in {place}: name another folder")

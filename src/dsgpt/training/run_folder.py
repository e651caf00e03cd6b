"""The run folder: whether it holds a run of this program, and what a start removes from it."""

import os
import re
from pathlib import Path
from typing import Any

from dsgpt.checkpoints import store
from dsgpt.common.errors import Problems, UserError
from dsgpt.common.files import is_regular_file, remove
from dsgpt.common.json_files import JsonError, read_object
from dsgpt.config.run_config import RunConfig
from dsgpt.record.schema import COMPLETE_FILE, LOG_FILE, RECORD_FILE, STEPS_FILE, read_steps
from dsgpt.telemetry.communication_profile import COMMUNICATION_FILE
from dsgpt.telemetry.trace import PROFILE_FOLDER, is_profile_folder
from dsgpt.training.resume import MAX_RECORD_BYTES, ResumePoint
from dsgpt.training.trackers import TRACKERS_FOLDER, is_tracker_folder

CONFIG_FILE = "config.json"
_FILES = (
    COMPLETE_FILE,
    store.LATEST,
    store.BEST,
    LOG_FILE,
    COMMUNICATION_FILE,
    STEPS_FILE,
    RECORD_FILE,
    CONFIG_FILE,
)
"""Files that a run writes next to its checkpoints, in the order of removal: those that identify a run go last.
``hardware.jsonl`` and those of further machines go before them.

A kill in between leaves no ``latest``, and no step lines without a record;
``earlier_record.why_nothing_was_saved`` says why this matters."""
_HARDWARE = re.compile(r"hardware(-\d+)?\.jsonl")
"""``telemetry.monitor.hardware_file``."""
_OWN_FOLDERS = (store.STEP_FOLDER, store.PARTIAL_FOLDER, store.DAMAGED_FOLDER)
_OWN_KEYS = {RECORD_FILE: {"schema_version", "training_config"}, CONFIG_FILE: {"options", "training_config"}}

_OWN_LINES = ({"step", "epoch", "loss", "lr", "grad_norm", "tokens"}, {"step", "val_loss", "val_tokens"})


def holds_run_to_resume(config: RunConfig, problems: Problems) -> bool:
    """Whether the folder holds a run for ``--resume`` to continue; changes nothing.

    Args:
        config: the run.
        problems: receives what prevents the run from starting in the folder.
    """
    run_dir, options = config.run_dir, config.options
    _check_writable(run_dir, problems)
    if not run_dir.is_dir() or not os.access(run_dir, os.R_OK | os.X_OK):
        return False
    found = _existing(run_dir)
    if foreign := _foreign(run_dir, found):
        problems.add(
            f"--checkpoint_path {run_dir}: holds a {foreign.name} that this program did not write: name another folder"
        )
        return False
    if not found or options.overwrite:
        return False
    if not options.resume:
        proof = _proof(run_dir)
        assert proof is not None  # else what was found is foreign
        problems.add(
            f"--checkpoint_path {run_dir}: holds a run already ({proof.name}): add --resume to continue "
            "it, --overwrite to delete it, or name another folder"
        )
        return False
    trackers = run_dir / TRACKERS_FOLDER
    inside = sorted(trackers.glob("*")) if is_tracker_folder(trackers) else []
    links = [path.relative_to(run_dir) for path in (*found, *inside) if path.is_symlink()]
    for name in links:
        problems.add(
            f"--resume: {run_dir / name} is a link, and links inside a run folder are not followed: replace it "
            "by a copy of its target (cp -rL), or remove it"
        )
    return not links


def contents(run_dir: Path) -> list[str]:
    """The names of everything in the folder that a run writes, to notice a change by another process."""
    return [path.name for path in _existing(run_dir)] if run_dir.is_dir() else []


def make_run_folder(run_dir: Path) -> None:
    """Make the folder.

    Raises:
        UserError: the system refuses.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--checkpoint_path {run_dir}: cannot be made ({error.strerror}): name another folder"
        ) from error


def clear_run_folder(run_dir: Path, start: ResumePoint) -> None:
    """Remove what an earlier process left: a fresh start removes its run, a resume its incomplete checkpoints.

    A resume also marks the checkpoints that it refused as damaged. An overwrite renames the checkpoints first and
    removes them last: after a kill in between, ``--resume`` starts fresh.
    """
    remove(run_dir / COMPLETE_FILE)
    if start.checkpoint is None:
        for pattern in (store.DAMAGED_FOLDER, store.STEP_FOLDER):
            for checkpoint in _folders(run_dir, pattern):
                store.set_aside(checkpoint, suffix=store.OVERWRITTEN)
        for path in _files(run_dir):
            remove(path)
    for path in _folders(run_dir, store.PARTIAL_FOLDER):
        remove(path)
    if start.checkpoint is not None:
        for checkpoint in start.refused:
            store.mark_damaged(checkpoint)
        store.name_newest_and_best(run_dir)


def holds_own_config(run_dir: Path) -> bool:
    """Whether the ``config.json`` in the folder was written by a run of this program."""
    return _is_ours(run_dir / CONFIG_FILE)


def _existing(run_dir: Path) -> list[Path]:
    """Everything in ``run_dir`` that is named like a file or folder of a run, links included."""
    return _files(run_dir) + [path for name in _OWN_FOLDERS for path in _folders(run_dir, name)]


def _files(run_dir: Path) -> list[Path]:
    """What is named in ``run_dir`` like a file of a run, or like the folder of trackers or profiles, links included."""
    hardware = sorted(path for path in run_dir.iterdir() if _HARDWARE.fullmatch(path.name))
    named = [run_dir / name for name in (TRACKERS_FOLDER, PROFILE_FOLDER, *_FILES) if os.path.lexists(run_dir / name)]
    return hardware + named


def _folders(run_dir: Path, name: re.Pattern[str]) -> list[Path]:
    """Folders and links whose whole name matches ``name``, newest first."""
    found = (path for path in run_dir.iterdir() if name.fullmatch(path.name))
    return sorted((path for path in found if path.is_dir() or path.is_symlink()), reverse=True)


def _foreign(run_dir: Path, found: list[Path]) -> Path | None:
    """A file or folder that a run would replace although no run wrote it; None if there is none."""
    for path in found:
        if (path.name in _FILES or _HARDWARE.fullmatch(path.name)) and path.is_dir() and not path.is_symlink():
            return path
        for name, is_ours in ((TRACKERS_FOLDER, is_tracker_folder), (PROFILE_FOLDER, is_profile_folder)):
            if path.name == name and not path.is_symlink() and not is_ours(path):
                return path
    return found[0] if found and _proof(run_dir) is None else None


def _proof(run_dir: Path) -> Path | None:
    """The first file or folder that only a run of this program writes; None if there is none."""
    named = [run_dir / RECORD_FILE, run_dir / CONFIG_FILE]
    own = [path for path in named if _is_ours(path)]
    steps = run_dir / STEPS_FILE
    first: dict[str, Any] = next(read_steps(steps), {}) if is_regular_file(steps) else {}
    if any(first.keys() >= keys for keys in _OWN_LINES):
        own.append(steps)
    folders = [path for name in _OWN_FOLDERS for path in _folders(run_dir, name)]
    own += [path for path in folders if path.is_dir() and not path.is_symlink()]
    return own[0] if own else None


def _is_ours(path: Path) -> bool:
    try:
        return is_regular_file(path) and read_object(path, max_bytes=MAX_RECORD_BYTES).keys() >= _OWN_KEYS[path.name]
    except JsonError:
        return False


def _check_writable(run_dir: Path, problems: Problems) -> None:
    place = run_dir
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        problems.add(f"--checkpoint_path {run_dir}: {place} is a file, not a folder: name another folder")
    elif not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        problems.add(f"--checkpoint_path {run_dir}: no permission to read and write in {place}: name another folder")

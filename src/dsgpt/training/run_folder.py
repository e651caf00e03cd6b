"""The run folder: whether a run may start in it, go on in it, or has finished there."""

import os
import re
from pathlib import Path

from dsgpt.checkpointing import store
from dsgpt.common.errors import UserError
from dsgpt.common.files import is_regular_file
from dsgpt.common.json_files import JsonError, read_object
from dsgpt.common.problems import Problems
from dsgpt.config.run_config import RunConfig
from dsgpt.telemetry.record import COMPLETE_FILE, RECORD_FILE, STEPS_FILE
from dsgpt.training.earlier_record import MAX_RECORD_BYTES
from dsgpt.training.resume import Start

CONFIG_FILE = "config.json"
LOG_FILE = "train.log"
_FILES = (
    COMPLETE_FILE,
    store.LATEST,
    store.BEST,
    LOG_FILE,
    STEPS_FILE,
    RECORD_FILE,
    CONFIG_FILE,
)
"""What a run writes beside its checkpoints, in the order of removal: what proves that it is a run goes last.

A kill in between leaves no ``latest``, and no lines without a record: see ``leftovers.why_nothing_was_saved``."""
_OWN_FOLDERS = (store.STEP_FOLDER, store.PARTIAL_FOLDER, store.DAMAGED_FOLDER)
_OWN_KEYS = {RECORD_FILE: {"schema_version", "training_config"}, CONFIG_FILE: {"options", "training_config"}}


def may_go_on(config: RunConfig, problems: Problems) -> bool:
    """Whether the folder holds a run that this one is to go on with; changes nothing.

    What forbids this run goes to ``problems``.
    """
    run_dir, options = config.run_dir, config.options
    _check_writable(run_dir, problems)
    if not run_dir.is_dir() or not os.access(run_dir, os.R_OK | os.X_OK):
        return False
    found = _existing(run_dir)
    if foreign := _foreign(run_dir, found):
        problems.add(f"--checkpoint_path {run_dir}: holds a {foreign.name} that no run here wrote: name another folder")
        return False
    if not found or options.overwrite:
        return False
    if not options.resume:
        problems.add(
            f"--checkpoint_path {run_dir}: holds a run already ({_proof(run_dir).name}): add --resume to go on with "
            "it, --overwrite to delete it, or name another folder"
        )
        return False
    links = [path.name for path in found if path.is_symlink()]
    for name in links:
        problems.add(
            f"--resume: {run_dir / name} is a link, and links inside a run folder are not followed: put what it points "
            "to in its place (cp -rL), or remove it"
        )
    return not links


def contents(run_dir: Path) -> list[str]:
    """The names of everything there that a run writes, to notice that another process has been there."""
    return [path.name for path in _existing(run_dir)] if run_dir.is_dir() else []


def make_run_folder(run_dir: Path) -> None:
    """Make the folder.

    Raises:
        UserError: the system does not let this user make it.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--checkpoint_path {run_dir}: cannot be made ({error.strerror}): name another folder"
        ) from error


def clear_run_folder(run_dir: Path, start: Start) -> None:
    """Remove what an earlier process left: for a fresh start its run, else half a save and what was refused.

    The first checkpoint that is set aside marks the run as overwritten, and goes last: after a kill in between,
    ``--resume`` starts fresh.
    """
    store.remove(run_dir / COMPLETE_FILE)
    if start.checkpoint is None:
        for name in (store.DAMAGED_FOLDER, store.STEP_FOLDER):
            for checkpoint in _folders(run_dir, name):
                store.set_aside(checkpoint, suffix=store.OVERWRITTEN)
        for name in _FILES:
            store.remove(run_dir / name)
    for path in _folders(run_dir, store.PARTIAL_FOLDER):
        store.remove(path)
    if start.checkpoint is not None:
        for checkpoint in start.refused:
            store.mark_damaged(checkpoint)
        store.name_newest_and_best(run_dir)


def holds_own_config(run_dir: Path) -> bool:
    """Whether a run of ours left its ``config.json`` there."""
    return _is_ours(run_dir / CONFIG_FILE)


def _existing(run_dir: Path) -> list[Path]:
    """Everything in ``run_dir`` that has the name of something a run writes, links too."""
    files = [run_dir / name for name in _FILES if os.path.lexists(run_dir / name)]
    return files + [path for name in _OWN_FOLDERS for path in _folders(run_dir, name)]


def _folders(run_dir: Path, name: re.Pattern[str]) -> list[Path]:
    """Folders of that name and links in their place, newest first."""
    found = (path for path in run_dir.iterdir() if name.fullmatch(path.name))
    return sorted((path for path in found if path.is_dir() or path.is_symlink()), reverse=True)


def _foreign(run_dir: Path, found: list[Path]) -> Path | None:
    """Something that a run would replace and no run wrote; None where there is nothing of the kind."""
    for path in found:
        if path.name in _FILES and path.is_dir() and not path.is_symlink():
            return path
    return found[0] if found and _proof(run_dir) is None else None


def _proof(run_dir: Path) -> Path | None:
    """A file or folder that only a run of ours leaves, the first of them."""
    named = [run_dir / RECORD_FILE, run_dir / CONFIG_FILE]
    own = [path for path in named if _is_ours(path)]
    if is_regular_file(run_dir / STEPS_FILE):
        own.append(run_dir / STEPS_FILE)
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

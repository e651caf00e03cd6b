"""The folder ``trackers`` of a run: what trackers store on this machine, and the ids of the run in each of them."""

from pathlib import Path

from dsgpt.common.files import is_regular_file, write_json_atomic
from dsgpt.common.json_files import read_object

TRACKERS_FOLDER = "trackers"
IDS_FILE = "run_ids.json"
"""The run's id in each tracker, by the tracker's name. It also marks the folder as written by this program."""


def make_folder(run_dir: Path) -> Path:
    """The folder, made with an empty ``run_ids.json`` if it does not exist.

    Raises:
        OSError: the file system refuses.
    """
    folder = run_dir / TRACKERS_FOLDER
    folder.mkdir(exist_ok=True)
    if not (folder / IDS_FILE).exists():
        write_json_atomic(folder / IDS_FILE, {})
    return folder


def is_tracker_folder(path: Path) -> bool:
    """Whether ``path`` is a folder that ``make_folder`` made, or began to make before a kill; False for a link."""
    if path.is_symlink() or not path.is_dir():
        return False
    return is_regular_file(path / IDS_FILE) or not any(path.iterdir())


def read_id(folder: Path, tracker: str) -> str | None:
    """The id that an earlier process kept for ``tracker``; None if there is none.

    Raises:
        JsonError: the file is damaged.
    """
    kept = read_object(folder / IDS_FILE).get(tracker)
    return kept if isinstance(kept, str) else None


def keep_id(folder: Path, tracker: str, run_id: str) -> None:
    """Keep the id for a resumed run.

    Raises:
        JsonError: the file is damaged.
        OSError: the file system refuses.
    """
    write_json_atomic(folder / IDS_FILE, {**read_object(folder / IDS_FILE), tracker: run_id})

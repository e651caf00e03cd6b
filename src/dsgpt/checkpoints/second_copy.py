"""``--save_to``: a second copy of a run's checkpoints, in a folder or an object store.

    ADDRESS/
        step-00000200/...            the files of the checkpoint; its manifest is written last
        metrics.jsonl, training_metrics.json, config.json

Object stores cannot rename. A checkpoint of the second copy is complete once its manifest is there, and it is removed
manifest first. As in a run folder, each file is verified before anything in it is read.
"""

import contextlib
import io
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsgpt.checkpoints import store
from dsgpt.checkpoints.manifest import MANIFEST, Manifest, parse_manifest, read_manifest
from dsgpt.common.errors import UserError
from dsgpt.common.files import remove, sync_directory
from dsgpt.data.remote import Place, open_place, store_errors
from dsgpt.machine.console import Progress
from dsgpt.record.schema import COMPLETE_FILE, RECORD_FILE, STEPS_FILE

logger = logging.getLogger(__name__)

FLAG = "--save_to"
RUN_FILES = (STEPS_FILE, RECORD_FILE, "config.json", COMPLETE_FILE)
"""The files of a run besides its checkpoints that are copied; a resume on a new machine reads the first three."""
_TRIAL = ".can-be-written"


class SecondCopy:
    """Copies each new checkpoint to an address, in a thread; training never waits for it. Main rank only.

    If a checkpoint is published while an earlier one is copied, it is the next; those in between are left out. A
    failure is logged, and the next checkpoint is tried. Files are opened one at a time.

    Args:
        address: a folder, or an address that fsspec opens.
        run_dir: the run.
        keep: checkpoints to keep there, besides those that the run folder still has.
        resumed: the checkpoint that the run continues from; it is copied first if only older ones are there.
    """

    def __init__(self, address: str, *, run_dir: Path, keep: int, resumed: Path | None = None) -> None:
        self._place, self._run_dir, self._keep = open_place(address, flag=FLAG), run_dir, keep
        self._facts: dict[str, Any] = {"address": address, "step": None, "behind_steps": None, "copies": 0}
        self._facts |= {"failed_copies": 0, "last_copy_sec": None, "last_copy_bytes": None}
        self._next = self._resumed = resumed
        self._saved: int | None = None
        self._copying: Path | None = None
        self._changed = threading.Condition()
        self._ends = False
        self._thread = threading.Thread(target=self._copy_all, name="second copy", daemon=True)
        self._thread.start()

    def push(self, checkpoint: Path) -> None:
        """Copy ``checkpoint`` next."""
        with self._changed:
            self._next, self._saved = checkpoint, store.step_of(checkpoint.name)
            self._changed.notify_all()

    def needed(self) -> list[Path]:
        """The checkpoints that retention must leave in the run folder, because they are not copied yet."""
        with self._changed:
            return [path for path in (self._copying, self._next) if path]

    def facts(self) -> dict[str, Any]:
        """The record's ``second_copy``: how far the copy is behind the newest checkpoint, and what copying took."""
        with self._changed:
            behind = None if self._saved is None else max(0, self._saved - (self._facts["step"] or 0))
            return {**self._facts, "behind_steps": behind}

    def wait(self, seconds: float | None = None) -> None:
        """Copy what is left and end the thread, for at most ``seconds``; None waits until it is done."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join(seconds)
        if self._thread.is_alive():
            behind = self.facts()["behind_steps"]
            logger.warning(f"{FLAG}: not finished after {seconds:.0f} s: it is {behind} steps behind")

    def copy_run_files(self) -> None:
        """Copy the files of a complete run as they are now; a failure is logged."""
        try:
            self._copy_run_files()
        except Exception as error:  # noqa: BLE001 - as in ``_copy_all``; the run is complete
            self._failed("the record", error)

    def _copy_run_files(self) -> None:
        for name in RUN_FILES:
            with contextlib.suppress(FileNotFoundError), (self._run_dir / name).open("rb") as file:
                self._place.write(name, file)

    def _copy_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next or self._ends)
                if not self._next:
                    return
                checkpoint = self._copying = self._next
                self._next = None
            started = time.monotonic()
            try:
                if checkpoint is self._resumed:
                    newest = max(map(store.step_of, checkpoints_at(self._place)), default=-1)
                    with self._changed:
                        self._facts["step"] = None if newest < 0 else newest
                        self._saved = max(self._saved or 0, store.step_of(checkpoint.name))
                    if newest >= store.step_of(checkpoint.name):
                        continue
                size = self._copy(checkpoint)
            except Exception as error:  # noqa: BLE001 - stores raise errors of their packages; training must go on
                self._failed(checkpoint.name, error)
            else:
                with self._changed:
                    facts = self._facts
                    facts |= {"step": store.step_of(checkpoint.name), "copies": facts["copies"] + 1}
                    facts |= {"last_copy_sec": time.monotonic() - started, "last_copy_bytes": size}
            finally:
                self._copying = None

    def _copy(self, checkpoint: Path) -> int:
        """Write the files of the run and of a checkpoint, its manifest last; returns the checkpoint's bytes."""
        name, manifest = checkpoint.name, parse_manifest(checkpoint)
        _discard(self._place, name)
        self._copy_run_files()
        for file_name in (*manifest.files, MANIFEST):
            with (checkpoint / file_name).open("rb") as file:
                self._place.write(f"{name}/{file_name}", file)
        kept = {path.name for path in store.checkpoints(self._run_dir)}
        for old in checkpoints_at(self._place)[self._keep :]:
            if old not in kept:
                _discard(self._place, old)
        return manifest.size

    def _failed(self, name: str, error: Exception) -> None:
        self._facts["failed_copies"] += 1
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        logger.warning(f"{FLAG}: {name} was not copied ({reason}); the run continues, and the next one is tried")


def checkpoints_at(place: Place) -> list[str]:
    """The names of the complete checkpoints at ``place``, newest first."""
    named = [name for name in place.names() if store.STEP_FOLDER.fullmatch(name)]
    return sorted((name for name in named if place.exists(f"{name}/{MANIFEST}")), key=store.step_of, reverse=True)


def _discard(place: Place, name: str) -> None:
    """Remove a checkpoint; after a kill in between it is not complete."""
    place.remove(f"{name}/{MANIFEST}")
    place.remove(name)


def check_place(address: str, *, begins: bool, writes: bool) -> None:
    """Check that a run can save to ``address``.

    Args:
        address: as in ``SecondCopy``.
        begins: the run starts from nothing, and must not mix its checkpoints with those of another.
        writes: try to write, too.

    Raises:
        UserError: it holds checkpoints although the run ``begins``, or it cannot be read or written.
    """
    place = open_place(address, flag=FLAG)
    with store_errors(f"{FLAG} {address}: cannot be {'written' if writes else 'read'}"):
        present = checkpoints_at(place)
        if present and begins:
            cure = "add --resume to continue it, --overwrite to delete it, or name another place"
            raise UserError(f"{FLAG} {address}: holds {present[0]} of a run already: {cure}")
        if writes:
            place.write(_TRIAL, io.BytesIO(b"\n"))
            place.remove(_TRIAL)


def clear_place(address: str) -> None:
    """Remove every checkpoint at ``address``, complete or not."""
    place = open_place(address, flag=FLAG)
    for name in place.names():
        if store.STEP_FOLDER.fullmatch(name):
            _discard(place, name)


def fetch_newer(address: str, run_dir: Path, *, damage: Callable[[str], str]) -> list[str]:
    """Bring the newest checkpoint of ``address`` into ``run_dir``, if it is newer than all undamaged ones there.

    A damaged one is left out, and the next older one is tried. Files of the run that the folder lacks come too.

    Args:
        address: as in ``SecondCopy``.
        run_dir: the run; it may not exist yet.
        damage: what is wrong with a checkpoint there, by its name; empty if nothing is.

    Returns:
        Lines for the user.

    Raises:
        UserError: the store cannot be read, or its checkpoint is of another run.
    """
    place, lines = open_place(address, flag=FLAG), []
    local = store.checkpoints(run_dir) if run_dir.is_dir() else []
    with store_errors(f"{FLAG} {address}: cannot be read"):
        present = checkpoints_at(place)
        newest = next((store.step_of(path.name) for path in local if not damage(path.name)), -1) if present else -1
        for name in present:
            if store.step_of(name) <= newest:
                break
            folder = store.begin(run_dir, store.step_of(name))
            try:
                manifest = _fetch(place, name, folder)
            except (UserError, FileNotFoundError) as error:
                remove(folder)
                lines.append(f"{FLAG}: {name} of {address} is refused: {error}")
                continue
            if local and parse_manifest(local[0]).run_id != manifest.run_id:
                remove(folder)
                cure = "name another place, or remove one of them"
                raise UserError(f"{FLAG} {address}: {name} is of another run than {local[0]}: {cure}")
            for run_file in RUN_FILES[:3]:
                if not (run_dir / run_file).exists() and place.exists(run_file):
                    place.read_into(run_file, folder / run_file)
                    (folder / run_file).rename(run_dir / run_file)  # a kill leaves no part of it, which would stay
            if (run_dir / name).exists():
                store.mark_damaged(run_dir / name)
            for path in (run_dir, folder, *folder.iterdir()):
                if path.is_dir():
                    sync_directory(path)
            folder.rename(run_dir / name)
            sync_directory(run_dir)
            return [*lines, f"{FLAG}: {name} was fetched from {address}"]
    return lines


def _fetch(place: Place, name: str, folder: Path) -> Manifest:
    """Copy a checkpoint into the empty ``folder``, and verify every file as it comes.

    Raises:
        UserError: a file is damaged.
        FileNotFoundError: a file is missing.
    """
    place.read_into(f"{name}/{MANIFEST}", folder / MANIFEST)
    manifest = parse_manifest(folder)  # refuses names that lead out of the folder
    with contextlib.closing(Progress(total=manifest.size, what=f"fetching {name}", unit="B", lines=True)) as progress:
        for file_name, facts in manifest.files.items():
            (folder / file_name).parent.mkdir(parents=True, exist_ok=True)
            if place.read_into(f"{name}/{file_name}", folder / file_name, progress.advance) != facts.sha256:
                read_manifest(folder, only=lambda each: each == file_name)  # noqa: B023 - says what is wrong
    return manifest

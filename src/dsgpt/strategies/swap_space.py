"""Folders for what DeepSpeed swaps to nvme: each machine of each run has its own, and leaves none behind.

DeepSpeed names its files by rank alone, so that two runs under one ``nvme_path`` would write into each other's, and
removes none of them.
"""

import fcntl
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from dsgpt.errors import UserError
from dsgpt.process_group import from_main, gather_objects
from dsgpt.recipe import Recipe
from dsgpt.topology import Topology

_PREFIX = "nvme-swap-"


class SwapSpace:
    """The folders of this machine, which its first rank makes, holds and removes.

    Each is held by a lock that the system frees with the process, whatever ends it: the next run under the same path
    removes what a killed one left.
    """

    def __init__(self, engine_config: dict[str, Any], recipe: Recipe, topology: Topology) -> None:
        """Make the folders, and write them into ``engine_config`` in place of those that it names; collective.

        Raises:
            UserError: on every rank, where one of them cannot be made.
        """
        blocks = [engine_config["zero_optimization"][name] for name in recipe.nvme_blocks]
        name = f"{_PREFIX}{from_main(secrets.token_hex(4))}-{topology.rank - topology.local_rank}"
        self._held: dict[Path, int] = {}
        trouble = ""
        try:
            for base in {Path(block["nvme_path"]) for block in blocks if topology.local_rank == 0}:
                _remove_abandoned(base)
                self._held[base / name] = _make(base / name)
        except OSError as error:
            trouble = f"nvme_path {error.filename}: cannot be used ({error.strerror}): name another folder"
        if told := sorted(set(filter(None, gather_objects(trouble)))):
            self.close()
            raise UserError(*told)
        for block in blocks:
            block["nvme_path"] = str(Path(block["nvme_path"]) / name)

    def close(self) -> None:
        """Remove the folders with all that is in them, which no rank may need any more.

        After an error others may still write there; what this leaves is left to the next run.
        """
        while self._held:
            folder, handle = self._held.popitem()
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)


def _make(folder: Path) -> int:
    """Make ``folder`` so that it is never seen without its lock; the handle that holds it comes back."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    hidden = folder.with_name(f".{folder.name}")
    hidden.mkdir()
    handle = _lock(hidden, fcntl.LOCK_SH)
    hidden.rename(folder)
    return handle


def _remove_abandoned(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*"):
        try:
            handle = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held by another run, or somebody else's
            continue
        shutil.rmtree(folder)
        os.close(handle)


def _lock(folder: Path, kind: int) -> int:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, kind)
    except OSError:
        os.close(handle)
        raise
    return handle

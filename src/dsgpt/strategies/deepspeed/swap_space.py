"""Folders for the files that DeepSpeed swaps to nvme: one for each machine of each run, removed when the run ends.

DeepSpeed names its files by rank only, so two runs under one ``nvme_path`` would write into each other's files. It
never removes them.
"""

import contextlib
import re
import secrets
import shutil
import socket
from pathlib import Path
from typing import Any

from dsgpt.common.errors import UserError
from dsgpt.common.locks import Lock
from dsgpt.config.recipe import Recipe
from dsgpt.runtime.process_group import from_main, gather_objects
from dsgpt.runtime.topology import Topology


def _own_prefix() -> str:
    """The beginning of the names of this host's folders. The dot ends the host's name, in which dots are replaced."""
    return f"nvme-swap-{re.sub(r'[^A-Za-z0-9_-]', '_', socket.gethostname())}."


class SwapSpace:
    """The folders of this machine, which its first rank makes, locks and removes.

    The operating system releases the locks when the process ends, however it ends. So the next run on this host under
    the same path removes the folders of killed runs. Folders of other hosts stay, because a file system that hosts
    share may show a host only its own locks (Lustre with ``localflock``, NFS with ``local_lock``).
    """

    def __init__(self, engine_config: dict[str, Any], recipe: Recipe, topology: Topology) -> None:
        """Make the folders, and put their paths into ``engine_config``; collective.

        Raises:
            UserError: on every rank, if one of the folders cannot be made.
        """
        blocks = [engine_config["zero_optimization"][name] for name in recipe.nvme_blocks]
        name = f"{_own_prefix()}{from_main(secrets.token_hex(4))}-{topology.rank - topology.local_rank}"
        self._held: dict[Path, Lock] = {}
        problem = ""
        for base in {Path(block["nvme_path"]) for block in blocks if topology.local_rank == 0}:
            try:
                _remove_abandoned(base)
                self._held[base / name] = _make(base / name)
            except OSError as error:
                place, reason = error.filename or base, error.strerror or error
                problem = f"nvme_path {place}: cannot be used ({reason}): name another folder"
                break
        if problems := sorted(set(filter(None, gather_objects(problem)))):
            self.close()
            raise UserError(*problems)
        for block in blocks:
            block["nvme_path"] = str(Path(block["nvme_path"]) / name)

    def close(self) -> None:
        """Remove the folders and everything in them; call it when no rank needs them any more.

        After an error, other ranks may still write there; the next run removes what they leave.
        """
        while self._held:
            folder, lock = self._held.popitem()
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()


def _make(folder: Path) -> Lock:
    """Make and lock ``folder``; no other process ever sees it without its lock."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    hidden = folder.with_name(f".{folder.name}")
    hidden.mkdir()
    lock = None
    try:
        lock = Lock.of_folder(hidden)
        lock.take(shared=True, wait=True)
        hidden.rename(folder)
    except OSError:
        if lock is not None:
            lock.release()
        with contextlib.suppress(OSError):
            hidden.rmdir()
        raise
    return lock


def _remove_abandoned(base: Path) -> None:
    """Remove the folders under ``base`` that ended processes of this host left, as far as possible."""
    for folder in base.glob(f"{_own_prefix()}*"):
        # An OSError means that the folder belongs to another user, is a link, or has been removed.
        with contextlib.suppress(OSError), Lock.of_folder(folder) as lock:
            if lock.take():  # otherwise another run holds it
                shutil.rmtree(folder, ignore_errors=True)  # may fail: another user's, or another run removes it too

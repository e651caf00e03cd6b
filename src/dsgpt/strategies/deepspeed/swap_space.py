"""Folders for the files that DeepSpeed swaps to nvme: one for each machine of each run, removed at its end.

DeepSpeed names its files by rank only, so that two runs under one ``nvme_path`` would write into each other's files,
and it never removes them.
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
    """How the names of this host's folders begin; the dot ends the host's name, which has none here."""
    return f"nvme-swap-{re.sub(r'[^A-Za-z0-9_-]', '_', socket.gethostname())}."


class SwapSpace:
    """The folders of this machine, which its first rank makes, holds and removes.

    Each is held by a lock that the system frees with the process, however it ends: the next run of this host under the
    same path removes the folders of killed runs. Folders of other hosts stay, because a file system that hosts share
    may show a host only its own locks (Lustre with ``localflock``, NFS with ``local_lock``).
    """

    def __init__(self, engine_config: dict[str, Any], recipe: Recipe, topology: Topology) -> None:
        """Make the folders, and write them into ``engine_config`` in place of those that it names; collective.

        Raises:
            UserError: on every rank, where one of them cannot be made.
        """
        blocks = [engine_config["zero_optimization"][name] for name in recipe.nvme_blocks]
        name = f"{_own_prefix()}{from_main(secrets.token_hex(4))}-{topology.rank - topology.local_rank}"
        self._held: dict[Path, Lock] = {}
        trouble = ""
        for base in {Path(block["nvme_path"]) for block in blocks if topology.local_rank == 0}:
            try:
                _remove_abandoned(base)
                self._held[base / name] = _make(base / name)
            except OSError as error:
                place, reason = error.filename or base, error.strerror or error
                trouble = f"nvme_path {place}: cannot be used ({reason}): name another folder"
                break
        if told := sorted(set(filter(None, gather_objects(trouble)))):
            self.close()
            raise UserError(*told)
        for block in blocks:
            block["nvme_path"] = str(Path(block["nvme_path"]) / name)

    def close(self) -> None:
        """Remove the folders and everything in them; no rank may need them any more.

        After an error other ranks may still write there; the next run removes what is left then.
        """
        while self._held:
            folder, lock = self._held.popitem()
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()


def _make(folder: Path) -> Lock:
    """Make ``folder`` so that it is never seen without its lock, which this process then holds."""
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
    """Remove the folders under ``base`` that ended processes of this host left, where that is possible."""
    for folder in base.glob(f"{_own_prefix()}*"):
        with contextlib.suppress(OSError), Lock.of_folder(folder) as lock:  # somebody else's, a link, or removed
            if lock.take():  # otherwise another run holds it
                shutil.rmtree(folder, ignore_errors=True)  # another user's, or one that another run removes too

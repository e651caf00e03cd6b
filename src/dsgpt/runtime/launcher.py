"""The processes between this one and the command that started the ranks. Imports no torch."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

_COMMANDS = {"deepspeed", "deepspeed.pt", "ds", "torchrun"}
_MODULES = {
    "deepspeed.launcher.launch",
    "deepspeed.launcher.runner",
    "torch.distributed.launch",
    "torch.distributed.run",
}


class Launcher:
    """Whoever waits for this rank: its parent, and further up every process as far as the launcher's own command.

    ``deepspeed`` is two processes, of which the upper one may be killed alone. Where ``/proc`` is missing, only the
    parent is known.
    """

    def __init__(self) -> None:
        self._parents = _watched_parents()

    def is_gone(self) -> bool:
        """Whether one of these processes has ended, so that nobody would notice what this rank does."""
        return any(_parent(child) != parent for child, parent in self._parents.items())


def _watched_parents() -> dict[int, int]:
    """From this process upwards, each one's parent; the last parent is the topmost process of a launcher."""
    found = {os.getpid(): os.getppid()}
    kept = 1
    last = os.getppid()
    while last > 1 and (above := _parent(last)):
        if _is_launcher(last):
            kept = len(found)
        found[last] = above
        last = above
    if _is_launcher(last):  # the first process of a container
        kept = len(found)
    return dict(list(found.items())[:kept])


def _parent(pid: int) -> int | None:
    """The parent of a process, None where there is no such process or no way to know."""
    if pid == os.getpid():
        return os.getppid()
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, parent = status.rpartition(")")[2].split()[:2]  # the name before it may hold anything
    return None if state in "ZX" else int(parent)


def _is_launcher(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:
        return False
    return starts_launcher(words)


def starts_launcher(words: Sequence[str]) -> bool:
    """Whether a command line is a launcher's, called by name or as a module."""
    if any(Path(word).name in _COMMANDS for word in words[:2]):
        return True
    return any(flag == "-m" and module in _MODULES for flag, module in itertools.pairwise(words))

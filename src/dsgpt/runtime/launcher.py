"""Launchers (``deepspeed``, ``torchrun``): makes and recognises their commands, and watches the launcher of this rank.

Imports no torch.
"""

import contextlib
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from dsgpt.runtime.topology import free_port

_COMMANDS = {"deepspeed", "deepspeed.pt", "ds", "torchrun"}
_MODULES = {
    "deepspeed.launcher.launch",
    "deepspeed.launcher.runner",
    "torch.distributed.launch",
    "torch.distributed.run",
}


def launcher_command(launcher: str, ranks: int, *flags: str) -> list[str]:
    """The words to put before a script to start ``ranks`` ranks of it on this machine, with a free port as rendezvous.

    Args:
        launcher: ``python``, which starts one rank; or this environment's ``deepspeed`` or ``torchrun``. The
            environment need not be activated.
        ranks: how many to start.
        flags: further flags of the launcher.
    """
    if launcher == "python":
        return [sys.executable]
    command = str(Path(sys.executable).parent / launcher)
    count, quiet = ("--nproc_per_node", []) if launcher == "torchrun" else ("--num_gpus", ["--quiet"])
    return [command, count, str(ranks), "--master_port", str(free_port()), *quiet, *flags]


def starts_launcher(words: Sequence[str]) -> bool:
    """Whether a command line is a launcher's, called by name or as a module."""
    if any(Path(word).name in _COMMANDS for word in words[:2]):
        return True
    return any(flag == "-m" and module in _MODULES for flag, module in itertools.pairwise(words))


def own_command() -> list[str]:
    """The words that started this run: those of its launcher, if it has one, else of this process."""
    processes = waiting_processes()
    words = _words(processes[-1]) if processes else []
    if not starts_launcher(words):
        return [sys.executable, *sys.argv]
    return words if Path(words[0]).name in _COMMANDS or "-m" in words else words[1:]  # without the script's interpreter


class Launcher:
    """The processes that wait for this rank: its parent and those above, up to the topmost launcher command.

    ``deepspeed`` is two processes. A kill may end the upper one and leave the lower one running.
    """

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._processes = waiting_processes()

    def is_gone(self) -> bool:
        """Whether one of these processes has ended, so that nothing waits for this rank any more."""
        return os.getppid() != self._parent or any(_has_ended(process) for process in self._processes)


def waiting_processes() -> list[psutil.Process]:
    """This process's parent, its parent, and so on to the topmost process that is a launcher; at least the first."""
    parents: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):  # a parent that ended just now, or that this user may not see
        parents = psutil.Process().parents()
    launchers = [index for index, process in enumerate(parents) if starts_launcher(_words(process))]
    return parents[: max([0, *launchers]) + 1]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended, or belongs to another user
        return []


def _has_ended(process: psutil.Process) -> bool:
    """Whether a process is gone, or is a zombie: it has ended, but its parent has not read its exit code."""
    try:
        return not process.is_running() or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True

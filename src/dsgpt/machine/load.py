"""CPU time of other processes while something is measured."""

import contextlib
import os
import time
from pathlib import Path

import psutil

from dsgpt.machine.launcher import waiting_processes

SHORTEST_SEC = 20.0
"""Below this duration the share is recorded as null: the kernel counts CPU time in ticks of 10 ms, and processes that
just ended distort it."""
_USER, _NICE, _SYSTEM, _STEAL = 1, 2, 3, 8
"""Columns of ``/proc/stat`` (proc_stat(5)). Interrupts are left out: they may be ours."""
_HIDDEN = (AttributeError, OSError, psutil.Error)
"""No CPU affinity and no ``/proc/stat`` (macOS), or a ``/proc`` that hides processes of other users (hidepid)."""


class LoadOfOthers:
    """The CPU time that others use on the CPUs of this process, from the start of this object.

    Own are this process and its descendants; with ``ranks``, those of the launcher, which has the other ranks too.
    """

    def __init__(self, *, ranks: bool = False) -> None:
        self._root = [psutil.Process(), *(waiting_processes() if ranks else [])][-1]
        self._started = time.monotonic()
        self._load_before: float | None = None
        self._counted: tuple[float, float] | None = None
        with contextlib.suppress(*_HIDDEN):
            self._load_before = os.getloadavg()[0]
            self._cpus = {f"cpu{number}" for number in self._root.cpu_affinity()}
            self._counted = self.busy_seconds(), self.own_seconds()

    def figures(self) -> dict[str, float | None]:
        """Figures for a record: processes that ran or waited in the minute before, and others' share of the CPUs since.

        None for what the system hides.
        """
        seconds, share = time.monotonic() - self._started, None
        if seconds >= SHORTEST_SEC and self._counted:
            with contextlib.suppress(*_HIDDEN):
                busy, own = self.busy_seconds() - self._counted[0], self.own_seconds() - self._counted[1]
                if busy > 0 and self._root.is_running():
                    share = min(1.0, max(0.0, (busy - own) / (seconds * len(self._cpus))))
        return {"load_average_before": self._load_before, "cpu_share_of_others": share}

    def busy_seconds(self) -> float:
        """CPU time of all processes, and what the hypervisor gave to other machines; 0 where the system hides it."""
        lines = [line.split() for line in Path("/proc/stat").read_text(encoding="ascii").splitlines()]
        ticks = [int(line[column]) for line in lines if line[0] in self._cpus
                 for column in (_USER, _NICE, _SYSTEM, _STEAL)]  # fmt: skip
        return sum(ticks) / os.sysconf("SC_CLK_TCK")

    def own_seconds(self) -> float:
        """CPU time of own processes, also of those that ended and were waited for."""
        seconds = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has just ended
            for process in [self._root, *self._root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    seconds += sum(process.cpu_times()[:4])
        return seconds

"""``goodput`` of the record: how much of a run's wall time went into steps that were kept, and where the rest went.

Within a process, seconds are those of a clock that nobody sets. Between processes only the clock of the day is known,
and it may be of another machine.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from dsgpt.common.json_files import Count, Finite, Seconds
from dsgpt.record.schema import read_steps

CAUSES = ("start", "compilation", "data", "validation", "saves", "repeated", "gaps", "other")
"""Causes of the seconds that no kept step took; ``docs/records.md`` explains each."""
EARLY_SEC = 2.0
"""Seconds by which the start of a process may seem to be before the end of the one before: the system rounds it."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The block of the record, without ``share``; by default that of a run before its first process."""

    wall_sec: Seconds | None = 0.0
    """Since the first process of the run started; None, like every figure, where it is unknown."""
    kept_sec: Seconds | None = 0.0
    """Seconds of the steps that led to the run's present state."""
    lost_sec: dict[str, Seconds | None] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    """The other seconds, by cause."""
    repeated_steps: Count | None = 0
    """Steps that a process took and a later one took again."""
    starts: Count | None = 0
    """Processes, or the processes that one launcher started."""
    seen_at: Finite = 0.0
    """Time at which this was written, in seconds since 1970."""

    @classmethod
    def unknown(cls) -> Self:
        """The goodput of a run whose earlier processes did not record it."""
        return cls(wall_sec=None, lost_sec=dict.fromkeys(CAUSES), repeated_steps=None, starts=None)

    @property
    def share(self) -> float | None:
        """Share of the wall time that kept steps took."""
        return self.kept_sec / self.wall_sec if self.wall_sec and self.kept_sec is not None else None

    def _lost(self, more: Mapping[str, float | None]) -> dict[str, Seconds | None]:
        return self.lost_sec | {cause: _sum(self.lost_sec.get(cause), seconds) for cause, seconds in more.items()}

    def after_loss(self, steps_file: Path, *, kept_step: int, wall_sec: float | None) -> Self:
        """The same at the last sign of life of the process that wrote it; its steps after ``kept_step`` are lost.

        Args:
            steps_file: ``metrics.jsonl``, before those steps are removed from it.
            kept_step: of the checkpoint from which the run continues.
            wall_sec: ``total_wall_time_sec`` of the same record.
        """
        lines = list(read_steps(steps_file)) if steps_file.exists() else []
        lost = [line.get("step_time_sec") or 0.0 for line in lines if line["step"] > kept_step and "loss" in line]
        last = max((line.get("wall_time_sec") or 0.0 for line in lines), default=0.0)
        later = max(0.0, last - (wall_sec or 0.0))
        return replace(
            self,
            wall_sec=_sum(self.wall_sec, later),
            seen_at=self.seen_at + later,
            lost_sec=self._lost({"repeated": sum(lost)}),
            repeated_steps=None if self.repeated_steps is None else self.repeated_steps + len(lost),
        )

    def begin(self, process_sec: float) -> Self:
        """The same when the next process has run for ``process_sec``; the time between the two is a gap."""
        between = time.time() - process_sec - self.seen_at if self.starts else 0.0
        gap = max(0.0, between) if between > -EARLY_SEC else None  # None: a clock was set back
        return replace(
            self,
            wall_sec=_sum(self.wall_sec, gap),
            lost_sec=self._lost({"gaps": gap}) | dict.fromkeys(("compilation", "data"), 0.0),
            starts=None if self.starts is None else self.starts + 1,
        )

    def now(self, *, process_sec: float, kept_sec: float | None, lost_sec: Mapping[str, float]) -> Self:
        """The same now.

        Args:
            process_sec: since this process started.
            kept_sec: of all kept steps, without compilation and waits for data.
            lost_sec: of this process, by cause; ``compilation`` and ``data`` are of all kept steps.
        """
        wall, sums = _sum(self.wall_sec, process_sec), self._lost(lost_sec) | {"other": 0.0}
        rest = _sum(wall, *(None if part is None else -part for part in (kept_sec, *sums.values())))
        sums["other"] = None if rest is None else max(0.0, rest)
        return replace(self, wall_sec=wall, kept_sec=kept_sec, lost_sec=sums, seen_at=time.time())


def _sum(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None

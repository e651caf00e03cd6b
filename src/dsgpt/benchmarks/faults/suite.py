"""Everything that the campaign does, one fault after the other."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from dsgpt.benchmarks.faults.damage import DAMAGES, try_damage
from dsgpt.benchmarks.faults.disk import DISK_FAULTS, try_disk_fault
from dsgpt.benchmarks.faults.kills import try_kill
from dsgpt.benchmarks.faults.launches import try_restart, try_two_runs
from dsgpt.benchmarks.faults.outcome import Outcome
from dsgpt.benchmarks.faults.plan import core_kills, seeded_kills
from dsgpt.benchmarks.faults.processes import Missed
from dsgpt.benchmarks.faults.runs import Runs
from dsgpt.benchmarks.faults.signals import CORE_REQUESTS, REQUESTS, try_request


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing to try."""

    kind: str
    name: str
    attempt: Callable[[Runs], Outcome]


def all_faults(*, kills: int, seed: int) -> list[Fault]:
    """The campaign, with as many ``kills`` drawn with ``seed``."""
    return [
        *_faults("kill", try_kill, seeded_kills(kills, seed=seed)),
        *_faults("request", try_request, REQUESTS),
        *_faults("damage", try_damage, DAMAGES),
        *_faults("disk", try_disk_fault, DISK_FAULTS),
        RESTART,
        Fault(kind="launch", name="two runs on one folder", attempt=try_two_runs),
    ]


def core_faults() -> list[Fault]:
    """What ``make test`` runs; damage to files has tests of its own there, which need no launcher."""
    return [*_faults("kill", try_kill, core_kills()), *_faults("request", try_request, CORE_REQUESTS), RESTART]


def try_faults(runs: Runs, faults: list[Fault]) -> Iterator[Outcome]:
    """The outcome of each fault as it comes; one that cannot be brought about is a failed one."""
    for fault in faults:
        started = time.perf_counter()
        try:
            yield fault.attempt(runs)
        except Missed as error:
            yield _failed(fault, str(error), started)
        except Exception as error:  # noqa: BLE001 - one fault that surprises the campaign must not end it
            yield _failed(fault, f"{type(error).__name__}: {error}", started)


def _failed(fault: Fault, why: str, started: float) -> Outcome:
    return Outcome(kind=fault.kind, name=fault.name, wrong=why, seconds=time.perf_counter() - started)


def _faults(kind: str, attempt: Callable[[Runs, Any], Outcome], plans: Iterable[Any]) -> list[Fault]:
    return [Fault(kind=kind, name=plan.name, attempt=partial(attempt, plan=plan)) for plan in plans]


RESTART = Fault(kind="launch", name="torchrun restarts a killed worker", attempt=try_restart)

"""The faults of the campaign, tried one after the other."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from dsgpt.benchmarks.faults.damage import DAMAGES, try_damage
from dsgpt.benchmarks.faults.disk import DISK_FAULTS, try_disk_fault
from dsgpt.benchmarks.faults.kills import try_kill
from dsgpt.benchmarks.faults.launches import try_restart, try_two_runs
from dsgpt.benchmarks.faults.outcome import Outcome
from dsgpt.benchmarks.faults.plan import core_kills, seeded_kills
from dsgpt.benchmarks.faults.processes import Missed
from dsgpt.benchmarks.faults.runs import Runs
from dsgpt.benchmarks.faults.signals import CORE_SIGNALS, SIGNALS, try_signal


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault to try."""

    kind: str
    name: str
    attempt: Callable[[Runs], Outcome]


def all_faults(*, kills: int, seed: int) -> list[Fault]:
    """All faults of the campaign, among them ``kills`` kills drawn with ``seed``."""
    return [
        *_faults("kill", try_kill, seeded_kills(kills, seed=seed)),
        *_faults("request", try_signal, SIGNALS),
        *_faults("damage", try_damage, DAMAGES),
        *_faults("disk", try_disk_fault, DISK_FAULTS),
        RESTART,
        Fault(kind="launch", name="two runs on one folder", attempt=try_two_runs),
    ]


def core_faults() -> list[Fault]:
    """The faults of ``make test``. Other tests there damage files, without a launcher."""
    return [*_faults("kill", try_kill, core_kills()), *_faults("request", try_signal, CORE_SIGNALS), RESTART]


def try_faults(runs: Runs, faults: list[Fault]) -> Iterator[Outcome]:
    """Yield the outcome of each fault as it comes. A fault that could not be caused counts as failed."""
    for fault in faults:
        started = time.perf_counter()
        try:
            yield fault.attempt(runs)
        except Missed as error:
            yield _failed(fault, str(error), started)
        except Exception as error:  # noqa: BLE001 - an unexpected error must not end the campaign
            yield _failed(fault, f"{type(error).__name__}: {error}", started)


def _failed(fault: Fault, why: str, started: float) -> Outcome:
    return Outcome(kind=fault.kind, name=fault.name, wrong=why, seconds=time.perf_counter() - started)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


P = TypeVar("P", bound=_Named)


def _faults(kind: str, attempt: Callable[[Runs, P], Outcome], plans: Iterable[P]) -> list[Fault]:
    return [_fault(kind, attempt, plan) for plan in plans]


def _fault(kind: str, attempt: Callable[[Runs, P], Outcome], plan: P) -> Fault:
    return Fault(kind=kind, name=plan.name, attempt=lambda runs: attempt(runs, plan))


RESTART = Fault(kind="launch", name="torchrun restarts a killed worker", attempt=try_restart)

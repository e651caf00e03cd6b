"""Runs that were held against a plan on this machine (``--plan``), and correct its next plan."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsgpt.common.json_files import JsonError, read_object
from dsgpt.common.text import BUSY_FROM, counted
from dsgpt.planner.hardware import recognise
from dsgpt.planner.rates import Machine, Rates
from dsgpt.record.schema import RECORD_FILE, Fields

COUNT = 3
"""Runs that count: the newest."""


MOST = 2.0
"""Largest factor of a correction: what is farther off has another cause than rates."""


@dataclass(frozen=True, kw_only=True)
class OwnRun:
    """Tokens per second of a run."""

    planned: float
    """By the plan, before earlier runs corrected it."""
    measured: float


def own_runs(folder: Path, machine: Machine) -> list[OwnRun]:
    """The newest runs in ``folder`` that ``machine`` executed as planned with the same rates, the newest first.

    What cannot be read, had other settings than its plan, did not take enough steps, or shared the CPUs with other
    programs is left out.
    """
    found = []
    for path in folder.glob(f"*/{RECORD_FILE}"):
        try:
            record = Fields(read_object(path), notes=[])
            changed = path.stat().st_mtime
        except (JsonError, OSError):
            continue
        plan, segments = record.section("plan"), record.sections("segments")
        planned, measured = (plan.number(key) or 0.0 for key in ("planned_tokens_per_sec", "tokens_per_sec"))
        same = plan.text("fingerprint") == machine.fingerprint and _is_of(record.section("hardware"), machine)
        others = max((segment.number("cpu_share_of_others") or 0.0 for segment in segments), default=0.0)
        if same and min(planned, measured) > 0 and others < BUSY_FROM:
            found.append((changed, OwnRun(planned=planned, measured=measured)))
    return [run for _, run in sorted(found, key=lambda each: -each[0])[:COUNT]]


def _is_of(hardware: Fields, machine: Machine) -> bool:
    """Whether a run was on the machine's devices, and not on others that its plan was not made for."""
    name = hardware.text("gpu_name" if machine.kind == "cuda" else "cpu_name") or "?"
    gpu = recognise(name, int(hardware.number("gpu_memory_bytes") or 0))
    named = machine.name.startswith(name) or (gpu is not None and gpu.key == machine.name)
    return named and hardware.text("device") == machine.kind


def corrected(machine: Machine, runs: Sequence[OwnRun]) -> Machine:
    """The machine at the speed of ``runs``: everything that it does takes longer, or shorter, by their median."""
    if not runs:
        return machine
    times = min(MOST, max(1 / MOST, statistics.median(run.planned / run.measured for run in runs)))
    planned, measured = ([getattr(run, name) for run in runs] for name in ("planned", "measured"))
    last = f"your last {counted(len(runs), 'run')} here: planned {_span(planned)}, measured {_span(measured)} tokens/s"

    def slower(rates: Rates) -> Rates:
        return replace(
            rates.scaled(compute=times, communication=times),
            host_sec=rates.host_sec * times,
            host_link=rates.host_link / times,
            host_memory=rates.host_memory / times,
        )

    return replace(
        machine,
        rates=slower(machine.rates),
        slowest=slower(machine.slowest),
        fastest=slower(machine.fastest),
        uncorrected=machine,
        basis=f"{machine.basis}; corrected by {last}",
    )


def _span(values: Sequence[float]) -> str:
    """``41,200``, or ``39,800 to 40,300``."""
    low, high = (f"{value:,.0f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"

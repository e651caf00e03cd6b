"""Runs that were held against a plan on this machine (``--plan``), and correct its next plan."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsgpt.common.json_files import JsonError, read_object
from dsgpt.common.text import counted
from dsgpt.planner.hardware import recognise
from dsgpt.planner.rates import Machine
from dsgpt.record.schema import RECORD_FILE, Fields

COUNT = 3
"""Runs that count: the newest."""


@dataclass(frozen=True, kw_only=True)
class OwnRun:
    """Tokens per second of a run."""

    planned: float
    """By the plan, without its corrections."""
    measured: float


def own_runs(folder: Path, machine: Machine) -> list[OwnRun]:
    """The newest runs in ``folder`` that ``machine`` executed and that were held against a plan, the newest first.

    What cannot be read, was held against no plan of this machine, or did not take enough steps is left out.
    """
    found = []
    for path in folder.glob(f"*/{RECORD_FILE}"):
        try:
            record = Fields(read_object(path), notes=[])
            changed = path.stat().st_mtime
        except (JsonError, OSError):
            continue
        plan = record.section("plan")
        keys = ("planned_tokens_per_sec", "tokens_per_sec", "corrected_by")
        planned, measured, times = (plan.number(key) or 0.0 for key in keys)
        same = plan.text("machine") == machine.name and _is_of(record.section("hardware"), machine)
        if same and min(planned, measured, times) > 0:
            found.append((changed, OwnRun(planned=planned * times, measured=measured)))
    return [run for _, run in sorted(found, key=lambda each: -each[0])[:COUNT]]


def _is_of(hardware: Fields, machine: Machine) -> bool:
    """Whether a run was on the machine's devices, and not on others that its plan was not made for."""
    name = hardware.text("gpu_name" if machine.kind == "cuda" else "cpu_name") or "?"
    gpu = recognise(name, int(hardware.number("gpu_memory_bytes") or 0))
    named = machine.name.startswith(name) or (gpu is not None and gpu.key == machine.name)
    return named and hardware.text("device") == machine.kind


def corrected(machine: Machine, runs: Sequence[OwnRun]) -> Machine:
    """The machine at the speed of ``runs``: what it computes and sends takes longer, or shorter, by their median."""
    if not runs:
        return machine
    times = statistics.median(run.planned / run.measured for run in runs)
    planned, measured = ([getattr(run, name) for run in runs] for name in ("planned", "measured"))
    last = f"your last {counted(len(runs), 'run')} here: planned {_span(planned)}, measured {_span(measured)} tokens/s"
    changed = {
        name: getattr(machine, name).scaled(compute=times, communication=times)
        for name in ("rates", "slowest", "fastest")
    }
    return replace(machine, **changed, corrected_by=times, basis=f"{machine.basis}; corrected by {last}")


def _span(values: Sequence[float]) -> str:
    """``41,200``, or ``39,800 to 40,300``."""
    low, high = (f"{value:,.0f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"

"""The machines and setups of runs, and warnings if times of different ones are compared."""

from collections.abc import Sequence

from dsgpt.reports.runs import Run
from dsgpt.reports.segments import HARDWARE, differences, unrecorded_steps


def setup_stamps(runs: Sequence[Run]) -> list[str]:
    """All warnings about machines and setups."""
    return [*machine_stamps(runs), *segment_stamps(runs)]


def machine_stamps(runs: Sequence[Run]) -> list[str]:
    """The warning that runs, or segments of a run, used different hardware."""
    if len(_machines(runs)) < 2:
        return []
    return ["DIFFERENT HARDWARE: " + "; ".join(f"{run.name}: {run.machine or 'not recorded'}" for run in runs)]


def segment_stamps(runs: Sequence[Run]) -> list[str]:
    """The warnings that segments of a run were executed in different or in unrecorded ways."""
    lines = []
    for run in runs:
        if changed := differences(run.segments, noted=False):
            lines.append(f"SEGMENTS DIFFER: {run.name}: " + "; ".join(changed))
        if steps := unrecorded_steps(run.segments):
            lines.append(f"NOT RECORDED: how {run.name} executed its {steps}")
    return lines


def _machines(runs: Sequence[Run]) -> list[str]:
    """All hardware that was recorded, each once."""
    found = (segment.setup.get(HARDWARE) for run in runs for segment in run.segments)
    return list(dict.fromkeys(machine for machine in found if machine))


def machine_line(runs: Sequence[Run]) -> str:
    """The machine in one line, with the devices of each run and the runs that did not record the machine."""
    known = _machines(runs)
    unrecorded = [run.name for run in runs if run.machine is None]
    if not known:
        return "machine: not recorded"
    machine = f"machine: {known[0]}" if len(known) == 1 else "several machines or devices"
    if unrecorded:
        machine += f" (not recorded by {', '.join(unrecorded)})"
    users: dict[str, list[str]] = {}
    for run in runs:
        if run.devices:
            users.setdefault(run.devices, []).append(run.name)
    devices = "; ".join(f"{share}: {', '.join(names)}" for share, names in users.items())
    return f"{machine}. {devices}." if devices else f"{machine}."

"""The machines and setups of runs, and warnings if times of different ones are compared."""

from collections.abc import Sequence

from dsgpt.common.measured import instruction_words
from dsgpt.reports.runs import Run
from dsgpt.reports.segments import HARDWARE, INSTRUCTIONS, differences, unrecorded_steps


def setup_stamps(runs: Sequence[Run]) -> list[str]:
    """All warnings about machines and setups."""
    busy = [f"A BUSY MACHINE: {run.name}: {each.busy}" for run in runs for each in run.segments if each.busy]
    return [*machine_stamps(runs), *segment_stamps(runs), *dict.fromkeys(busy)]


def machine_stamps(runs: Sequence[Run]) -> list[str]:
    """The warning that runs, or segments of a run, used different hardware."""
    if len(_all(runs, HARDWARE)) < 2 and len(_all(runs, INSTRUCTIONS)) < 2:
        return []
    used = [f"{run.name}: {run.machine or 'not recorded'} ({instruction_words(run.instruction_sets)})" for run in runs]
    return ["DIFFERENT HARDWARE: " + "; ".join(used)]


def segment_stamps(runs: Sequence[Run]) -> list[str]:
    """The warnings that segments of a run were executed in different or in unrecorded ways."""
    lines = []
    for run in runs:
        if changed := differences(run.segments, noted=False):
            lines.append(f"SEGMENTS DIFFER: {run.name}: " + "; ".join(changed))
        if steps := unrecorded_steps(run.segments):
            lines.append(f"NOT RECORDED: how {run.name} executed its {steps}")
    return lines


def _all(runs: Sequence[Run], what: str) -> list[str]:
    """All hardware, or instruction sets, that were recorded, each once."""
    found = (segment.setup.get(what) for run in runs for segment in run.segments)
    return list(dict.fromkeys(value for value in found if value))


def machine_line(runs: Sequence[Run]) -> str:
    """The machine in one line, with the devices of each run and the runs that did not record the machine."""
    known, sets = _all(runs, HARDWARE), _all(runs, INSTRUCTIONS)
    unrecorded = [run.name for run in runs if run.machine is None]
    if not known:
        return "machine: not recorded"
    machine = "several machines or devices"
    if len(known) == 1 and len(sets) < 2:
        machine = f"machine: {known[0]} ({instruction_words(', '.join(sets))})"
    if unrecorded:
        machine += f" (not recorded by {', '.join(unrecorded)})"
    users: dict[str, list[str]] = {}
    for run in runs:
        if run.devices:
            users.setdefault(run.devices, []).append(run.name)
    devices = "; ".join(f"{share}: {', '.join(names)}" for share, names in users.items())
    return f"{machine}. {devices}." if devices else f"{machine}."

"""Which machine the runs used: times from two machines must not pass for times from one."""

from collections.abc import Sequence

from runs import Run


def machine_stamps(runs: Sequence[Run]) -> list[str]:
    """The warning that the runs are known to come from different hardware."""
    if len({run.machine for run in runs} - {None}) < 2:
        return []
    return ["DIFFERENT HARDWARE: " + "; ".join(f"{run.name}: {run.machine or 'not recorded'}" for run in runs)]


def machine_line(runs: Sequence[Run]) -> str:
    """The machine in one line, with the runs that did not record it and how much of it each run used."""
    known = [run.machine for run in runs if run.machine is not None]
    silent = [run.name for run in runs if run.machine is None]
    if not known:
        return "machine: not recorded"
    machine = f"machine: {known[0]}" if len(set(known)) == 1 else "several machines or devices"
    if silent:
        machine += f" (not recorded by {', '.join(silent)})"
    users: dict[str, list[str]] = {}
    for run in runs:
        if run.devices:
            users.setdefault(run.devices, []).append(run.name)
    devices = "; ".join(f"{share}: {', '.join(names)}" for share, names in users.items())
    return f"{machine}. {devices}." if devices else f"{machine}."

"""Interleaved rounds: every contender of a row takes a few steps in turn, again and again."""

import contextlib
import math
import statistics
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.speed.team import Team
from dsgpt.benchmarks.speed.workloads import HUGGING_FACE, NANOGPT, OURS, Entry, Row, Work

WARM_UP_STEPS = 3
SETTLING_STEPS = 1
"""Before every turn, not counted: while a process waits, caches and even its pages may go to others."""
SHORTEST_TURN_SEC = 1.5
"""A turn has as many steps as take this long, so that starting and ending it does not count."""


def measure_row(row: Row, *, rounds: int, tokens: Path, folder: Path, peers: dict[str, Path]) -> dict[str, Any]:
    """The row's result: tokens per second of every contender in every round, and the ratio of the first to the best.

    In each round another contender is the first, so that a machine that becomes slower favours none.

    Raises:
        UserError: a contender failed.
    """
    with contextlib.ExitStack() as held:
        teams = {
            entry.name: held.enter_context(
                Team(row, entry, tokens=tokens, folder=folder / str(number), peer=peers.get(entry.kind))
            )
            for number, entry in enumerate(row.entries)
        }
        steps = {name: _warm_up(team) for name, team in teams.items()}
        names = list(teams)
        speeds: dict[str, list[float]] = {name: [] for name in names}
        last: dict[str, dict[str, Any]] = {}
        for number in range(rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                teams[name].take(SETTLING_STEPS)
                last[name] = teams[name].take(steps[name])
                speeds[name].append(teams[name].tokens * steps[name] / last[name]["seconds"])
    per_rank = {name: [speed / teams[name].ranks for speed in values] for name, values in speeds.items()}
    return {
        "key": row.key,
        "title": row.title,
        "work": row.work.as_dict(),
        "entries": [
            {
                "name": entry.name,
                "kind": entry.kind,
                "ranks": entry.ranks,
                "steps_per_turn": steps[entry.name],
                "tokens_per_sec": span(speeds[entry.name]),
                "loss": last[entry.name]["loss"],
                "peak_bytes": last[entry.name]["peak_bytes"],
                "synchronisations": last[entry.name]["synchronisations"],
            }
            for entry in row.entries
        ],
        "flops_per_token": row.work.shape.flops_per_token(),
        **_ratio(per_rank if row.per_rank else speeds, row),
    }


def _warm_up(team: Team) -> int:
    """Warm the contender up; returns the number of steps of its turns."""
    team.ready()
    team.take(WARM_UP_STEPS)
    seconds: float = team.take(2)["seconds"] / 2
    return max(1, math.ceil(SHORTEST_TURN_SEC / seconds))


def _ratio(speeds: dict[str, list[float]], row: Row) -> dict[str, Any]:
    """The first entry's speed divided by that of the fastest other, round by round; and the limit of weak scaling."""
    first, *others = row.entries
    found: dict[str, Any] = {"target": row.target}
    for best_key, ratio_key, keeps_memory in (
        ("best_other", "ratio", False),
        ("best_with_memory_kept", "ratio_with_memory_kept", True),
    ):
        names = [entry.name for entry in others if entry.keeps_memory == keeps_memory and not entry.apart]
        if names:
            best = max(names, key=lambda name: statistics.median(speeds[name]))
            ratios = [ours / theirs for ours, theirs in zip(speeds[first.name], speeds[best], strict=True)]
            found |= {best_key: best, ratio_key: span(ratios)}
    for entry in others:
        if entry.apart:
            best = found["best_other"]
            limits = [apart / alone for apart, alone in zip(speeds[entry.name], speeds[best], strict=True)]
            found["limit"] = span(limits)
    return found


def span(values: list[float]) -> dict[str, Any]:
    """Median, smallest and largest of ``values``, and all of them."""
    return {"median": statistics.median(values), "smallest": min(values), "largest": max(values), "values": values}


def measure_memory(work: Work, *, steps: int, tokens: Path, folder: Path, peers: dict[str, Path]) -> dict[str, Any]:
    """The most memory of a process that takes ``steps`` steps, for this program and nanoGPT, and their ratio.

    On a CPU it is all that was resident in the host, with Python and its libraries; on a GPU what torch had allocated.

    Raises:
        UserError: a contender failed.
    """
    title = f"peak memory, {work.shape.name}, T={work.shape.length}, B={work.batch}, {work.precision}"
    kinds = [OURS, *(kind for kind in (NANOGPT, HUGGING_FACE) if kind == HUGGING_FACE or kind in peers)]
    entries = tuple(Entry(name=kind, kind=kind) for kind in kinds)
    row = Row(key="memory", title=title, work=work, entries=entries, target=0)
    peaks = {}
    for entry in entries:
        own = folder / entry.name.replace(" ", "-")
        with Team(row, entry, tokens=tokens, folder=own, peer=peers.get(entry.kind)) as team:
            team.ready()
            peaks[entry.name] = team.take(steps)["peak_bytes"]
    best = min((name for name in peaks if name != OURS), key=lambda name: peaks[name])
    other = NANOGPT if NANOGPT in peaks else best
    return {
        "title": title,
        "work": work.as_dict(),
        "peak_bytes": peaks,
        "other": other,
        "share": peaks[OURS] / peaks[other],
    }

"""Runs that differ in the seed alone, shown as one: the mean of each figure, and its range. Imports no Streamlit."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import reduce
from typing import Any

import numpy as np

from dsgpt.common.measured import NO_DIFFERENCE, no_difference
from dsgpt.dashboard.curves import Series
from dsgpt.dashboard.steps import Steps, Values
from dsgpt.reports.comparison import ROWS
from dsgpt.reports.equal_work import inference_stamps, judge
from dsgpt.reports.runs import Run
from dsgpt.reports.segments import NOTED


def by_seed(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs in their order; those of the same work and setup but for the seed are one group."""
    groups: list[list[Run]] = []
    for run in runs:
        own = next((group for group in groups if all(_seed_alone(each, run) for each in group)), None)
        if own is None:
            groups.append([run])
        else:
            own.append(run)
    return groups


def _seed_alone(one: Run, other: Run) -> bool:
    seed, other_seed = one.work["seed"], other.work["seed"]
    if None in (seed, other_seed) or seed == other_seed or _setups(one) != _setups(other):
        return False
    same = replace(other, work={**other.work, "seed": seed})
    return judge([one, same]).answer == "yes" and not inference_stamps([one, other])


def _setups(run: Run) -> set[frozenset[tuple[str, str | None]]]:
    return {frozenset((k, v) for k, v in each.setup.items() if k not in NOTED) for each in run.segments}


def mean_run(group: Sequence[Run]) -> Run:
    """The mean of every figure that all runs of a group have; a group of one is its run."""
    first = group[0]
    if len(group) == 1:
        return first
    figures: dict[str, Any] = {}
    for field in fields(Run):
        if field.type == float | None:
            values = [getattr(run, field.name) for run in group]
            figures[field.name] = None if None in values else float(np.mean(values))
    latencies = [latency for run in group for latency in run.latency_range or ()]
    return replace(
        first,
        **figures,
        name=f"{first.name} (mean of {len(group)} seeds)",
        status=next((run.status for run in group if run.status != "completed"), first.status),
        segments=tuple(segment for run in group for segment in run.segments),
        work={**first.work, "seed": ", ".join(sorted((run.work["seed"] for run in group), key=int))},
        latency_range=(min(latencies), max(latencies)) if latencies else None,
        notes=tuple(f"{run.name}: {note}" for run in group for note in run.notes),
    )


def aligned(group: Sequence[Steps]) -> list[Steps]:
    """Each with the steps and the validations that all have."""
    if len(group) == 1:
        return [*group]
    train, validation = (
        reduce(np.intersect1d, [getattr(each, part)["step"] for each in group]) for part in ("train", "validation")
    )
    return [replace(each, train=_at(train, each.train), validation=_at(validation, each.validation)) for each in group]


def _at(steps: Values, columns: Mapping[str, Values]) -> dict[str, Values]:
    places = np.isin(columns["step"], steps)
    return {name: values[places] for name, values in columns.items()}


def mean_steps(group: Sequence[Steps]) -> Steps:
    """The mean of every column of aligned steps."""
    if len(group) == 1:
        return group[0]
    train = {name: np.mean([each.train[name] for each in group], axis=0) for name in group[0].train}
    validation = {name: np.mean([each.validation[name] for each in group], axis=0) for name in group[0].validation}
    return replace(group[0], train=train, validation=validation)


def band(group: Sequence[Series], *, name: str) -> Series:
    """The mean of curves of aligned steps, and their least and most; a group of one is its curve."""
    if len(group) == 1:
        return group[0]
    y = np.stack([each.y for each in group])
    x = np.mean([each.x for each in group], axis=0)
    return Series(name=name, x=x, y=y.mean(axis=0), low=y.min(axis=0), high=y.max(axis=0))


def with_ranges(rows: Sequence[Sequence[str]], groups: Sequence[Sequence[Run]]) -> list[list[str]]:
    """The rows of ``reports.comparison.result_rows``, with the range of what was measured beside each mean.

    Means whose ranges overlap have no difference.
    """
    measured = {row.label: row for row in ROWS}
    found = [[*cells] for cells in rows]
    for cells in found:
        row, base = measured.get(cells[0]), None
        for place, group in enumerate(groups, start=1):
            values = [value for run in group if row and (value := row.value(run)) is not None]
            if row is None or len(group) == 1 or len(values) < len(group):
                continue
            least, most = min(values), max(values)
            cells[place] += f" ({row.form(least)} to {row.form(most)})"
            if place == 1:
                base = least, most
            elif base and no_difference(least, most, than=base):
                cells[len(groups) + place - 1] = NO_DIFFERENCE
    return found

"""Reads what ``charts/generate_charts.py`` draws: runs, sweeps, and the records of the planner and of many requests."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from dsgpt.common.errors import UserError
from dsgpt.reports.concurrency import Concurrency, read_concurrency
from dsgpt.reports.predictions import Predictions, read_predictions
from dsgpt.reports.runs import Run, read_run
from dsgpt.reports.sweeps import Sweep, read_sweep

Read = TypeVar("Read")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The records that could be read."""

    runs: list[Run]
    """The first is the baseline."""
    sweeps: dict[str, Sweep]
    """By the name with which their charts begin."""
    predictions: Predictions | None
    """The record of ``benchmark.py plan``."""
    concurrency: Concurrency | None
    """The record of ``benchmark.py inference``."""


def read_inputs(
    paths: Mapping[str, Path],
    *,
    sweeps: Sequence[tuple[str | None, Path]],
    plan: Path | None,
    inference: Path | None,
) -> tuple[Inputs, list[str]]:
    """Everything that can be read, and the mistakes of the rest, one line each.

    Args:
        paths: of runs, by name.
        sweeps: name and path of each; without a name, that of the suite.
        plan: the record of ``benchmark.py plan``.
        inference: the record of ``benchmark.py inference``.
    """
    problems: list[str] = []
    runs = [_read(partial(read_run, name=name), path, problems) for name, path in paths.items()]
    inputs = Inputs(
        runs=[run for run in runs if run is not None],
        sweeps=_read_sweeps(sweeps, problems),
        predictions=_read(read_predictions, plan, problems),
        concurrency=_read(read_concurrency, inference, problems),
    )
    return inputs, problems


def _read(reader: Callable[[Path], Read], path: Path | None, problems: list[str]) -> Read | None:
    """What ``reader`` reads from ``path``; None if there is no path, or if the file has mistakes."""
    if path is None:
        return None
    try:
        return reader(path)
    except UserError as error:
        problems += error.problems
        return None


def _read_sweeps(given: Sequence[tuple[str | None, Path]], problems: list[str]) -> dict[str, Sweep]:
    """Every sweep that can be read, by name."""
    sweeps: dict[str, Sweep] = {}
    for wanted, path in given:
        sweep = _read(read_sweep, path, problems)
        if sweep is None:
            continue
        name = wanted or re.sub(r"[^\w.-]+", "-", sweep.suite)
        if name in sweeps:
            problems.append(f"two sweeps are called {name!r}; give each its own name in --sweep NAME=PATH")
        sweeps[name] = sweep
    return sweeps

"""The record of one run of the suite, as JSON: machine, bounds, references, and every cell with its figures."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dsgpt.benchmarks.harness.command import record_head, work_facts
from dsgpt.benchmarks.harness.work import STEPS, VALIDATION_WINDOWS
from dsgpt.benchmarks.parity.bounds import BOUNDS
from dsgpt.benchmarks.parity.planted import BUGS
from dsgpt.benchmarks.parity.suite import Result, Suite

SCHEMA_VERSION = "1.1"
"""1.1: validation, the learning rate that optimizers used, the first update, and bounds by kind of arithmetic."""


def suite_record(suite: Suite, results: Sequence[Result], *, seconds: float, device: str) -> dict[str, Any]:
    """The record of one run of the suite.

    Args:
        suite: what ran.
        results: of all its cells.
        seconds: how long it took.
        device: ``cpu`` or ``cuda``.
    """
    return record_head(SCHEMA_VERSION, device=device) | {
        "work": {"steps": STEPS, **work_facts(device), "validation_windows": VALIDATION_WINDOWS},
        "bounds": {name: asdict(bounds) for name, bounds in BOUNDS[device].items()},
        "references": suite.references,
        "seconds": round(seconds, 1),
        "launches": [
            {name: round(value, 1) if isinstance(value, float) else value for name, value in asdict(launch).items()}
            for launch in suite.launches
        ],
        "cells": [_cell(result) for result in results],
    }


def _cell(result: Result) -> dict[str, Any]:
    bug = {"bug_description": BUGS[result.cell.bug].description} if result.cell.bug else {}
    return {
        **asdict(result.cell),
        **bug,
        "status": result.status,
        "refusal_expected": result.refusal_expected,
        "as_expected": result.as_expected,
        "seconds": round(result.seconds, 2),
        "message": result.message or None,
        "measured": result.measured,
        "failures": result.failures,
        "cost": result.bytes_per_rank or None,
    }

"""The record of one run of the suite, as JSON: every cell with all that was measured, and where that was."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.harness.work import GLOBAL_BATCH, SEQUENCE, STEPS, VALIDATION_WINDOWS, shape
from dsgpt.benchmarks.parity.bounds import BOUNDS
from dsgpt.benchmarks.parity.planted import BUGS
from dsgpt.benchmarks.parity.suite import Result, Suite
from dsgpt.common.files import write_json_atomic
from dsgpt.runtime.device import describe_hardware
from dsgpt.telemetry.environment import git_commit, software_versions
from dsgpt.telemetry.record import finite

SCHEMA_VERSION = "1.1"
"""1.1: validation, the learning rate that optimizers used, the first update, and bounds by kind of arithmetic."""


def suite_record(suite: Suite, results: Sequence[Result], *, seconds: float, device: str) -> dict[str, Any]:
    """Everything about one run of the suite.

    Args:
        suite: what ran.
        results: of all its cells.
        seconds: how long it took.
        device: ``cpu`` or ``cuda``.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "timestamp_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "env": software_versions(),
        "hardware": describe_hardware(device),
        "work": {
            "steps": STEPS,
            "global_batch_size": GLOBAL_BATCH,
            "seq_len": SEQUENCE,
            "model": shape(device),
            "validation_windows": VALIDATION_WINDOWS,
        },
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
        "cost": result.cost or None,
    }


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Replace ``path`` as a whole; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, finite(record))

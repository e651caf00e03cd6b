"""Descriptions of sweeps of a small model, and records with made-up figures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from small_run import command_line, write_data, write_recipe

from dsgpt.benchmarks.sweep import SweepOptions
from dsgpt.config.options import TRAINING_FACTS, WORK_FACTS
from dsgpt.record.suites import State, Turn

STEPS = 6
WORK = dict.fromkeys((*WORK_FACTS, *TRAINING_FACTS), "as the others") | {
    "global batch": 8.0,
    "tokens": 768.0,
    "precision": "fp32",
}


def write_description(folder: Path, cells: Sequence[Mapping[str, Any]], **more: Any) -> Path:
    """Write data, a recipe and a description of ``cells`` on them."""
    write_recipe(write_data(folder) / "recipe.json")
    flags = command_line(folder, run_type=None, checkpoint_path=None, max_train_steps=None, device=None)
    file = folder / "mine.json"
    file.write_text(json.dumps({"schema_version": "1.0", "flags": flags, "cells": list(cells), **more}))
    return file


def cell(name: str, *flags: str, run_type: str = "baseline", **more: Any) -> dict[str, Any]:
    return {"name": name, "flags": ["--run_type", run_type, *flags], **more}


def options(folder: Path, suite: Path | str, **changes: Any) -> SweepOptions:
    """Options of a sweep of a few steps, with its record in ``folder/out``."""
    values: dict[str, Any] = {
        "output": folder / "out" / "sweep.json",
        "page": folder / "out" / "sweep.md",
        "keep": None,
        "suite": str(suite),
        "devices": None,
        "repeats": 2,
        "limit": 900,
        "seed": 1337,
        "device": "cpu",
        "model_size": "demo",
        "steps": STEPS,
        "seq_length": 16,
        "target_loss": None,
        "price": None,
        "profile_comm": 0,
    }
    return SweepOptions(**values | changes)


def made_up(name: str, repeat: int, *, speed: float | None, place: int = 1, **more: Any) -> Turn:
    """A turn that is done, with this speed."""
    values: dict[str, Any] = {"state": State.DONE, "message": None, "seconds": 5.0, "work": WORK, "final_loss": 5.0}
    values |= {"tokens_per_sec": speed, "train_time_sec": None if speed is None else 768 / speed}
    return Turn(cell=name, repeat=repeat, place=place, **values | more)

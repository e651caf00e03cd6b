"""What a sweep trains and compares: cells, comparisons, and what may differ in them."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dsgpt.reports.sweeps import Kind

MAY_DIFFER: dict[Kind, tuple[str, ...]] = {
    "same training": (),
    "weak scaling": ("global batch", "tokens", "validation windows"),
    "precisions": ("precision", "loss scaling"),
}
"""The facts of the work that may differ between the cells of a comparison."""
LABELS: dict[Kind, str] = {
    "same training": "The same training: equal data, order, global batch, steps and settings.",
    "weak scaling": (
        "Weak scaling: every device gets the same number of tokens, so the global batch grows with the devices. These "
        "are not the same training, and their losses are not compared."
    ),
    "precisions": "The same training but for the precision of its arithmetic, so losses are not compared.",
}
EQUAL: dict[Kind, str] = {
    "same training": "the same",
    "weak scaling": "the same per device",
    "precisions": "the same but for the precision",
}
"""What is said of the work of a cell that may be compared."""
LAUNCHERS = {"baseline": "python", "ddp": "torchrun", "fsdp": "torchrun", "optimized": "deepspeed"}
"""The launcher of each run type, unless a cell names another."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One setting."""

    name: str
    devices: int
    launcher: str
    flags: tuple[str, ...]
    """Of ``src/gpt2.py``, without data, length and run folder, which are the sweep's."""

    @property
    def folder(self) -> str:
        """The name without characters that a path should not have; cells of a suite must differ in it."""
        return "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in self.name)


@dataclass(frozen=True, kw_only=True)
class ComparisonPlan:
    """Cells that are compared with one of them."""

    name: str
    kind: Kind
    baseline: str
    cells: tuple[str, ...]
    """Names, without the baseline's."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What a sweep trains."""

    name: str
    cells: tuple[Cell, ...]
    comparisons: tuple[ComparisonPlan, ...]

    def cell(self, name: str) -> Cell:
        """The cell of that name."""
        return next(cell for cell in self.cells if cell.name == name)

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return {
            "name": self.name,
            "cells": [asdict(cell) | {"flags": list(cell.flags)} for cell in self.cells],
            "comparisons": [asdict(one) | {"cells": list(one.cells)} for one in self.comparisons],
        }


def value_of(flags: Sequence[str], flag: str) -> str | None:
    """The word behind ``flag``, or behind ``flag=``; None if it is not given."""
    for word, following in itertools.zip_longest(flags, flags[1:]):
        if word == flag:
            return following
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def on_devices(what: str, devices: int) -> str:
    """``zero1 on 1 device``, ``zero1 on 2 devices``."""
    return f"{what} on {devices} device{'s' * (devices != 1)}"

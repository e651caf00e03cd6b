"""Reads a suite from a file: cells from lists of flags, and what to compare. All mistakes are reported together."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from dsgpt.benchmarks.sweep.cells import LAUNCHERS, Cell, ComparisonPlan, Suite, value_of
from dsgpt.common.errors import UserError
from dsgpt.common.json_files import JsonError, clipped, read_object
from dsgpt.common.problems import Problems, did_you_mean
from dsgpt.config.flags import parse_arguments
from dsgpt.reports.sweeps import Kind

SCHEMA_VERSION = "1.0"
_KINDS: tuple[Kind, ...] = get_args(Kind)
_KEYS = ("schema_version", "flags", "cells", "comparisons")
_CELL_KEYS = ("name", "devices", "flags", "launcher")
_COMPARISON_KEYS = ("name", "kind", "baseline", "cells")
_OWN = ("--checkpoint_path", "--device", "--resume", "--overwrite", "--dry_run")
"""Flags that the sweep sets itself."""


def read_description(file: Path, *, devices: Sequence[int] | None) -> Suite:
    """The suite that ``file`` describes.

    Args:
        file: its name without the suffix is the suite's.
        devices: keep only cells on these numbers of devices; None for all.

    Raises:
        UserError: with every mistake in the file, a line each.
    """
    try:
        values = read_object(file)
    except JsonError as error:
        raise UserError(f"--suite {file}: cannot be read as a description of a sweep: {error}") from error
    reader = _Reader(file)
    suite = reader.suite(values)
    reader.problems.raise_if_any()
    return suite if devices is None else _only_on(suite, devices, file=file)


def _only_on(suite: Suite, devices: Sequence[int], *, file: Path) -> Suite:
    """The suite without cells on other numbers of devices.

    Raises:
        UserError: a comparison would lose its baseline, or nothing is left.
    """
    cells = tuple(cell for cell in suite.cells if cell.devices in devices)
    kept = {cell.name for cell in cells}
    lost = sorted({one.baseline for one in suite.comparisons} - kept)
    if lost or not cells:
        words = ",".join(map(str, devices))
        what = f"the baseline {lost[0]!r}" if lost else "every cell"
        raise UserError(f"--devices {words}: leaves out {what} of {file}: name its number of devices too")
    comparisons = tuple(
        ComparisonPlan(
            name=one.name,
            kind=one.kind,
            baseline=one.baseline,
            cells=tuple(name for name in one.cells if name in kept),
        )
        for one in suite.comparisons
    )
    return Suite(name=suite.name, cells=cells, comparisons=comparisons)


class _Reader:
    """Checks the values of a file, and notes every mistake."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.problems = Problems()

    def suite(self, values: Mapping[str, Any]) -> Suite:
        """What the values describe, without their wrong parts."""
        self._known_keys(values, _KEYS, where="the description")
        version = values.get("schema_version")
        if version != SCHEMA_VERSION:
            self._wrong(f'schema_version must be "{SCHEMA_VERSION}", not {clipped(version)}')
        shared = self._words(values.get("flags", []), where="flags")
        given = self._objects(values.get("cells"), "cells")
        cells = [cell for number, one in enumerate(given) if (cell := self._cell(one, f"cells.{number}", shared))]
        self._distinct(cells)
        names = [cell.name for cell in cells]
        if "comparisons" in values:
            listed = self._objects(values["comparisons"], "comparisons")
            found = [self._comparison(one, f"comparisons.{number}", names) for number, one in enumerate(listed)]
            comparisons = tuple(one for one in found if one)
        else:
            comparisons = tuple(
                ComparisonPlan(name="all", kind="same training", baseline=first, cells=tuple(names[1:]))
                for first in names[:1]
            )
        return Suite(name=self._file.stem, cells=tuple(cells), comparisons=comparisons)

    def _cell(self, values: Mapping[str, Any], where: str, shared: tuple[str, ...]) -> Cell | None:
        self._known_keys(values, _CELL_KEYS, where=where)
        name, devices = values.get("name"), values.get("devices", 1)
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            self._wrong(f"{where}.name must be a text that can be printed, not {clipped(name)}")
            name = None
        if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
            self._wrong(f"{where}.devices must be a whole number of at least 1, not {clipped(devices)}")
            devices = None
        flags = (*shared, *self._words(values.get("flags", []), where=f"{where}.flags"))
        run_type = self._checked_flags(flags, where)
        launcher = values.get("launcher", LAUNCHERS.get(run_type or ""))
        if launcher not in LAUNCHERS.values() and (run_type or "launcher" in values):
            known = ", ".join(dict.fromkeys(LAUNCHERS.values()))
            self._wrong(f"{where}.launcher must be one of {known}, not {clipped(launcher)}")
        elif launcher == "python" and devices is not None and devices > 1:
            self._wrong(f"{where}: python starts one rank, not {devices}: use torchrun or deepspeed")
        if name is None or devices is None or launcher is None:
            return None
        return Cell(name=name, devices=devices, launcher=str(launcher), flags=flags)

    def _checked_flags(self, flags: tuple[str, ...], where: str) -> str | None:
        """Note mistakes in flags of ``src/gpt2.py``; return the run type."""
        for flag in _OWN:
            if any(word.partition("=")[0] == flag for word in flags):
                self._wrong(f"{where}.flags: {flag} is set by the sweep: leave it out")
        try:
            _, problems = parse_arguments(flags)
            problems.raise_if_any()
        except UserError as error:
            for line in error.problems:
                self._wrong(f"{where}.flags: {line}")
        run_type = value_of(flags, "--run_type")
        if run_type is None:
            self._wrong(f"{where}.flags: --run_type is missing: name one of {', '.join(LAUNCHERS)}")
        return run_type

    def _comparison(self, values: Mapping[str, Any], where: str, names: Sequence[str]) -> ComparisonPlan | None:
        self._known_keys(values, _COMPARISON_KEYS, where=where)
        kind, baseline, cells = values.get("kind", _KINDS[0]), values.get("baseline"), values.get("cells")
        if kind not in _KINDS:
            self._wrong(f"{where}.kind must be one of {', '.join(_KINDS)}, not {clipped(kind)}")
        others = self._words(cells, where=f"{where}.cells") if cells is not None else tuple(names)
        for name in (baseline, *others):
            if name not in names:
                hint = did_you_mean(name, names) if isinstance(name, str) else ""
                self._wrong(f"{where}: {clipped(name)} is no cell{hint}")
        if kind not in _KINDS or baseline not in names or not isinstance(baseline, str):
            return None
        return ComparisonPlan(
            name=str(values.get("name", where)),
            kind=kind,
            baseline=baseline,
            cells=tuple(name for name in others if name != baseline),
        )

    def _distinct(self, cells: Sequence[Cell]) -> None:
        seen: dict[str, str] = {}
        for cell in cells:
            if cell.folder in seen:
                self._wrong(f"cells: {cell.name!r} and {seen[cell.folder]!r} need names that differ in a letter")
            seen[cell.folder] = cell.name

    def _words(self, value: Any, *, where: str) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            self._wrong(f"{where} must be a list of texts, not {clipped(value)}")
            return ()
        return tuple(value)

    def _objects(self, value: Any, where: str) -> list[Mapping[str, Any]]:
        if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
            self._wrong(f"{where} must be a list of at least one object, not {clipped(value)}")
            return []
        return value

    def _known_keys(self, values: Mapping[str, Any], known: Sequence[str], *, where: str) -> None:
        for key in values:
            if key not in known:
                self._wrong(f"{where} has no key {clipped(key)}{did_you_mean(key, known)}")

    def _wrong(self, line: str) -> None:
        self.problems.add(f"--suite {self._file}: {line}")

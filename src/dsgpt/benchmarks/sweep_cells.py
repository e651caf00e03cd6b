"""The description of a sweep: cells and comparisons, read from a file or built in, and judged before anything runs."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from dsgpt.common.errors import Problems, UserError, did_you_mean
from dsgpt.common.json_files import JsonError, Positive, clipped, read_as
from dsgpt.common.text import counted
from dsgpt.config.options import parse_arguments
from dsgpt.machine.launcher import LAUNCHERS
from dsgpt.machine.topology import Topology
from dsgpt.record.equal_work import Verdict, judge
from dsgpt.record.schema import Fields
from dsgpt.record.suites import Kind, Turn, worked
from dsgpt.record.work import Worked, read_work

# What a sweep trains and compares: cells, comparisons, and what may differ in them.

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
"""Words for the work of a cell that may be compared."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One setting."""

    name: str
    devices: int
    launcher: str
    flags: tuple[str, ...]
    """Flags of ``src/gpt2.py``, without data, length and run folder, which are the sweep's."""

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
class SweepPlan:
    """Trainings and comparisons of a sweep."""

    name: str
    cells: tuple[Cell, ...]
    comparisons: tuple[ComparisonPlan, ...]

    def cell(self, name: str) -> Cell:
        """The cell of that name."""
        return next(cell for cell in self.cells if cell.name == name)


def value_of(flags: Sequence[str], flag: str) -> str | None:
    """The word behind the last ``flag``, or behind ``flag=``; None if it is not given."""
    words = itertools.chain.from_iterable(word.split("=", maxsplit=word.startswith("--")) for word in flags)
    return dict(itertools.pairwise(words)).get(flag)


def on_devices(what: str, devices: int) -> str:
    """``zero1 on 1 device``, ``zero1 on 2 devices``."""
    return f"{what} on {counted(devices, 'device')}"


# The suites that are built in.

BATCH = 32
"""Sequences of the global batch, as in the shipped recipes; of each device under weak scaling."""
CHECKPOINTED = ("--activation_checkpointing",)


@dataclass(frozen=True, kw_only=True)
class _Strategy:
    """Run type, recipe and devices of a strategy."""

    run_type: str
    recipe: str
    """A file of ``ds_configs/``."""
    share: int = 1
    """Devices that share one copy of the model: the number of devices must be a multiple."""
    alone: bool = False
    """Whether it runs on one device only."""

    def runs_on(self, devices: int) -> bool:
        return devices == 1 if self.alone else devices % self.share == 0


_ZERO = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "zero3_nvme")
STRATEGIES = {
    "baseline": _Strategy(run_type="baseline", recipe="zero1", alone=True),
    **{name: _Strategy(run_type=name, recipe="zero1") for name in ("ddp", "fsdp")},
    **{name.replace("_", "-"): _Strategy(run_type="optimized", recipe=name) for name in _ZERO},
    **{name: _Strategy(run_type="optimized", recipe=name, share=2) for name in ("tensor", "pipeline", "sequence")},
    "3d": _Strategy(run_type="optimized", recipe="3d", share=8),
}
"""Every shipped recipe but ``zeropp``, which rounds what it sends: that is another training."""
BASELINE = on_devices("baseline", 1)


def _cell(strategy: str, devices: int, *more: str, suffix: str = "") -> Cell:
    how = STRATEGIES[strategy]
    return Cell(
        name=on_devices(strategy, devices) + suffix,
        devices=devices,
        launcher=LAUNCHERS[how.run_type],
        flags=("--run_type", how.run_type, "--deepspeed_config", f"ds_configs/{how.recipe}.json", *more),
    )


def _cells(strategies: Sequence[str], devices: Sequence[int], *more: str, suffix: str = "") -> list[Cell]:
    """The baseline, and each other strategy on each number of devices that permits it."""
    return [
        _cell(name, count, *more, suffix=suffix)
        for count in sorted({1, *devices})
        for name in strategies
        if STRATEGIES[name].runs_on(count) and (STRATEGIES[name].alone or count in devices)
    ]


def _strong(cells: Sequence[Cell], *, name: str = "strong scaling", baseline: str = BASELINE) -> ComparisonPlan:
    others = tuple(cell.name for cell in cells if cell.name != baseline)
    return ComparisonPlan(name=name, kind="same training", baseline=baseline, cells=others)


SUITES = ("scaling", "strategies", "precision", "memory")


def built_in(name: str, *, devices: Sequence[int]) -> SweepPlan:
    """The suite ``name``, one of ``SUITES``, on each number of ``devices``; the baseline always has one.

    Raises:
        UserError: a number of devices does not divide the global batch.
    """
    if wrong := [str(count) for count in devices if BATCH % count]:
        raise UserError(f"--devices {','.join(wrong)}: must divide the global batch of {BATCH} sequences")
    cells: list[Cell] = []
    comparisons: list[ComparisonPlan] = []
    if name == "scaling":
        cells = _cells(("baseline", "ddp", "zero1"), devices)
        comparisons = [_strong(cells)]
        weak = [
            _cell(strategy, count, "--global_batch_size", str(BATCH * count), suffix=f", batch {BATCH * count}")
            for count in sorted(set(devices) - {1})
            for strategy in ("ddp", "zero1")
        ]
        if weak:
            grown = tuple(cell.name for cell in weak)
            comparisons.append(ComparisonPlan(name="weak scaling", kind="weak scaling", baseline=BASELINE, cells=grown))
        cells += weak
    elif name == "strategies":
        cells = _cells(tuple(STRATEGIES), devices)
        comparisons = [_strong(cells, name=name)]
    elif name == "precision":
        for kind in ("fp32", "bf16"):
            of_kind = _cells(("baseline", "ddp", "zero1", "zero3"), devices, "--precision", kind, suffix=f", {kind}")
            comparisons.append(_strong(of_kind, name=f"strategies in {kind}", baseline=f"{BASELINE}, {kind}"))
            cells += of_kind
        for fp32 in (cell.name for cell in cells if cell.name.endswith("fp32")):
            title, bf16 = f"bf16 beside fp32: {fp32.removesuffix(', fp32')}", fp32.replace("fp32", "bf16")
            comparisons.append(ComparisonPlan(name=title, kind="precisions", baseline=fp32, cells=(bf16,)))
    else:
        every = ("baseline", "ddp", "fsdp", "zero0", "zero1", "zero2", "zero3")
        checkpointed = _cells(every, devices, *CHECKPOINTED, suffix=", checkpointed")
        cells = [cell for pair in zip(_cells(every, devices), checkpointed, strict=True) for cell in pair]
        comparisons = [_strong(cells, name=name)]
    return SweepPlan(name=name, cells=tuple(cells), comparisons=tuple(comparisons))


# Whether cells that are compared will do the same work: judged before anything runs, by the facts of a record.

Facts = Mapping[str, Any]
"""Facts of the work of a training, by the names of ``dsgpt.config.options``."""


def planned_work(cell: Cell, flags: Sequence[str], *, repository: Path) -> Facts | None:
    """Work of a cell; None if this program would refuse it, which the sweep then records.

    Args:
        cell: where it runs.
        flags: all of ``src/gpt2.py``.
        repository: from which relative paths are.
    """
    from dsgpt.config.run_config import resolve  # noqa: PLC0415 - torch takes seconds
    from dsgpt.training.run_description import data_hashes, describe_run  # noqa: PLC0415
    from dsgpt.training.run_folder import ResumePoint  # noqa: PLC0415

    options, problems = parse_arguments(flags)
    files = ("train_data_path", "val_data_path", "deepspeed_config", "checkpoint_path")
    given = {name: getattr(options, name) for name in files}
    options = replace(options, **{name: repository / path for name, path in given.items() if path is not None})
    size = cell.devices
    topology = Topology(rank=0, local_rank=0, world_size=size, local_world_size=size, launcher=cell.launcher)
    try:
        config = resolve(options, topology=topology, problems=problems)
        hashes = data_hashes(config) | {"initial weights": config.init_from.sha256 if config.init_from else None}
    except UserError:
        return None
    record = describe_run(config, ResumePoint(), hashes=hashes)
    steps = config.total_steps
    return read_work(Fields(record, notes=[]), steps=steps, tokens=steps * config.tokens_per_step)


def require_equal_work(suite: SweepPlan, works: Mapping[str, Facts | None]) -> None:
    """Refuse a suite that would compare different work.

    Args:
        suite: what is compared.
        works: of every cell, by name; None for those that are refused.

    Raises:
        UserError: with a line for each cell that does other work than its baseline.
    """
    problems = Problems()
    for plan in suite.comparisons:
        for name in plan.cells:
            base, work = works[plan.baseline], works[name]
            if base is None or work is None:
                continue
            verdict = judge([Worked(plan.baseline, base), Worked(name, work)])
            one, other = (suite.cell(each).devices for each in (plan.baseline, name))
            where = f"comparison {plan.name!r} ({plan.kind}): {name} beside {plan.baseline}"
            if not comparable(verdict, plan.kind):
                problems.add(f"{where}: {verdict.line()}: give both the same, or compare them as another kind")
            elif plan.kind == "weak scaling" and work["global batch"] * one != base["global batch"] * other:
                per_device = f"{work['global batch'] / other:g} vs {base['global batch'] / one:g}"
                problems.add(f"{where}: sequences per device differ: {per_device}: weak scaling keeps them constant")
    problems.raise_if_any()


def judge_turns(turns: Iterable[tuple[str, Turn]]) -> Verdict:
    """Whether turns, each under the name of what it belongs to, did the same work; equal ones are named once."""
    distinct: list[Worked] = []
    for name, turn in turns:
        if (one := worked(turn, name=name)) not in distinct:
            distinct.append(one)
    return judge(distinct)


def comparable(verdict: Verdict, kind: Kind) -> bool:
    """Whether two runs differ, or may differ, only in facts in which a comparison of this kind allows it."""
    unknown = [fact for facts in verdict.unknown.values() for fact in facts]
    facts = [*(difference.fact for difference in verdict.differences), *unknown]
    return all(fact.startswith(MAY_DIFFER[kind]) for fact in facts)


# Reads a suite from a file: cells from lists of flags, and what to compare.

_OWN = ("--checkpoint_path", "--device", "--resume", "--overwrite", "--dry_run")
"""Flags that the sweep sets itself."""


@dataclass(frozen=True, kw_only=True)
class _DescribedCell:
    name: str
    devices: Positive = 1
    flags: tuple[str, ...] = ()
    launcher: Literal["python", "torchrun", "deepspeed"] | None = None
    """Launcher; by default that of the run type."""


@dataclass(frozen=True, kw_only=True)
class _DescribedComparison:
    baseline: str
    name: str | None = None
    kind: Kind = "same training"
    cells: tuple[str, ...] | None = None
    """Names of the compared cells; by default all."""


@dataclass(frozen=True, kw_only=True)
class _Description:
    schema_version: Literal["1.0"]
    cells: Annotated[tuple[_DescribedCell, ...], Field(min_length=1)]
    flags: tuple[str, ...] = ()
    """Flags of every cell."""
    comparisons: Annotated[tuple[_DescribedComparison, ...], Field(min_length=1)] | None = None
    """Comparisons; by default all cells with the first."""


def read_description(file: Path, *, devices: Sequence[int] | None) -> SweepPlan:
    """The suite that ``file`` describes.

    Args:
        file: its name without the suffix is the suite's.
        devices: keep only cells on these numbers of devices; None for all.

    Raises:
        UserError: the file cannot be read as a description, or has mistakes: then a line for each. Or a comparison
            would lose its baseline, or nothing is left on ``devices``.
    """
    try:
        described = read_as(file, _Description)
    except JsonError as error:
        raise UserError(f"--suite {file}: cannot be read as a description of a sweep: {error}") from error
    mistakes: list[str] = []
    cells: list[Cell] = []
    folders: dict[str, str] = {}
    for number, one in enumerate(described.cells):
        flags = (*described.flags, *one.flags)
        launcher = one.launcher or LAUNCHERS.get(value_of(flags, "--run_type") or "", "")
        cells.append(Cell(name=one.name, devices=one.devices, launcher=launcher, flags=flags))
        mistakes += (f"cells.{number}{line}" for line in _mistakes(cells[-1]))
        if other := folders.get(cells[-1].folder):
            mistakes.append(f"cells: {one.name!r} and {other!r} need names that differ in a letter")
        folders[cells[-1].folder] = one.name
    names = [cell.name for cell in cells]
    plans = []
    for number, plan in enumerate(described.comparisons or [_DescribedComparison(name="all", baseline=names[0])]):
        others = names if plan.cells is None else plan.cells
        unknown = dict.fromkeys(name for name in (plan.baseline, *others) if name not in names)
        mistakes += (f"comparisons.{number}: {clipped(one)} is no cell{did_you_mean(one, names)}" for one in unknown)
        compared = tuple(name for name in others if name != plan.baseline)
        name = plan.name or f"comparisons.{number}"
        plans.append(ComparisonPlan(name=name, kind=plan.kind, baseline=plan.baseline, cells=compared))
    if mistakes:
        raise UserError(*(f"--suite {file}: {line}" for line in mistakes))
    kept = [cell for cell in cells if devices is None or cell.devices in devices]
    names = [cell.name for cell in kept]
    lost = sorted({one.baseline for one in plans} - set(names))
    if devices is not None and (lost or not kept):
        words, what = ",".join(map(str, devices)), f"the baseline {lost[0]!r}" if lost else "every cell"
        raise UserError(f"--devices {words}: leaves out {what} of {file}: name its number of devices too")
    plans = [replace(one, cells=tuple(name for name in one.cells if name in names)) for one in plans]
    return SweepPlan(name=file.stem, cells=tuple(kept), comparisons=tuple(plans))


def _mistakes(cell: Cell) -> Iterator[str]:
    """Yields the mistakes of a cell, each behind its place in it."""
    if not (cell.name.strip() and cell.name.isprintable()):
        yield f".name must be a text that can be printed, not {clipped(cell.name)}"
    given = {word.partition("=")[0] for word in cell.flags}
    yield from (f".flags: {flag} is set by the sweep: leave it out" for flag in _OWN if flag in given)
    try:
        parse_arguments(cell.flags)[1].raise_if_any()
    except UserError as error:
        yield from (f".flags: {line}" for line in error.problems)
    if value_of(cell.flags, "--run_type") is None:
        yield f".flags: --run_type is missing: name one of {', '.join(LAUNCHERS)}"
    if cell.launcher == "python" and cell.devices > 1:
        yield f": python starts one rank, not {cell.devices}: use torchrun or deepspeed"

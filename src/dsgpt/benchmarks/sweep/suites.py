"""The suites that are built in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsgpt.benchmarks.sweep.cells import LAUNCHERS, Cell, ComparisonPlan, Suite, on_devices
from dsgpt.common.errors import UserError

BATCH = 32
"""Sequences of the global batch, as in the shipped recipes; of each device under weak scaling."""
CHECKPOINTED = ("--activation_checkpointing",)


@dataclass(frozen=True, kw_only=True)
class _Strategy:
    """How a strategy is started."""

    run_type: str
    recipe: str
    """A file of ``ds_configs/``."""
    share: int = 1
    """Devices that share one copy of the model: the number of devices must be a multiple."""
    alone: bool = False
    """Whether it runs on one device only."""

    def runs_on(self, devices: int) -> bool:
        return devices == 1 if self.alone else devices % self.share == 0


STRATEGIES = {
    "baseline": _Strategy(run_type="baseline", recipe="zero1", alone=True),
    "ddp": _Strategy(run_type="ddp", recipe="zero1"),
    "fsdp": _Strategy(run_type="fsdp", recipe="zero1"),
    **{
        name.replace("_", "-"): _Strategy(run_type="optimized", recipe=name)
        for name in ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "zero3_nvme")
    },
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


def _scaling(devices: Sequence[int]) -> Suite:
    names = ("baseline", "ddp", "zero1")
    strong = _cells(names, devices)
    weak = [
        _cell(name, count, "--global_batch_size", str(BATCH * count), suffix=f", batch {BATCH * count}")
        for count in devices
        if count > 1
        for name in names[1:]
    ]
    grown = ComparisonPlan(
        name="weak scaling", kind="weak scaling", baseline=BASELINE, cells=tuple(cell.name for cell in weak)
    )
    return Suite(name="scaling", cells=(*strong, *weak), comparisons=(_strong(strong), *([grown] if weak else [])))


def _strategies(devices: Sequence[int]) -> Suite:
    cells = _cells(tuple(STRATEGIES), devices)
    return Suite(name="strategies", cells=tuple(cells), comparisons=(_strong(cells, name="strategies"),))


def _precision(devices: Sequence[int]) -> Suite:
    cells: list[Cell] = []
    comparisons = []
    for kind in ("fp32", "bf16"):
        of_kind = _cells(("baseline", "ddp", "zero1", "zero3"), devices, "--precision", kind, suffix=f", {kind}")
        comparisons.append(_strong(of_kind, name=f"strategies in {kind}", baseline=f"{BASELINE}, {kind}"))
        cells += of_kind
    comparisons += [
        ComparisonPlan(
            name=f"bf16 beside fp32: {cell.name.removesuffix(', fp32')}",
            kind="precisions",
            baseline=cell.name,
            cells=(cell.name.replace("fp32", "bf16"),),
        )
        for cell in cells
        if cell.name.endswith("fp32")
    ]
    return Suite(name="precision", cells=tuple(cells), comparisons=tuple(comparisons))


def _memory(devices: Sequence[int]) -> Suite:
    names = ("baseline", "ddp", "fsdp", "zero0", "zero1", "zero2", "zero3")
    plain = _cells(names, devices)
    checkpointed = _cells(names, devices, *CHECKPOINTED, suffix=", checkpointed")
    cells = [cell for pair in zip(plain, checkpointed, strict=True) for cell in pair]
    return Suite(name="memory", cells=tuple(cells), comparisons=(_strong(cells, name="memory"),))


_MAKERS: dict[str, Callable[[Sequence[int]], Suite]] = {
    "scaling": _scaling,
    "strategies": _strategies,
    "precision": _precision,
    "memory": _memory,
}
SUITES = tuple(_MAKERS)


def built_in(name: str, *, devices: Sequence[int]) -> Suite:
    """The suite ``name``, one of ``SUITES``, on each number of ``devices``; the baseline always has one.

    Raises:
        UserError: a number of devices does not divide the global batch.
    """
    wrong = [str(count) for count in devices if BATCH % count]
    if wrong:
        raise UserError(f"--devices {','.join(wrong)}: must divide the global batch of {BATCH} sequences")
    return _MAKERS[name](sorted(set(devices)))

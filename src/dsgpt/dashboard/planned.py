"""Plans for the page "Plan and cost": command lines of ``src/plan.py``, carried out here. Imports no Streamlit."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsgpt.advising.line import words_of
from dsgpt.advising.options import PlanOptions, read_options
from dsgpt.advising.plan import Plan, plan_of, what_would_fit
from dsgpt.advising.recommendation import best_of, recommendation_files
from dsgpt.advising.request import PlanRequest, fixed_setup, read_request
from dsgpt.advising.search import Judged, search
from dsgpt.common.errors import UserError
from dsgpt.common.files import is_regular_file, is_utf8, link_between
from dsgpt.common.problems import Problems
from dsgpt.planning.calibrations import read_calibration
from dsgpt.planning.hardware import gpus
from dsgpt.planning.prices import TABLE, Cost, PriceTable, read_prices
from dsgpt.planning.rates import CALIBRATION


@dataclass(frozen=True, kw_only=True)
class MachineChoice:
    """A machine that can be planned for."""

    name: str
    flags: tuple[tuple[str, Any], ...]
    """Fields of ``PlanOptions`` that name it."""
    devices: int | None
    """That were measured; None for a GPU of the table, of which there are as many as wanted."""

    @property
    def is_measured(self) -> bool:
        """Whether its rates were measured."""
        return self.devices is not None


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What ``src/plan.py`` predicts for a command line."""

    request: PlanRequest
    plan: Plan
    """Of the setup that was asked for, or of the recommended one."""
    advice: tuple[str, ...] = ()
    """What would fit, if the plan does not."""
    best: Judged | None = None
    """The recommended way; None if one setup was asked for."""
    found: tuple[Judged, ...] = ()
    """Every way that was searched."""


def machines(folder: Path) -> tuple[list[MachineChoice], list[str]]:
    """Every machine, measured ones first; and why a calibration cannot be used.

    Args:
        folder: of runs. Its ``calibration.json`` is what ``src/plan.py --calibrate`` writes. Each record of
            ``benchmark.py plan`` in ``reference`` holds a calibration, and steps to which its rates are fitted.
    """
    measured: list[MachineChoice] = []
    broken: list[str] = []
    for path in (folder / CALIBRATION.name, *sorted(folder.glob("reference/*/plan.json"))):
        if is_regular_file(path) and is_utf8(path) and link_between(folder, path) is None:
            try:
                measured.append(_measured(path))
            except UserError as error:
                broken += error.problems
    table = [MachineChoice(name=key, flags=(("gpu", key),), devices=None) for key in gpus()]
    return [*measured, *table], broken


def _measured(path: Path) -> MachineChoice:
    """The machine of a calibration, or of a record with one."""
    calibration = read_calibration(path)
    fitted: tuple[tuple[str, Any], ...] = () if path.name == CALIBRATION.name else (("measured", (path,)),)
    return MachineChoice(
        name=f"{calibration.machine}, {calibration.timestamp_utc[:10]}",
        flags=(("machine", path), *fitted),
        devices=max(each.devices for each in calibration.ceilings),
    )


def command_line(options: PlanOptions) -> str:
    """The command that prints the same plan."""
    return shlex.join([".venv/bin/python", "src/plan.py", *words_of(options)])


def planned(words: Sequence[str], *, repository: Path) -> Planned:
    """What ``src/plan.py`` does with these words, without writing anything.

    Args:
        words: as on a command line. The path of a recipe begins at ``repository``.
        repository: has the shipped recipes.

    Raises:
        UserError: it would refuse them, or nothing fits; every mistake, a line each.
    """
    given, problems = read_options(words)
    recipe = given.deepspeed_config
    options = replace(given, deepspeed_config=recipe and repository / recipe)
    request = read_request(options, problems, repository=repository)
    prices = read_prices(options.prices or TABLE)
    if options.recommend:
        found = search(request, prices, repository=repository)
        best = best_of(found, request)
        assert best.plan is not None
        return Planned(request=request, plan=best.plan, best=best, found=tuple(found))
    plan = plan_of(fixed_setup(request, problems), request, prices)
    advice = tuple(what_would_fit(plan))
    return Planned(request=request, plan=plan, advice=advice)


def recommended_files(done: Planned) -> dict[Path, bytes]:
    """Recipe, command and plan, as ``src/plan.py --recommend`` writes them."""
    assert done.best is not None
    return recommendation_files(done.best, done.request)


def offers(done: Planned) -> Iterator[tuple[str, Cost]]:
    """What the training costs on each offer, on demand and spot; a price of the user's own is the only one."""
    plan, options = done.plan, done.request.options
    if options.price_per_gpu_hour is not None:
        yield from (("yours", cost) for cost in plan.costs)
        return
    for kind, spot in (("on demand", False), ("spot", True)):
        again = replace(plan, request=replace(done.request, options=replace(options, spot=spot)))
        yield from ((kind, cost) for cost in again.costs)


def on_other_gpus(done: Planned, *, repository: Path) -> Iterator[tuple[str, Plan | str]]:
    """The setup that was asked for on each GPU of the table: its plan, or why it is refused."""
    options = done.request.options
    prices = read_prices(options.prices or TABLE)
    for gpu in gpus():
        yield gpu, _on(gpu, options, prices, repository=repository)


def _on(gpu: str, options: PlanOptions, prices: PriceTable, *, repository: Path) -> Plan | str:
    problems = Problems()
    try:
        request = read_request(
            replace(options, gpu=gpu, instance=None, machine=None, measured=()), problems, repository=repository
        )
        return plan_of(fixed_setup(request, problems), request, prices)
    except UserError as error:
        return error.problems[0]

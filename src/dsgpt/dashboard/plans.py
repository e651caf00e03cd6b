"""Plans for the page "Plan and cost": made, and shown as tables and pictures."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsgpt.common.errors import Problems, UserError
from dsgpt.common.files import is_regular_file, is_utf8, link_between
from dsgpt.planner.hardware import PRICES as TABLE
from dsgpt.planner.hardware import Cost, PriceTable, gpus, read_prices
from dsgpt.planner.options import PlanOptions, read_plan_options, words_of
from dsgpt.planner.plan import Plan, plan_of, what_would_fit
from dsgpt.planner.rates import CALIBRATION, read_calibration
from dsgpt.planner.request import PlanRequest, fixed_setup, read_request
from dsgpt.planner.search import Judged, best_of, recommendation_files, search

# Plans for the page "Plan and cost": command lines of ``src/plan.py``, carried out here.


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
    given, problems = read_plan_options(words)
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


Table = dict[str, list[Any]]


def parts_table(parts: Mapping[str, float], unit: str, *, scale: float = 1.0) -> Table:
    """What a figure is made of, each part times ``scale``, in ``unit``; parts that are 0 are left out."""
    shown = {name.replace("_", " "): scale * value for name, value in parts.items() if value}
    whole = sum(shown.values())
    return {"part": list(shown), unit: list(shown.values()), "share": [value / whole for value in shown.values()]}


def offers_table(costs: Iterable[tuple[str, Cost]]) -> Table:
    """Every offer, with the date and the source of its list price; the cheapest first."""
    rows = sorted(costs, key=lambda each: each[1].usd)
    return {
        "offer": [cost.offer for _, cost in rows],
        "price": [kind for kind, _ in rows],
        "instances": [cost.instances for _, cost in rows],
        "US dollars an hour": [_cents(cost.usd_per_hour) for _, cost in rows],
        "US dollars": [_cents(cost.usd) for _, cost in rows],
        "at least": [_cents(cost.least) for _, cost in rows],
        "at most": [_cents(cost.most) for _, cost in rows],
        "list price of": [cost.known_on or "your own" for _, cost in rows],
        "source": [cost.source or "" for _, cost in rows],
    }


def ways_table(found: Iterable[Judged]) -> Table:
    """Every way to train that was searched: those within the limits, the fastest first, then the others with why."""
    rows = [(judged, judged.plan if judged.fits else None) for judged in found]
    return {
        "way": [judged.name for judged, _ in rows],
        "micro batch": [plan.setup.micro_batch_size if plan else None for _, plan in rows],
        "peak, bytes": [plan.peak.total if plan else None for _, plan in rows],
        "tokens/s": [round(plan.tokens_per_sec(plan.step.seconds)) if plan else None for _, plan in rows],
        "training, hours": [_hours(plan.run.seconds) if plan else None for _, plan in rows],
        "US dollars": [_cents(plan.costs[0].usd) if plan and plan.costs else None for _, plan in rows],
        "list price of": [_dated(plan) for _, plan in rows],
        "why not": [judged.reason for judged, _ in rows],
    }


def gpus_table(plans: Iterable[tuple[str, Plan | str]]) -> Table:
    """The same setup on other GPUs."""
    rows = [(gpu, None if isinstance(plan, str) or not plan.fits else plan, plan) for gpu, plan in plans]
    return {
        "GPU": [gpu for gpu, _, _ in rows],
        "precision": [plan.setup.precision if plan else None for _, plan, _ in rows],
        "fits": [_verdict(why) for _, _, why in rows],
        "tokens/s": [round(plan.tokens_per_sec(plan.step.seconds)) if plan else None for _, plan, _ in rows],
        "training, hours": [_hours(plan.run.seconds) if plan else None for _, plan, _ in rows],
        "at least, hours": [_hours(plan.run.least) if plan else None for _, plan, _ in rows],
        "at most, hours": [_hours(plan.run.most) if plan else None for _, plan, _ in rows],
        "US dollars": [_cents(plan.costs[0].usd) if plan and plan.costs else None for _, plan, _ in rows],
        "list price of": [_dated(plan) for _, plan, _ in rows],
        "offer": [plan.costs[0].offer if plan and plan.costs else "" for _, plan, _ in rows],
    }


def _dated(plan: Plan | None) -> str:
    return (plan.costs[0].known_on or "your own") if plan and plan.costs else ""


def _verdict(plan: Plan | str) -> str:
    if isinstance(plan, str):
        return plan
    return "yes" if plan.fits else "no"


def _hours(seconds: float) -> float:
    return round(seconds / 3600, 2)


def _cents(amount: float) -> float:
    return round(amount, 2)


# The pictures of the page "Plan and cost", in Vega-Lite.

_X = {"field": "usd", "type": "quantitative", "title": "US dollars", "scale": {"zero": True}}
_Y = {"field": "offer", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 260}}
RANGES: dict[str, Any] = {
    "layer": [
        {
            "mark": {"type": "rule", "strokeWidth": 7, "opacity": 0.4, "strokeCap": "round"},
            "encoding": {"x": {**_X, "field": "least"}, "x2": {"field": "most"}, "y": _Y, "color": {"field": "price"}},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1, "tooltip": {"content": "data"}},
            "encoding": {
                "x": _X,
                "y": _Y,
                "color": {"field": "price", "type": "nominal", "legend": {"orient": "top", "title": None}},
            },
        },
    ],
}
"""A line from the least to the most of each offer, and a point at the likely cost."""


def bars(unit: str) -> dict[str, Any]:
    """A bar for each part, the longest first."""
    return {
        "mark": {"type": "bar", "tooltip": {"content": "data"}},
        "height": {"step": 24},
        "encoding": {
            "y": {"field": "part", "type": "nominal", "sort": "-x", "title": None},
            "x": {"field": unit, "type": "quantitative", "title": unit, "axis": {"tickCount": 4}},
        },
    }

"""The tables of the page "Plan and cost". Imports no Streamlit."""

from collections.abc import Iterable, Mapping
from typing import Any

from dsgpt.advising.plan import Plan
from dsgpt.advising.search import Judged
from dsgpt.planning.prices import Cost

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

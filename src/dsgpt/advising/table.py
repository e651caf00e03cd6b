"""A plan as a table for people, and as JSON."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dsgpt.advising.plan import HOST_SHARE, Plan
from dsgpt.advising.words import batch_in_words, between, dollars, duration, size, strategy_name

SCHEMA_VERSION = "1.0"
_OFFERS = 3


def plan_lines(plan: Plan) -> list[str]:
    """The plan, a line each."""
    return [*_head(plan), "", *_memory(plan), "", *_step(plan), "", *_run(plan), "", *_cost(plan), "", *_basis(plan)]


def _head(plan: Plan) -> list[str]:
    setup = plan.setup
    checkpointing = ", activation checkpointing" if setup.activation_checkpointing else ""
    return [
        f"GPT-2 with {setup.model.parameter_count() / 1e6:,.0f}M parameters, {strategy_name(setup)} on "
        f"{setup.world_size} x {plan.machine.name}, {setup.precision}{checkpointing}",
        f"global batch {batch_in_words(setup)}, {setup.seq_length:,} tokens each",
    ]


def _memory(plan: Plan) -> list[str]:
    used = plan.peak.total / plan.usable_bytes if plan.usable_bytes else float("inf")
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    return [
        f"memory of rank {plan.rank}, which needs most ({plan.peak.moment}): {size(plan.peak.total)} of "
        f"{size(plan.usable_bytes)} that tensors can fill, {used:.0%}: {verdict}",
        *_rows(plan.peak.parts, size, least=1.0),
        *(
            [f"  and {size(plan.host_bytes)} of {size(_host(plan))} in the memory of its host"]
            if plan.host_bytes
            else []
        ),
    ]


def _host(plan: Plan) -> float:
    """Bytes that offload can fill."""
    return HOST_SHARE * plan.machine.host_bytes


def _step(plan: Plan) -> list[str]:
    step = plan.step
    speeds = between(plan.tokens_per_sec(step.most), plan.tokens_per_sec(step.least), lambda each: f"{each:,.0f}")
    mfu = "" if plan.mfu is None else f", MFU {plan.mfu:.0%}"
    hidden = f"; another {duration(step.hidden)} of communication is hidden" if step.hidden else ""
    return [
        f"step: {duration(step.seconds)} ({between(step.least, step.most, duration)}), "
        f"{plan.tokens_per_sec(step.seconds):,.0f} tokens/s ({speeds}){mfu}",
        *_rows(step.parts, duration),
        f"  overlap: {step.overlap}{hidden}",
    ]


def _run(plan: Plan) -> list[str]:
    run = plan.run
    return [
        f"training: {run.steps:,} steps, {duration(run.seconds)} ({between(run.least, run.most, duration)})",
        *_rows(run.parts, duration),
    ]


def _cost(plan: Plan) -> list[str]:
    if not plan.costs:
        kind, more = ("spot price", ", leave out --spot") if plan.request.options.spot else ("price", "")
        return [f"cost: no {kind} of {plan.machine.name} is known: give --price_per_gpu_hour{more}, or --prices"]
    lines = []
    for cost in plan.costs[:_OFFERS]:
        dated = f", list price of {cost.known_on}, not live: check {cost.source}" if cost.known_on else ""
        count = f"{cost.instances} x " if cost.instances > 1 else ""
        lines.append(
            f"cost: {dollars(cost.usd)} ({between(cost.least, cost.most, dollars)}) on {count}{cost.offer} at "
            f"{dollars(cost.usd_per_hour)} an hour{dated}"
        )
    return lines


def _basis(plan: Plan) -> list[str]:
    return [f"rates: {plan.machine.basis}"]


def _rows(parts: Mapping[str, float], form: Any, *, least: float = 0.0) -> list[str]:
    shown = {name: value for name, value in parts.items() if value > least}
    width, whole = max(map(len, shown), default=0), sum(shown.values())
    return [
        f"  {name.replace('_', ' '):<{width}}  {form(value):>10}  {value / whole:>4.0%}"
        for name, value in shown.items()
    ]


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON; times in seconds, sizes in bytes, money in US dollars."""
    setup, step, run = plan.setup, plan.step, plan.run
    return {
        "schema_version": SCHEMA_VERSION,
        "strategy": strategy_name(setup),
        "run_type": setup.run_type,
        "model": setup.model.as_dict() | {"parameters": setup.model.parameter_count()},
        "machine": {"name": plan.machine.name, "devices": setup.world_size, "rates": plan.machine.basis},
        "precision": setup.precision,
        "seq_length": setup.seq_length,
        "micro_batch_size": setup.micro_batch_size,
        "gradient_accumulation_steps": setup.gradient_accumulation_steps,
        "data_parallel_size": setup.data_parallel_size,
        "parallel_sizes": asdict(setup.sizes),
        "activation_checkpointing": setup.activation_checkpointing,
        "memory": {
            "fits": plan.fits,
            "rank": plan.rank,
            "moment": plan.peak.moment,
            "bytes": plan.peak.total,
            "usable_bytes": plan.usable_bytes,
            "parts": plan.peak.parts,
            "host_bytes": plan.host_bytes,
        },
        "step": {
            "seconds": step.seconds,
            "least_seconds": step.least,
            "most_seconds": step.most,
            "assumed": step.assumed,
            "overlap": step.overlap,
            "hidden_communication_seconds": step.hidden,
            "parts": step.parts,
            "tokens_per_sec": plan.tokens_per_sec(step.seconds),
            "mfu": plan.mfu,
        },
        "training": {
            "steps": run.steps,
            "seconds": run.seconds,
            "least_seconds": run.least,
            "most_seconds": run.most,
            "parts": run.parts,
        },
        "costs": [asdict(cost) for cost in plan.costs],
    }

"""A plan as a table for people, and as JSON."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dsgpt.advising.plan import FIXED_BYTES, HOST_SHARE, Assumption, Plan, what_would_fit
from dsgpt.advising.words import batch_in_words, between, dollars, duration, priced, size, strategy_name

SCHEMA_VERSION = "1.1"
_OFFERS = 3


def plan_lines(plan: Plan) -> list[str]:
    """The plan, a line each; that it does not fit is the last word."""
    if not plan.fits:
        return [
            *_head(plan),
            "",
            *_memory(plan),
            "",
            *what_would_fit(plan),
            "",
            f"DOES NOT FIT: {needs_in_words(plan)}",
        ]
    return [
        *_head(plan),
        "",
        *_memory(plan),
        "",
        *_step(plan),
        "",
        *_run(plan),
        "",
        *_cost(plan),
        "",
        *_basis(plan),
        *_notes(plan),
    ]


def _head(plan: Plan) -> list[str]:
    setup = plan.setup
    checkpointing = ", activation checkpointing" if setup.activation_checkpointing else ""
    return [
        f"GPT-2 with {setup.model.parameter_count() / 1e6:,.0f}M parameters, {strategy_name(setup)} on "
        f"{setup.world_size} x {plan.machine.name}, {setup.precision}{checkpointing}",
        f"global batch {batch_in_words(setup)}, {setup.seq_length:,} tokens each",
    ]


def _memory(plan: Plan) -> list[str]:
    return [
        f"memory of rank {plan.rank}, which needs most ({plan.peak.moment}): {needs_in_words(plan)}"
        f"{': fits' if plan.fits else ''}",
        f"  {usable_in_words(plan)}",
        *_rows(plan.peak.parts, size, least=1.0),
        *(
            [f"  and {size(plan.host_bytes)} of {size(_host(plan))} in the memory of its host"]
            if plan.host_bytes
            else []
        ),
    ]


def needs_in_words(plan: Plan) -> str:
    """The memory that it needs, of that which there is."""
    used = plan.peak.total / plan.usable_bytes if plan.usable_bytes else float("inf")
    needs = f"{size(plan.peak.total)} of {size(plan.usable_bytes)} that tensors can fill, {used:.0%}"
    short = not plan.fits and plan.peak.total <= plan.usable_bytes
    return needs + (f", but {size(plan.host_bytes)} of {size(_host(plan))} in the host's memory" if short else "")


def usable_in_words(plan: Plan) -> str:
    """How much of a device tensors can fill, and why not all of it."""
    machine = plan.machine
    what = "CUDA's context and NCCL's buffers" if machine.kind == "cuda" else "the process"
    return (
        f"{size(plan.usable_bytes)} is {size(machine.memory_bytes)} less {plan.request.options.headroom:g}% headroom "
        f"(--headroom) and {size(FIXED_BYTES[machine.kind])} of {what}"
    )


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
        dated = f", not live: check {cost.source}" if cost.known_on else ""
        count = f"{cost.instances} x " if cost.instances > 1 else ""
        lines.append(
            f"cost: {priced(cost)}, {between(cost.least, cost.most, dollars)} on {count}{cost.offer} at "
            f"{dollars(cost.usd_per_hour)} an hour{dated}"
        )
    return lines


def _basis(plan: Plan) -> list[str]:
    lines = [f"rates: {plan.machine.basis}"]
    if plan.host_bytes and plan.request.options.host_memory_gb is None and plan.machine.kind == "cuda":
        together = min(plan.machine.devices, plan.setup.world_size)
        lines.append(
            f"assumed: {size(plan.machine.host_bytes * together)} in the host of a machine (--host_memory_gb), twice "
            f"its GPUs' memory; at least {size(plan.host_bytes * together / HOST_SHARE)} are needed"
        )
    return [*lines, *(f"assumed: {line}" for line in map(assumption_in_words, plan.assumptions))]


def assumption_in_words(assumption: Assumption) -> str:
    """What is assumed, the training's time if it were otherwise, and where another way wins."""
    times = ", ".join(f"{duration(seconds)} at {value}" for value, seconds in assumption.seconds.items())
    return "; ".join([f"{assumption.what} {assumption.value}: training {times}", *assumption.break_even])


def _notes(plan: Plan) -> list[str]:
    return [f"note: {line}" for line in plan.notes]


def _rows(parts: Mapping[str, float], form: Any, *, least: float = 0.0) -> list[str]:
    shown = {name: value for name, value in parts.items() if value > least}
    width, whole = max(map(len, shown), default=0), sum(shown.values())
    return [
        f"  {name.replace('_', ' '):<{width}}  {form(value):>10}  {value / whole:>4.0%}"
        for name, value in shown.items()
    ]


def with_assumptions(plan: Plan) -> dict[str, Any]:
    """``plan_json`` of the plan that was asked for. For every plan of a search it would take too long."""
    return plan_json(plan) | {"assumptions": [asdict(each) for each in plan.assumptions] if plan.fits else []}


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON; times in seconds, sizes in bytes, money in US dollars."""
    setup, several = plan.setup, plan.request.machines > 1
    return {
        "schema_version": SCHEMA_VERSION,
        "strategy": strategy_name(setup),
        "run_type": setup.run_type,
        "model": setup.model.as_dict() | {"parameters": setup.model.parameter_count()},
        "machine": {"name": plan.machine.name, "devices": setup.world_size, "rates": plan.machine.basis}
        | {"network_gbps": plan.request.network_gbps if several else None},
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
            "device_bytes": plan.machine.memory_bytes,
            "headroom_percent": plan.request.options.headroom,
            "fixed_bytes": FIXED_BYTES[plan.machine.kind],
        },
    } | (_times(plan) if plan.fits else {"step": None, "training": None, "costs": [], "advice": what_would_fit(plan)})


def _times(plan: Plan) -> dict[str, Any]:
    step, run = plan.step, plan.run
    return {
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
        "notes": plan.notes,
    }

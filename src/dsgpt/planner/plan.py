"""The plan of one setup: computed, in words, as a table and as JSON."""

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

from dsgpt.common.text import byte_size, dollars, estimate
from dsgpt.machine.topology import Topology
from dsgpt.planner.formulas import FIXED_BYTES, HOST_SHARE, Peak, model_state, worst_peak
from dsgpt.planner.hardware import MEANT, Cost, PriceTable, cost, gpus
from dsgpt.planner.rates import ASSUMED, Machine, Utilisation, changed
from dsgpt.planner.request import PlanRequest
from dsgpt.planner.rows import Evidence, evidence_for, traits_of
from dsgpt.planner.setup import Setup
from dsgpt.planner.step_time import RunTime, StepTime, predict_step, run_time

# Figures of a plan in words: bytes, times, money, and the name of a setup.

GB = 10**9


size = partial(byte_size, form=",.1f")


def priced(cost: Cost) -> str:
    """``$12.34 (2024-06-01)``: a sum, and the date of the price that it follows from."""
    return dollars(cost.usd) + (f" ({cost.known_on})" if cost.known_on else "")


def between(low: float, high: float, form: Callable[[float], str]) -> str:
    """``1.0 h to 2.0 h``."""
    return f"{form(low)} to {form(high)}"


def held_in_words(setup: Setup, rank: int) -> str:
    """Parts of the training on ``rank``: its stage's layers, its shard of matrices, its positions and its data."""
    place, words = place_of(setup, rank), ["all layers"]
    if setup.sizes.pipeline > 1:
        names = [part.name.split(".") for part in setup.parameters(rank)]
        blocks = sorted({int(number) for kind, number, *_ in names if kind == "blocks"})
        words = ["embedding"] * (["wte", "weight"] in names)
        words += [f"blocks {blocks[0]}-{blocks[-1]}"] if blocks else []
    if setup.sizes.tensor > 1:
        words.append(f"matrices {place.tensor_rank + 1}/{setup.sizes.tensor}")
    if setup.sizes.sequence > 1:
        words.append(f"positions {place.sequence_rank + 1}/{setup.sizes.sequence}")
    if setup.data_parallel_size > 1:
        words.append(f"data {place.data_rank + 1}/{setup.data_parallel_size}")
    return ", ".join(words)


def place_of(setup: Setup, rank: int) -> Topology:
    """The stage, the shards and the data of ``rank``."""
    ranks = setup.world_size
    return Topology(rank=rank, local_rank=0, world_size=ranks, local_world_size=ranks, launcher="").split(setup.sizes)


# The plan of one setup: its memory, the time of a step and of the training, and what that costs.

NETWORKS = (25.0, 50.0, 100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0)
"""Gbit/s between machines at which a plan is tried."""
LEAST_CHANGE = 0.1
"""Least share of the training's time by which an assumption must move it to be named."""
_HALVINGS = 8
_YEAR = 365


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """A rate or limit that nobody measured and on which the time of a training depends."""

    what: str
    value: str
    """The assumed value, with unit and source."""
    seconds: dict[str, float]
    """Seconds of the training at other values."""
    break_even: list[str]
    """Values at which another setup becomes the fastest."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Predictions for one setup."""

    request: PlanRequest
    setup: Setup
    prices: PriceTable
    rank: int
    """The rank that needs most memory."""
    peak: Peak
    usable_bytes: int
    """Bytes of a device that tensors can fill."""
    host_bytes: int
    """Bytes of model state that a rank keeps in the memory of its host."""
    name: str = ""
    """Name of the setup in a search."""
    rivals: tuple["Plan", ...] = ()
    """Every plan of the search that fits, if this one is recommended."""

    @property
    def machine(self) -> Machine:
        """The machine the plan is for."""
        return self.request.machine

    @cached_property
    def step(self) -> StepTime:
        """The time of a step, computed on first use: a search needs it only of setups that fit."""
        return predict_step(self.setup, self.machine)

    @property
    def evidence(self) -> Evidence | None:
        """What steps that others measured say about this one; None for rates that were measured here."""
        if not self.machine.assumed:
            return None
        return evidence_for(traits_of(self.setup, gpu=self.machine.name, devices=self.machine.devices))

    @property
    def uncorrected_seconds(self) -> float:
        """Seconds of a step before own runs corrected the rates."""
        before = self.machine.uncorrected
        return predict_step(self.setup, before).seconds if before else self.step.seconds

    @cached_property
    def run(self) -> RunTime:
        """The time of the whole training."""
        return run_time(self.setup, self.machine, self.step, self.request.options)

    @cached_property
    def costs(self) -> list[Cost]:
        """Offers and their costs, the cheapest first; empty without a price. Billed by the second, for whole instances.

        GPUs that are in one machine need an instance with as many.
        """
        options, gpus, spot = self.request.options, self.setup.world_size, self.request.options.spot
        seconds = (self.run.seconds, self.run.least, self.run.most)
        if options.price_per_gpu_hour is not None:
            return [cost("your price", options.price_per_gpu_hour * gpus, seconds=seconds)]
        offers = []
        for price in self.prices.prices:
            hourly = price.spot_usd_per_hour if spot else price.on_demand_usd_per_hour
            wanted = options.instance in {None, price.instance}
            if hourly and wanted and price.gpu == self.machine.name and price.gpus >= min(gpus, self.machine.devices):
                name, instances = f"{price.provider} {price.instance}{', spot' if spot else ''}", -(-gpus // price.gpus)
                row = {"instances": instances, "known_on": price.known_on, "source": price.source}
                offers.append(cost(name, hourly * instances, seconds=seconds, **row))
        return sorted(offers, key=lambda offer: offer.usd)

    @cached_property
    def assumptions(self) -> list[Assumption]:
        """Assumptions that move the training by ``LEAST_CHANGE``, or with which another setup is the fastest."""
        assumptions, request = [], self.request
        if request.machines > 1 and (gbps := request.machine.network_gbps):
            basis = request.network_basis or "assumed: give --network_gbps or --instance"
            seconds, turns = _tried(self, ("network",), gbps, NETWORKS, _gbps)
            value, what = f"{_gbps(gbps)} ({basis})", "network between machines"
            assumptions.append(Assumption(what=what, value=value, seconds=seconds, break_even=turns))
        best = {each.name: each for each in sorted(self.rivals, key=lambda each: -each.run.seconds)}
        plan = replace(self, rivals=tuple(best.values()))
        for what in ASSUMED if self.machine.assumed else self.machine.unmeasured:
            fields, general, scale, unit = ASSUMED[what]
            share = self.machine.shares.get(what, general)
            form = partial(_number, scale=scale, unit=unit)
            seconds, turns = _tried(plan, fields, share.likely, (share.least, share.most), form)
            if turns or any(abs(each / plan.run.seconds - 1) >= LEAST_CHANGE for each in seconds.values()):
                assumptions.append(Assumption(what=what, value=form(share.likely), seconds=seconds, break_even=turns))
        return assumptions

    @property
    def notes(self) -> list[str]:
        """Warnings about the figures, a line each."""
        options, scheduler = self.request.options, self.setup.recipe.scheduler
        lines, warm_up = [], scheduler.warmup_num_steps if scheduler else 0
        if options.gpu and (meant := MEANT.get(options.gpu.lower())):
            lines.append(f"--gpu {options.gpu} is taken as {meant}")
        if self.run.steps < 2 * warm_up:
            lines.append(
                f"the training ends at step {self.run.steps:,}, and the recipe warms up for {warm_up:,} steps: lower "
                "scheduler.params.warmup_num_steps, or train on more tokens"
            )
        today = datetime.datetime.now(tz=datetime.UTC).date()
        dates = sorted(cost.known_on for cost in self.costs if cost.known_on)
        if dates and (today - datetime.date.fromisoformat(dates[0])).days > _YEAR:
            cure = "check their source, or give --price_per_gpu_hour"
            lines.append(f"list prices of {dates[0]} are over a year old: {cure}")
        return lines

    @property
    def fits(self) -> bool:
        """Whether the rank that needs most has the memory, and its host too."""
        if self.machine.kind == "cpu":
            return self.peak.total + self.host_bytes <= self.usable_bytes
        return self.peak.total <= self.usable_bytes and self.host_bytes <= HOST_SHARE * self.machine.host_bytes

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks."""
        setup = self.setup
        return setup.micro_batch_size * setup.gradient_accumulation_steps * setup.data_parallel_size * setup.seq_length

    def tokens_per_sec(self, seconds: float) -> float:
        """Over all ranks, if a step takes ``seconds``."""
        return self.tokens_per_step / seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation at the likely time; None without a datasheet's peak."""
        setup, gpu = self.setup, gpus().get(self.machine.name)
        peak = gpu.peak(setup.precision) if gpu else None
        flops = setup.model.flops_per_token(setup.attended or setup.seq_length)
        used = Utilisation(flops_per_token=flops, devices=setup.world_size, peak=peak)
        return used.mfu(self.tokens_per_sec(self.step.seconds))


def plan_of(setup: Setup, request: PlanRequest, prices: PriceTable) -> Plan:
    """The plan of ``setup``."""
    machine, headroom = request.machine, request.options.headroom
    rank, peak = worst_peak(setup, device=machine.kind)
    state, recipe = model_state(setup, rank=rank), setup.recipe
    files = {"optimizer", "master"} if recipe.offload_optimizer == "nvme" else set()
    files |= {"parameters"} if recipe.offload_param == "nvme" else set()
    return Plan(
        request=request,
        setup=setup,
        prices=prices,
        rank=rank,
        peak=peak,
        usable_bytes=max(0, int((1 - headroom / 100) * machine.memory_bytes) - FIXED_BYTES[machine.kind]),
        host_bytes=sum(size for name, size in state.off_device.items() if name not in files),
    )


def what_would_fit(plan: Plan) -> list[str]:
    """A line for a setup that does not fit: the largest micro batch that would, with as little change as possible."""
    if plan.fits:
        return []
    for flags, setup in plan.setup.arrangements():
        if plan_of(setup, plan.request, plan.prices).fits:
            return [f"it fits with {' and '.join(flags)}"]
    return ["it fits with no micro batch: take --recommend, which also tries other strategies, or other GPUs"]


def _tried(
    plan: Plan, fields: Sequence[str], likely: float, values: Sequence[float], form: Callable[[float], str]
) -> tuple[dict[str, float], list[str]]:
    """The time of the training at other values of these rates, and the values at which another way gets the fastest.

    Times are monotone in a rate. Up to the last value that is tried, no rival takes less than at the better of
    the two ends. It is timed in between only if that would win.
    """
    seconds, turns = {form(value): _seconds_at(plan, fields, value / likely) for value in values}, []
    for side, outward in (
        ("from", sorted(value for value in values if value > likely)),
        ("below", sorted((value for value in values if value < likely), reverse=True)),
    ):
        if not outward:
            continue
        first, near, end = plan, likely, outward[-1]
        times = max(end / likely, likely / end)  # no training gets this many times as fast
        could = [each for each in plan.rivals if each.run.seconds / times < plan.run.seconds]
        bounds = [(min(each.run.seconds, _seconds_at(each, fields, end / likely)), each) for each in could]

        def winner(value: float, first: Plan, bounds: Sequence[tuple[float, Plan]] = tuple(bounds)) -> Plan:
            own = _seconds_at(first, fields, value / likely)
            faster = [each for bound, each in bounds if bound < own]
            return min([first, *faster], key=lambda each: _seconds_at(each, fields, value / likely))

        for value in outward:
            while (best := winner(value, first)).name != first.name:
                low, high = near, value
                for _ in range(_HALVINGS):
                    middle = math.sqrt(low * high)
                    there = winner(middle, first)
                    low, high, best = (middle, high, best) if there.name == first.name else (low, middle, there)
                turns.append(f"{best.name} is the fastest {side} {form(high)}")
                first, near = best, high
            near = value
    return seconds, turns


def _number(value: float, *, scale: float, unit: str) -> str:
    """Three digits, but no fewer than stand before the point."""
    value *= scale
    return (f"{value:,.0f}" if value >= 100 else f"{value:.3g}") + unit


_gbps = partial(_number, scale=1, unit=" Gbit/s")


def _seconds_at(plan: Plan, fields: Sequence[str], times: float) -> float:
    """Seconds of the training with these rates multiplied."""
    multiplied = {name: changed(getattr(plan.machine.rates, name), lambda rate: rate * times) for name in fields}
    rates = replace(plan.machine.rates, **multiplied)
    # only the likely time is asked for
    machine = replace(plan.machine, rates=rates, slowest=rates, fastest=rates)
    return replace(plan, request=replace(plan.request, machine=machine), rivals=()).run.seconds


# A plan as a table for people, and as JSON.

SCHEMA_VERSION = "1.1"
_OFFERS = 3
_SHOWN = ("precision", "seq_length", "micro_batch_size", "gradient_accumulation_steps", "data_parallel_size")


def plan_lines(plan: Plan) -> list[str]:
    """The plan, a line each; that it does not fit is the last word."""
    setup, request, machine = plan.setup, plan.request, plan.machine
    micro, batches, ranks = setup.micro_batch_size, setup.gradient_accumulation_steps, setup.data_parallel_size
    room = f"{size(HOST_SHARE * machine.host_bytes)} in the memory of its host"
    lines = [
        f"GPT-2 with {setup.model.parameter_count() / 1e6:,.0f}M parameters, {setup.strategy_name} on "
        f"{setup.world_size} x {machine.name}, {setup.precision}"
        f"{', activation checkpointing' if setup.activation_checkpointing else ''}"
        f"{f', attention within documents of {setup.attended:,.0f} tokens' if setup.attended else ''}",
        f"global batch {micro * batches * ranks} sequences = micro batch {micro} x {batches} accumulated x {ranks} "
        f"data ranks, {setup.seq_length:,} tokens each",
        "",
        f"memory of rank {plan.rank}, which needs most ({plan.peak.moment}): {needs_in_words(plan)}"
        f"{': fits' if plan.fits else ''}",
        f"  {usable_in_words(plan)}",
        *_rows(plan.peak.parts, size, least=1.0),
        *([f"  and {size(plan.host_bytes)} of {room}"] if plan.host_bytes else []),
        "",
    ]
    if not plan.fits:
        return [*lines, *what_would_fit(plan), "", f"DOES NOT FIT: {needs_in_words(plan)}"]
    step, run = plan.step, plan.run
    rate, slow, fast = map(plan.tokens_per_sec, (step.seconds, step.most, step.least))
    mfu = "" if plan.mfu is None else f", MFU {plan.mfu:.0%}"
    hidden = f"; another {estimate(step.hidden)} of communication is hidden" if step.hidden else ""
    lines += [
        f"step: {estimate(step.seconds)} ({between(step.least, step.most, estimate)}), {rate:,.0f} tokens/s "
        f"({between(slow, fast, '{:,.0f}'.format)}){mfu}",
        *_rows(step.parts, estimate),
        f"  overlap: {step.overlap}{hidden}",
        "",
        f"training: {run.steps:,} steps, {estimate(run.seconds)} ({between(run.least, run.most, estimate)})",
        *_rows(run.parts, estimate),
        *saves_in_words(plan),
        "",
    ]
    if not plan.costs:
        kind, more = ("spot price", ", leave out --spot") if request.options.spot else ("price", "")
        what = request.options.instance or machine.name
        lines.append(f"cost: no {kind} of {what} is known: give --price_per_gpu_hour{more}, or --prices")
    for offer in plan.costs[:_OFFERS]:
        dated = f", not live: check {offer.source}" if offer.known_on else ""
        count = f"{offer.instances} x " if offer.instances > 1 else ""
        lines.append(
            f"cost: {priced(offer)}, {between(offer.least, offer.most, dollars)} on {count}{offer.offer} at "
            f"{dollars(offer.usd_per_hour)} an hour{dated}"
        )
    lines += ["", f"rates: {machine.basis}"]
    if evidence := plan.evidence:
        low, high = step.seconds * evidence.low, step.seconds * evidence.high
        lines.append(f"evidence: {evidence.words}; 8 of 10 such steps take {between(low, high, estimate)}")
    if plan.host_bytes and request.options.host_memory_gb is None and machine.kind == "cuda":
        together = min(machine.devices, setup.world_size)
        lines.append(
            f"assumed: {size(machine.host_bytes * together)} in the host of a machine (--host_memory_gb), twice its "
            f"GPUs' memory; at least {size(plan.host_bytes * together / HOST_SHARE)} are needed"
        )
    lines += [f"assumed: {assumption_in_words(each)}" for each in plan.assumptions]
    return lines + [f"note: {line}" for line in plan.notes]


def saves_in_words(plan: Plan) -> list[str]:
    """Lines about the best interval between saves, with ``--mtbf``, and what was assumed of interruptions."""
    if plan.request.options.mtbf is None:
        return []
    run, between_saves = plan.run, plan.run.save_every * plan.step.seconds
    return [
        f"  --save_every {run.save_every}: {estimate(between_saves)} between saves lose least if interruptions come at "
        f"random every {estimate(plan.request.options.mtbf)}; goodput {run.goodput:.0%}, the share of the time in "
        f"steps that are kept; a restart takes {estimate(run.restart)}, and the wait for another machine is not in it"
    ]


def needs_in_words(plan: Plan) -> str:
    """The memory that it needs, of that which there is."""
    used = plan.peak.total / plan.usable_bytes if plan.usable_bytes else float("inf")
    needs = f"{size(plan.peak.total)} of {size(plan.usable_bytes)} that tensors can fill, {used:.0%}"
    if plan.fits or plan.peak.total > plan.usable_bytes:
        return needs
    return f"{needs}, but {size(plan.host_bytes)} of {size(HOST_SHARE * plan.machine.host_bytes)} in the host's memory"


def usable_in_words(plan: Plan) -> str:
    """Words for the memory of a device that tensors can fill, and for the rest."""
    machine = plan.machine
    what = "CUDA's context and NCCL's buffers" if machine.kind == "cuda" else "the process"
    return (
        f"{size(plan.usable_bytes)} is {size(machine.memory_bytes)} less {plan.request.options.headroom:g}% headroom "
        f"(--headroom) and {size(FIXED_BYTES[machine.kind])} of {what}"
    )


def assumption_in_words(assumption: Assumption) -> str:
    """Words for the assumed value, the training's time at other values, and the values at which another setup wins."""
    times = ", ".join(f"{estimate(seconds)} at {value}" for value, seconds in assumption.seconds.items())
    return "; ".join([f"{assumption.what} {assumption.value}: training {times}", *assumption.break_even])


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
    planned = {
        **{"schema_version": SCHEMA_VERSION, "strategy": setup.strategy_name, "run_type": setup.run_type},
        "model": setup.model.as_dict() | {"parameters": setup.model.parameter_count()},
        "machine": {"name": plan.machine.name, "devices": setup.world_size, "rates": plan.machine.basis}
        | {"fingerprint": plan.machine.fingerprint}
        | {"network_gbps": plan.machine.network_gbps if several else None},
        **{name: getattr(setup, name) for name in _SHOWN},
        **{"parallel_sizes": asdict(setup.sizes), "activation_checkpointing": setup.activation_checkpointing},
        "attended_length": setup.attended,
        "memory": {
            **{"fits": plan.fits, "rank": plan.rank, "moment": plan.peak.moment, "bytes": plan.peak.total},
            **{"usable_bytes": plan.usable_bytes, "parts": plan.peak.parts, "host_bytes": plan.host_bytes},
            **{"device_bytes": plan.machine.memory_bytes, "headroom_percent": plan.request.options.headroom},
            "fixed_bytes": FIXED_BYTES[plan.machine.kind],
        },
    }
    if not plan.fits:
        return planned | {"step": None, "training": None, "costs": [], "advice": what_would_fit(plan)}
    step, run = plan.step, plan.run
    return planned | {
        "step": {
            **{"seconds": step.seconds, "uncorrected_seconds": plan.uncorrected_seconds},
            **{"least_seconds": step.least, "most_seconds": step.most, "assumed": plan.machine.assumed},
            **{"overlap": step.overlap, "hidden_communication_seconds": step.hidden, "parts": step.parts},
            **({"evidence": each.as_dict()} if (each := plan.evidence) else {}),
            **{"tokens_per_sec": plan.tokens_per_sec(step.seconds), "mfu": plan.mfu},
        },
        "training": {"steps": run.steps, "seconds": run.seconds, "least_seconds": run.least, "most_seconds": run.most}
        | {"parts": run.parts, "goodput": run.goodput}
        | ({} if plan.request.options.mtbf is None else {"save_every": run.save_every, "restart_seconds": run.restart}),
        "costs": [asdict(cost) for cost in plan.costs],
        "notes": plan.notes,
    }

"""The plan of one setup: its memory, the time of a step and of the training, and what that costs."""

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from dsgpt.advising.options import HEADROOM, PlanOptions
from dsgpt.advising.request import PlanRequest
from dsgpt.common.divisors import divisors
from dsgpt.planning.datasheet_rates import ASSUMED
from dsgpt.planning.hardware import MEANT, gpus
from dsgpt.planning.model_state import model_state
from dsgpt.planning.peak_memory import Peak, peak_memory, worst_peak
from dsgpt.planning.prices import Cost, PriceTable, costs, own_cost
from dsgpt.planning.rates import Machine
from dsgpt.planning.run_time import Length, RunTime, run_time
from dsgpt.planning.setup import Setup
from dsgpt.planning.step_time import StepTime, predict_step

FIXED_BYTES = {"cuda": 600_000_000, "cpu": 700_000_000}
"""Of a device that no tensor can fill: CUDA's context and NCCL's buffers; the process without tensors."""
NETWORKS = (25.0, 50.0, 100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0)
"""Gbit/s between machines at which a plan is tried."""
LEAST_CHANGE = 0.1
"""Of the training's time: assumptions that move it by less are not named."""
_HALVINGS = 8
_YEAR = 365
HOST_SHARE = 0.8
"""Of a host's memory, offload can fill this share, beside processes, data and the cache of its files."""


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """Something nobody measured that the time of a training depends on."""

    what: str
    value: str
    """That is assumed, with its unit and where it comes from."""
    seconds: dict[str, float]
    """Of the training, if it were another value."""
    break_even: list[str]
    """At which value another way becomes the fastest."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is predicted of one setup."""

    request: PlanRequest
    setup: Setup
    prices: PriceTable
    rank: int
    """The rank that needs most memory."""
    peak: Peak
    usable_bytes: int
    """Of a device, for tensors."""
    host_bytes: int
    """Of model state that a rank keeps in the memory of its host."""
    name: str = ""
    """Of its way, in a search."""
    rivals: tuple["Plan", ...] = ()
    """Every plan of the search that fits, if this one is recommended."""

    @property
    def machine(self) -> Machine:
        """That it is planned for."""
        return self.request.machine

    @cached_property
    def step(self) -> StepTime:
        """Computed when it is asked for: a search needs it only of setups that fit."""
        return predict_step(self.setup, self.machine)

    @cached_property
    def run(self) -> RunTime:
        """The whole training."""
        return run_time(self.setup, self.machine, self.step, length_of(self.request.options))

    @cached_property
    def costs(self) -> list[Cost]:
        """The cheapest first; empty if no price is known."""
        return _costs(self.setup, self.machine, self.request.options, self.prices, self.run)

    @cached_property
    def assumptions(self) -> list[Assumption]:
        """Those that move the training by ``LEAST_CHANGE``, or with which another way is the fastest."""
        return _assumptions(self)

    @property
    def notes(self) -> list[str]:
        """What to know before the figures are trusted, a line each."""
        options, scheduler = self.request.options, self.setup.recipe.scheduler
        found, warm_up = [], scheduler.warmup_num_steps if scheduler else 0
        if options.gpu and (meant := MEANT.get(options.gpu.lower())):
            found.append(f"--gpu {options.gpu} is taken as {meant}")
        if self.run.steps < 2 * warm_up:
            found.append(
                f"the training ends at step {self.run.steps:,}, and the recipe warms up for {warm_up:,} steps: lower "
                "scheduler.params.warmup_num_steps, or train on more tokens"
            )
        today = datetime.datetime.now(tz=datetime.UTC).date()
        dates = sorted(cost.known_on for cost in self.costs if cost.known_on)
        if dates and (today - datetime.date.fromisoformat(dates[0])).days > _YEAR:
            found.append(
                f"list prices of {dates[0]} are over a year old: check their source, or give --price_per_gpu_hour"
            )
        return found

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
        sequences = setup.micro_batch_size * setup.gradient_accumulation_steps * setup.data_parallel_size
        return sequences * setup.seq_length

    def tokens_per_sec(self, seconds: float) -> float:
        """Over all ranks, if a step takes ``seconds``."""
        return self.tokens_per_step / seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation at the likely time; None without a datasheet's peak."""
        gpu = gpus().get(self.machine.name)
        peak = gpu.peak(self.setup.precision) if gpu else None
        if peak is None:
            return None
        flops = self.setup.model.flops_per_token(self.setup.seq_length)
        return self.tokens_per_sec(self.step.seconds) / self.setup.world_size * flops / peak


def usable_bytes(machine: Machine, *, headroom: float = HEADROOM) -> int:
    """Bytes of a device that tensors can fill, if ``headroom`` percent of its memory are left free."""
    return max(0, int((1 - headroom / 100) * machine.memory_bytes) - FIXED_BYTES[machine.kind])


def fullest_rank(setup: Setup, kind: str) -> tuple[int, Peak]:
    """The rank that needs the most memory of its device, and its peak.

    Only ZeRO 1 and 2 in fp32 deal parameters unevenly to the ranks of a pipeline stage.
    """
    if setup.run_type == "optimized" and setup.recipe.zero_stage in {1, 2} and setup.precision == "fp32":
        return worst_peak(setup, device=kind)
    peaks = [(rank, peak_memory(setup, rank=rank, device=kind)) for rank in setup.first_ranks]
    return max(peaks, key=lambda each: each[1].total)


def length_of(options: PlanOptions) -> Length:
    """The length of the training that the flags name."""
    return Length(
        tokens=options.tokens or 0.0,
        eval_every=options.eval_every,
        val_tokens=options.val_tokens,
        save_every=options.save_every,
    )


def plan_of(setup: Setup, request: PlanRequest, prices: PriceTable) -> Plan:
    """The plan of ``setup``."""
    rank, peak = fullest_rank(setup, request.machine.kind)
    return Plan(
        request=request,
        setup=setup,
        prices=prices,
        rank=rank,
        peak=peak,
        usable_bytes=usable_bytes(request.machine, headroom=request.options.headroom),
        host_bytes=_host_bytes(setup, rank),
    )


def what_would_fit(plan: Plan) -> list[str]:
    """A line for a setup that does not fit: the largest micro batch that would, with as little change as possible."""
    if plan.fits:
        return []
    share = plan.setup.micro_batch_size * plan.setup.gradient_accumulation_steps
    for checkpointing in sorted({plan.setup.activation_checkpointing, True}):
        for micro in sorted(divisors(share), reverse=True):
            setup = replace(
                plan.setup,
                micro_batch_size=micro,
                gradient_accumulation_steps=share // micro,
                activation_checkpointing=checkpointing,
            )
            if plan_of(setup, plan.request, plan.prices).fits:
                flag = "--activation_checkpointing and " if checkpointing > plan.setup.activation_checkpointing else ""
                return [f"it fits with {flag}--micro_batch_size_per_gpu {micro}"]
    return ["it fits with no micro batch: take --recommend, which also tries other strategies, or other GPUs"]


def _assumptions(plan: Plan) -> list[Assumption]:
    found, request = [], plan.request
    if request.machines > 1:
        basis = request.network_basis or "assumed: give --network_gbps or --instance"
        seconds, turns = _tried(plan, ("network",), request.network_gbps, NETWORKS, _gbps)
        value = f"{_gbps(request.network_gbps)} ({basis})"
        found.append(Assumption(what="network between machines", value=value, seconds=seconds, break_even=turns))
    best = {each.name: each for each in sorted(plan.rivals, key=lambda each: -each.run.seconds)}
    plan = replace(plan, rivals=tuple(best.values()))
    for what, (fields, share, scale, unit) in ASSUMED.items() if plan.machine.assumed else ():
        form = partial(_number, scale=scale, unit=unit)
        seconds, turns = _tried(plan, fields, share.likely, (share.least, share.most), form)
        if turns or any(abs(each / plan.run.seconds - 1) >= LEAST_CHANGE for each in seconds.values()):
            found.append(Assumption(what=what, value=form(share.likely), seconds=seconds, break_even=turns))
    return found


def _tried(
    plan: Plan, fields: Sequence[str], likely: float, values: Sequence[float], form: Callable[[float], str]
) -> tuple[dict[str, float], list[str]]:
    """The time of the training at other values of these rates, and the values at which another way gets the fastest.

    Times are monotone in a rate. So at no value up to the last one that is tried does a rival take less than at the
    better of the two ends, and it is timed in between only if that would win.
    """

    def at(each: Plan, value: float) -> float:
        return _at(each, fields, value / likely).run.seconds

    seconds, turns = {form(value): at(plan, value) for value in values}, []
    for side, outward in (
        ("from", sorted(value for value in values if value > likely)),
        ("below", sorted((value for value in values if value < likely), reverse=True)),
    ):
        if not outward:
            continue
        first, near, end = plan, likely, outward[-1]
        times = max(end / likely, likely / end)  # no training gets this many times as fast
        could = [each for each in plan.rivals if each.run.seconds / times < plan.run.seconds]
        bounds = [(min(each.run.seconds, at(each, end)), each) for each in could]

        def winner(value: float, first: Plan, bounds: Sequence[tuple[float, Plan]] = tuple(bounds)) -> Plan:
            own = at(first, value)
            return min([first, *(each for bound, each in bounds if bound < own)], key=lambda each: at(each, value))

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


def _at(plan: Plan, fields: Sequence[str], times: float) -> Plan:
    """The plan with these rates multiplied."""

    def multiplied(rate: Any) -> Any:
        return {key: multiplied(each) for key, each in rate.items()} if isinstance(rate, Mapping) else rate * times

    rates = replace(plan.machine.rates, **{field: multiplied(getattr(plan.machine.rates, field)) for field in fields})
    # only the likely time is asked for
    machine = replace(plan.machine, rates=rates, slowest=rates, fastest=rates)
    return replace(plan, request=replace(plan.request, machine=machine), rivals=())


def _host_bytes(setup: Setup, rank: int) -> int:
    """What is off the device and not swapped to files."""
    state, recipe = model_state(setup, rank=rank), setup.recipe
    files = {"optimizer", "master"} if recipe.offload_optimizer == "nvme" else set()
    files |= {"parameters"} if recipe.offload_param == "nvme" else set()
    return sum(size for name, size in state.off_device.items() if name not in files)


def _costs(setup: Setup, machine: Machine, options: PlanOptions, prices: PriceTable, run: RunTime) -> list[Cost]:
    if options.price_per_gpu_hour is not None:
        times = {"seconds": run.seconds, "least": run.least, "most": run.most}
        return [own_cost(options.price_per_gpu_hour, gpus=setup.world_size, **times)]
    return costs(
        prices,
        gpu=machine.name,
        gpus=setup.world_size,
        together=min(setup.world_size, machine.devices),
        spot=options.spot,
        instance=options.instance,
        seconds=run.seconds,
        least=run.least,
        most=run.most,
    )

"""``--recommend``: plans every way to train, and ranks those that fit into memory, budget and deadline."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsgpt.advising.plan import HOST_SHARE, Plan, plan_of
from dsgpt.advising.request import PlanRequest
from dsgpt.advising.ways import Way, ways
from dsgpt.advising.words import dollars, duration, priced, size
from dsgpt.common.divisors import divisors
from dsgpt.common.problems import Problems
from dsgpt.config.batch import LARGEST_BATCH, BatchPlan
from dsgpt.config.compatibility import check_accumulation, check_split
from dsgpt.config.recipe import Recipe
from dsgpt.planning.prices import PriceTable

_SHARE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A way with or without activation checkpointing, and its fastest micro batch that fits."""

    way: Way
    activation_checkpointing: bool
    recipe: Recipe | None
    """With the batch; None if it was refused."""
    plan: Plan | None
    """If it does not fit into memory, the plan that needs least."""
    fitting: tuple[Plan, ...] = ()
    """The plans of every micro batch that fits into memory."""
    reason: str
    """Why it is not recommended; empty if it is within all limits."""

    @property
    def name(self) -> str:
        """The way's, with a remark about checkpointing."""
        return f"{self.way.name}, checkpointing" if self.activation_checkpointing else self.way.name

    @property
    def fits(self) -> bool:
        """Whether it is within memory, budget and deadline."""
        return not self.reason


def search(request: PlanRequest, prices: PriceTable, *, repository: Path) -> list[Judged]:
    """Every way to train, judged: first those within all limits, the fastest first, then the others.

    All micro batches are planned, because those that fit are no range: the smallest may need more memory than a larger
    one. With as many sequences in a step it accumulates, and then a rank holds buffers that a single micro batch does
    without: the sum of the gradients beside those of the micro batch, 4 bytes for each parameter that it reduces.
    The time of a plan is computed only if it fits.
    """
    found = [
        _judge(request, prices, way, activation_checkpointing=checkpointing)
        for way in ways(request.devices, together=request.machine.devices, repository=repository)
        for checkpointing in (False, True)
    ]
    ranked = sorted((each for each in found if each.fits), key=_seconds)
    if ranked:
        best = ranked[0]
        assert best.plan is not None
        rivals = tuple(plan for each in found for plan in each.fitting)
        ranked[0] = replace(best, plan=replace(best.plan, rivals=rivals))
    return [*ranked, *(each for each in found if not each.fits)]


def _seconds(judged: Judged) -> float:
    """Of the training, for ranking; equal ones stay in order, the simpler first."""
    assert judged.plan is not None
    return judged.plan.run.seconds


def _judge(request: PlanRequest, prices: PriceTable, way: Way, *, activation_checkpointing: bool) -> Judged:
    best: Plan | None = None
    chosen: Recipe | None = None
    least: Plan | None = None
    fitting: list[Plan] = []
    try:
        for recipe, plan in _plans(request, prices, way, activation_checkpointing=activation_checkpointing):
            if least is None or plan.peak.total < least.peak.total:
                least = plan
            if not plan.fits:
                continue
            fitting.append(plan)
            if best is None or plan.run.seconds < best.run.seconds * (1 - _SHARE):
                best, chosen = plan, recipe
    except _Refused as refusal:
        return Judged(
            way=way,
            activation_checkpointing=activation_checkpointing,
            recipe=None,
            plan=None,
            reason=str(refusal),
        )
    return Judged(
        way=way,
        activation_checkpointing=activation_checkpointing,
        recipe=chosen,
        plan=best or least,
        fitting=tuple(fitting),
        reason=_reason(request, best, least),
    )


class _Refused(ValueError):
    """Training would refuse the way, whatever the micro batch is."""


def _plans(
    request: PlanRequest, prices: PriceTable, way: Way, *, activation_checkpointing: bool
) -> Iterator[tuple[Recipe, Plan]]:
    """The plans of all micro batches, the smallest first."""
    for recipe, batch in _batches(request, way, activation_checkpointing=activation_checkpointing):
        setup = request.setup(recipe, way.run_type, batch, activation_checkpointing=activation_checkpointing)
        name = f"{way.name}, checkpointing" if activation_checkpointing else way.name
        yield recipe, replace(plan_of(setup, request, prices), name=name)


def _batches(request: PlanRequest, way: Way, *, activation_checkpointing: bool) -> Iterator[tuple[Recipe, BatchPlan]]:
    """Every split of the global batch that the flags allow.

    Raises:
        _Refused: there is none, or training refuses the way.
    """
    total = request.options.global_batch_size or request.recipe.train_batch_size
    path = request.options.into / "recipe.json"
    more: dict[str, Any] = {"activation_checkpointing": {}} if activation_checkpointing else {}
    problems = Problems()
    plain = way.recipe(request.recipe, path, train_batch_size=total, **more)
    training = request.training(plain, way.run_type, problems=problems)
    check_split(training, problems)
    ranks = request.devices // plain.parallel_of(way.run_type).ranks_per_copy
    total = _divisible(total, ranks, problems)
    if problems:
        raise _Refused(_first_line(problems, path))
    share, count = total // ranks, 0
    for micro in divisors(share):
        batch = BatchPlan(
            global_batch_size=total,
            micro_batch_size=micro,
            gradient_accumulation_steps=share // micro,
            data_parallel_size=ranks,
        )
        if not _asked_for(batch, request):
            continue
        recipe = way.recipe(
            request.recipe,
            path,
            train_batch_size=total,
            train_micro_batch_size_per_gpu=micro,
            gradient_accumulation_steps=batch.gradient_accumulation_steps,
            **more,
        )
        check_accumulation(training, batch.gradient_accumulation_steps, problems)
        if not problems:
            count += 1
            yield recipe, batch
    if not count:
        raise _Refused(f"no micro batch as asked for divides the {share} sequences of a rank")


def _divisible(total: int | None, ranks: int, problems: Problems) -> int:
    """The global batch, for ``ranks`` data ranks; what is wrong with it goes to ``problems``."""
    if total is None:
        problems.add("the global batch is not given: set train_batch_size in the recipe or --global_batch_size")
        return 0
    if total > LARGEST_BATCH:
        problems.add(f"the global batch of {total:,} is too large: at most {LARGEST_BATCH:,}")
    if not problems and total % ranks:
        problems.add(f"the global batch of {total} is not divisible by {ranks} data ranks")
    return total


def _asked_for(batch: BatchPlan, request: PlanRequest) -> bool:
    """Whether the flags permit its micro batch and accumulation."""
    wanted = (request.options.micro_batch_size_per_gpu, request.options.grad_accum_steps)
    sizes = (batch.micro_batch_size, batch.gradient_accumulation_steps)
    return all(want is None or want == have for want, have in zip(wanted, sizes, strict=True))


def _first_line(problems: Problems, path: Path) -> str:
    """The first mistake, without the name of the file that is not written yet."""
    try:
        problems.raise_if_any()
    except ValueError as error:
        return str(error).splitlines()[0].removeprefix(f"{path}: ")
    return ""


def no_price(spot: bool) -> str:
    """Why a budget cannot be judged."""
    return f"has no known {'spot price' if spot else 'price'}: give --price_per_gpu_hour"


def _reason(request: PlanRequest, best: Plan | None, least: Plan | None) -> str:
    """Why a way is not within the limits; empty if it is."""
    options = request.options
    if best is None:
        assert least is not None
        if least.peak.total <= least.usable_bytes:
            room = size(HOST_SHARE * least.machine.host_bytes)
            return f"does not fit: needs {size(least.host_bytes)} of {room} in the host's memory for each device"
        part = max(least.peak.parts, key=lambda name: least.peak.parts[name])
        return (
            f"does not fit: needs {size(least.peak.total)} of {size(least.usable_bytes)} with micro batch "
            f"{least.setup.micro_batch_size}; most of it is {part} ({size(least.peak.parts[part])})"
        )
    if options.deadline is not None and best.run.seconds > options.deadline:
        return f"takes {duration(best.run.seconds)}, longer than the deadline of {duration(options.deadline)}"
    if options.budget is not None and not best.costs:
        return no_price(options.spot)
    if options.budget is not None and best.costs[0].usd > options.budget:
        return f"costs {priced(best.costs[0])}, more than the budget of {dollars(options.budget)}"
    return ""

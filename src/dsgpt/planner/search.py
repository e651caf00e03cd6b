"""``--recommend``: the search over all ways to train, and the recommendation that it gives."""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsgpt.common.errors import Problems, UserError
from dsgpt.common.files import json_text, write_atomic
from dsgpt.common.text import divisors, next_line
from dsgpt.config.compatibility import check_accumulation, check_split
from dsgpt.config.recipe import Recipe, recipe_text
from dsgpt.config.run_config import LARGEST_BATCH, BatchPlan
from dsgpt.planner.hardware import PriceTable, gpus
from dsgpt.planner.plan import (
    HOST_SHARE,
    Plan,
    assumption_in_words,
    dollars,
    duration,
    plan_json,
    plan_lines,
    plan_of,
    priced,
    size,
    with_assumptions,
)
from dsgpt.planner.request import PlanRequest, Way, ways

# ``--recommend``: plans every way to train, and ranks those that fit into memory, budget and deadline.

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


RECIPE, COMMAND, PLAN = "recipe.json", "train.sh", "plan.json"


# A recommendation for people, as JSON, and as the files that carry it out.


def best_of(found: Sequence[Judged], request: PlanRequest) -> Judged:
    """The first of ``found``, if it is within all limits.

    Raises:
        UserError: nothing is; the line says what would be.
    """
    if found and found[0].fits:
        return found[0]
    raise UserError(_nothing_fits(found, request))


def _nothing_fits(found: Sequence[Judged], request: PlanRequest) -> str:
    where = f"{request.devices} x {request.machine.name}"
    inside = [each for each in found if each.plan is not None and each.plan.fits]
    if inside:
        fastest = min(inside, key=lambda each: each.plan.run.seconds if each.plan else 0.0)
        assert fastest.plan is not None
        if request.options.budget is not None and not fastest.plan.costs:
            return f"--budget cannot be judged, because {request.machine.name} {no_price(request.options.spot)}"
        cost = f" and costs {priced(fastest.plan.costs[0])}" if fastest.plan.costs else ""
        return (
            f"no setup on {where} is within the limits: the fastest, {fastest.name}, takes "
            f"{duration(fastest.plan.run.seconds)}{cost}: allow that, take more or faster GPUs, or fewer --tokens"
        )
    planned = [each.plan for each in found if each.plan is not None]
    if not planned:
        return f"no setup on {where} can be trained: {found[0].reason}"
    on_device = [plan for plan in planned if plan.host_bytes == 0] or planned
    least = min(on_device, key=lambda plan: plan.peak.total)
    share = least.usable_bytes / request.machine.memory_bytes
    enough = [gpu.key for gpu in gpus().values() if gpu.memory_bytes * share >= least.peak.total]
    cure = f"take {enough[0]}, or more GPUs" if enough else "take more GPUs, or a smaller model"
    return (
        f"GPT-2 with {request.model.parameter_count() / 1e6:,.0f}M parameters fits nowhere on {where}, not even with "
        f"offload to its host; without it the least is {size(least.peak.total)} of {size(least.usable_bytes)} a "
        f"device: {cure}"
    )


def recommendation_lines(found: Sequence[Judged], best: Judged, written: Sequence[Path]) -> list[str]:
    """The recommended plan, those that fit beside it, and why the others do not."""
    assert best.plan is not None
    ranked = [each for each in found if each.fits]
    others = [each for each in found if not each.fits]
    width = max(len(each.name) for each in found)
    lines = [f"recommended of {len(found)} ways to train: {best.name}", "", *plan_lines(best.plan), ""]
    lines += [f"within the limits ({len(ranked)}):", *(_row(each, width) for each in ranked), ""]
    if others:
        lines += ["not within the limits:", *(f"  {each.name:<{width}}  {each.reason}" for each in others), ""]
    names = [path.as_posix() for path in written]
    command = next(path for path in written if path.name == COMMAND)
    return [*lines, f"written: {', '.join(names)}", next_line(["sh", command, "--dry_run"])]


def _row(judged: Judged, width: int) -> str:
    plan = judged.plan
    assert plan is not None
    cost = f"  {priced(plan.costs[0]):>21}" if plan.costs else ""
    return (
        f"  {judged.name:<{width}}  micro batch {plan.setup.micro_batch_size:>3}  {size(plan.peak.total):>9}  "
        f"{plan.tokens_per_sec(plan.step.seconds):>11,.0f} tokens/s  {duration(plan.run.seconds):>10}{cost}"
    )


def recommendation_json(found: Sequence[Judged], best: Judged, written: Sequence[Path]) -> dict[str, Any]:
    """The same as JSON."""
    assert best.plan is not None
    return {
        "recommended": {"name": best.name, "plan": with_assumptions(best.plan)},
        "ranked": [{"name": each.name, "plan": plan_json(each.plan)} for each in found if each.fits and each.plan],
        "refused": [{"name": each.name, "reason": each.reason} for each in found if not each.fits],
        "written": [path.as_posix() for path in written],
    }


def write_recommendation(best: Judged, request: PlanRequest) -> list[Path]:
    """Write recipe, command and plan to the folder of ``--into``; return their paths."""
    files = recommendation_files(best, request)
    request.options.into.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        write_atomic(path, content)
    return list(files)


def recommendation_files(best: Judged, request: PlanRequest) -> dict[Path, bytes]:
    """Recipe, command and plan, by their paths in the folder of ``--into``."""
    assert best.plan is not None
    assert best.recipe is not None
    recipe, command, plan = (request.options.into / name for name in (RECIPE, COMMAND, PLAN))
    return {
        recipe: recipe_text(best.recipe.raw).encode(),
        command: command_text(best, request, recipe).encode(),
        plan: json_text(with_assumptions(best.plan)).encode(),
    }


def command_text(best: Judged, request: PlanRequest, recipe: Path) -> str:
    """The script that starts the training from the root of the repository.

    It prefers the environment that ``make demo`` creates there. What is given to it is added to the command:
    ``sh plan/train.sh --dry_run``.
    """
    words = [*launcher_words(best.way.run_type, request), "src/gpt2.py", *_training_words(best, request, recipe)]
    lines = ['PATH="$PWD/.venv/bin:$PATH"', f'exec {shlex.join(words)} "$@"']
    if request.machines > 1 and request.machine.kind == "cuda":
        assert best.plan is not None
        network = next(each for each in best.plan.assumptions if each.what.startswith("network"))
        lines.insert(0, f"# Planned for a {assumption_in_words(network)}.")
        lines.insert(0, "# Start it on every machine, with MASTER set to the address of one of them.")
    return "\n".join(["#!/bin/sh", *lines]).replace("'$MASTER:29500'", '"$MASTER:29500"') + "\n"


def launcher_words(run_type: str, request: PlanRequest) -> list[str]:
    """The launcher and its flags; several machines are joined by torchrun."""
    devices, together = request.devices, request.machine.devices
    if run_type == "baseline":
        return ["python"]
    if devices > together and request.machine.kind == "cuda":
        machines = ["--nnodes", str(request.machines), "--nproc_per_node", str(together)]
        return ["torchrun", *machines, "--rdzv_backend", "c10d", "--rdzv_endpoint", "$MASTER:29500"]
    if run_type == "optimized":
        return ["deepspeed", "--quiet", "--num_gpus", str(devices)]
    return ["torchrun", "--nproc_per_node", str(devices)]


def _training_words(best: Judged, request: PlanRequest, recipe: Path) -> list[str]:
    assert best.plan is not None
    options, name = request.options, best.name.replace(", ", "-").replace(" ", "-")
    given = {
        "--run_type": best.way.run_type,
        "--deepspeed_config": recipe.as_posix(),
        "--train_data_path": options.train_data_path.as_posix(),
        "--val_data_path": options.val_data_path.as_posix(),
        "--checkpoint_path": f"checkpoint/{options.model_size}-{name}",
        "--model_size": options.model_size,
        "--num_layers": options.num_layers,
        "--num_heads": options.num_heads,
        "--embedding_size": options.embedding_size,
        "--max_position_embeddings": options.max_position_embeddings,
        "--vocab_size": request.model.vocab_size,
        "--seq_length": request.seq_length,
        "--max_train_steps": best.plan.run.steps,
        "--eval_every": options.eval_every or None,
        "--max_val_steps": _validation_steps(best.plan, options.val_tokens),
        "--save_every": options.save_every,
        "--precision": None if options.precision == "auto" else options.precision,
        "--plan": (options.into / PLAN).as_posix(),
    }
    return [word for flag, value in given.items() if value is not None for word in (flag, str(value))]


def _validation_steps(plan: Plan, val_tokens: float) -> int | None:
    """Global batches of a validation as it is planned; None to validate on the whole file."""
    return math.ceil(val_tokens / plan.tokens_per_step) if val_tokens else None

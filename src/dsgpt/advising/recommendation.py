"""A recommendation for people, as JSON, and as the files that carry it out."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsgpt.advising.plan import Plan
from dsgpt.advising.request import PlanRequest
from dsgpt.advising.search import Judged, no_price
from dsgpt.advising.table import assumption_in_words, plan_json, plan_lines, with_assumptions
from dsgpt.advising.words import duration, priced, size
from dsgpt.common.errors import UserError
from dsgpt.common.files import json_text, write_atomic
from dsgpt.common.next_step import next_line
from dsgpt.config.recipe import recipe_text
from dsgpt.planning.hardware import gpus

RECIPE, COMMAND, PLAN = "recipe.json", "train.sh", "plan.json"


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

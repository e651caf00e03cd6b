"""Executes ``src/plan.py`` after its flags are read: a plan, a search, or the published figures.

``--recommend`` searches all setups for the best one.
"""

import contextlib
import hashlib
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsgpt.common.errors import EXIT_DOES_NOT_FIT, EXIT_DONE, EXIT_USER_ERROR, Problems, UserError
from dsgpt.common.files import json_text, write_atomic
from dsgpt.common.text import IN_CHECKOUT, REPOSITORY, divisors, dollars, estimate, next_line, script_words
from dsgpt.config.compatibility import check_accumulation, check_split
from dsgpt.config.recipe import recipe_text
from dsgpt.config.run_config import plan_batch
from dsgpt.machine.launcher import LAUNCHERS, job_words
from dsgpt.model.config import SHAPE_FLAGS
from dsgpt.planner.formulas import HOST_SHARE
from dsgpt.planner.hardware import PriceTable, gpus, read_prices
from dsgpt.planner.options import CALIBRATION, PlanOptions
from dsgpt.planner.plan import Plan, assumption_in_words, plan_json, plan_lines, plan_of, priced, size, with_assumptions
from dsgpt.planner.published import projections_page, published_page
from dsgpt.planner.request import CandidateSetup, PlanRequest, candidate_setups, fixed_setup, read_request
from dsgpt.planner.rows import answers

# The search: plans every candidate, and ranks those that fit into memory, budget and deadline.

_SHARE = 1e-9
RECIPE, COMMAND, PLAN, JOB = "recipe.json", "train.sh", "plan.json", "train.yaml"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A candidate with or without activation checkpointing, and its fastest micro batch that fits."""

    name: str
    """The candidate's, with a remark about checkpointing."""
    plan: Plan | None = None
    """If it does not fit into memory, the plan that needs least; None if training would refuse it."""
    fitting: tuple[Plan, ...] = ()
    """The plans of every micro batch that fits into memory."""
    reason: str
    """Reason not to recommend the plan; empty if it is within all limits."""

    @property
    def fits(self) -> bool:
        """Whether it is within memory, budget and deadline."""
        return not self.reason


def search(request: PlanRequest, prices: PriceTable) -> list[Judged]:
    """Every candidate, judged: first those within all limits, the fastest first, then the others.

    All micro batches are planned, because those that fit are no range: the smallest may need more memory than a larger
    one. With as many sequences in a step it accumulates, and then a rank holds buffers that a single micro batch does
    without: the sum of the gradients beside those of the micro batch, 4 bytes for each parameter that it reduces.
    The time of a plan is computed only if it fits.
    """
    judged = [
        _judge(request, prices, candidate, checkpointing=checkpointing)
        for candidate in candidate_setups(request.devices, together=request.machine.devices)
        for checkpointing in (False, True)
    ]
    # equally fast ones stay in order, the simpler first
    ranked = sorted((each for each in judged if each.fits), key=lambda each: each.plan.run.seconds if each.plan else 0)
    if ranked and (best := ranked[0].plan):
        rivals = tuple(plan for each in judged for plan in each.fitting)
        ranked[0] = replace(ranked[0], plan=replace(best, rivals=rivals))
    return [*ranked, *(each for each in judged if not each.fits)]


def _judge(request: PlanRequest, prices: PriceTable, candidate: CandidateSetup, *, checkpointing: bool) -> Judged:
    """The fastest of every split of the global batch that the flags allow and that training does not refuse."""
    options, path, problems = request.options, request.options.into / RECIPE, Problems()
    name = f"{candidate.name}, checkpointing" if checkpointing else candidate.name
    more: dict[str, Any] = {"activation_checkpointing": {}} if checkpointing else {}
    total = options.global_batch_size or request.recipe.train_batch_size
    plain = candidate.recipe(request.recipe, path, train_batch_size=total, **more)
    training = request.training(plain, candidate.run_type, problems=problems)
    check_split(training, problems)
    ranks = request.devices // plain.parallel_of(candidate.run_type).ranks_per_copy
    if not problems:
        plan_batch(total, None, None, ranks=ranks, problems=problems, keep=None)
    try:
        problems.raise_if_any()
    except UserError as error:  # its first line, without the name of the file that is not written yet
        return Judged(name=name, reason=error.problems[0].removeprefix(f"{path}: "))
    plans, share = [], (total or 0) // ranks
    for micro in divisors(share):
        steps = share // micro
        if options.micro_batch_size_per_gpu not in {None, micro} or options.grad_accum_steps not in {None, steps}:
            continue
        sizes = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
        recipe = candidate.recipe(request.recipe, path, train_batch_size=total, **sizes, **more)
        check_accumulation(training, steps, problems)
        if problems or (steps == 1 and recipe.dsgpt.fsdp.accumulation == "sharded"):  # there is nothing to add up
            continue
        setup = request.setup(recipe, candidate.run_type, micro, steps, activation_checkpointing=checkpointing)
        plans.append(replace(plan_of(setup, request, prices), name=name))
    if not plans:
        return Judged(name=name, reason=f"no micro batch as asked for divides the {share} sequences of a rank")
    if not (fitting := tuple(plan for plan in plans if plan.fits)):
        least = min(plans, key=lambda plan: plan.peak.total)
        return Judged(name=name, plan=least, reason=_missing_memory(least))
    best = fitting[0]
    for plan in fitting[1:]:
        if plan.run.seconds < best.run.seconds * (1 - _SHARE):
            best = plan
    return Judged(name=name, plan=best, fitting=fitting, reason=_exceeded(best, options))


def _missing_memory(least: Plan) -> str:
    if least.peak.total <= least.usable_bytes:
        room = size(HOST_SHARE * least.machine.host_bytes)
        return f"does not fit: needs {size(least.host_bytes)} of {room} in the host's memory for each device"
    part = max(least.peak.parts, key=lambda name: least.peak.parts[name])
    return (
        f"does not fit: needs {size(least.peak.total)} of {size(least.usable_bytes)} with micro batch "
        f"{least.setup.micro_batch_size}; most of it is {part} ({size(least.peak.parts[part])})"
    )


def _exceeded(best: Plan, options: PlanOptions) -> str:
    """The limit that a plan exceeds; empty if there is none."""
    if options.deadline is not None and best.run.seconds > options.deadline:
        return f"takes {estimate(best.run.seconds)}, longer than the deadline of {estimate(options.deadline)}"
    if options.budget is not None and not best.costs:
        return no_price(options.spot)
    if options.budget is not None and best.costs[0].usd > options.budget:
        return f"costs {priced(best.costs[0])}, more than the budget of {dollars(options.budget)}"
    return ""


def no_price(spot: bool) -> str:
    """Why a budget cannot be judged."""
    return f"has no known {'spot price' if spot else 'price'}: give --price_per_gpu_hour"


def best_of(judged: Sequence[Judged], request: PlanRequest) -> Plan:
    """The plan of the first, if it is within all limits.

    Raises:
        UserError: nothing is; the line says what would be.
    """
    if judged and judged[0].fits and judged[0].plan:
        return judged[0].plan
    where = f"{request.devices} x {request.machine.name}"
    if not (plans := [each.plan for each in judged if each.plan is not None]):
        raise UserError(f"no setup on {where} can be trained: {judged[0].reason}")
    if fitting := [plan for plan in plans if plan.fits]:
        fastest = min(fitting, key=lambda plan: plan.run.seconds)
        if request.options.budget is not None and not fastest.costs:
            reason = no_price(request.options.spot)
            raise UserError(f"--budget cannot be judged, because {request.machine.name} {reason}")
        cost = f" and costs {priced(fastest.costs[0])}" if fastest.costs else ""
        raise UserError(
            f"no setup on {where} is within the limits: the fastest, {fastest.name}, takes "
            f"{estimate(fastest.run.seconds)}{cost}: allow that, take more or faster GPUs, or fewer --tokens"
        )
    least = min([plan for plan in plans if plan.host_bytes == 0] or plans, key=lambda plan: plan.peak.total)
    share = least.usable_bytes / request.machine.memory_bytes
    enough = [gpu.key for gpu in gpus().values() if gpu.memory_bytes * share >= least.peak.total]
    cure = f"take {enough[0]}, or more GPUs" if enough else "take more GPUs, or a smaller model"
    raise UserError(
        f"GPT-2 with {request.model.parameter_count() / 1e6:,.0f}M parameters fits nowhere on {where}, not even with "
        f"offload to its host; without it the least is {size(least.peak.total)} of {size(least.usable_bytes)} a "
        f"device: {cure}"
    )


# A recommendation for people, as JSON, and as the files that carry it out.


def recommendation_lines(judged: Sequence[Judged], best: Plan, written: Sequence[Path]) -> list[str]:
    """The recommended plan, those that fit beside it, and why the others do not."""
    width = max(len(each.name) for each in judged)
    fitting, others = [], []
    for each in judged:
        if each.fits and (plan := each.plan):
            cost = f"  {priced(plan.costs[0]):>21}" if plan.costs else ""
            fitting.append(
                f"  {each.name:<{width}}  micro batch {plan.setup.micro_batch_size:>3}  {size(plan.peak.total):>9}  "
                f"{plan.tokens_per_sec(plan.step.seconds):>11,.0f} tokens/s  {estimate(plan.run.seconds):>10}{cost}"
            )
        else:
            others.append(f"  {each.name:<{width}}  {each.reason}")
    lines = [f"recommended of {len(judged)} ways to train: {best.name}", "", *plan_lines(best), ""]
    lines += [f"within the limits ({len(fitting)}):", *fitting, ""]
    if others:
        lines += ["not within the limits:", *others, ""]
    command = next(path for path in written if path.name == COMMAND)
    lines.append(f"written: {', '.join(path.as_posix() for path in written)}")
    return [*lines, next_line(["sh", command] if launcher_of(best) == "kubernetes" else ["sh", command, "--dry_run"])]


def recommendation_json(judged: Sequence[Judged], best: Plan, written: Sequence[Path]) -> dict[str, Any]:
    """The recommendation as JSON."""
    return {
        "recommended": {"name": best.name, "plan": with_assumptions(best)},
        "ranked": [{"name": each.name, "plan": plan_json(each.plan)} for each in judged if each.fits and each.plan],
        "refused": [{"name": each.name, "reason": each.reason} for each in judged if not each.fits],
        "written": [path.as_posix() for path in written],
    }


def recommendation_files(best: Plan) -> dict[Path, bytes]:
    """Recipe, command and plan, by their paths in the folder of ``--into``; for Kubernetes also the job."""
    files = {RECIPE: recipe_text(best.setup.recipe.raw), COMMAND: command_text(best)}
    files[PLAN] = json_text(with_assumptions(best))
    if launcher_of(best) == "kubernetes":
        files[JOB] = job_text(best, {name: files[name] for name in (RECIPE, PLAN)})
    return {best.request.options.into / name: text.encode() for name, text in files.items()}


def launcher_of(best: Plan) -> str:
    """The launcher of ``--launcher``, or the one that suits the strategy; torchrun joins several machines."""
    request, run_type = best.request, best.setup.run_type
    if request.options.launcher is not None:
        return request.options.launcher
    return "torchrun" if request.machines > 1 and run_type != "baseline" else LAUNCHERS[run_type]


def training_flags(best: Plan) -> list[str]:
    """The flags of ``src/gpt2.py`` of the planned training."""
    request, options = best.request, best.request.options
    flags = {
        **{"--run_type": best.setup.run_type, "--deepspeed_config": (options.into / RECIPE).as_posix()},
        **{f"--{name}": getattr(options, name).as_posix() for name in ("train_data_path", "val_data_path")},
        "--checkpoint_path": f"checkpoint/{options.model_size}-{best.name.replace(', ', '-')}",
        "--model_size": options.model_size,
        **{flag: getattr(options, flag.removeprefix("--")) for flag in SHAPE_FLAGS.values()},
        **{"--vocab_size": request.model.vocab_size, "--seq_length": request.seq_length},
        **{"--max_train_steps": best.run.steps, "--eval_every": options.eval_every or None},
        # global batches of a validation as it is planned; without it the whole file
        "--max_val_steps": math.ceil(options.val_tokens / best.tokens_per_step) if options.val_tokens else None,
        "--save_every": best.run.save_every,
        "--precision": None if options.precision == "auto" else options.precision,
        "--plan": (options.into / PLAN).as_posix(),
    }
    masks = [] if options.mask_documents is None else ["--mask_documents"]
    return masks + [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]


def command_text(best: Plan) -> str:
    """The script that starts the training from the root of the repository.

    It prefers the environment that ``make demo`` creates there. What is given to it is added to the command:
    ``sh plan/train.sh --dry_run``.
    """
    request, options, launcher = best.request, best.request.options, launcher_of(best)
    if launcher == "kubernetes":
        return f"#!/bin/sh\nexec kubectl create -f {shlex.quote((options.into / JOB).as_posix())}\n"
    machines, on_gpus = request.machines, request.machine.kind == "cuda"
    launch = "launch" if IN_CHECKOUT else str(REPOSITORY / "launch")
    words = job_words(launcher, machines=machines, devices=devices_per_machine(request), gpus=on_gpus, launch=launch)
    missing = "is missing: download_data.py and preprocess.py of data_prep/ make it (--dataset names the text)"
    lines = [
        f"for file in {shlex.join([options.train_data_path.as_posix(), options.val_data_path.as_posix()])}; do",
        f'  [ -e "$file" ] || {{ echo "error: $file {missing}" >&2; exit {EXIT_USER_ERROR}; }}',
        "done",
        'PATH="$PWD/.venv/bin:$PATH"'
        if IN_CHECKOUT
        else f'PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"',
        f'exec {shlex.join([*words, *training_flags(best)])} "$@"',
    ]
    if machines > 1 and launcher == "torchrun":
        lines.insert(-1, f'export NODES="${{NODES:-{machines}}}"')
    if machines > 1 and launcher != "python":
        network = next(each for each in best.assumptions if each.what.startswith("network"))
        lines.insert(0, f"# Planned for a {assumption_in_words(network)}.")
        if launcher == "torchrun":
            lines.insert(0, "# Start it on every machine, with MASTER set to the address of one of them.")
        if launcher == "deepspeed":
            lines.insert(0, "# Start it on one machine; the file `hosts` names all (launch/hostfile.md).")
    return "\n".join(["#!/bin/sh", *lines, ""])


def devices_per_machine(request: PlanRequest) -> int:
    """Ranks of each of its machines."""
    return request.devices if request.machines == 1 else request.machine.devices


def job_text(best: Plan, files: dict[str, str]) -> str:
    """The ``TrainJob`` of the training: that of ``launch/kubernetes`` with its machines, devices and flags.

    The ``files``, recipe and plan, come along in a ``ConfigMap``, which the job mounts where its flags name them.
    """
    import yaml  # noqa: PLC0415 - for Kubernetes alone

    job: dict[str, Any] = yaml.safe_load((REPOSITORY / "launch" / "kubernetes" / "train.yaml").read_text("utf-8"))
    flags, into = training_flags(best), best.request.options.into
    name = f"dsgpt-{hashlib.sha256(files[RECIPE].encode() + shlex.join(flags).encode()).hexdigest()[:8]}"
    resource = "nvidia.com/gpu" if best.request.machine.kind == "cuda" else "cpu"  # as many ranks as a node has of it
    job["metadata"] = {"name": name}
    job["spec"]["trainer"] |= {
        "numNodes": best.request.machines,
        "args": [*[f"{flag}={value}" for flag, value in zip(flags[::2], flags[1::2], strict=True)], "--resume"],
        "resourcesPerNode": {"limits": {resource: devices_per_machine(best.request)}},
    }
    pod = {
        "volumes": [{"name": "plan", "configMap": {"name": name}}],
        "containers": [{"name": "node", "volumeMounts": [{"name": "plan", "mountPath": f"/dsgpt/{into.as_posix()}"}]}],
    }
    node = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"manager": "dsgpt.plan", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}}}
    job["spec"]["runtimePatches"] = [patch]
    plan = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": files}
    text: str = yaml.safe_dump_all([plan, job], sort_keys=False, width=120)
    return text


# The command.


def act(options: PlanOptions, problems: Problems, *, draw: Callable[[Plan, Path], None]) -> int:
    """Calibrate, plan one setup, recommend one, or write a page of the documentation; return the exit code.

    Args:
        options: the flags.
        problems: the mistakes in them that were found so far.
        draw: draws the picture of a plan to a file, for ``--picture``.

    Raises:
        UserError: with every mistake, a line each.
    """
    if options.calibrate:
        path = options.machine or CALIBRATION
        if path.is_dir():
            problems.add(f"--machine {path}: is a folder; name the file to write")
        problems.raise_if_any()
        from dsgpt.planner.calibrate import calibrate  # noqa: PLC0415 - torch takes seconds

        with _writing("--machine", path):  # the first thing that is measured is the disk of its folder
            calibrate(path, seconds=options.seconds, devices=options.gpus)
        print(path)
        print(next_line(script_words("src/plan.py", "--machine", path, "--model_size", "tiny", "--tokens", "1e6")))
        return EXIT_DONE
    for flag, target, page in (
        ("--published", options.published, published_page),
        ("--projections", options.projections, projections_page),
    ):
        if target is not None:
            problems.raise_if_any()
            text = page().encode()
            with _writing(flag, target):
                write_atomic(target, text)
            print(target)
            return EXIT_DONE
    if options.rows is not None:
        if not options.json:
            problems.add("--rows: is answered in JSON: add --json")
        problems.raise_if_any()
        print(json.dumps(list(answers(options.rows)), indent=2, allow_nan=False))
        return EXIT_DONE
    request = read_request(options, problems)
    answer: dict[str, Any] | list[str]
    if options.recommend:
        judged = search(request, read_prices(options.prices))
        plan = best_of(judged, request)
        files = recommendation_files(plan)
        with _writing("--into", options.into):
            options.into.mkdir(parents=True, exist_ok=True)
            for path, content in files.items():
                write_atomic(path, content)
        answer = (recommendation_json if options.json else recommendation_lines)(judged, plan, list(files))
    else:
        plan = plan_of(fixed_setup(request, problems), request, read_prices(options.prices))
        answer = with_assumptions(plan) if options.json else plan_lines(plan)
    if options.picture is not None:
        with _writing("--picture", options.picture):
            draw(plan, options.picture)
    print("\n".join(answer) if isinstance(answer, list) else json.dumps(answer, indent=2, allow_nan=False))
    return EXIT_DONE if plan.fits else EXIT_DOES_NOT_FIT


@contextlib.contextmanager
def _writing(flag: str, path: Path) -> Iterator[None]:
    """Turn a refusal of the file system into one line about ``flag``."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be written ({error.strerror or error})") from error

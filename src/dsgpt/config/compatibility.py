"""Combinations that are refused, and the releases of DeepSpeed that are.

Which options, recipes, models and machines are compatible. A refusal gives the reason and the nearest valid value. All
checks run before a process group or a model exists.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from dsgpt.common.errors import Problems
from dsgpt.common.text import divisors_around, multiples_around
from dsgpt.config.inputs import Inputs
from dsgpt.config.recipe import Recipe
from dsgpt.machine.probe import compiler, direct_io_problem, has_cuda_toolkit, libaio_problem, may_lock
from dsgpt.machine.topology import ParallelSizes, Topology
from dsgpt.model.config import GPT2Config

MOST_PROFILED_STEPS = 20
INSTALL_COMPILER = "install one (Debian: apt-get install g++)"


@dataclass(frozen=True, kw_only=True)
class RunRequest(Inputs):
    """Inputs that have a recipe, to be checked for compatibility."""

    recipe: Recipe
    mistakes: Problems
    """The mistakes found in the inputs before any check of compatibility."""

    @property
    def sizes(self) -> ParallelSizes:
        """Tensor, sequence and pipeline sizes of this run."""
        return self.recipe.parallel_of(self.options.run_type or "")

    @property
    def split_topology(self) -> Topology:
        """The ranks with the model split over them; only for sizes that divide the number of ranks."""
        return self.topology.split(self.sizes)

    def is_doubtful(self, *keys: str) -> bool:
        """Whether one of these top-level keys of the recipe is wrong or misspelt.

        The intended value is then unknown, so no other mistake may be derived from it.
        """
        places = [f"{self.recipe.path}: {key}" for key in keys]
        return any(map(self.mistakes.mention, [*keys, *places, *(f"{place}:" for place in places)]))


def _refuse(problems: Problems, recipe: Recipe, refusals: Mapping[str, object]) -> None:
    """Add the ``refusals`` of ``recipe`` that hold, in their order."""
    problems.add(*(f"{recipe.path}: {line}" for line, holds in refusals.items() if holds))


def check_compatibility(request: RunRequest, problems: Problems) -> None:
    """Add a line to ``problems`` for everything in ``request`` that makes training impossible or incorrect."""
    options, recipe, path = request.options, request.recipe, request.recipe.path
    check_split(request, problems)
    optimized = options.run_type == "optimized"
    if optimized and recipe.offloads and not request.is_doubtful("zero_optimization", "optimizer"):
        if recipe.nvme_blocks:
            _check_nvme(request, problems)
        elif recipe.uses_deepspeed_adam and not compiler():
            cure = f'{INSTALL_COMPILER}, or set "torch_adam": true in the optimizer\'s params'
            problems.add(f"{path}: optimizer offload compiles DeepSpeed's CPU Adam and finds no C++ compiler: {cure}")
    if optimized and recipe.zero_plus_plus:
        _check_zero_plus_plus(request, problems)
    if options.compile and not compiler():
        problems.add(f"--compile needs a C++ compiler, and none was found: {INSTALL_COMPILER}")
    if options.compile and optimized and recipe.zero_plus_plus:
        problems.add(f"{path}: Zero++ is not combined with --compile here: leave --compile out")
    if options.cuda_graphs and (options.run_type, options.compile, request.device) != ("baseline", True, "cuda"):
        cure = "add --run_type baseline --compile --device cuda, or leave it out"
        problems.add(f"--cuda_graphs captures the compiled baseline on a GPU: {cure}")
    if options.exact:
        _check_exact(request, problems)
    for flag, steps in (("--profile_comm", options.profile_comm), ("--profile", options.profile)):
        if steps > MOST_PROFILED_STEPS:
            problems.add(f"{flag} must be at most {MOST_PROFILED_STEPS}, not {steps}: the events are kept in memory")


ALLOW_MASKS = "DSGPT_ALLOW_MASKS"
"""The environment variable that lets ``--mask_documents`` run on a GPU, if it is 1."""


def _check_masks(request: RunRequest, problems: Problems) -> None:
    """Refuse ``--mask_documents`` where attention does not know the documents, or the kernel is not proved."""
    sizes, on_gpus = request.sizes, request.device == "cuda"
    drops = request.model is not None and request.model.dropout > 0
    reasons = {
        "sequence ranks, which see a part of a window": sizes.sequence > 1,
        "a pipeline, whose stages do not see the ids": sizes.pipeline > 1,
        "tensor ranks and dropout, whose masks would be the same on all of them": sizes.tensor > 1 and drops,
        "--compile, which would compile anew for the documents of each batch": request.options.compile,
        "fp32 on a GPU, for which PyTorch has no kernel": on_gpus and request.precision == "fp32",
        "dropout on a GPU, for which PyTorch has no kernel": on_gpus and drops,
    }
    problems.add(*(f"--mask_documents does not go with {why}: leave it out" for why, holds in reasons.items() if holds))
    if on_gpus and os.environ.get(ALLOW_MASKS) != "1":
        cure = f"take --device cpu, or set {ALLOW_MASKS}=1 and compare the losses"
        problems.add(f"--mask_documents uses a kernel of PyTorch on GPUs that no GPU has compared with a CPU: {cure}")


def _check_exact(request: RunRequest, problems: Problems) -> None:
    """Refuse ``--exact`` where the bits of the weights would depend on the number of ranks."""
    options, sizes, ranks = request.options, request.sizes, request.topology.world_size // request.sizes.ranks_per_copy
    optimized, precision, threads = options.run_type == "optimized", request.precision, options.threads_per_device or 1
    offloads = request.recipe.offloads if optimized else request.recipe.dsgpt.fsdp.cpu_offload
    reasons = {
        "tensor ranks, which add up parts of every activation": optimized and sizes.tensor > 1,
        "sequence ranks, which add up gradients of parts of a sequence": optimized and sizes.sequence > 1,
        "offload, whose optimizer rounds an element by its place": offloads,
        "dropout, whose masks are drawn per rank": request.model is not None and request.model.dropout > 0,
        "--compile, whose kernels round as their neighbours do": options.compile,
        "--check_invariants, which looks at the gradients that it replaces": options.check_invariants,
        f"{precision}, in which ranks exchange rounded gradients": precision not in {None, "fp32"},
        "a GPU, on which nobody has compared the weights": request.device == "cuda",
        f"{threads} threads, among which kernels divide their sums": threads > 1,
        f"{ranks} data ranks, by which a mean is not exact: take a power of two": ranks & (ranks - 1),
    }
    for why in (why for why, holds in reasons.items() if holds):
        problems.add(f"--exact does not go with {why}" + ("" if ": take" in why else ": leave one of them out"))


def check_split(request: RunRequest, problems: Problems) -> None:
    """Add a line for everything that no machine could train: ranks, strategies and shape that contradict each other."""
    world, run_type, path = request.topology.world_size, request.options.run_type, request.recipe.path
    if run_type == "baseline" and world > 1:
        cure = "run it with `.venv/bin/python src/gpt2.py ...`, or take --run_type ddp, fsdp or optimized"
        problems.add(f"--run_type baseline is one process, but the launcher started {world}: {cure}")
    copy = request.sizes.ranks_per_copy
    if world % copy:
        started = f"{world} {'was' if world == 1 else 'were'} started"
        cure = f"start {multiples_around(world, copy)}, or take ds_configs/zero1.json"
        problems.add(f"{path}: splits the model over {copy} ranks ({request.sizes}), but {started}: {cure}")
    if run_type == "optimized":
        _check_strategies(request, problems)
        if request.model is not None:
            _check_shape(request, request.model, problems)
        if request.recipe.offloads and copy > 1:
            cure = "take ds_configs/zero2_offload.json or ds_configs/zero3_offload.json, or leave the offload out"
            problems.add(f"{path}: offload works only with data parallelism here: {cure}")
    if request.options.mask_documents:
        _check_masks(request, problems)


def check_accumulation(request: RunRequest, accumulation: int, problems: Problems) -> None:
    """Refuse to sum the gradients of several micro batches in low precision, or in the memory of a CUDA graph.

    Args:
        request: the run.
        accumulation: micro batches per optimizer step.
        problems: receives the refusal.
    """
    fsdp = request.recipe.dsgpt.fsdp
    low = fsdp.reduce_dtype == "low" and fsdp.accumulation == "whole" and request.precision != "fp32"
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    doubtful = request.is_doubtful("dsgpt", "bf16", "fp16", *sizes)
    if request.options.run_type == "fsdp" and low and accumulation > 1 and not doubtful:
        problems.add(
            f'{request.recipe.path}: dsgpt.fsdp.reduce_dtype "low" does not go with {accumulation} micro batches per '
            f'step, whose gradients PyTorch would then also sum in {request.precision}: take "fp32", or '
            '"accumulation": "sharded", or --grad_accum_steps 1'
        )
    if request.options.cuda_graphs and request.precision == "fp32" and accumulation > 1 and not doubtful:
        what = "writes the gradients of each micro batch over those of the last, which fp32 adds up there"
        cure = "take --precision bf16, or --grad_accum_steps 1"
        problems.add(f"--cuda_graphs {what}, {accumulation} a step: {cure}")


def compatibility_notices(request: RunRequest) -> list[str]:
    """Lines to print about keys of the recipe that are allowed but ignored or untested."""
    recipe, stage = request.recipe, request.recipe.zero_stage
    if request.options.run_type != "optimized":
        keys = ", ".join(recipe.deepspeed_only)
        line = f"{request.options.run_type} ignores the keys of {recipe.path} that only DeepSpeed uses: {keys}"
        return [line] if keys else []
    if request.device == "cuda" and stage and recipe.zero_optimization.overlap_comm:
        return [
            f"{recipe.path}: overlap_comm is true, which no parity run on GPUs has covered (DeepSpeed's issues 5545, "
            f"8061 were races there): set it in ds_configs/zero{stage}.json, run "
            f"`.venv/bin/python src/benchmark.py parity --device cuda --only zero{stage}`, and trust it if that passes"
        ]
    return []


def _check_strategies(request: RunRequest, problems: Problems) -> None:
    sizes, stage, pipeline = request.sizes, request.recipe.zero_stage, request.sizes.pipeline > 1
    stage_is_known = not request.is_doubtful("zero_optimization", "bf16", "fp16")
    refusals = {
        f"a pipeline does not go with ZeRO stage {stage}, which frees gradients that the pipeline still adds to: take "
        "stage 0 or 1 (ds_configs/pipeline.json)": pipeline and stage > 1,
        f"a pipeline at ZeRO stage 0 does not go with {request.precision}, in which it would add up micro batches: "
        "take stage 1 (ds_configs/pipeline.json), which adds them up in fp32, or --precision fp32": (
            pipeline and stage == 0 and stage_is_known and request.precision != "fp32"
        ),
        "wall_clock_breakdown does not go with a pipeline, whose engine starts the timer of its backward pass twice "
        "and fails: leave it out, or look at step_time_sec in metrics.jsonl": (
            pipeline and request.recipe.wall_clock_breakdown
        ),
        f"tensor parallelism does not go with ZeRO stage {stage}, which would split the same matrices again: take "
        "stage 0, 1 or 2 (ds_configs/tensor.json)": sizes.tensor > 1 and not pipeline and stage > 2,
        "sequence parallelism is not combined with tensor parallelism or a pipeline here: take "
        "ds_configs/sequence.json or ds_configs/3d.json": sizes.sequence > 1 and sizes.tensor * sizes.pipeline > 1,
    }
    _refuse(problems, request.recipe, refusals)


def _check_shape(request: RunRequest, model: GPT2Config, problems: Problems) -> None:
    """Heads, layers and tokens must be divisible by the ranks that share them."""
    sizes, heads, layers = request.sizes, model.n_head, model.n_layer
    length = request.seq_length or sizes.sequence
    splits = {"tensor": ("autotp_size", sizes.tensor), "sequence": ("sequence_parallel_size", sizes.sequence)}
    refusals = {
        f"{key} {size} does not divide the model's {heads} heads: take {divisors_around(heads, size)} for {name} "
        "parallelism, or another --num_heads": heads % size
        for name, (key, size) in splits.items()
    } | {
        f"a pipeline of {sizes.pipeline} stages needs at least as many blocks, but the model has {layers}: take at "
        f"most {layers} stages, or --num_layers {sizes.pipeline}": sizes.pipeline > layers,
        f"sequence_parallel_size {sizes.sequence} does not divide sequences of {length} tokens: take --seq_length "
        f"{multiples_around(length, sizes.sequence)}": length % sizes.sequence,
    }
    _refuse(problems, request.recipe, refusals)


def _check_nvme(request: RunRequest, problems: Problems) -> None:
    """Refuse a machine that cannot swap to files. The first rank of each machine checks."""
    if request.topology.local_rank:
        return
    path, way_out = request.recipe.path, "or take ds_configs/zero3_offload.json, which offloads to memory"
    compiles = f"{path}: offload to nvme compiles DeepSpeed's asynchronous I/O"
    if not (command := compiler()):
        problems.add(f"{compiles} and finds no C++ compiler: {INSTALL_COMPILER}, {way_out}")
    elif trouble := libaio_problem(command):
        problems.add(f"{path}: offload to nvme {trouble}, {way_out}")
    if request.device == "cuda" and not has_cuda_toolkit():  # CPU Adam is compiled without it, on GPUs, too
        cure = f"install the toolkit and set CUDA_HOME to its folder, {way_out}"
        problems.add(f"{compiles}, which on GPUs needs the CUDA toolkit, and finds no nvcc: {cure}")
    for base in dict.fromkeys(nvme_paths(request.recipe, request.run_dir).values()):
        if trouble := direct_io_problem(next(folder for folder in (base, *base.absolute().parents) if folder.is_dir())):
            problems.add(f"{path}: nvme_path {base}: {trouble}; name a folder on a local drive, {way_out}")
    size, zero, ranks = 0, request.recipe.zero_optimization, request.topology.world_size
    if request.model:  # at least, for the buffers through which a rank swaps it (``swap_tensor/utils.py``)
        if zero.offload_param.device == "nvme":
            if (elements := zero.offload_param.buffer_size) is None:
                elements = -(-request.model.largest_parameter() // ranks)
            size += zero.offload_param.buffer_count * elements * (4 if request.precision == "fp32" else 2)
        if zero.offload_optimizer.device == "nvme":
            group = min(zero.sub_group_size, request.model.parameter_count() // ranks)
            size += zero.offload_optimizer.swap_buffers * group * 4
    if not may_lock(size):
        locks = f"locks {size / 1e6:,.0f} MB per rank in memory, more than this process may"
        problems.add(f"{path}: offload to nvme {locks}: raise the limit (ulimit -l unlimited), {way_out}")


def nvme_paths(recipe: Recipe, run_dir: Path) -> dict[str, Path]:
    """The folder in which each block of ``zero_optimization`` swaps: ``run_dir`` if the JSON does not name one."""
    given = {name: getattr(recipe.zero_optimization, name).nvme_path for name in recipe.nvme_blocks}
    return {name: run_dir if path is None else Path(path) for name, path in given.items()}


def _check_zero_plus_plus(request: RunRequest, problems: Problems) -> None:
    recipe, topology = request.recipe, request.topology
    size = recipe.zero_optimization.zero_hpz_partition_size
    refusals = {
        "DeepSpeed implements Zero++ only for GPUs: on CPU take ds_configs/zero3.json": request.device == "cpu",
        "Zero++ is not combined with offload here: take ds_configs/zeropp.json, or ds_configs/zero3_offload.json "
        "without it": recipe.offloads,
        "Zero++ works only with data parallelism here: take ds_configs/zeropp.json, or leave its keys "
        "out": request.sizes.ranks_per_copy > 1,
        f"zero_hpz_partition_size {size} does not divide {topology.world_size} ranks: set it to the GPUs of one "
        f"machine, here {topology.local_world_size}": topology.world_size % size,
    }
    _refuse(problems, recipe, refusals)


# Releases of DeepSpeed that train wrong, most without an error. docs/training.md shows ``KNOWN_BAD`` as a table.

TESTED = "0.19.8"
"""The release of DeepSpeed that requirements.txt pins; the suites compared this one with plain PyTorch."""
ALLOW = "DSGPT_ALLOW_VERSION"
"""The environment variable that lets a run start all the same, if it is 1."""


class KnownBad(NamedTuple):
    """A fault of some releases. A run is affected if all that is named here is true of it."""

    releases: str
    """Releases of DeepSpeed, in pip's notation."""
    thread: str
    """Thread below DeepSpeed's repository on GitHub; ``no thread`` for an observation of this project."""
    effect: str
    stages: tuple[int, ...] = (0, 1, 2, 3)
    """Stages of ZeRO that are affected."""
    precision: str = "any"
    needs: str = ""
    """``accumulation in a pipeline``, ``overlap_comm on GPUs`` or ``several ranks``."""


KNOWN_BAD = (
    KnownBad(">=0.17.6,<0.18.3", "issues/7718", "gradients are wrong: their norm is a third to a half", stages=(2,)),
    KnownBad("<0.18.3", "issues/7773", "gradients of micro batches are summed, not averaged",
             needs="accumulation in a pipeline"),
    KnownBad("==0.18.5", "issues/7837", "gradients are divided by a loss scale that the loss never had, and kept from "
             "step to step", stages=(0,), precision="bf16"),
    KnownBad(">=0.18.3,<0.19.0", "pull/7985", "the last micro batch is left out of the average over ranks",
             stages=(1,), precision="bf16", needs="several ranks"),
    KnownBad("<0.19.0", "pull/7965", "buffers are used again before their reduction is done: wrong gradients or NaN",
             stages=(1, 2), needs="overlap_comm on GPUs"),
    KnownBad("==0.18.9", "no thread", "the first step ends in the error 'Output 0 of Split is a view'", stages=(1, 2)),
)  # fmt: skip


def check_version(request: RunRequest, accumulation: int, problems: Problems, notices: list[str]) -> tuple[str, ...]:
    """Refuse a run that the installed DeepSpeed trains wrong, or note that ``ALLOW`` lets it start.

    Args:
        request: the run.
        accumulation: micro batches per optimizer step.
        problems: receives the refusals.
        notices: receives a line if the installed release is not the tested one, and what was allowed.

    Returns:
        The threads of the faults that were allowed.
    """
    if request.options.run_type != "optimized":
        return ()
    try:
        installed = version("deepspeed")
    except PackageNotFoundError:
        problems.add(f"--run_type optimized needs DeepSpeed: install it (pip install deepspeed=={TESTED})")
        return ()
    if installed == TESTED:
        return ()
    notices.append(f"DeepSpeed {installed} is installed; this program is tested with {TESTED} (requirements.txt)")
    from packaging.specifiers import SpecifierSet  # noqa: PLC0415 - few have another release

    holds = {
        "": True,
        "accumulation in a pipeline": request.sizes.pipeline > 1 and accumulation > 1,
        "overlap_comm on GPUs": request.device == "cuda" and bool(request.recipe.zero_optimization.overlap_comm),
        "several ranks": request.topology.world_size > 1,
    }
    faults = [
        fault
        for fault in KNOWN_BAD
        if SpecifierSet(fault.releases).contains(installed, prereleases=True)
        and request.recipe.zero_stage in fault.stages
        and fault.precision in ("any", request.precision)
        and holds[fault.needs]
    ]
    allowed = os.environ.get(ALLOW) == "1"
    for fault in faults:
        what = f"{fault.effect} (DeepSpeed's {fault.thread})"
        if allowed:
            notices.append(f"{ALLOW}=1 lets DeepSpeed {installed} train, though {what}")
        else:
            cure = f"install {TESTED} (pip install deepspeed=={TESTED}), or set {ALLOW}=1 to train all the same"
            problems.add(f"{request.recipe.path}: DeepSpeed {installed} cannot train this: {what}: {cure}")
    return tuple(fault.thread for fault in faults) if allowed else ()

"""What cannot be combined: each refusal says the reason and the nearest thing that works.

Everything here is known before a process group or a model exists. The numbers that such a refusal is about (ranks,
heads, layers, positions) and the way out stand in one line.
"""

import os
import shutil
from dataclasses import dataclass

from dsgpt.model.config import GPT2Config
from dsgpt.options import Options
from dsgpt.problems import Problems
from dsgpt.recipe import Recipe
from dsgpt.topology import ParallelSizes, Topology


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a combination is made of; None where another mistake hides it."""

    options: Options
    recipe: Recipe
    topology: Topology
    """As the launcher announced it, not yet split."""
    model: GPT2Config | None
    seq_length: int | None
    device: str
    """``cpu`` or ``cuda``."""
    precision: str
    """``fp32``, ``bf16`` or ``fp16``."""

    @property
    def sizes(self) -> ParallelSizes:
        """How this run splits the model: PyTorch's strategies do not."""
        return self.recipe.parallel if self.options.run_type == "optimized" else ParallelSizes()


def check_combinations(request: Request, problems: Problems) -> None:
    """Complain about every combination in ``request`` that cannot be trained, or not rightly."""
    _check_ranks(request, problems)
    if request.options.run_type == "optimized":
        _check_strategies(request, problems)
        _check_shape(request, problems)
        _check_offload(request, problems)
    _check_compile(request, problems)


def _check_ranks(request: Request, problems: Problems) -> None:
    world, run_type = request.topology.world_size, request.options.run_type
    if run_type == "baseline" and world > 1:
        problems.add(
            f"--run_type baseline is one process, but the launcher started {world}: run it with `python src/gpt2.py "
            "...`, or take --run_type ddp, fsdp or optimized"
        )
    copy = request.sizes.ranks_per_copy
    if world % copy:
        lower, upper = world // copy * copy, -(-world // copy) * copy
        counts = f"{lower} or {upper}" if lower else str(upper)
        problems.add(
            f"{request.recipe.path}: splits the model over {copy} ranks ({request.sizes}), but {world} "
            f"{'was' if world == 1 else 'were'} started: start {counts}, or take ds_configs/zero1.json"
        )


def _check_strategies(request: Request, problems: Problems) -> None:
    recipe, sizes = request.recipe, request.sizes
    stage = recipe.zero_stage
    if sizes.pipeline > 1 and stage > 1:
        problems.add(
            f"{recipe.path}: a pipeline does not go with ZeRO stage {stage}, which frees gradients that the pipeline "
            "still adds to: take stage 0 or 1 (ds_configs/pipeline.json)"
        )
    if sizes.pipeline > 1 and stage == 0 and request.precision != "fp32":
        problems.add(
            f"{recipe.path}: a pipeline at ZeRO stage 0 does not go with {request.precision}, in which it would add up "
            "micro batches: take stage 1 (ds_configs/pipeline.json), which adds them up in fp32, or --precision fp32"
        )
    if sizes.tensor > 1 and sizes.pipeline == 1 and stage > 2:
        problems.add(
            f"{recipe.path}: tensor parallelism does not go with ZeRO stage {stage}, which would split the same "
            "matrices again: take stage 0, 1 or 2 (ds_configs/tensor.json)"
        )
    if sizes.sequence > 1 and sizes.tensor * sizes.pipeline > 1:
        problems.add(
            f"{recipe.path}: sequence parallelism is not combined with tensor parallelism or a pipeline here: take "
            "ds_configs/sequence.json or ds_configs/3d.json"
        )


def _check_shape(request: Request, problems: Problems) -> None:
    """The model and its sequences must divide by what splits them."""
    model, sizes, path = request.model, request.sizes, request.recipe.path
    if model is None:
        return
    for name, key, size in (
        ("tensor", "autotp_size", sizes.tensor),
        ("sequence", "sequence_parallel_size", sizes.sequence),
    ):
        if model.n_head % size:
            problems.add(
                f"{path}: {key} {size} does not divide the model's {model.n_head} heads: take "
                f"{_divisors_near(model.n_head, size)} for {name} parallelism, or another --num_heads"
            )
    if sizes.pipeline > model.n_layer:
        problems.add(
            f"{path}: a pipeline of {sizes.pipeline} stages needs as many blocks, but the model has {model.n_layer}: "
            f"take at most {model.n_layer} stages, or --num_layers {sizes.pipeline}"
        )
    length = request.seq_length
    if length is not None and length % sizes.sequence:
        lower, upper = length // sizes.sequence * sizes.sequence, -(-length // sizes.sequence) * sizes.sequence
        problems.add(
            f"{path}: sequence_parallel_size {sizes.sequence} does not divide sequences of {length} tokens: take "
            f"--seq_length {f'{lower} or {upper}' if lower else upper}"
        )


def _divisors_near(number: int, wanted: int) -> str:
    """The divisors of ``number`` on either side of ``wanted``, in words."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return " or ".join(str(d) for d in below + above)


def _check_offload(request: Request, problems: Problems) -> None:
    recipe, sizes = request.recipe, request.sizes
    devices = (recipe.offload_optimizer, recipe.offload_param)
    if devices == ("none", "none"):
        return
    if sizes.ranks_per_copy > 1:
        problems.add(
            f"{recipe.path}: offload is combined with data parallelism alone here: take ds_configs/zero2_offload.json "
            "or ds_configs/zero3_offload.json, or leave the offload out"
        )
    if "nvme" in devices:
        problems.add(f"{recipe.path}: offload to nvme is not supported in this version: take device cpu")
    if needs_compiled_adam(recipe) and not compiler():
        problems.add(
            f"{recipe.path}: optimizer offload compiles DeepSpeed's CPU Adam and finds no C++ compiler: install "
            'one (Debian: apt-get install g++), or set "torch_adam": true in the optimizer\'s params'
        )


def _check_compile(request: Request, problems: Problems) -> None:
    options, recipe, sizes = request.options, request.recipe, request.sizes
    if not options.compile:
        return
    if not compiler():
        problems.add("--compile needs a C++ compiler, and none was found: install one (Debian: apt-get install g++)")
    if options.run_type != "optimized":
        return
    if recipe.zero_stage == 3:
        problems.add("--compile does not go with ZeRO stage 3, whose gathers break the graph: take stage 1 or 2")
    if sizes.ranks_per_copy > 1:
        problems.add(
            f"--compile does not go with a model split over ranks ({sizes}), whose collectives break the graph: take "
            "ds_configs/zero1.json, or leave --compile out"
        )


def needs_compiled_adam(recipe: Recipe) -> bool:
    """Whether DeepSpeed's own CPU Adam would run, which a C++ compiler builds at first use."""
    optimizer = recipe.optimizer
    return recipe.offload_optimizer == "cpu" and optimizer.type == "AdamW" and not optimizer.torch_adam


def compiler() -> str | None:
    """The C++ compiler that PyTorch would call; None where there is none."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")

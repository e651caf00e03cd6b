"""One rank of one cell of the parity suite, with the known bugs that can be planted in it.

Each bug is planted where real trainers had it. The reported loss and norm stay right if possible, so that the suite has
to find the bug by its effect on the training.
"""

import contextlib
import functools
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dsgpt.benchmarks import parity_reference as reference
from dsgpt.benchmarks.cells import Cell
from dsgpt.benchmarks.launch import joined_run
from dsgpt.benchmarks.parity import Split
from dsgpt.checkpoints.training_state import ParamState, Shards, StateReader, complete_state, write_shards
from dsgpt.config.run_config import RunConfig
from dsgpt.machine.device import barrier, from_main, gather_objects
from dsgpt.machine.device import sum_over_ranks as summed_over_ranks
from dsgpt.model.gpt2 import GPT2, parameter_shapes
from dsgpt.model.linear_cross_entropy import CHUNKS
from dsgpt.planner.formulas import largest_model_state, most_sent_bytes
from dsgpt.strategies import base as all_strategies
from dsgpt.strategies import pytorch as torch_strategies
from dsgpt.strategies.base import Strategy, build_strategy, to_device
from dsgpt.strategies.deepspeed import engine as deepspeed_engine
from dsgpt.strategies.deepspeed.pipeline import PipelineParallel
from dsgpt.strategies.deepspeed.zero import SequenceParallel, Zero
from dsgpt.telemetry.cost import MODEL_STATE, TrafficMeter
from dsgpt.training.run_description import setup_of
from dsgpt.training.trainer import training_batches, validation_loss

# Known bugs, planted in real strategies, to show that the suite reports each one.

RANKS = 2
"""The number of ranks of every planted cell."""


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A mistake that parallel trainers have made, and the strategy in which it is planted."""

    owner: Any
    attribute: str
    """Name of the attribute of ``owner`` that it replaces."""
    function: Callable[..., Any]
    """The replacement. It gets the original first, then the original's arguments. Its docstring says what is wrong."""
    cell: Cell
    """The cell that must fail."""

    def planted(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which the bug is planted."""
        original = getattr(self.owner, self.attribute)
        replacement = functools.wraps(original)(lambda *given, **named: self.function(original, *given, **named))
        return mock.patch.object(self.owner, self.attribute, replacement)


BUGS: dict[str, Bug] = {}
"""Bugs by name: the function ``sum_over_ranks`` is the bug ``sum-over-ranks``."""


def planted_cells(device: str) -> list[Cell]:
    """The cells that must fail on ``device``, ``cpu`` or ``cuda``, where bounds of bf16 are wider than their effect."""
    return [bug.cell for bug in BUGS.values() if device == "cpu" or bug.cell.precision == "fp32"]


def bug_of(owner: Any, attribute: str, **cell: str) -> Callable[[Callable[..., Any]], None]:
    """A decorator for the replacement of ``owner.attribute``: adds it to ``BUGS``, planted in ``cell``."""

    def add(function: Callable[..., Any]) -> None:
        name = function.__name__.replace("_", "-")
        where = Cell(**cell, ranks=RANKS, bug=name)  # type: ignore[arg-type]
        BUGS[name] = Bug(owner=owner, attribute=attribute, function=function, cell=where)

    return add


@bug_of(torch_strategies.Ddp, "_average", strategy="ddp")
def sum_over_ranks(_average: Any, _strategy: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Gradients are summed over the data ranks instead of averaged."""
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    summed: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return summed


@bug_of(Zero, "__init__", strategy="zero2")
def accumulation_counted_twice(build: Any, strategy: Any, *given: Any, **named: Any) -> None:
    """Gradients are divided by the accumulation steps twice."""
    build(strategy, *given, **named)
    strategy._loss_factor /= strategy._accumulation  # DeepSpeed's ``backward`` has divided by it already


@bug_of(Zero, "__init__", strategy="zero0", optimizer="sgd")
def clipping_before_averaging(build: Any, strategy: Any, *given: Any, **named: Any) -> None:
    """Every rank clips its own gradients before they are averaged."""
    build(strategy, *given, **named)
    engine = strategy._engine
    reduce = engine.allreduce_gradients

    def clip_and_reduce(*arguments: Any, **more: Any) -> None:
        if engine.is_gradient_accumulation_boundary():
            torch.nn.utils.clip_grad_norm_(engine.module.parameters(), engine.gradient_clipping())
        reduce(*arguments, **more)

    engine.allreduce_gradients = clip_and_reduce


@bug_of(Zero, "__init__", strategy="zero1")
def dropped_last_micro_batch(build: Any, strategy: Any, *given: Any, **named: Any) -> None:
    """The last micro batch of every step is read, but adds no gradient."""
    build(strategy, *given, **named)
    engine = strategy._engine
    backward = engine.backward
    engine.backward = lambda loss: backward(loss * (not engine.is_gradient_accumulation_boundary()))


@bug_of(GPT2, "forward", strategy="sequence2-zero1")
def positions_not_shifted(forward: Any, *given: Any, **named: Any) -> Tensor:
    """Every sequence rank numbers its positions from 0."""
    output: Tensor = forward(*given, **{**named, "first_position": 0})
    return output


@bug_of(SequenceParallel, "__init__", strategy="sequence2-zero0")
def not_reduced_over_sequence_ranks(build: Any, strategy: Any, *given: Any, **named: Any) -> None:
    """Gradients are reduced over data ranks, but not over sequence ranks."""
    build(strategy, *given, **named)
    strategy._engine.allreduce_gradients = lambda *_arguments, **_named: None  # the one data rank is alone


@bug_of(PipelineParallel, "__init__", strategy="pipeline2-zero1")
def skipped_tied_gradient_sum(build: Any, strategy: Any, *given: Any, **named: Any) -> None:
    """First and last stage each train their own copy of the tied embedding."""
    build(strategy, *given, **named)
    strategy._module.get_tied_weights_and_groups = list


@bug_of(torch.nn.utils, "clip_grads_with_norm_", strategy="pipeline2-zero0", optimizer="sgd")
def clipping_norm_of_one_stage(clip: Any, parameters: Any, max_norm: float, _whole_norm: Tensor) -> None:
    """Every pipeline stage clips by the norm of its own gradients."""
    parameters = list(parameters)
    clip(parameters, max_norm, torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


@bug_of(Zero, "eval_step", strategy="zero1")
@torch.no_grad()
def mean_of_ranks_means(_eval_step: Any, strategy: Any, batches: Iterator[Any]) -> tuple[Tensor, Tensor]:
    """Validation averages the ranks' means, though ranks find unequal numbers of targets."""
    strategy._engine.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=strategy._device)
    for _ in range(strategy._accumulation):
        sums += torch.stack(strategy._micro_batch_sums(to_device(next(batches), strategy._device)))
    mean = summed_over_ranks(sums[0] / sums[1].clamp(min=1)) / strategy._ranks
    targets = summed_over_ranks(sums[1])
    return mean * targets, targets


@bug_of(Zero, "_sum_gradients_in_fp32", strategy="zero0", optimizer="sgd", precision="bf16")
def micro_batches_summed_in_bf16(_sum: Any, _strategy: Any) -> None:
    """ZeRO-0 in bf16 adds up its micro batches in bf16."""


@bug_of(torch_strategies, "average_in_fp32", strategy="ddp", optimizer="sgd", precision="bf16")
def rounded_before_the_reduction(
    average: Any, masters: Mapping[Tensor, nn.Parameter], bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    """DDP in bf16 rounds its fp32 sums before it adds those of the other ranks."""
    reduce = dist.all_reduce
    with mock.patch.object(dist, "all_reduce", lambda flat, **named: reduce(flat.copy_(flat.bfloat16()), **named)):
        reduced: torch.futures.Future[Tensor] = average(masters, bucket)
    return reduced


@bug_of(Zero, "_before_step", strategy="zero0-unclipped-sgd", optimizer="sgd")
def scaled_after_the_norm(before_step: Any, strategy: Any) -> Tensor | None:
    """Gradients are multiplied by the number of ranks after their norm was read."""
    norm: Tensor | None = before_step(strategy)
    for parameter in strategy._parameters.values():
        parameter.grad *= strategy._ranks
    return norm


@bug_of(deepspeed_engine, "set_learning_rate", strategy="zero2")
def second_group_keeps_its_rate(_set: Any, optimizer: Any, lr: float) -> None:
    """The schedule changes only the learning rate of the first parameter group, which is the one that is reported."""
    optimizer.param_groups[0]["lr"] = lr


@bug_of(all_strategies, "decays", strategy="zero1", precision="bf16")
def biases_decay(_decays: Any, _name: str) -> bool:
    """Weight decay acts on biases and LayerNorms too."""
    return True


@bug_of(all_strategies, "build_optimizer", strategy="ddp")
def large_epsilon(build: Any, groups: Any, recipe: Any, **named: Any) -> torch.optim.Optimizer:
    """AdamW's epsilon is 1e-6 instead of 1e-8."""
    optimizer: torch.optim.Optimizer = build(groups, replace(recipe, eps=1e-6), **named)
    return optimizer


# What optimizers step with, and the gradient of the first step.

PLACES = ("exp_avg", "exp_avg_sq")
"""Attributes in which Adam keeps its moments. DeepSpeed links both or none."""


@contextlib.contextmanager
def watched_optimizers(*, sgd_gradients: bool) -> Iterator[set[float]]:
    """The learning rates of all parameter groups of every optimizer that steps in the context.

    PyTorch's hook runs before every optimizer step of the process. It sees torch's optimizers, DeepSpeed's CPU Adam,
    which is one of them, and those inside an engine or a pipeline. It does not depend on what a strategy reports.

    Args:
        sgd_gradients: whether SGD keeps the gradient that it steps on where Adam keeps its moments, until the end of
            the context. SGD has no state that a strategy would write. With the gradient in that place,
            ``whole_state`` has it, as it has Adam's first moment with a beta1 of 0.
    """
    rates, states = set[float](), list[Any]()

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        rates.update(float(group["lr"]) for group in optimizer.param_groups)
        if not sgd_gradients or not isinstance(optimizer, torch.optim.SGD):
            return
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter.grad is not None:
                moments = (parameter.grad.detach().clone(), torch.zeros_like(parameter.grad))
                optimizer.state[parameter].update(zip(PLACES, moments, strict=True))
        states.append(optimizer.state)

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield rates
    finally:
        handle.remove()
        for state in (state for by_parameter in states for state in by_parameter.values()):
            for name in PLACES:
                state.pop(name, None)


# One rank of one cell: what ``src/gpt2.py`` does from flags to steps, measured.

SENT = "sent"
"""A category besides those of ``MODEL_STATE``: the bytes that the busiest rank sends in a step."""
LOGITS_AT_ONCE = 12_000
"""Logits of a chunk of the loss: 40 tokens with the suite's vocabulary of 300, so that every micro batch has several
chunks, as in large models."""


def train_cell(flags: list[str], folder: Path, *, bug: str) -> None:
    """Train as ``flags`` say, and write this rank's measurements into ``folder``.

    Args:
        flags: of ``src/gpt2.py``.
        folder: an existing folder.
        bug: to plant in the strategy, a key of ``BUGS``; empty for none.

    Raises:
        UserError: the product refuses the combination.
    """
    CHUNKS.update(dict.fromkeys(CHUNKS, LOGITS_AT_ONCE))
    with joined_run(flags) as (config, device):
        torch.manual_seed(config.options.seed)
        with BUGS[bug].planted() if bug else contextlib.nullcontext():
            with contextlib.closing(build_strategy(config, device)) as strategy:
                measurement = _measure(config, strategy)
                barrier()
            measurement.write(folder, rank=config.topology.rank)
        barrier()


def train_reference_cell(flags: list[str], folder: Path, *, split: Mapping[str, Any]) -> None:
    """Train the same in plain PyTorch instead of a strategy; ``split`` holds the fields of a ``Split``.

    Raises:
        UserError: the product refuses the combination.
    """
    CHUNKS.update(dict.fromkeys(CHUNKS, LOGITS_AT_ONCE))
    with joined_run(flags) as (config, device):
        reference.train_reference(config, device, Split(**split)).write(folder, rank=0)


def _measure(config: RunConfig, strategy: Strategy) -> reference.Measurement:
    """Train from the first to the last step; every rank calls it, because parts of it are collective."""
    measurement = reference.Measurement(data_rank=config.topology.data_rank)
    batches = reference.WatchedBatches(training_batches(config, first_step=0))
    recipe, main, clipping = config.recipe, config.topology.is_main, config.recipe.gradient_clipping
    beta1 = recipe.optimizer.betas[0] if recipe.optimizer.type == "AdamW" else 0.0  # see ``watched_optimizers``

    def note_bytes(cost: dict[str, Any]) -> None:
        """Note what the rank that has most keeps and sends in a step, measured and by ``dsgpt.planner``."""
        setup = setup_of(config)
        state, traffic = cost["model_state_bytes_per_rank"], cost["communication_per_step"]
        predicted = largest_model_state(setup)
        sizes = {name: {"measured": state[name], "formula": getattr(predicted, name)} for name in MODEL_STATE}
        sent = None if traffic is None else traffic["ring_bytes_per_rank"]
        measurement.bytes_per_rank = sizes | {SENT: {"measured": sent, "formula": most_sent_bytes(setup)}}

    meter = TrafficMeter(lambda: strategy.state_tensors()._asdict(), last_step=config.total_steps, report=note_bytes)
    for step in range(1, config.total_steps + 1):
        with watched_optimizers(sgd_gradients=step == 1) as used:
            with meter.watch(step):
                result = strategy.train_step(batches, step)
            for name, state in whole_state(config, strategy).items() if step == 1 else ():
                if main and state.exp_avg is not None:
                    # Adam's first moment is now (1 - beta1) times the clipped gradient (Kingma and Ba 2015, algorithm
                    # 1). Clipping divided it by this if it exceeds 1, both in ``clip_grad_norm_`` and in DeepSpeed.
                    shrunk = max(1.0, (float(result.grad_norm) + 1e-6) / clipping) if clipping > 0 else 1.0
                    measurement.tensor(reference.GRADIENT, name, state.exp_avg.float() / (1 - beta1) * shrunk)
        facts: dict[str, Any] = {"loss": float(result.loss), "grad_norm": float(result.grad_norm), "lr": result.lr}
        facts |= {"used": sorted(used), "skipped": bool(result.skipped), "samples": sorted(batches.take())}
        measurement.steps.append(facts)
        for name, state in whole_state(config, strategy).items() if step == reference.FIRST_CHANGE else ():
            if main:
                measurement.tensor(reference.CHANGED, name, state.weight)
        if step in reference.validated_after(config.total_steps):  # as the training loop does
            loss, targets, _ = validation_loss(config, strategy) or (math.nan, 0, {})
            measurement.validations.append({"after_step": step, "loss": loss, "targets": targets})
    for name, value in strategy.replicated_weights():
        measurement.replica(name, value)
    for name, state in whole_state(config, strategy).items():
        if main:
            measurement.tensor(reference.WEIGHT, name, state.weight)
    return measurement


def whole_state(config: RunConfig, strategy: Strategy) -> dict[str, ParamState]:
    """Every weight, whole, with its moments, by canonical name, on every rank of one machine; collective.

    It is written as a checkpoint is, and read: no strategy can gather it.
    """
    place, shapes = config.topology, parameter_shapes(config.model)
    folder = Path(from_main(tempfile.mkdtemp() if place.is_main else ""))
    own = strategy.shards()
    in_fp32 = Shards(own.boxes, ((name, state.mapped(Tensor.float)) for name, state in own.states))
    parts = gather_objects(write_shards(folder, in_fp32, rank=place.rank, ranks=place.world_size))
    if place.is_main:
        complete_state(folder, parts, strategy.counters(), shapes=shapes)
    barrier()
    reader = StateReader(folder)
    states = {name: reader.state(name) for name in shapes}
    barrier()
    if place.is_main:
        shutil.rmtree(folder)
    return states

"""One rank of one cell of the parity suite, with the known bugs that can be planted in it.

Contexts that each plant one known bug in a strategy, and remove it at the end. Each is planted where real trainers had
it. The reported loss and norm stay right if possible, so that the suite has to find the bug by its effect on the
training.

Notes what optimizers step with, using PyTorch's hook that runs before every optimizer step of the process. The hook
sees torch's optimizers, DeepSpeed's CPU Adam, which is one of them, and those inside an engine or a pipeline. It does
not depend on what a strategy reports.
"""

import contextlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # DDP requires this annotation of its hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dsgpt.benchmarks.cells import Cell
from dsgpt.benchmarks.parity_bounds import Split
from dsgpt.benchmarks.parity_reference import (
    CHANGED,
    FIRST_CHANGE,
    WEIGHT,
    Measurement,
    WatchedBatches,
    train_reference,
    validated_after,
)
from dsgpt.config.options import parse_arguments
from dsgpt.config.run_config import RunConfig, resolve
from dsgpt.machine import process_group
from dsgpt.machine.device import bring_up
from dsgpt.machine.process_group import barrier, joined
from dsgpt.machine.topology import read_topology
from dsgpt.model.gpt2 import GPT2
from dsgpt.model.linear_cross_entropy import CHUNKS
from dsgpt.planner.strategies import largest_model_state, most_sent_bytes
from dsgpt.strategies import optimizer as optimization
from dsgpt.strategies import pytorch as ddp
from dsgpt.strategies import pytorch as torch_strategy
from dsgpt.strategies.base import Strategy, build_strategy, to_device
from dsgpt.strategies.deepspeed import engine as deepspeed_engine
from dsgpt.strategies.deepspeed.pipeline import PipelineParallel
from dsgpt.strategies.deepspeed.sequence import SequenceParallel
from dsgpt.strategies.deepspeed.zero import Zero
from dsgpt.telemetry.memory import MODEL_STATE, TrafficMeter
from dsgpt.telemetry.meter import StepResult
from dsgpt.training.run_description import setup_of
from dsgpt.training.trainer import training_batches, validation_loss

Patch = contextlib.AbstractContextManager[None]


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Patch:
    """Replace an attribute with what ``wrap`` makes of it."""
    return _replaced(owner, name, wrap(getattr(owner, name)))


def _after_building(strategy: type, change: Callable[[Any], None]) -> Patch:
    """Apply ``change`` to every ``strategy`` right after it was built."""

    def wrap(build: Callable[..., None]) -> Callable[..., None]:
        def build_and_change(self: Any, *arguments: Any, **named: Any) -> None:
            build(self, *arguments, **named)
            change(self)

        return build_and_change

    return _wrapped(strategy, "__init__", wrap)


def sum_over_ranks() -> Patch:
    """Gradients are summed over the data ranks instead of averaged."""

    def add_up(_strategy: ddp.Ddp, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        summed: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        return summed

    return _replaced(ddp.Ddp, "_average", add_up)


def accumulation_counted_twice() -> Patch:
    """Gradients are divided by the accumulation steps twice."""

    def divide_again(strategy: Any) -> None:
        strategy._loss_factor /= strategy._accumulation  # DeepSpeed's ``backward`` has divided by it already

    return _after_building(Zero, divide_again)


def clipping_before_averaging() -> Patch:
    """Every rank clips its own gradients before they are averaged."""

    def clip_first(strategy: Any) -> None:
        """Let every rank clip what it has, and only then average."""
        engine = strategy._engine
        reduce = engine.allreduce_gradients

        def clip_and_reduce(*arguments: Any, **named: Any) -> None:
            if engine.is_gradient_accumulation_boundary():
                torch.nn.utils.clip_grad_norm_(engine.module.parameters(), engine.gradient_clipping())
            reduce(*arguments, **named)

        engine.allreduce_gradients = clip_and_reduce

    return _after_building(Zero, clip_first)


def dropped_last_micro_batch() -> Patch:
    """The last micro batch of every step is read, but adds no gradient."""

    def drop_last(strategy: Any) -> None:
        engine = strategy._engine
        backward = engine.backward
        engine.backward = lambda loss: backward(loss * (not engine.is_gradient_accumulation_boundary()))

    return _after_building(Zero, drop_last)


def positions_not_shifted() -> Patch:
    """Every sequence rank numbers its positions from 0."""
    forward = GPT2.forward

    def forget_the_shift(self: GPT2, *arguments: Any, **named: Any) -> Tensor:
        return forward(self, *arguments, **{**named, "first_position": 0})

    return _replaced(GPT2, "forward", forget_the_shift)


def not_reduced_over_sequence_ranks() -> Patch:
    """Gradients are reduced over data ranks, but not over sequence ranks."""

    def reduce_nothing(strategy: Any) -> None:
        strategy._engine.allreduce_gradients = lambda *_arguments, **_named: None  # the one data rank is alone

    return _after_building(SequenceParallel, reduce_nothing)


def skipped_tied_gradient_sum() -> Patch:
    """First and last stage each train their own copy of the tied embedding."""

    def tie_nothing(strategy: Any) -> None:
        strategy._module.get_tied_weights_and_groups = list

    return _after_building(PipelineParallel, tie_nothing)


def clipping_norm_of_one_stage() -> Patch:
    """Every pipeline stage clips by the norm of its own gradients."""
    clip = torch.nn.utils.clip_grads_with_norm_

    def clip_by_own_norm(parameters: Any, max_norm: float, _whole_norm: Tensor) -> None:
        parameters = list(parameters)
        clip(parameters, max_norm, torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))

    return _replaced(torch.nn.utils, "clip_grads_with_norm_", clip_by_own_norm)


def mean_of_ranks_means() -> Patch:
    """Validation averages the ranks' means, though ranks find unequal numbers of targets."""

    def average_the_averages(strategy: Any, batches: Iterator[Any]) -> tuple[Tensor, Tensor]:
        """As ``eval_step``, but every rank's mean has the same weight."""
        strategy._engine.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=strategy._device)
        for _ in range(strategy._accumulation):
            sums += torch.stack(strategy._micro_batch_sums(to_device(next(batches), strategy._device)))
        mean = process_group.sum_over_ranks(sums[0] / sums[1].clamp(min=1)) / strategy._ranks
        targets = process_group.sum_over_ranks(sums[1])
        return mean * targets, targets

    return _replaced(Zero, "eval_step", torch.no_grad()(average_the_averages))


def micro_batches_summed_in_bf16() -> Patch:
    """ZeRO-0 in bf16 adds up its micro batches in bf16."""
    return _replaced(Zero, "_sum_gradients_in_fp32", lambda _strategy: None)


def rounded_before_the_reduction() -> Patch:
    """DDP in bf16 rounds its fp32 sums before it adds those of the other ranks."""
    average, reduce = ddp.average_in_fp32, dist.all_reduce

    def round_and_reduce(flat: Tensor, **named: Any) -> Any:
        return reduce(flat.copy_(flat.bfloat16()), **named)

    def average_rounded(masters: Mapping[Tensor, nn.Parameter], bucket: GradBucket) -> Any:
        with _replaced(dist, "all_reduce", round_and_reduce):
            return average(masters, bucket)

    return _replaced(ddp, "average_in_fp32", average_rounded)


def scaled_after_the_norm() -> Patch:
    """Gradients are multiplied by the number of ranks after their norm was read."""
    before_step = Zero._before_step

    def scale_after_reading(strategy: Any) -> Tensor | None:
        norm = before_step(strategy)
        for parameter in strategy._parameters.values():
            parameter.grad *= strategy._ranks
        return norm

    return _replaced(Zero, "_before_step", scale_after_reading)


def second_group_keeps_its_rate() -> Patch:
    """The schedule changes only the learning rate of the first parameter group, which is the one that is reported."""

    def set_the_first(optimizer: Any, lr: float) -> None:
        optimizer.param_groups[0]["lr"] = lr

    return _replaced(deepspeed_engine, "set_learning_rate", set_the_first)


def biases_decay() -> Patch:
    """Weight decay acts on biases and LayerNorms too."""
    return _replaced(optimization, "decays", lambda _name: True)


def large_epsilon() -> Patch:
    """AdamW's epsilon is 1e-6 instead of 1e-8."""

    def wrap(build: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
        return lambda groups, recipe: build(groups, replace(recipe, eps=1e-6))

    return _wrapped(torch_strategy, "build_optimizer", wrap)


# Known bugs, planted in real strategies, to show that the suite reports each one.

RANKS = 2
"""The number of ranks of every planted cell."""


class PlantingFunction(Protocol):
    """A function of ``patches``, whose name is the bug's."""

    __name__: str

    def __call__(self) -> Patch:
        """A context in which the bug is planted."""


@dataclass(frozen=True)
class Bug:
    """A mistake that parallel trainers have made, and the strategy in which it is planted."""

    patch: PlantingFunction
    strategy: str
    optimizer: str
    precision: str

    @property
    def description(self) -> str:
        """What is wrong: the first line of the patch's docstring."""
        return (inspect.getdoc(self.patch) or "").split("\n")[0].removesuffix(".")

    def visible_on(self, device: str) -> bool:
        """Whether the bounds of ``device`` detect it: those of bf16 on a GPU are wider than its effect."""
        return device == "cpu" or self.precision == "fp32"

    def cell(self, name: str) -> Cell:
        """The cell that must fail."""
        return Cell(strategy=self.strategy, ranks=RANKS, optimizer=self.optimizer, precision=self.precision, bug=name)


def plant(name: str) -> Patch:
    """A context in which the bug of this name is planted; without a name, one in which nothing is."""
    return BUGS[name].patch() if name else contextlib.nullcontext()


def _bug(
    patch: PlantingFunction, strategy: str, *, optimizer: str = "adamw", precision: str = "fp32"
) -> tuple[str, Bug]:
    """``sum_over_ranks`` plants the bug ``sum-over-ranks``."""
    return patch.__name__.replace("_", "-"), Bug(patch, strategy, optimizer, precision)


BUGS = dict(
    (
        _bug(sum_over_ranks, "ddp"),
        _bug(accumulation_counted_twice, "zero2"),
        _bug(
            clipping_before_averaging,
            "zero0",
            optimizer="sgd",
        ),
        _bug(
            dropped_last_micro_batch,
            "zero1",
        ),
        _bug(positions_not_shifted, "sequence2-zero1"),
        _bug(
            not_reduced_over_sequence_ranks,
            "sequence2-zero0",
        ),
        _bug(
            skipped_tied_gradient_sum,
            "pipeline2-zero1",
        ),
        _bug(
            clipping_norm_of_one_stage,
            "pipeline2-zero0",
            optimizer="sgd",
        ),
        _bug(
            mean_of_ranks_means,
            "zero1",
        ),
        _bug(
            micro_batches_summed_in_bf16,
            "zero0",
            optimizer="sgd",
            precision="bf16",
        ),
        _bug(
            rounded_before_the_reduction,
            "ddp",
            optimizer="sgd",
            precision="bf16",
        ),
        _bug(
            scaled_after_the_norm,
            "zero0-unclipped-sgd",
            optimizer="sgd",
        ),
        _bug(
            second_group_keeps_its_rate,
            "zero2",
        ),
        _bug(biases_decay, "zero1", precision="bf16"),
        _bug(large_epsilon, "ddp"),
    )
)


def planted_cells(device: str) -> list[Cell]:
    """The cells that must fail on ``device``, ``cpu`` or ``cuda``."""
    return [bug.cell(name) for name, bug in BUGS.items() if bug.visible_on(device)]


PLACES = ("exp_avg", "exp_avg_sq")
"""Where Adam keeps its moments. DeepSpeed links both or none."""


class _StepHook(ABC):
    """A context in which ``_note`` is called with every optimizer that is about to step."""

    @abstractmethod
    def _note(self, optimizer: torch.optim.Optimizer) -> None: ...

    def __enter__(self) -> Self:
        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._note(optimizer)

        self._handle = register_optimizer_step_pre_hook(before_step)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


class UsedRates(_StepHook):
    """Notes the learning rate of every parameter group of every optimizer that steps."""

    def __init__(self) -> None:
        self.seen: set[float] = set()

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen |= {float(group["lr"]) for group in optimizer.param_groups}


class SgdGradients(_StepHook):
    """Makes SGD keep the gradient that it steps on where Adam keeps its moments.

    SGD has no state that a strategy would gather. With the gradient in that place, ``Strategy.iter_state`` gathers it,
    as it gathers Adam's first moment with a beta1 of 0.
    """

    def __init__(self) -> None:
        self._optimizers: list[torch.optim.Optimizer] = []

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.SGD):
            return
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kept = (parameter.grad.detach().clone(), torch.zeros_like(parameter.grad))
                    optimizer.state[parameter].update(zip(PLACES, kept, strict=True))

    def forget(self) -> None:
        """Remove the gradients, which are not model state and would be kept through later steps."""
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for name in PLACES:
                    state.pop(name, None)


def full_gradient(exp_avg: Tensor, *, beta1: float, grad_norm: float, clipping: float) -> Tensor:
    """The gradient of the first step, from Adam's first moment after it.

    ``exp_avg`` is then (1 - beta1) times the clipped gradient (Kingma and Ba 2015, algorithm 1), and clipping divided
    it by ``(norm + 1e-6) / clipping`` if that exceeds 1, both in torch's ``clip_grad_norm_`` and in DeepSpeed.
    """
    shrunk = max(1.0, (grad_norm + 1e-6) / clipping) if clipping > 0 else 1.0
    return exp_avg / (1 - beta1) * shrunk


# One rank of one cell: what ``src/gpt2.py`` does from flags to steps, measured.

SENT = "sent"
"""A category besides those of ``MODEL_STATE``: the bytes that the busiest rank sends in a step."""


def train_cell(flags: list[str], folder: Path, *, bug: str) -> None:
    """Train as ``flags`` say, and write this rank's measurements into ``folder``.

    Args:
        flags: of ``src/gpt2.py``.
        folder: an existing folder.
        bug: to plant in the strategy, a key of ``planted.BUGS``; empty for none.

    Raises:
        UserError: the product refuses the combination.
    """
    config, device = _resolved(flags)
    with contextlib.nullcontext() if config.run_type == "baseline" else joined(config.topology, device):
        torch.manual_seed(config.options.seed)
        with plant(bug):
            _train(config, device).write(folder, rank=config.topology.rank)
        barrier()


def train_reference_cell(flags: list[str], folder: Path, *, split: Mapping[str, Any]) -> None:
    """Train the same in plain PyTorch instead of a strategy; ``split`` holds the fields of a ``Split``.

    Raises:
        UserError: the product refuses the combination.
    """
    config, device = _resolved(flags)
    train_reference(config, device, Split(**split)).write(folder, rank=0)


LOGITS_AT_ONCE = 12_000
"""Of the loss: 40 tokens with the suite's vocabulary of 300, so that every micro batch has several chunks, as in large
models."""


def _resolved(flags: list[str]) -> tuple[RunConfig, torch.device]:
    CHUNKS.update(dict.fromkeys(CHUNKS, LOGITS_AT_ONCE))
    options, problems = parse_arguments(flags)
    config = resolve(options, topology=read_topology(), problems=problems)
    device = bring_up(config.device, local_rank=config.topology.local_rank, threads=config.threads_per_device)
    return config, device


def _train(config: RunConfig, device: torch.device) -> Measurement:
    with contextlib.closing(build_strategy(config, device)) as strategy:
        measurement = _measure(config, strategy)
        barrier()
    return measurement


def _measure(config: RunConfig, strategy: Strategy) -> Measurement:
    """Train from the first to the last step; every rank calls it, because parts of it are collective."""
    measurement = Measurement(data_rank=config.topology.data_rank, strategy=config.strategy_name)
    batches = WatchedBatches(training_batches(config, first_step=0))
    meter = TrafficMeter(
        lambda: strategy.state_tensors()._asdict(),
        last_step=config.total_steps,
        report=lambda cost: measurement.bytes_per_rank(compared_bytes(cost, config)),
    )
    sgd = SgdGradients()
    for step in range(1, config.total_steps + 1):
        with meter.watch(step), UsedRates() as used, sgd if step == 1 else contextlib.nullcontext():
            result = strategy.train_step(batches, step)
        measurement.step(
            loss=float(result.loss),
            grad_norm=float(result.grad_norm),
            lr=result.lr,
            used=sorted(used.seen),
            skipped=bool(result.skipped),
            samples=batches.take(),
        )
        if step == 1:
            _take_gradient(config, strategy, result, measurement)
            sgd.forget()
        if step == FIRST_CHANGE:
            _take_weights(config, strategy, measurement, after=CHANGED)
        if step in validated_after(config.total_steps):
            _validate(config, strategy, measurement, after_step=step)
    for name, value in strategy.replicated_weights():
        measurement.replica(name, value)
    _take_weights(config, strategy, measurement, after=WEIGHT)
    return measurement


def compared_bytes(measured: dict[str, Any], config: RunConfig) -> dict[str, dict[str, int | None]]:
    """Bytes of model state and of traffic in a step, measured and by ``dsgpt.planner``, of the rank that has most.

    Args:
        measured: the ``cost`` block of a run's record.
        config: the run.
    """
    setup = setup_of(config)
    state, traffic = measured["model_state_bytes_per_rank"], measured["communication_per_step"]
    predicted = largest_model_state(setup)
    found = {name: {"measured": state[name], "formula": getattr(predicted, name)} for name in MODEL_STATE}
    sent = None if traffic is None else traffic["ring_bytes_per_rank"]
    return found | {SENT: {"measured": sent, "formula": most_sent_bytes(setup)}}


def _take_weights(config: RunConfig, strategy: Strategy, measurement: Measurement, *, after: str) -> None:
    """Note every weight on the main rank; every rank walks through the state, because that is collective."""
    for name, state in strategy.iter_state():
        if config.topology.is_main:
            measurement.weight(name, state.weight, after=after)


def _validate(config: RunConfig, strategy: Strategy, measurement: Measurement, *, after_step: int) -> None:
    """Validate as the training loop does, which is collective."""
    loss, targets = validation_loss(config, strategy) or (math.nan, 0)
    measurement.validation(after_step=after_step, loss=loss, targets=targets)


def _take_gradient(config: RunConfig, strategy: Strategy, result: StepResult, measurement: Measurement) -> None:
    """Note the first step's gradient; collective, as ``_take_weights``."""
    recipe = config.recipe
    beta1 = recipe.optimizer.betas[0] if recipe.optimizer.type == "AdamW" else 0.0  # see ``SgdGradients``
    for name, state in strategy.iter_state():
        if config.topology.is_main and state.exp_avg is not None:
            gradient = full_gradient(
                state.exp_avg.float(),
                beta1=beta1,
                grad_norm=float(result.grad_norm),
                clipping=recipe.gradient_clipping,
            )
            measurement.gradient(name, gradient)

"""Contexts that each plant one known bug in a strategy, and remove it at the end.

Each is planted where real trainers had it. The reported loss and norm stay right if possible, so that the suite has to
find the bug by its effect on the training.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # DDP requires this annotation of its hook

from dsgpt.model.gpt2 import GPT2
from dsgpt.optimization import optimizer as optimization
from dsgpt.runtime import process_group
from dsgpt.strategies.base import to_device
from dsgpt.strategies.deepspeed import engine as deepspeed_engine
from dsgpt.strategies.deepspeed.pipeline import PipelineParallel
from dsgpt.strategies.deepspeed.sequence import SequenceParallel
from dsgpt.strategies.deepspeed.zero import Zero
from dsgpt.strategies.pytorch import ddp, torch_strategy

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

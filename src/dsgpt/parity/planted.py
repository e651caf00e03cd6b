"""Known bugs, planted into real strategies, to show that the suite reports each one.

Each is planted where trainers had it: the reported loss and norm stay honest where they can, so that the bug has to be
found in what it does to the training.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsgpt.model.gpt2 import GPT2
from dsgpt.parity.matrix import Cell

Patch = contextlib.AbstractContextManager[None]


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A mistake that parallel trainers have made, and where it is planted."""

    description: str
    strategy: str
    patch: Callable[[], Patch]
    ranks: int = 2
    optimizer: str = "adamw"

    def cell(self, name: str) -> Cell:
        """The cell that must fail."""
        return Cell(strategy=self.strategy, ranks=self.ranks, optimizer=self.optimizer, bug=name)


def plant(name: str) -> Patch:
    """Have the bug of this name as long as the context lasts; nothing without a name."""
    return BUGS[name].patch() if name else contextlib.nullcontext()


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _after_building(strategy: type, change: Callable[[Any], None]) -> Patch:
    """Change every ``strategy`` right after it was built."""
    build = strategy.__init__

    def build_and_change(self: Any, *arguments: Any, **named: Any) -> None:
        build(self, *arguments, **named)
        change(self)

    return _replaced(strategy, "__init__", build_and_change)


def _sum_over_ranks() -> Patch:
    from dsgpt.strategies.ddp import Ddp  # noqa: PLC0415 - the planted cell alone needs it, here and below

    def add_up(_strategy: Ddp, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    return _replaced(Ddp, "_average", add_up)


def _accumulation_counted_twice() -> Patch:
    from dsgpt.strategies.zero import Zero  # noqa: PLC0415

    def divide_again(strategy: Any) -> None:
        strategy._loss_factor /= strategy._accumulation  # DeepSpeed's ``backward`` has divided by it already

    return _after_building(Zero, divide_again)


def _clipping_before_averaging() -> Patch:
    from dsgpt.strategies.zero import Zero  # noqa: PLC0415

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


def _dropped_last_micro_batch() -> Patch:
    from dsgpt.strategies.zero import Zero  # noqa: PLC0415

    def drop_last(strategy: Any) -> None:
        engine = strategy._engine
        backward = engine.backward
        engine.backward = lambda loss: backward(loss * (not engine.is_gradient_accumulation_boundary()))

    return _after_building(Zero, drop_last)


def _positions_not_shifted() -> Patch:
    forward = GPT2.forward

    def forget_the_shift(self: GPT2, *arguments: Any, **named: Any) -> Tensor:
        return forward(self, *arguments, **{**named, "first_position": 0})

    return _replaced(GPT2, "forward", forget_the_shift)


def _gradients_not_reduced_over_sequence_ranks() -> Patch:
    from dsgpt.strategies.sequence import Sequence  # noqa: PLC0415

    def reduce_nothing(strategy: Any) -> None:
        strategy._engine.allreduce_gradients = lambda *_arguments, **_named: None  # the one data rank is alone

    return _after_building(Sequence, reduce_nothing)


def _skipped_tied_gradient_sum() -> Patch:
    from dsgpt.strategies.pipeline import Pipeline  # noqa: PLC0415

    def tie_nothing(strategy: Any) -> None:
        strategy._module.get_tied_weights_and_groups = list

    return _after_building(Pipeline, tie_nothing)


def _clipping_norm_of_one_stage() -> Patch:
    clip = torch.nn.utils.clip_grads_with_norm_

    def clip_by_own_norm(parameters: Any, max_norm: float, _whole_norm: Tensor) -> None:
        parameters = list(parameters)
        clip(parameters, max_norm, torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))

    return _replaced(torch.nn.utils, "clip_grads_with_norm_", clip_by_own_norm)


BUGS = {
    "sum-over-ranks": Bug(
        description="gradients are summed over the data ranks instead of averaged",
        strategy="ddp",
        patch=_sum_over_ranks,
    ),
    "accumulation-counted-twice": Bug(
        description="gradients are divided by the accumulation steps twice",
        strategy="zero2",
        patch=_accumulation_counted_twice,
    ),
    "clipping-before-averaging": Bug(
        description="every rank clips its own gradients before they are averaged",
        strategy="zero0",
        optimizer="sgd",
        patch=_clipping_before_averaging,
    ),
    "dropped-last-micro-batch": Bug(
        description="the last micro batch of every step is read, but adds no gradient",
        strategy="zero1",
        patch=_dropped_last_micro_batch,
    ),
    "positions-not-shifted": Bug(
        description="every sequence rank numbers its positions from 0",
        strategy="sequence2-zero1",
        patch=_positions_not_shifted,
    ),
    "not-reduced-over-sequence-ranks": Bug(
        description="gradients are reduced over data ranks, but not over sequence ranks",
        strategy="sequence2-zero0",
        patch=_gradients_not_reduced_over_sequence_ranks,
    ),
    "skipped-tied-gradient-sum": Bug(
        description="first and last stage each train their own copy of the tied embedding",
        strategy="pipeline2-zero1",
        patch=_skipped_tied_gradient_sum,
    ),
    "clipping-norm-of-one-stage": Bug(
        description="every pipeline stage clips by the norm of its own gradients",
        strategy="pipeline2-zero0",
        optimizer="sgd",
        patch=_clipping_norm_of_one_stage,
    ),
}

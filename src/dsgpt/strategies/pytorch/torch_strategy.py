"""The base class of the plain-PyTorch strategies: the optimizer step, validation, and the state to save.

Baseline, DDP and FSDP differ only in which rank holds which weights and in how gradients are reduced. Optimizer,
schedule, clipping, accumulation and loss scale are the same.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from dsgpt.checkpointing.training_state import Counters, ParamState, StateReader
from dsgpt.config.run_config import RunConfig
from dsgpt.data.loader import IGNORED_TARGET, Batch
from dsgpt.model.gpt2 import GPT2
from dsgpt.optimization.optimizer import (
    STATE_NAMES,
    begin_state,
    build_optimizer,
    global_norm,
    parameter_groups,
    set_learning_rate,
)
from dsgpt.optimization.schedule import build_schedule
from dsgpt.runtime.process_group import sum_over_ranks
from dsgpt.runtime.ranges import named_range
from dsgpt.strategies.base import StateTensors, StepResult, Strategy, optimizer_tensors, to_device
from dsgpt.strategies.loss_scale import LossScale
from dsgpt.strategies.pytorch.master_weights import TrainedWeights


class TorchStrategy(Strategy):
    """One optimizer step in plain PyTorch; a subclass builds the model and reduces its gradients.

    Args:
        config: the run.
        device: of this rank.
        model: computes the loss of a micro batch.
        weights: the fp32 weights that the optimizer changes, all or this rank's part.
    """

    def __init__(self, config: RunConfig, device: torch.device, *, model: GPT2, weights: TrainedWeights) -> None:
        recipe = config.recipe
        self.model = model
        self._weights = weights
        self._device = device
        self._ranks = config.topology.world_size
        self._accumulation = config.batch.gradient_accumulation_steps
        self._clipping = recipe.gradient_clipping
        self._optimizer = build_optimizer(parameter_groups(weights.parameters, recipe.optimizer), recipe.optimizer)
        self._schedule = build_schedule(recipe.scheduler, base_lr=recipe.optimizer.lr, total_steps=config.total_steps)
        self._scale = LossScale(recipe.loss_scaling if config.precision == "fp16" else None)
        self._optimizer_steps = 0

    def train_step(self, batches: Iterator[Batch], step: int) -> StepResult:
        """See ``Strategy``."""
        self.model.train()
        lr = self._schedule(step)
        set_learning_rate(self._optimizer, lr)
        self._optimizer.zero_grad()
        loss_sum = torch.zeros((), device=self._device)
        for micro in range(self._accumulation):
            batch = to_device(next(batches), self._device)
            with self._micro_batch(last=micro == self._accumulation - 1):
                with named_range("forward"):
                    loss = self._training_loss(batch) / self._accumulation
                with named_range("backward"):
                    torch.autograd.backward(loss * self._scale.factor)
            self._weights.gather_gradients()
            loss_sum += loss.detach()
        with named_range("optimizer"):
            norm, overflow = self._clip_and_step()
        own_loss = loss_sum.clone()  # the sum is taken in place
        loss_mean = self._sum_over_ranks(loss_sum) / self._ranks
        return StepResult(loss=loss_mean, own_loss=own_loss, grad_norm=norm, lr=lr, skipped=torch.tensor(overflow))

    def _clip_and_step(self) -> tuple[Tensor, bool]:
        """Step on the gradients; return their norm before clipping, and whether they overflowed instead."""
        norm = self._unscale_and_clip()
        overflow = self._scale.enabled and not bool(torch.isfinite(norm))  # waits for the device, in fp16 only
        if not overflow:
            self._optimizer.step()
            self._optimizer_steps += 1
            self._weights.publish()
        self._scale.update(overflow=overflow)
        return norm, overflow

    def _micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002 - for subclasses
        """A context for one forward and backward pass; gradients are reduced over ranks in the ``last`` one only."""
        return contextlib.nullcontext()

    def _training_loss(self, batch: Batch) -> Tensor:
        loss: Tensor = self.model(batch.inputs, batch.targets)
        return loss

    def _unscale_and_clip(self) -> Tensor:
        """Undo the loss scale and clip; return the whole model's gradient norm before clipping, equal on all ranks."""
        parameters = self._weights.parameters.values()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self._scale.factor != 1:
            for gradient in gradients:
                gradient.div_(self._scale.factor)
        norm = self._global_norm(gradients)
        if self._clipping > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self._clipping, norm)
        return norm

    def _global_norm(self, gradients: Iterable[Tensor]) -> Tensor:
        return global_norm(gradients)

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        return sum_over_ranks(value) if self._ranks > 1 else value

    @torch.no_grad()
    def eval_step(self, batches: Iterator[Batch]) -> tuple[Tensor, Tensor]:
        """See ``Strategy``."""
        self._optimizer.zero_grad()  # whole logits may need the memory of the last step's gradients
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)  # losses, targets
        for _ in range(self._accumulation):
            batch = to_device(next(batches), self._device)
            sums[0] += self.model(batch.inputs, batch.targets, reduction="sum")
            sums[1] += (batch.targets != IGNORED_TARGET).sum()
        loss_sum, tokens = self._sum_over_ranks(sums)
        return loss_sum, tokens

    def iter_state(self) -> Iterator[tuple[str, ParamState]]:
        """See ``Strategy``."""
        self._optimizer.zero_grad()  # gathered weights may need the memory of the last step's gradients
        for name, parameter in self._weights.parameters.items():
            moments = self._optimizer.state.get(parameter, {})
            whole = {key: self._whole(name, moments[key]) for key in STATE_NAMES if key in moments}
            yield name, ParamState(self._whole(name, parameter.detach()), **whole)

    def _whole(self, name: str, part: Tensor) -> Tensor:  # noqa: ARG002 - for subclasses
        """The whole of the parameter ``name``, or of a moment of it, from each rank's ``part``; collective."""
        return part

    def _part(self, whole: Tensor) -> Tensor:
        """What this rank holds of a whole parameter, or of a moment of it."""
        return whole

    def replicated_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Strategy``."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def state_tensors(self) -> StateTensors:
        """See ``Strategy``."""
        computed_with, trained = list(self.model.parameters()), list(self._weights.parameters.values())
        return StateTensors(
            parameters=[parameter.detach() for parameter in computed_with],
            gradients=[parameter.grad for parameter in [*trained, *computed_with] if parameter.grad is not None],
            optimizer=optimizer_tensors(self._optimizer),
            master=[parameter.detach() for parameter in trained],  # in fp32 the parameters again, which count once
            buffers=[],
        )

    def counters(self) -> Counters:
        """See ``Strategy``."""
        return Counters(optimizer_steps=self._optimizer_steps, loss_scale=self._scale.state())

    @torch.no_grad()
    def load_state(self, reader: StateReader) -> None:
        """See ``Strategy``."""
        self._optimizer_steps = reader.counters.optimizer_steps
        self._scale.restore(reader.counters.loss_scale)
        for name, parameter in self._weights.parameters.items():
            state = reader.state(name)
            self._weights.replace(name, self._part(state.weight))
            if reader.has_moments:
                for key, moment in begin_state(self._optimizer, parameter, steps=self._optimizer_steps).items():
                    moment.copy_(self._part(state.moments[key]))

    def close(self) -> None:
        """See ``Strategy``; plain PyTorch writes no swap files."""


def compile_blocks(model: GPT2) -> None:
    """Compile each transformer block alone, in place.

    All blocks share one compiled graph. What a strategy does between blocks (reduce a bucket, gather the next weights)
    still happens there, and not before or after one graph of the whole model.
    """
    for block in model.blocks:
        block.compile()

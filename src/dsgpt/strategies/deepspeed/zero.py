"""DeepSpeed data parallelism at ZeRO stage 0, 1, 2 or 3, with or without offload to the CPU.

Written for DeepSpeed 0.19.8. The optimizer and the learning rate come from this package, not from DeepSpeed's JSON, so
that they are the same objects as the baseline's; DeepSpeed shards, reduces, clips and steps.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dsgpt.checkpointing.training_state import Counters, ParamState, StateReader
from dsgpt.config.run_config import RunConfig
from dsgpt.data.loader import IGNORED_TARGET, Batch
from dsgpt.model.gpt2 import GPT2
from dsgpt.optimization.optimizer import global_norm, set_learning_rate
from dsgpt.optimization.schedule import build_schedule
from dsgpt.runtime.process_group import sum_over_ranks
from dsgpt.strategies.base import StateTensors, StepResult, to_device
from dsgpt.strategies.deepspeed.engine_state import EngineState
from dsgpt.strategies.deepspeed.gradient_sum import GradientSum
from dsgpt.strategies.deepspeed.setup import build_deepspeed_optimizer, engine_config, import_deepspeed, repeat_counting
from dsgpt.strategies.deepspeed.sharded_model import build_sharded
from dsgpt.strategies.deepspeed.sharded_state import iter_sharded_state, load_sharded_state
from dsgpt.strategies.deepspeed.state_access import deepspeed_state
from dsgpt.strategies.initial_weights import initialize_whole
from dsgpt.strategies.loss_scale import LossScale


class Zero:
    """One DeepSpeed engine per rank; strategies that also split the model over ranks add to its private steps."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        deepspeed = import_deepspeed(device)
        recipe = config.recipe
        self._device = device
        self._ranks = config.topology.data_parallel_size
        self._copies = config.topology.sizes.tensor  # ranks that compute the very same loss
        self._loss_factor = 1  # on what a rank backpropagates, where DeepSpeed averages over more than the data ranks
        self._accumulation = config.batch.gradient_accumulation_steps
        self._stage = recipe.zero_stage
        self._precision = config.precision
        self._scale = LossScale(recipe.loss_scaling if config.precision == "fp16" else None)
        ours = self._engine_config(config)
        model = build_sharded(config, ours) if self._stage == 3 else _build_whole(config, device)
        self._parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=model,
            optimizer=build_deepspeed_optimizer(self._parameters, recipe),
            config=ours,
            mpu=self._spread(model, config),
        )
        self._engine_state = None if self._stage == 3 else EngineState(self._optimizer, self._parameters)
        self._optimizer_steps = 0
        self._gradient_sum: GradientSum | None = None
        if self._stage == 0 and self._precision != "fp32":
            self._undo_first_step()
            self._sum_gradients_in_fp32()
        self._schedule = build_schedule(recipe.scheduler, base_lr=recipe.optimizer.lr, total_steps=config.total_steps)
        if config.options.compile:
            model.compile()

    def _engine_config(self, config: RunConfig) -> dict[str, Any]:
        """The JSON as DeepSpeed shall see it on this rank."""
        return engine_config(config)

    def _spread(self, model: GPT2, config: RunConfig) -> Any:  # noqa: ARG002 - for subclasses
        """Prepare ``model`` for the ranks that share it, and answer with the groups of ranks as DeepSpeed wants them.

        DeepSpeed calls them ``mpu``; without, every rank is a data rank.
        """
        return None

    @torch.no_grad()
    def _undo_first_step(self) -> None:
        """Take back the optimizer step on zero gradients that DeepSpeed makes at stage 0 to allocate moments.

        ``FP16_UnfusedOptimizer.initialize_optimizer_states`` leaves Adam's counter at 1, so that every later bias
        correction is off, and decays the master weights once.
        """
        self._optimizer.optimizer.state.clear()
        for low_group, high_group in zip(self._optimizer.fp16_groups, self._optimizer.fp32_groups, strict=True):
            for low, high in zip(low_group, high_group, strict=True):
                high.copy_(low)

    def _sum_gradients_in_fp32(self) -> None:
        """Stage 0 adds up the micro batches' gradients in bf16 or fp16, the other stages in fp32 as was asked."""
        if self._accumulation > 1:
            self._gradient_sum = GradientSum(self._parameters.values())
            self._engine.enable_backward_allreduce = False

    def _reduce_gradient_sum(self, *, last: bool) -> None:
        self._gradient_sum.add()
        if last:
            self._gradient_sum.hand_over()
            self._engine.allreduce_gradients()

    def train_step(self, batches: Iterator[Batch], step: int) -> StepResult:
        """See ``Strategy``."""
        self._engine.train()
        lr = self._schedule(step)
        set_learning_rate(self._optimizer, lr)
        own_factor = self._set_loss_scale()
        loss_sum = torch.zeros((), device=self._device)
        for micro in range(self._accumulation):
            batch = to_device(next(batches), self._device)
            loss = self._micro_batch_loss(batch)
            self._engine.backward(
                loss * self._loss_factor * own_factor
            )  # divides by the accumulation steps, and reduces over ranks at the last
            loss_sum += loss.detach()
            last = micro == self._accumulation - 1
            if self._gradient_sum:
                self._reduce_gradient_sum(last=last)
            own_norm = self._before_step() if last else None
            self._engine.step()
        norm = torch.as_tensor(self._engine.get_global_grad_norm() if own_norm is None else own_norm).float()
        loss_mean = sum_over_ranks(loss_sum / (self._accumulation * self._ranks * self._copies))
        # DeepSpeed skips a step on gradients that are not finite in fp32 too; only fp16, which scales its loss, may.
        overflow = self._scale.enabled and not self._engine.was_step_applied()
        self._optimizer_steps += not overflow
        self._scale.update(overflow=overflow)
        return StepResult(loss=loss_mean, grad_norm=norm / own_factor, lr=lr, skipped=torch.tensor(overflow))

    def _set_loss_scale(self) -> float:
        """Hand DeepSpeed the loss scale of this step; what it leaves to us to multiply the loss by comes back.

        The factor is divided by the ranks: a rank's micro batch is divided by the accumulation steps alone and averaged
        over ranks later, so that its fp16 gradients are as large as the baseline's only then. Stage 0 unscales
        gradients but never scales the loss (``DeepSpeedEngine.backward`` asks for a ``ZeROOptimizer``).
        """
        if not self._scale.enabled:
            return 1.0
        factor = self._scale.factor / self._ranks
        if self._stage > 0:
            self._optimizer.override_loss_scale(factor)
            return 1.0
        self._optimizer.loss_scale_config.cur_scale = factor
        return factor

    def _micro_batch_loss(self, batch: Batch) -> Tensor:
        """What this rank adds to the mean loss of its micro batch; the whole of it, unless it reads a part."""
        return self._engine(batch.inputs, batch.targets)

    def _micro_batch_sums(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum of losses and number of targets over what this rank reads of the micro batch."""
        loss_sum = self._engine(batch.inputs, batch.targets, reduction="sum")
        return loss_sum, (batch.targets != IGNORED_TARGET).sum()

    def _before_step(self) -> Tensor | None:
        """Look at the reduced gradients before DeepSpeed clips them; their norm, where DeepSpeed will not tell it."""
        return self._reduced_gradient_norm() if self._reports_no_norm else None

    @property
    def _reports_no_norm(self) -> bool:
        """DeepSpeed clips fp32 gradients at stage 0 but throws their norm away (``clip_fp32_gradients``)."""
        return self._stage == 0 and self._precision == "fp32"

    def _reduced_gradient_norm(self) -> Tensor:
        return global_norm(p.grad for p in self._parameters.values() if p.grad is not None)

    @torch.no_grad()
    def eval_step(self, batches: Iterator[Batch]) -> tuple[Tensor, Tensor]:
        """See ``Strategy``."""
        self._engine.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)  # losses, targets
        for _ in range(self._accumulation):
            batch = to_device(next(batches), self._device)
            loss_sum, tokens = self._micro_batch_sums(batch)
            sums[0] += loss_sum
            sums[1] += tokens
        loss_sum, tokens = sum_over_ranks(sums) / self._copies  # exact for whole numbers
        return loss_sum, tokens

    def iter_state(self) -> Iterator[tuple[str, ParamState]]:
        """See ``Strategy``; a parameter that is split over ranks is gathered, one at a time."""
        if self._stage == 3:
            yield from iter_sharded_state(self._optimizer, self._parameters)
        else:
            yield from self._engine_state.iterate()

    @staticmethod
    def _shape(parameter: nn.Parameter) -> torch.Size:
        """The whole parameter's shape; ZeRO-3 leaves an empty tensor where the parameter was."""
        return getattr(parameter, "ds_shape", parameter.shape)

    def replicated_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Strategy``; stage 3 leaves none whole but those too small to be worth splitting."""
        for name, parameter in self._parameters.items():
            if parameter.shape == self._shape(parameter):
                yield name, parameter.detach()

    def state_tensors(self) -> StateTensors:
        """See ``Strategy``."""
        return deepspeed_state(self._optimizer, self._parameters.values())

    def counters(self) -> Counters:
        """See ``Strategy``."""
        return Counters(optimizer_steps=self._optimizer_steps, loss_scale=self._scale.state())

    def load_state(self, reader: StateReader) -> None:
        """See ``Strategy``."""
        self._optimizer_steps = reader.counters.optimizer_steps
        self._scale.take_up(reader.counters.loss_scale)
        if self._stage == 3:
            load_sharded_state(self._optimizer, self._parameters, reader)
        else:
            self._engine_state.load(reader, part=self._part)
        repeat_counting(self._optimizer, steps=self._optimizer_steps)

    def _part(self, name: str, whole: Tensor) -> Tensor:  # noqa: ARG002 - for subclasses
        """What this rank's data group holds of a whole parameter, or of a moment of it."""
        return whole

    def close(self) -> None:
        """See ``Strategy``."""


def _build_whole(config: RunConfig, device: torch.device) -> GPT2:
    """GPT-2 with its initial weights on ``device``; for tensor ranks in host memory, see ``Tensor``."""
    model = GPT2(config.model, activation_checkpointing=config.activation_checkpointing)
    initialize_whole(model, config)
    return model if config.topology.sizes.tensor > 1 else model.to(device)

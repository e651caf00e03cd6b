"""DeepSpeed's pipeline of stages, times ZeRO stage 0 or 1 over data ranks, times tensor parallelism inside blocks.

Written for DeepSpeed 0.19.8. DeepSpeed deals the layers to stages, runs the schedule, moves activations and gradients
between stages and reduces gradients; layers, optimizer and learning rate are this package's, as are the steps of the
schedule that DeepSpeed gets wrong.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dsgpt.checkpointing.training_state import Counters, ParamState, StateReader
from dsgpt.config.run_config import RunConfig
from dsgpt.data.loader import IGNORED_TARGET, Batch
from dsgpt.optimization.optimizer import set_learning_rate
from dsgpt.optimization.schedule import build_schedule
from dsgpt.runtime.process_group import sum_over_ranks
from dsgpt.strategies.base import StateTensors, StepResult, to_device
from dsgpt.strategies.deepspeed.engine_state import EngineState
from dsgpt.strategies.deepspeed.setup import build_deepspeed_optimizer, engine_config, import_deepspeed, quietly
from dsgpt.strategies.deepspeed.state_access import deepspeed_state, pipeline_buffers
from dsgpt.strategies.deepspeed.tensor_layout import is_split, join_parts, take_part
from dsgpt.strategies.loss_scale import LossScale

TRAIN_BATCH_TIMER = "train_batch"


class Pipeline:
    """One DeepSpeed pipeline engine per rank, which holds one stage, or its part of one."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        deepspeed = import_deepspeed(device)
        from dsgpt.strategies.deepspeed.pipeline_layers import StageModule  # noqa: PLC0415 - imports DeepSpeed

        recipe = config.recipe
        self._device = device
        self._topology = config.topology
        self._accumulation = config.batch.gradient_accumulation_steps
        self._zero_stage = recipe.zero_stage
        self._clipping = recipe.gradient_clipping
        self._scale = LossScale(recipe.loss_scaling if config.precision == "fp16" else None)
        with quietly():
            self._module = StageModule(config, self._loss)
            self._parameters = self._module.canonical_parameters()
            self._engine, self._optimizer, _, _ = deepspeed.initialize(
                model=self._module,
                optimizer=build_deepspeed_optimizer(self._parameters, recipe),
                config=engine_config(config),
            )
        self._mend_schedule()
        self._engine_state = EngineState(self._optimizer, self._parameters)
        self._optimizer_steps = 0
        self._own_norm: Tensor | None = None
        self._schedule = build_schedule(recipe.scheduler, base_lr=recipe.optimizer.lr, total_steps=config.total_steps)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Of a micro batch, fp32: the mean in training; in validation, where some targets do not count, the sum."""
        reduction = "mean" if self._module.training else "sum"
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)

    def _mend_schedule(self) -> None:
        """Put our own steps into DeepSpeed's schedule, in the place of those that compute something else."""
        from deepspeed.runtime.pipe.schedule import OptimizerStep, ReduceTiedGrads  # noqa: PLC0415

        ours = {}
        if self._zero_stage == 0:
            ours[OptimizerStep] = self._clip_and_step
        if self._scale.enabled:
            ours[ReduceTiedGrads] = self._sum_tied_gradients
        self._engine._INSTRUCTION_MAP = {**self._engine._INSTRUCTION_MAP, **ours}

    def _clip_and_step(self, engine: Any, **arguments: Any) -> None:
        """Clip by the norm of all stages, and let DeepSpeed step; its own clipping is switched off.

        ``clip_fp32_gradients`` takes the stages for tensor peers that hold the same parameters, so that it clips by the
        norm of the first stage alone, and throws that away.
        """
        self._own_norm = self._global_norm()
        if self._clipping > 0:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._clipping, self._own_norm)
        type(engine)._exec_optimizer_step(engine, **arguments)

    def _global_norm(self) -> Tensor:
        """The gradient norm of the whole model: every parameter counts on one stage and one tensor peer.

        ``ds_pipe_replicated`` marks the tied embedding on all stages but the first that has it. Squares are summed in
        fp64, as in ``optimization.optimizer.global_norm``.
        """
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for name, parameter in self._parameters.items():
            if not parameter.ds_pipe_replicated and (is_split(name) or self._topology.tensor_rank == 0):
                squares += torch.linalg.vector_norm(parameter.grad, dtype=torch.float64).square()
        dist.all_reduce(squares, group=self._engine.grid.get_model_parallel_group())
        return squares.sqrt().float()

    def _sum_tied_gradients(self, engine: Any) -> None:
        """In fp16, sum the fp32 gradients of the tied embedding over its stages.

        DeepSpeed's ``_exec_reduce_tied_grads`` looks for them in ``grad``, but stage 1 has moved them to
        ``grad_accum``: each stage would go on with its own part, and the copies would drift apart.
        """
        for weight, group in engine.module.get_tied_weights_and_groups():
            dist.all_reduce(weight.grad_accum, group=group)

    def train_step(self, batches: Iterator[Batch], step: int) -> StepResult:
        """See ``Strategy``."""
        lr = self._schedule(step)
        set_learning_rate(self._optimizer, lr)
        if self._scale.enabled:
            # Divided by the data ranks for the reason given in ``Zero._set_loss_scale``.
            self._optimizer.override_loss_scale(self._scale.factor / self._topology.data_parallel_size)
        loss = self._engine.train_batch(iter(self._draw(batches)))
        self._engine.timers(TRAIN_BATCH_TIMER).reset()  # it would keep two events per step for a report nobody asks for
        norm = self._engine.get_global_grad_norm() if self._own_norm is None else self._own_norm
        # DeepSpeed skips a step on gradients that are not finite in fp32 too; only fp16, which scales its loss, may.
        overflow = self._scale.enabled and not self._engine.was_step_applied()
        self._optimizer_steps += not overflow
        self._scale.update(overflow=overflow)
        return StepResult(loss=loss, grad_norm=torch.as_tensor(norm).float(), lr=lr, skipped=torch.tensor(overflow))

    def _draw(self, batches: Iterator[Batch]) -> list[Batch]:
        """The micro batches of one step; stages between the first and the last draw theirs too, and need none."""
        return [to_device(next(batches), self._device) for _ in range(self._accumulation)]

    def eval_step(self, batches: Iterator[Batch]) -> tuple[Tensor, Tensor]:
        """See ``Strategy``."""
        drawn = self._draw(batches)
        losses = self._engine.eval_batch(iter(drawn), reduce_output=None, bcast_loss=False)
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)  # losses, targets
        if self._engine.is_last_stage() and self._topology.tensor_rank == 0:
            sums[0] = torch.stack(losses).double().sum()
            sums[1] = sum((batch.targets != IGNORED_TARGET).sum() for batch in drawn)
        loss_sum, tokens = sum_over_ranks(sums)
        return loss_sum, tokens

    def iter_state(self) -> Iterator[tuple[str, ParamState]]:
        """See ``Strategy``; what a stage holds is sent to all others, one tensor at a time."""
        keys = self._engine_state.moment_names()
        for name in self._module.shapes:
            yield name, ParamState(self._whole(name), **{key: self._whole(name, key) for key in keys})

    def _whole(self, name: str, key: str | None = None) -> Tensor:
        """The weight ``name``, or its moment ``key``, whole and in fp32, from the stage that owns it."""
        owner, grid = self._module.owner(name), self._engine.grid
        if owner == self._topology.stage:
            value = self._joined(name, self._engine_state.value(name, key))
        else:
            value = torch.empty(self._module.shapes[name], device=self._device)
        dist.broadcast(value, grid.stage_to_global(owner), group=grid.get_pipe_parallel_group())
        return value

    def _joined(self, name: str, part: Tensor) -> Tensor:
        """The parts of all tensor peers in one."""
        peers = self._topology.sizes.tensor
        if peers == 1 or not is_split(name):
            return part
        parts = [torch.empty_like(part) for _ in range(peers)]
        dist.all_gather(parts, part, group=self._engine.grid.get_slice_parallel_group())
        return join_parts(name, parts)

    def replicated_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Strategy``; the weights of this stage, less the matrices that tensor peers share."""
        for name, parameter in self._parameters.items():
            if self._topology.sizes.tensor == 1 or not is_split(name):
                yield name, parameter.detach()

    def state_tensors(self) -> StateTensors:
        """See ``Strategy``; the engine keeps what it receives, and the last stage's logits until they are replaced."""
        state = deepspeed_state(self._optimizer, self._parameters.values())
        return state._replace(buffers=[*state.buffers, *pipeline_buffers(self._engine)])

    def counters(self) -> Counters:
        """See ``Strategy``."""
        return Counters(optimizer_steps=self._optimizer_steps, loss_scale=self._scale.state())

    def load_state(self, reader: StateReader) -> None:
        """See ``Strategy``; the tied embedding is read by every stage that has it."""
        self._optimizer_steps = reader.counters.optimizer_steps
        self._scale.take_up(reader.counters.loss_scale)
        self._engine_state.load(reader, part=self._part)

    def _part(self, name: str, whole: Tensor) -> Tensor:
        return take_part(name, whole, rank=self._topology.tensor_rank, size=self._topology.sizes.tensor)

    def close(self) -> None:
        """See ``Strategy``."""

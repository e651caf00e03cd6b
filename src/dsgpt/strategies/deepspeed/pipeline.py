"""Pipeline parallelism x ZeRO stage 0 or 1 over data ranks x tensor parallelism inside blocks.

Written for DeepSpeed 0.19.8. DeepSpeed assigns the layers to stages, runs the schedule, moves activations and gradients
between stages and reduces gradients. This module replaces the steps of the schedule that DeepSpeed gets wrong.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dsgpt.checkpointing.training_state import ParamState
from dsgpt.config.run_config import RunConfig
from dsgpt.data.loader import IGNORED_TARGET, Batch
from dsgpt.optimization.optimizer import square_sum
from dsgpt.runtime.process_group import sum_over_ranks
from dsgpt.runtime.ranges import named_range
from dsgpt.strategies.base import StateTensors, to_device
from dsgpt.strategies.deepspeed.engine import DeepSpeedStrategy
from dsgpt.strategies.deepspeed.engine_state import EngineState
from dsgpt.strategies.deepspeed.protocols import PipelineEngine, attached
from dsgpt.strategies.deepspeed.setup import engine_config, quietly
from dsgpt.strategies.deepspeed.state_tensors import pipeline_buffers
from dsgpt.strategies.deepspeed.tensor_layout import is_split

TRAIN_BATCH_TIMER = "train_batch"


class PipelineParallel(DeepSpeedStrategy):
    """One DeepSpeed pipeline engine per rank, which holds one stage, or its part of one."""

    _engine: PipelineEngine
    _state: EngineState

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        super().__init__(config, device)
        from dsgpt.strategies.deepspeed.pipeline_layers import StageModule  # noqa: PLC0415 - imports DeepSpeed

        self._clipping = config.recipe.gradient_clipping
        self._own_norm: Tensor | None = None
        with quietly():
            self._module = StageModule(config, self._loss)
            self._parameters = self._module.canonical_parameters()
            self._start(self._module, config, ds_config=engine_config(config))
        self._tensor_group = self._engine.grid.get_slice_parallel_group()
        self._mend_schedule()

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Loss of a micro batch, fp32: the mean in training; the sum in validation, where some targets do not count."""
        reduction = "mean" if self._module.training else "sum"
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)

    def _mend_schedule(self) -> None:
        """Replace the steps of DeepSpeed's schedule that compute something wrong."""
        from deepspeed.runtime.pipe import schedule  # noqa: PLC0415

        replaced: dict[type, Callable[..., None]] = {}
        if self._stage == 0:
            replaced[schedule.OptimizerStep] = self._clip_and_step
        if self._scale.enabled:
            replaced[schedule.ReduceTiedGrads] = self._sum_tied_gradients
        instructions = {**self._engine._INSTRUCTION_MAP, **replaced}
        named = {
            "forward": schedule.ForwardPass,
            "backward": schedule.BackwardPass,
            "optimizer": schedule.OptimizerStep,
        }
        instructions |= {kind: _in_range(name, instructions[kind]) for name, kind in named.items()}
        self._engine._INSTRUCTION_MAP = instructions

    def _clip_and_step(self, engine: PipelineEngine, **arguments: dict[str, Any] | None) -> None:
        """Clip by the norm of all stages, and let DeepSpeed step; its own clipping is switched off.

        ``clip_fp32_gradients`` treats the stages as tensor peers that hold the same parameters. So it clips by the norm
        of the first stage alone. It does not return a norm.
        """
        self._own_norm = self._global_norm()
        if self._clipping > 0:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._clipping, self._own_norm)
        engine._exec_optimizer_step(**arguments)

    def _global_norm(self) -> Tensor:
        """The gradient norm of the whole model: every parameter counts on one stage and one tensor peer.

        ``ds_pipe_replicated`` marks the tied embedding on all stages but the first that has it.
        """
        own = [
            parameter.grad
            for name, parameter in self._parameters.items()
            if not attached(parameter, "ds_pipe_replicated") and (is_split(name) or self._topology.tensor_rank == 0)
        ]
        squares = square_sum(gradient for gradient in own if gradient is not None).to(self._device)
        dist.all_reduce(squares, group=self._engine.grid.get_model_parallel_group())
        return squares.sqrt().float()

    def _sum_tied_gradients(self, _engine: PipelineEngine) -> None:
        """In fp16, sum the fp32 gradients of the tied embedding over its stages.

        DeepSpeed's ``_exec_reduce_tied_grads`` looks for them in ``grad``, but stage 1 has moved them to
        ``grad_accum``. So each stage would step on its own part, and the copies would drift apart.
        """
        for weight, group in self._module.get_tied_weights_and_groups():
            dist.all_reduce(weight.grad_accum, group=group)

    def _execute(self, batches: Iterator[Batch], *, own_factor: float) -> tuple[Tensor, Tensor, Tensor]:
        """See ``DeepSpeedStrategy``; ``own_factor`` is 1, because fp16 is refused at stage 0."""
        loss = self._engine.train_batch(iter(self._draw(batches)))
        self._engine.timers(TRAIN_BATCH_TIMER).reset()  # else it keeps two events per step for a report that is off
        return loss, self._engine.dp_group_loss, self._gradient_norm(self._own_norm) / own_factor

    def _draw(self, batches: Iterator[Batch]) -> list[Batch]:
        """The micro batches of one step. Stages between the first and the last draw them too, but use none."""
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
        keys = self._state.moment_names()
        for name in self._module.shapes:
            yield name, ParamState(self._whole(name), **{key: self._whole(name, key) for key in keys})

    def _whole(self, name: str, key: str | None = None) -> Tensor:
        """The weight ``name``, or its moment ``key``, whole and in fp32, from the stage that owns it."""
        owner, grid = self._module.owner(name), self._engine.grid
        if owner == self._topology.stage:
            value = self._joined(name, self._state.value(name, key))
        else:
            value = torch.empty(self._module.shapes[name], device=self._device)
        dist.broadcast(value, grid.stage_to_global(owner), group=grid.get_pipe_parallel_group())
        return value

    def state_tensors(self) -> StateTensors:
        """See ``Strategy``; the engine keeps what it receives, and the last stage's logits until they are replaced."""
        state = super().state_tensors()
        return state._replace(buffers=[*state.buffers, *pipeline_buffers(self._engine)])


def _in_range(name: str, instruction: Callable[..., None]) -> Callable[..., None]:
    """A step of the schedule that profilers show under ``name``."""

    def call(engine: PipelineEngine, **arguments: Any) -> None:
        with named_range(name):
            instruction(engine, **arguments)

    return call

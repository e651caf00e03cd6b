"""The base class of all DeepSpeed strategies.

Gradient norms that DeepSpeed computes from norms of blocks, instead of converting every element to fp64. Written for
DeepSpeed 0.19.8, whose ``get_grad_norm_direct`` of stages 1 to 3 took more time on a CPU than the optimizer's update.
The norm of the norms of blocks is the norm.

The base class of all DeepSpeed strategies: the optimizer step around the micro batches, and the state to save. Written
for DeepSpeed 0.19.8. Optimizer, learning rate and loss scale are this package's, not those of DeepSpeed's JSON, so
they are the same as under the baseline. DeepSpeed shards, reduces, clips and steps.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dsgpt.checkpoints.pieces import Box
from dsgpt.checkpoints.training_state import Shards, StateReader
from dsgpt.config.run_config import RunConfig
from dsgpt.data.loader import Batch
from dsgpt.model.gpt2 import GPT2, parameter_shapes
from dsgpt.strategies.base import StateTensors, Strategy, Watch, block_norms, set_learning_rate, watch_losses
from dsgpt.strategies.deepspeed import state
from dsgpt.strategies.deepspeed.setup import build_deepspeed_optimizer, import_deepspeed, repeat_counting
from dsgpt.strategies.exact import ExactSums, exact_sums, take_exact_norms
from dsgpt.telemetry.meter import StepResult


def take_norms_of_blocks(optimizer: Any) -> None:
    """Let ``optimizer``, DeepSpeed's of stage 1, 2 or 3, compute its norm so; others have no such method.

    Stage 1 in bf16 (``BF16_Optimizer``), stage 0, and offload below stage 3 compute their norms in other places; of the
    last see ``wait_once``.
    """
    if type(optimizer).__name__ not in ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"):
        return
    norm = optimizer.get_grad_norm_direct

    def norm_of_blocks(gradients: Iterable[Tensor], params: Sequence[Tensor]) -> Any:
        # DeepSpeed leaves out what has the mark of padding.
        parts = [part if getattr(part, "_zero_padding", False) else block_norms(part) for part in gradients]
        return norm(parts, params)

    optimizer.get_grad_norm_direct = norm_of_blocks


def wait_once(optimizer: Any) -> None:
    """Let ``optimizer``, DeepSpeed's of stage 1 or 2 with offload, wait for the device per group, not per parameter.

    It reads the norm of each gradient by itself, and whether each is finite (``update_offload_overflow_tracker``).
    Here the norms of a group are read together, and whether all are finite is read once, by ``has_overflow``.
    """
    if type(optimizer).__name__ != "DeepSpeedZeroOptimizer" or not optimizer.cpu_offload:
        return
    add_up, infinite = optimizer.complete_grad_norm_calculation_for_cpu_offload, optimizer._has_inf_or_nan

    def add_up_on_host(params: Sequence[Tensor]) -> Tensor:
        norms = optimizer.norm_for_param_grads
        if own := [key for key in map(optimizer.get_param_id, params) if key in norms]:
            norms.update(zip(own, torch.stack([norms[key] for key in own]).cpu(), strict=True))
        total: Tensor = add_up(params)
        return total

    def track(gradient: Tensor | None) -> None:
        if gradient is not None:
            optimizer.local_overflow = infinite(gradient) | optimizer.local_overflow

    optimizer.complete_grad_norm_calculation_for_cpu_offload = add_up_on_host
    optimizer.update_offload_overflow_tracker = track


class Exchanges:
    """Finds the first tensor of a step that this rank gave to others and that was not finite, without waiting for it.

    What it received before that must have been finite: otherwise another rank computed it. So the rank at fault is
    known though all ranks of a model have the NaN at the end of the step.
    """

    def __init__(self, device: torch.device) -> None:
        self._none = torch.full((), torch.inf, device=device)
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._number, self._first, self._innocent = 0, self._none, self._none.isinf()

    def give(self, *given: Tensor) -> None:
        """Note what this rank gives to an exchange. Peers that share an exchange give to it in the same order."""
        if torch.compiler.is_compiling():  # it would break the graph
            return
        self._number += 1
        finite = torch.stack([_finite(one) for one in given]).all() | ~self._innocent
        self._first = torch.where(finite, self._first, self._first.clamp(max=self._number))

    def receive(self, received: Tensor) -> None:
        """Note what this rank received from one that computes before it."""
        self._innocent = self._innocent & _finite(received)

    def first(self) -> Tensor:
        """Number of the exchange that was the first, from 1; infinite if none was. 0-dim fp32."""
        return self._first


def _finite(activations: Tensor) -> Tensor:
    """0-dim bool; by one sum, which reads them once."""
    return torch.isfinite(activations.detach().sum(dtype=torch.float32))


class DeepSpeedStrategy(Strategy):
    """One DeepSpeed engine per rank.

    A subclass builds the model, calls ``_start`` and executes the micro batches of a step.
    """

    _engine: Any
    _state: state.EngineState | state.ShardedState
    _exact: ExactSums | None = None
    _parameters: dict[str, nn.Parameter]
    """This rank's parameters, or its parts of them, by canonical name."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._deepspeed = import_deepspeed(device)
        self._topology = config.topology
        self._shapes = parameter_shapes(config.model)
        self._ranks, self._stage = config.topology.data_parallel_size, config.recipe.zero_stage
        self._exchanges = Exchanges(device)

    def _start(self, model: nn.Module, config: RunConfig, *, ds_config: dict[str, Any], groups: Any = None) -> None:
        """Make the engine around ``model``.

        Args:
            model: the module with the parameters ``self._parameters``.
            config: the run.
            ds_config: the JSON that DeepSpeed gets.
            groups: of ranks that share the model (DeepSpeed's ``mpu``); None if every rank is a data rank.
        """
        self._engine, self._optimizer, _, _ = self._deepspeed.initialize(
            model=model, optimizer=build_deepspeed_optimizer(self._parameters, config), config=ds_config, mpu=groups
        )
        take_norms_of_blocks(self._optimizer)
        wait_once(self._optimizer)
        pipeline = config.topology.sizes.pipeline > 1
        self._exact = exact_sums(config, group=self._engine.grid.get_data_parallel_group() if pipeline else None)
        if self._exact is not None:
            self._exact.watch(model)  # after DeepSpeed's hooks, which gather parameters
            if self._stage > 0:
                take_exact_norms(self._optimizer, self._exact, clipping=config.recipe.gradient_clipping)
        state.step_on_weights(self._optimizer)
        kinds = state.WholeState, state.PartitionedState, state.PartitionedState, state.ShardedState
        self._state = kinds[self._stage](self._optimizer, self._parameters)

    def _watch_row_parallel(self, model: nn.Module) -> None:
        """Note the activations that tensor peers are about to sum."""
        for name, module in model.named_modules():
            if name.endswith(".proj"):
                module.register_forward_pre_hook(lambda _, given: self._exchanges.give(*given))

    def train_step(self, batches: Iterator[Batch], step: int) -> StepResult:
        """See ``Strategy``."""
        lr = self._schedule(step)
        set_learning_rate(self._optimizer, lr)
        self._exchanges.begin()
        loss, own_loss, norm = self._execute(batches, own_factor=self._set_loss_scale())
        if self._exact is not None:
            loss = self._exact.mean_loss(self._device)
        # DeepSpeed also skips fp32 steps whose gradients are not finite. Only fp16, which scales its loss, may skip.
        overflow = self._scale.enabled and not self._engine.was_step_applied()
        self._optimizer_steps += not overflow
        self._scale.update(overflow=overflow)
        own_gradient = None
        if self._topology.data_parallel_size == self._topology.world_size:  # else it has passed other ranks
            own_gradient = self._engine.module.take_gradient_sum()
        return StepResult(loss, own_loss, norm, lr, torch.tensor(overflow), own_gradient, self._exchanges.first())

    @abstractmethod
    def _execute(self, batches: Iterator[Batch], *, own_factor: float) -> tuple[Tensor, Tensor, Tensor]:
        """Compute a step's micro batches and let DeepSpeed step.

        Args:
            batches: this rank's micro batches.
            own_factor: to multiply the loss by, and to divide the norm by.

        Returns:
            Mean loss over the global batch, mean loss over what this rank reads of it, and gradient norm before
            clipping; all 0-dim fp32.
        """

    def _set_loss_scale(self) -> float:
        """Give DeepSpeed the loss scale of this step; return the factor by which the loss has to be multiplied here.

        The scale is divided by the number of data ranks, so that fp16 gradients are as large as the baseline's.
        DeepSpeed divides the loss of a micro batch by the accumulation steps alone, and averages over ranks later.
        Stage 0 unscales gradients but never scales the loss (``DeepSpeedEngine.backward`` does so only with a
        ``ZeROOptimizer``).
        """
        if not self._scale.enabled:
            return 1.0
        factor = self._scale.factor / self._ranks
        if self._stage > 0:
            self._optimizer.override_loss_scale(factor)
            return 1.0
        self._optimizer.loss_scale_config.cur_scale = factor
        return factor

    def _gradient_norm(self, own: Tensor | None) -> Tensor:
        """The norm that DeepSpeed clipped by, or ``own`` where DeepSpeed reports none; 0-dim fp32."""
        return torch.as_tensor(self._engine.get_global_grad_norm() if own is None else own).float()

    def _boxes(self, name: str) -> list[Box]:
        """Boxes, in the whole parameter, of the part that this rank's data group holds."""
        place = self._topology
        return state.part_boxes(name, self._shapes[name], rank=place.tensor_rank, size=place.sizes.tensor)

    def shards(self) -> Shards:
        """See ``Strategy``; what several ranks hold alike, each writes an equal share of."""
        place, sizes = self._topology, self._topology.sizes
        own = self._state.shards(self._boxes).only(self._owns)
        if self._stage == 0:  # of the data ranks and their sequence peers, each has everything
            copies = place.data_parallel_size * sizes.sequence
            own = own.share(place.data_rank * sizes.sequence + place.sequence_rank, copies)
        return own.share(place.tensor_rank, sizes.tensor, among=lambda name: not state.is_split(name))

    def _owns(self, name: str) -> bool:  # noqa: ARG002 - for subclasses
        """Whether this rank, of all pipeline stages that hold the parameter ``name``, writes it."""
        return True

    def replicated_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Strategy``; parameters that tensor ranks or ZeRO-3 split are left out.

        ZeRO-3 leaves an empty tensor in place of a parameter that it splits. It keeps small parameters whole. Those
        that it gathers for the next forward pass may have arrived in part, and are left out too.
        """
        for name, parameter in self._parameters.items():
            split = self._topology.sizes.tensor > 1 and state.is_split(name)
            whole = parameter.shape == getattr(parameter, "ds_shape", parameter.shape)
            status = getattr(parameter, "ds_status", None)
            in_flight = status is not None and status.name == "INFLIGHT"
            if whole and not split and not in_flight:
                yield name, parameter.detach()

    def watch(self, watch: Watch, undo: ExitStack) -> None:
        """See ``Strategy``; a pipeline, whose engine calls the loss, notes it there."""
        if isinstance(self._engine.module, GPT2):
            undo.enter_context(watch_losses(self._engine.module, watch))
        for name, parameter in self._parameters.items():
            hook = partial(watch.gradient, name, self._boxes(name))
            undo.enter_context(parameter.register_hook(hook))  # type: ignore[no-untyped-call]  # torch's has no types

    def state_tensors(self) -> StateTensors:
        """See ``Strategy``."""
        return state.engine_tensors(self._optimizer, self._parameters.values())

    def load_state(self, reader: StateReader) -> None:
        """See ``Strategy``."""
        super().load_state(reader)
        self._state.load(reader, part=self._boxes)
        repeat_counting(self._optimizer, steps=self._optimizer_steps)

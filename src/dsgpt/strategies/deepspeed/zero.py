"""DeepSpeed data parallelism at ZeRO stage 0, 1, 2 or 3, with or without offload.

Fewer passes over the gradients of ``BF16_Optimizer``, DeepSpeed's stage 1 in bf16. Written for DeepSpeed 0.19.8. It
fills gradients in both precisions with zeros after each step, adds to both what the next backward pass computes, and
converts each gradient in memory of its own before it is added.

DeepSpeed data parallelism at ZeRO stage 0, 1, 2 or 3, with or without offload to the CPU or to nvme. Written for
DeepSpeed 0.19.8.
"""

import gc
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dsgpt.config.run_config import RunConfig
from dsgpt.data.loader import IGNORED_TARGET, Batch
from dsgpt.machine.device import named_range
from dsgpt.machine.process_group import sum_over_ranks
from dsgpt.model.gpt2 import GPT2
from dsgpt.strategies.base import to_device
from dsgpt.strategies.deepspeed.engine import DeepSpeedStrategy
from dsgpt.strategies.deepspeed.setup import SwapSpace, engine_config, load_ops
from dsgpt.strategies.optimizer import DTYPES, global_norm, initial_values, initialize_whole


def spare_passes(optimizer: Any, *, single_rank: bool, engine: Any) -> None:
    """Replace methods of ``optimizer`` if it is a ``BF16_Optimizer``; others stay as they are.

    Args:
        optimizer: from ``deepspeed.initialize``.
        single_rank: whether there is nothing to reduce, so that the engine need not copy all gradients to buckets.
        engine: the optimizer's.
    """
    if type(optimizer).__name__ != "BF16_Optimizer":
        return
    clear = optimizer.clear_lp_grads
    optimizer.clear_lp_grads = lambda *_, **__: clear(set_to_none=True)
    optimizer.clear_hp_grads = partial(_forget_sums, optimizer)
    optimizer._update_hp_grad = partial(_add_to_sum, optimizer)
    if single_rank:
        engine.enable_backward_allreduce = False


def _forget_sums(optimizer: Any) -> None:
    """Let the next gradients replace the fp32 sums. Every parameter has a gradient in every step."""
    optimizer.fp32_groups_has_gradients = [[False] * len(group) for group in optimizer.fp32_groups_gradients]


@torch.no_grad()
def _add_to_sum(optimizer: Any, low: nn.Parameter, group: int, index: int, clear_lp_grads: bool) -> None:
    """Add the gradient of ``low`` to its fp32 sum, or begin the sum with it."""
    if low.grad is None:
        return
    total, begun = optimizer.fp32_groups_gradients[group][index], optimizer.fp32_groups_has_gradients[group]
    gradient = low.grad.view(total.shape)
    if begun[index]:
        total.add_(gradient)
    else:
        total.copy_(gradient)
    begun[index] = True
    low._hp_grad = total  # type: ignore[attr-defined]  # DeepSpeed's
    if clear_lp_grads:
        low.grad.zero_()


# A model that is split over the ranks while it is built (ZeRO-3's ``zero.Init``): no rank ever holds all of it.

_INIT_KEYS = ("zero_optimization", "bf16", "fp16", "aio")


def build_sharded(config: RunConfig, engine_config: dict[str, Any]) -> GPT2:
    """GPT-2 with the baseline's initial weights, each split over all ranks as soon as it exists; collective.

    A rank holds its part of every parameter. It also holds one whole layer while that layer is built, and one whole
    parameter while that parameter gets its value.

    Args:
        config: the run.
        engine_config: the JSON that the engine will get.
    """
    import deepspeed  # noqa: PLC0415 - takes seconds

    # ``zero.Init`` checks the batch sizes too, but does not know the groups of ranks yet: any micro batch is fine here,
    # and the engine checks the real sizes later.
    init_config = {key: engine_config[key] for key in _INIT_KEYS if key in engine_config}
    with deepspeed.zero.Init(config_dict_or_path={**init_config, "train_micro_batch_size_per_gpu": 1}):
        model = GPT2(config.model, activation_checkpointing=config.activation_checkpointing)
    # Frees the head's own weight, which the embedding replaced: DeepSpeed's closures put it into a reference cycle.
    gc.collect()
    values = initial_values(config)
    for name, parameter in model.named_parameters():
        with torch.no_grad(), deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            if config.topology.is_main:
                parameter.copy_(values(name, parameter.ds_shape))  # type: ignore[attr-defined]  # DeepSpeed's
    return model


class Zero(DeepSpeedStrategy):
    """Data parallelism. Subclasses that also split the model over ranks extend the private methods."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._copies = config.topology.sizes.tensor  # ranks that compute the very same loss
        self._slices = config.topology.sizes.sequence  # ranks that each add their positions to the same loss
        self._loss_factor: float = 1  # multiplies a rank's loss if DeepSpeed averages over more than the data ranks
        self._precision = config.precision
        ds_config = self._engine_config(config)
        model = build_sharded(config, ds_config) if self._stage == 3 else _build_whole(config, device)
        self._parameters = dict(model.named_parameters())
        self._start(model, config, ds_config=ds_config, groups=self._spread(model, config))
        spare_passes(self._optimizer, single_rank=config.topology.world_size == 1, engine=self._engine)
        self._gradient_sum: GradientSum | None = None
        if self._stage == 0 and self._precision != "fp32":
            self._undo_first_step()
            self._sum_gradients_in_fp32()
        if config.options.compile:
            model.compile()

    def _engine_config(self, config: RunConfig) -> dict[str, Any]:
        """The JSON that DeepSpeed gets on this rank."""
        return engine_config(config)

    def _spread(self, model: GPT2, config: RunConfig) -> Any:  # noqa: ARG002 - for subclasses
        """Prepare ``model`` for the ranks that share it, and return their groups in DeepSpeed's form.

        None here: every rank is a data rank.
        """
        return None

    @torch.no_grad()
    def _undo_first_step(self) -> None:
        """Undo the optimizer step on zero gradients that DeepSpeed takes at stage 0 to allocate moments.

        ``FP16_UnfusedOptimizer.initialize_optimizer_states`` leaves Adam's counter at 1, so that every later bias
        correction is off, and decays the master weights once.
        """
        self._optimizer.optimizer.state.clear()
        for low_group, high_group in zip(self._optimizer.fp16_groups, self._optimizer.fp32_groups, strict=True):
            for low, high in zip(low_group, high_group, strict=True):
                high.copy_(low)

    def _sum_gradients_in_fp32(self) -> None:
        """Sum the micro batches' gradients here: DeepSpeed's stage 0 would do it in bf16 or fp16."""
        if self._accumulation > 1:
            self._gradient_sum = GradientSum(self._parameters.values())
            self._engine.enable_backward_allreduce = False

    def _execute(self, batches: Iterator[Batch], *, own_factor: float) -> tuple[Tensor, Tensor, Tensor]:
        """See ``DeepSpeedStrategy``."""
        self._engine.train()
        loss_sum, own_norm = torch.zeros((), device=self._device), None
        for micro in range(self._accumulation):
            batch = to_device(next(batches), self._device)
            with named_range("forward"):
                loss = self._micro_batch_loss(batch)
            with named_range("backward"):
                # Divides by the accumulation steps; in the last micro batch, also reduces over ranks.
                self._engine.backward(loss * self._loss_factor * own_factor)
            loss_sum += loss.detach()
            last = micro == self._accumulation - 1
            if self._gradient_sum is not None:
                self._gradient_sum.add()
                if last:
                    self._gradient_sum.hand_over()
                    self._engine.allreduce_gradients()
            with named_range("optimizer"):
                if last:
                    own_norm = self._before_step()
                self._engine.step()
        norm = self._gradient_norm(own_norm) / own_factor
        own_loss = loss_sum * (self._slices / self._accumulation)
        return sum_over_ranks(loss_sum / (self._accumulation * self._ranks * self._copies)), own_loss, norm

    def _micro_batch_loss(self, batch: Batch) -> Tensor:
        """What this rank adds to the mean loss of its micro batch: all of it, unless the rank reads only a part."""
        loss: Tensor = self._engine(batch.inputs, batch.targets)
        return loss

    def _micro_batch_sums(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum of losses and number of targets over what this rank reads of the micro batch."""
        loss_sum = self._engine(batch.inputs, batch.targets, reduction="sum")
        return loss_sum, (batch.targets != IGNORED_TARGET).sum()

    def _before_step(self) -> Tensor | None:
        """Look at the reduced gradients before DeepSpeed clips them; return their norm where DeepSpeed reports none."""
        # DeepSpeed clips fp32 gradients at stage 0 but throws their norm away (``clip_fp32_gradients``).
        return self._reduced_gradient_norm() if self._stage == 0 and self._precision == "fp32" else None

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


def _build_whole(config: RunConfig, device: torch.device) -> GPT2:
    """GPT-2 with its initial weights on ``device``; for tensor ranks in host memory, see ``TensorParallel``.

    They are rounded to the run's precision in host memory, so that no fp32 copy needs room on the device. DeepSpeed
    makes its master weights from the rounded ones in any case.
    """
    model = GPT2(config.model, activation_checkpointing=config.activation_checkpointing)
    initialize_whole(model, config)
    model.to(DTYPES[config.precision])
    return model if config.topology.sizes.tensor > 1 else model.to(device)


class GradientSum:
    """fp32 sums of the low-precision gradients of ``parameters`` over micro batches, rounded once at the end."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._sums: list[Tensor | None] = [None] * len(self._parameters)

    def add(self) -> None:
        """Add the gradients of a backward pass to the sums, and clear them."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                so_far = self._sums[index]
                self._sums[index] = parameter.grad.float() if so_far is None else so_far.add_(parameter.grad)
                parameter.grad = None

    def hand_over(self) -> None:
        """Set each gradient to its sum, in the parameter's precision, and clear the sums."""
        for index, parameter in enumerate(self._parameters):
            so_far = self._sums[index]
            parameter.grad = None if so_far is None else so_far.to(parameter.dtype)
            self._sums[index] = None


class ZeroNvme(Zero):
    """ZeRO-3 with weights or optimizer state swapped to files on a local drive (ZeRO-Infinity).

    The files are in folders that only this run uses; see ``swap_space``.
    """

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self._swap_space: SwapSpace | None = None
        try:
            super().__init__(config, device)
        except BaseException:
            self.close()
            raise

    def _engine_config(self, config: RunConfig) -> dict[str, Any]:
        ds_config = super()._engine_config(config)
        load_ops("PinMemoryBuilder", "AsyncIOBuilder")
        self._swap_space = SwapSpace(ds_config, config.recipe, config.topology)
        return ds_config

    def close(self) -> None:
        """See ``Strategy``; remove the files."""
        if self._swap_space is not None:
            self._swap_space.close()

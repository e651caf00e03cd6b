"""DeepSpeed data parallelism at ZeRO stage 0, 1, 2 or 3, with or without offload, and the splits that it allows.

Written for DeepSpeed 0.19.8. Import it after DeepSpeed is set up. Offload goes to the CPU or to nvme (ZeRO-Infinity).
Under Ulysses sequence parallelism every rank of a group computes a slice of the positions through the whole model; only
attention needs the other positions (Jacobs et al. 2023, "DeepSpeed Ulysses", section 3). All ranks hold the same
parameters, so ZeRO shards over all of them. Under tensor parallelism DeepSpeed's AutoTP splits the matrices of every
block, at ZeRO stage 0, 1 or 2; the token embedding is split here.
"""

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn

from dsgpt.config.run_config import RunConfig
from dsgpt.data.loader import IGNORED_TARGET, Batch
from dsgpt.formats.tensor_files import DTYPES
from dsgpt.machine.device import named_range, sum_over_ranks
from dsgpt.model.gpt2 import GPT2, Attend, Attention, Block, dense_attention
from dsgpt.strategies import base
from dsgpt.strategies.deepspeed.engine import DeepSpeedStrategy, Exchanges
from dsgpt.strategies.deepspeed.setup import SwapSpace, engine_config, load_ops
from dsgpt.strategies.deepspeed.state import attend_with_own_dropout, is_split, take_part
from dsgpt.strategies.deepspeed.tensor_layers import VocabularyEmbedding, mark_split, reduce_contiguous, vocabulary_part


def spare_passes(optimizer: Any, *, single_rank: bool, engine: Any) -> None:
    """Spare passes over the gradients of ``BF16_Optimizer``, DeepSpeed's stage 1 in bf16; others stay as they are.

    It fills gradients in both precisions with zeros after each step, adds to both what the next backward pass computes,
    and converts each gradient in memory of its own before it is added.

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
    if config.options.exact:
        # ZeRO-3's own linear layer adds the bias after the sum over the inputs. PyTorch's begins that sum with it.
        init_config["zero_optimization"] = {**init_config["zero_optimization"], "memory_efficient_linear": False}
    with deepspeed.zero.Init(config_dict_or_path={**init_config, "train_micro_batch_size_per_gpu": 1}):
        model = base.model_of(config)
    # Frees the head's own weight, which the embedding replaced: DeepSpeed's closures put it into a reference cycle.
    gc.collect()
    values = base.initial_values(config)
    for name, parameter in model.named_parameters():
        with torch.no_grad(), deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            if config.topology.is_main:
                parameter.copy_(values(name, parameter.ds_shape))  # type: ignore[attr-defined]  # DeepSpeed's
    return model


class Zero(DeepSpeedStrategy):
    """Data parallelism. Subclasses that also split the model over ranks extend the private methods."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._model_ranks = config.topology.sizes.tensor * config.topology.sizes.sequence  # that exchange activations
        self._copies = config.topology.sizes.tensor  # ranks that compute the very same loss
        self._slices = config.topology.sizes.sequence  # ranks that each add their positions to the same loss
        self._loss_factor: float = 1  # multiplies a rank's loss if DeepSpeed averages over more than the data ranks
        self._precision, self._clipping = config.precision, config.recipe.gradient_clipping
        self._swap_space: SwapSpace | None = None
        try:
            model = self._build(config, device)
        except BaseException:
            self.close()
            raise
        spare_passes(self._optimizer, single_rank=config.topology.world_size == 1, engine=self._engine)
        self._gradient_sums: dict[nn.Parameter, Tensor] | None = None
        if self._stage == 0 and self._precision != "fp32":
            self._undo_first_step()
            self._sum_gradients_in_fp32()
        if config.options.compile and (self._stage == 3 or self._model_ranks > 1):
            base.compile_blocks(model)
        elif config.options.compile:
            model.compile()

    def _build(self, config: RunConfig, device: torch.device) -> GPT2:
        """Make the model and its engine; for offload to nvme, first folders that only this run uses."""
        ds_config = engine_config(config)
        if config.recipe.nvme_blocks:
            load_ops("PinMemoryBuilder", "AsyncIOBuilder")
            self._swap_space = SwapSpace(ds_config, config.recipe, config.topology)
        model = build_sharded(config, ds_config) if self._stage == 3 else _build_whole(config, device)
        if config.options.compile and self._stage == 3:
            set_z3_leaf_modules(model, [Block])
        self._parameters = dict(model.named_parameters())
        self._start(model, config, ds_config=ds_config, groups=self._spread(model, config))
        return model

    def close(self) -> None:
        """See ``Strategy``; remove the files of offload to nvme."""
        if self._swap_space is not None:
            self._swap_space.close()

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
            self._gradient_sums = {}
            self._engine.enable_backward_allreduce = False

    def _add_gradients(self, sums: dict[nn.Parameter, Tensor], *, last: bool) -> None:
        """Add the gradients of a backward pass to the fp32 ``sums``; after the ``last``, round each sum once."""
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                so_far = sums.get(parameter)
                sums[parameter] = parameter.grad.float() if so_far is None else so_far.add_(parameter.grad)
            parameter.grad = sums.pop(parameter).to(parameter.dtype) if last and parameter in sums else None

    def _execute(self, batches: Iterator[Batch], *, own_factor: float) -> tuple[Tensor, Tensor, Tensor]:
        """See ``DeepSpeedStrategy``."""
        self._engine.train()
        loss_sum, own_norm = torch.zeros((), device=self._device), None
        for micro in range(self._accumulation):
            batch = base.to_device(next(batches), self._device)
            with named_range("forward"):
                loss = self._micro_batch_loss(batch)
            if self._model_ranks > 1:  # now: its gradients reach all of them
                self._exchanges.give(loss)
            with named_range("backward"):
                # Divides by the accumulation steps; in the last micro batch, also reduces over ranks.
                self._engine.backward(loss * self._loss_factor * own_factor)
            loss_sum += loss.detach()
            last = micro == self._accumulation - 1
            if self._gradient_sums is not None:
                self._add_gradients(self._gradient_sums, last=last)
                if last:
                    self._engine.allreduce_gradients()
            with named_range("optimizer"):
                if last:
                    own_norm = self._before_step()
                self._engine.step()
        norm = self._gradient_norm(own_norm) / own_factor
        own_loss = loss_sum * (self._slices / self._accumulation)
        return sum_over_ranks(loss_sum / (self._accumulation * self._ranks * self._copies)), own_loss, norm

    def _micro_batch_loss(self, batch: Batch) -> Tensor:
        """This rank's summand of the mean loss of its micro batch: all of it, unless the rank reads only a part."""
        loss: Tensor = self._engine(batch.inputs, batch.targets)
        return loss

    def _micro_batch_sums(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum of losses and number of targets over what this rank reads of the micro batch."""
        return self._engine(batch.inputs, batch.targets, reduction="sum"), (batch.targets != IGNORED_TARGET).sum()

    def _before_step(self) -> Tensor | None:
        """Look at the reduced gradients before DeepSpeed clips them; return their norm where DeepSpeed reports none."""
        # DeepSpeed clips fp32 gradients at stage 0 but throws their norm away (``clip_fp32_gradients``).
        norm = self._reduced_gradient_norm() if self._stage == 0 and self._precision == "fp32" else None
        if self._exact is not None and norm is not None and self._clipping > 0:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._clipping, norm)
        return norm

    def _reduced_gradient_norm(self) -> Tensor:
        gradients = (p.grad for p in self._parameters.values() if p.grad is not None)
        if self._exact is not None:
            return self._exact.norm(gradients, group=None, split=False)
        return base.global_norm(gradients)

    @torch.no_grad()
    def eval_step(self, batches: Iterator[Batch]) -> tuple[Tensor, Tensor]:
        """See ``Strategy``."""
        self._engine.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)  # losses, targets
        for _ in range(self._accumulation):
            loss_sum, tokens = self._micro_batch_sums(base.to_device(next(batches), self._device))
            sums[0] += loss_sum
            sums[1] += tokens
        loss_sum, tokens = sum_over_ranks(sums) / self._copies  # exact for whole numbers
        return loss_sum, tokens


def _build_whole(config: RunConfig, device: torch.device) -> GPT2:
    """GPT-2 with its initial weights on ``device``; for tensor ranks in host memory, see ``TensorParallel``.

    They are rounded to the run's precision in host memory, so that no fp32 copy needs room on the device. DeepSpeed
    makes its master weights from the rounded ones in any case.
    """
    model = base.whole_model(config).to(DTYPES[config.precision])
    return model if config.topology.sizes.tensor > 1 else model.to(device)


# Sequence parallelism: the ranks of a group share every sequence, at any ZeRO stage.


class SequenceParallel(Zero):
    """One DeepSpeed engine per rank, each with its slice of every sequence."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        size = config.topology.sizes.sequence
        self._length = config.seq_length // size  # positions that this rank reads
        self._first = config.topology.sequence_rank * self._length
        super().__init__(config, device)
        if self._stage == 3:
            self._average_over_all_ranks(size)
        self._forget_model_parallelism()

    def _spread(self, model: GPT2, config: RunConfig) -> Any:
        from deepspeed.runtime.sequence_parallel import parallel_state_sp  # noqa: PLC0415

        # Not by DeepSpeed's ``mesh_param``: with it, gradients are reduced over data ranks alone.
        parallel_state_sp.initialize_sequence_parallel(config.topology.sizes.sequence)
        attend = ulysses_attention(parallel_state_sp.get_sequence_parallel_group(), self._exchanges)
        for module in model.modules():
            if isinstance(module, Attention):
                module.attend = attend
        return parallel_state_sp

    def _average_over_all_ranks(self, size: int) -> None:
        """Stage 3: make every path of DeepSpeed average gradients over all ranks, and multiply the loss to match.

        Stages 0 to 2 sum over sequence ranks and average over data ranks, as the losses here require. So does
        ``__avg_scatter_contiguous_grads`` of stage 3. But ``reduce_scatter_coalesced``, which reduces most gradients,
        averages over all ranks.
        """
        self._optimizer.sequence_parallel_size = 1
        self._loss_factor = size

    def _forget_model_parallelism(self) -> None:
        """Tell DeepSpeed's low-precision optimizers that every rank holds the whole model.

        They treat sequence ranks as ranks with different parameters. ``BF16_Optimizer`` (stage 1) fails on a rank that
        adds nothing to the norm. ``CheckOverflow`` (stage 0) asks for a group of data ranks that does not exist.
        """
        for part in (self._optimizer, getattr(self._optimizer, "overflow_checker", None)):
            if part is not None and hasattr(part, "mpu"):
                part.mpu = None

    def _micro_batch_loss(self, batch: Batch) -> Tensor:
        """See ``Zero``; the mean is over the targets of all positions, so that every target weighs the same."""
        loss_sum, _ = self._micro_batch_sums(batch)
        return loss_sum / (batch.targets != IGNORED_TARGET).sum()

    def _micro_batch_sums(self, batch: Batch) -> tuple[Tensor, Tensor]:
        inputs, targets = (part.narrow(1, self._first, self._length) for part in batch)
        loss_sum = self._engine(inputs, targets, reduction="sum", first_position=self._first)
        return loss_sum, (targets != IGNORED_TARGET).sum()


def ulysses_attention(group: dist.ProcessGroup, exchanges: Exchanges) -> Attend:
    """Attention over positions of which each rank of ``group`` holds a slice, in the order of the ranks.

    Before attention, an all-to-all turns "some positions, all heads" into "all positions, some heads"; after it,
    another all-to-all turns the result back. ``exchanges`` notes what this rank gives to both.
    Queries, keys and values come as (B, nh, T of this rank, hs); the group's size must divide nh.
    """
    from deepspeed.sequence.layer import DistributedAttention  # noqa: PLC0415

    def attend_here(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool) -> Tensor:
        """Attention of this rank's heads over all positions: (B, T, nh of this rank, hs) each."""
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        attended = dense_attention(q, k, v, dropout, causal).transpose(1, 2)
        exchanges.give(attended)
        return attended

    exchange = DistributedAttention(attend_here, group, scatter_idx=2, gather_idx=1)

    def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool) -> Tensor:
        exchanges.give(q, k, v)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, T of this rank, nh, hs)
        attended: Tensor = exchange(q, k, v, 0, None, dropout, causal)
        return attended.transpose(1, 2)

    return attend


# Tensor parallelism: each rank of a group has its part of every matrix (``tensor_layers.py``).


class TensorParallel(Zero):
    """One DeepSpeed engine per rank, each with its part of every layer.

    The model is made whole in host memory, and only what a rank keeps is copied to its device. AutoTP
    (``TensorParallel_Layer.move``) copies a rank's part of each matrix there and frees the whole one. The engine then
    moves the rest (``_configure_distributed_model``), with this rank's rows of the embedding. So a model may be larger
    than one device, but each rank needs host memory for all of it while it starts. For a larger model use
    ``ds_configs/3d.json``, with which each rank builds only its part.
    """

    def _build(self, config: RunConfig, device: torch.device) -> GPT2:
        model = super()._build(config, device)
        self._watch_row_parallel(model)
        return model

    def _spread(self, model: GPT2, config: RunConfig) -> Any:
        from deepspeed.utils import groups  # noqa: PLC0415

        # AutoTP would make these groups itself, but only after DeepSpeed has multiplied the batch by all ranks.
        groups._init_tp_mesh_device(tensor_model_parallel_size=config.topology.sizes.tensor)
        self._tensor_group = groups.get_tensor_model_parallel_group()
        reduce_contiguous()
        for module in model.modules():
            if isinstance(module, Attention):
                module.attend = attend_with_own_dropout(module.attend, rank=config.topology.tensor_rank)
        # This rank's rows of the embedding, and so of the head, stay in the same parameter.
        weight, place = model.wte.weight, config.topology
        weight.data = take_part("wte.weight", weight.data, rank=place.tensor_rank, size=place.sizes.tensor)
        mark_split(weight, split=True)
        give = self._exchanges.give
        with torch.device("meta"):
            model.wte = VocabularyEmbedding(config.model, group=lambda: self._tensor_group, give=give)
        model.wte.weight = weight
        model.lm_head.vocabulary = vocabulary_part(config.model, self._tensor_group, give)
        return groups

    def _before_step(self) -> Tensor | None:
        """See ``Zero``; at stage 0, also mark the gradients of which this rank holds a part.

        In bf16 and fp16, ``FP16_UnfusedOptimizer.step`` passes gradients to ``get_weight_norm``, which looks for a mark
        that only their parameters have. It would count only the first tensor rank's parts of split gradients.
        """
        if self._stage == 0:
            for name, parameter in self._parameters.items():
                if is_split(name) and parameter.grad is not None:
                    parameter.grad.tensor_model_parallel = True  # type: ignore[attr-defined]
        return super()._before_step()

    def _reduced_gradient_norm(self) -> Tensor:
        """See ``Zero``; counts the parts of all tensor ranks, and counts once what every rank holds whole."""
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        parts = base.square_sum(gradient for name, gradient in gradients.items() if is_split(name))
        dist.all_reduce(parts, group=self._tensor_group)
        shared = base.square_sum(gradient for name, gradient in gradients.items() if not is_split(name))
        norm: Tensor = (parts + shared).sqrt().float()
        return norm

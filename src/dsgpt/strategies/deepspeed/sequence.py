"""Ulysses sequence parallelism x data parallelism at any ZeRO stage: the ranks of a group share every sequence.

Written for DeepSpeed 0.19.8. Every rank of a group computes a slice of the positions through the whole model; only
attention needs the other positions (Jacobs et al. 2023, "DeepSpeed Ulysses", section 3). All ranks hold the same
parameters, so ZeRO shards over all of them.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsgpt.config.run_config import RunConfig
from dsgpt.data.loader import IGNORED_TARGET, Batch
from dsgpt.model.gpt2 import GPT2, Attend, Attention, dense_attention
from dsgpt.strategies.deepspeed.zero import Zero


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
        attend = ulysses_attention(parallel_state_sp.get_sequence_parallel_group())
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

        They treat sequence ranks as ranks with different parameters: ``BF16_Optimizer`` (stage 1) fails on a rank that
        adds nothing to the norm, and ``CheckOverflow`` (stage 0) asks for a group of data ranks that does not exist.
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


def ulysses_attention(group: dist.ProcessGroup) -> Attend:
    """Attention over positions of which each rank of ``group`` holds a slice, in the order of the ranks.

    Before attention, an all-to-all turns "some positions, all heads" into "all positions, some heads"; after it,
    another all-to-all turns the result back. Queries, keys and values come as (B, nh, T of this rank, hs); the group's
    size must divide nh.
    """
    from deepspeed.sequence.layer import DistributedAttention  # noqa: PLC0415

    exchange = DistributedAttention(_attend_by_position, group, scatter_idx=2, gather_idx=1)

    def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, T of this rank, nh, hs)
        attended: Tensor = exchange(q, k, v, 0, None, dropout, causal)
        return attended.transpose(1, 2)

    return attend


def _attend_by_position(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool) -> Tensor:
    """All positions of this rank's heads: (B, T, nh of this rank, hs) each."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return dense_attention(q, k, v, dropout, causal).transpose(1, 2)

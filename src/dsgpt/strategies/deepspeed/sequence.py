"""Ulysses sequence parallelism x data parallelism at any ZeRO stage: the ranks of a group share every sequence.

Written for DeepSpeed 0.19.8. Every rank of a group computes a slice of the positions through the whole model; only
attention needs the others. All ranks hold the same parameters, so ZeRO divides its part among all of them.
"""

from typing import Any

import torch
from torch import Tensor

from dsgpt.config.run_config import RunConfig
from dsgpt.data.loader import IGNORED_TARGET, Batch
from dsgpt.model.gpt2 import GPT2
from dsgpt.strategies.deepspeed.ulysses import ulysses_attention
from dsgpt.strategies.deepspeed.zero import Zero


class Sequence(Zero):
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

        # Not DeepSpeed's ``mesh_param``, with which gradients are reduced over data ranks alone.
        parallel_state_sp.initialize_sequence_parallel(config.topology.sizes.sequence)
        attend = ulysses_attention(parallel_state_sp.get_sequence_parallel_group())
        for block in model.blocks:
            block.attn.attend = attend
        return parallel_state_sp

    def _average_over_all_ranks(self, size: int) -> None:
        """Stage 3: make every path of DeepSpeed average gradients over all ranks, and multiply the loss to match.

        Stages 0 to 2 sum over sequence ranks and average over data ranks, which is what our losses want. So does
        ``__avg_scatter_contiguous_grads`` of stage 3, but ``reduce_scatter_coalesced``, which most gradients take,
        averages over all ranks.
        """
        self._optimizer.sequence_parallel_size = 1
        self._loss_factor = size

    def _forget_model_parallelism(self) -> None:
        """Tell DeepSpeed's low-precision optimizers that every rank holds the whole model.

        They take sequence ranks for ranks with other parameters: ``BF16_Optimizer`` (stage 1) fails on a rank that adds
        nothing to the norm, and ``CheckOverflow`` (stage 0) asks for a group of data ranks that does not exist.
        """
        for part in (self._optimizer, getattr(self._optimizer, "overflow_checker", None)):
            if hasattr(part, "mpu"):
                part.mpu = None

    def _micro_batch_loss(self, batch: Batch) -> Tensor:
        """See ``Zero``; the mean is over the targets of all positions, so that every target weighs the same."""
        loss_sum, _ = self._micro_batch_sums(batch)
        return loss_sum / (batch.targets != IGNORED_TARGET).sum()

    def _micro_batch_sums(self, batch: Batch) -> tuple[Tensor, Tensor]:
        inputs, targets = (part.narrow(1, self._first, self._length) for part in batch)
        loss_sum = self._engine(inputs, targets, reduction="sum", first_position=self._first)
        return loss_sum, (targets != IGNORED_TARGET).sum()

"""Tensor parallelism x data parallelism at ZeRO stage 0, 1 or 2: DeepSpeed's AutoTP splits the layers' matrices.

Written for DeepSpeed 0.19.8. Every rank of a tensor group computes on the same micro batches; what is not split is the
same on all of them, bit for bit, because it sees the same activations, gradients and dropout masks. ZeRO divides
gradients and optimizer state among data ranks. ``deepspeed_setup`` tells AutoTP how to split.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from dsgpt.checkpointing.training_state import ParamState
from dsgpt.config.run_config import RunConfig
from dsgpt.model.gpt2 import GPT2
from dsgpt.optimization.optimizer import global_norm
from dsgpt.strategies.deepspeed.tensor_layout import attend_with_own_dropout, is_split, join_parts, take_part
from dsgpt.strategies.deepspeed.zero import Zero


class Tensor(Zero):
    """One DeepSpeed engine per rank, each with its part of every layer.

    The model is made whole in host memory, in fp32, and only what a rank keeps ever comes to its device: AutoTP
    (``TensorParallel_Layer.move``) copies a rank's part of each matrix there and lets go of the whole one, and the
    engine moves the rest after that (``_configure_distributed_model``). So a model may be larger than one device, but
    each rank needs host memory for all of it while it starts; a model larger than that is for ``ds_configs/3d.json``,
    which builds parts alone.
    """

    def _spread(self, model: GPT2, config: RunConfig) -> Any:
        from deepspeed.utils import groups  # noqa: PLC0415

        from dsgpt.strategies.deepspeed.tensor_reduction import reduce_contiguous  # noqa: PLC0415

        # AutoTP would make these groups itself, but only after DeepSpeed has multiplied the batch by all ranks.
        groups._init_tp_mesh_device(tensor_model_parallel_size=config.topology.sizes.tensor)
        self._tensor_rank = config.topology.tensor_rank
        self._group = groups.get_tensor_model_parallel_group()
        reduce_contiguous()
        for block in model.blocks:
            block.attn.attend = attend_with_own_dropout(block.attn.attend, rank=config.topology.tensor_rank)
        return groups

    def _before_step(self) -> torch.Tensor | None:
        """See ``Zero``; also tell DeepSpeed's stage 0 in bf16 and fp16 which gradients are parts.

        ``FP16_UnfusedOptimizer.step`` hands gradients to ``get_weight_norm``, which looks for a mark that only their
        parameters bear: of the split ones, it would count the first tensor rank's parts alone.
        """
        if self._stage == 0:
            for name, parameter in self._parameters.items():
                if is_split(name) and parameter.grad is not None:
                    parameter.grad.tensor_model_parallel = True
        return super()._before_step()

    def _reduced_gradient_norm(self) -> torch.Tensor:
        """See ``Zero``; the parts of all tensor ranks, and once what each of them holds whole."""
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        parts = global_norm(gradient for name, gradient in gradients.items() if is_split(name)).double() ** 2
        dist.all_reduce(parts, group=self._group)
        shared = global_norm(gradient for name, gradient in gradients.items() if not is_split(name)).double() ** 2
        return (parts + shared).sqrt().float()

    def iter_state(self) -> Iterator[tuple[str, ParamState]]:
        """See ``Strategy``; what is split over data ranks and tensor ranks is gathered from both."""
        for name, state in super().iter_state():
            yield name, ParamState(*(None if value is None else self._whole(name, value) for value in state))

    def _whole(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if not is_split(name):
            return value
        parts = [torch.empty_like(value) for _ in range(self._copies)]
        dist.all_gather(parts, value.contiguous(), group=self._group)
        return join_parts(name, parts)

    def _part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return take_part(name, whole, rank=self._tensor_rank, size=self._copies)

    def replicated_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``Strategy``."""
        return ((name, weight) for name, weight in super().replicated_weights() if not is_split(name))

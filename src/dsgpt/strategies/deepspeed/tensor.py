"""Tensor parallelism x data parallelism at ZeRO stage 0, 1 or 2: DeepSpeed's AutoTP splits the layers' matrices.

Written for DeepSpeed 0.19.8. Every rank of a tensor group computes on the same micro batches. Parameters that are
not split are the same on all of them, bit for bit, because they see the same activations, gradients and dropout masks.
ZeRO divides gradients and optimizer state among data ranks. ``setup.engine_config`` tells AutoTP which matrices to
split, and how.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from dsgpt.config.run_config import RunConfig
from dsgpt.model.gpt2 import GPT2, Attention
from dsgpt.optimization.optimizer import square_sum
from dsgpt.strategies.deepspeed.protocols import attach
from dsgpt.strategies.deepspeed.tensor_layout import attend_with_own_dropout, is_split
from dsgpt.strategies.deepspeed.zero import Zero


class TensorParallel(Zero):
    """One DeepSpeed engine per rank, each with its part of every layer.

    The model is made whole in host memory, and only what a rank keeps is copied to its device: AutoTP
    (``TensorParallel_Layer.move``) copies a rank's part of each matrix there and frees the whole one, and the engine
    moves the rest after that (``_configure_distributed_model``). So a model may be larger than one device, but each
    rank needs host memory for all of it while it starts. For a larger model use ``ds_configs/3d.json``, with which
    each rank builds only its part.
    """

    def _spread(self, model: GPT2, config: RunConfig) -> Any:
        from deepspeed.utils import groups  # noqa: PLC0415

        from dsgpt.strategies.deepspeed.tensor_reduction import reduce_contiguous  # noqa: PLC0415

        # AutoTP would make these groups itself, but only after DeepSpeed has multiplied the batch by all ranks.
        groups._init_tp_mesh_device(tensor_model_parallel_size=config.topology.sizes.tensor)
        self._tensor_group = groups.get_tensor_model_parallel_group()
        reduce_contiguous()
        for module in model.modules():
            if isinstance(module, Attention):
                module.attend = attend_with_own_dropout(module.attend, rank=config.topology.tensor_rank)
        return groups

    def _before_step(self) -> Tensor | None:
        """See ``Zero``; at stage 0, also mark the gradients of which this rank holds a part.

        In bf16 and fp16, ``FP16_UnfusedOptimizer.step`` passes gradients to ``get_weight_norm``, which looks for a mark
        that only their parameters have. It would count only the first tensor rank's parts of split gradients.
        """
        if self._stage == 0:
            for name, parameter in self._parameters.items():
                if is_split(name) and parameter.grad is not None:
                    attach(parameter.grad, tensor_model_parallel=True)
        return super()._before_step()

    def _reduced_gradient_norm(self) -> Tensor:
        """See ``Zero``; counts the parts of all tensor ranks, and counts once what every rank holds whole."""
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        parts = square_sum(gradient for name, gradient in gradients.items() if is_split(name))
        dist.all_reduce(parts, group=self._tensor_group)
        shared = square_sum(gradient for name, gradient in gradients.items() if not is_split(name))
        norm: Tensor = (parts + shared).sqrt().float()
        return norm

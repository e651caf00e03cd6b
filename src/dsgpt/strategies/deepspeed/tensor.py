"""Tensor parallelism, with ZeRO stage 0, 1 or 2 over data ranks.

DeepSpeed 0.19.8's tensor-parallel sums, corrected for tensors of any layout. Import it after DeepSpeed is set up.
``RowParallel.forward`` and ``ColumnParallel.backward`` (``deepspeed/module_inject/layers.py``) reduce
``x.contiguous()`` in place and return ``x``. If ``x`` is not contiguous, ``x.contiguous()`` is a copy: the sum is
lost, and every rank continues with its own part, without an error. Matrix products give contiguous tensors today, but
nothing guarantees that.

Tensor parallelism inside a transformer block, as in Megatron-LM (Shoeybi et al. 2019, section 3). Attention and the
MLP each have two matrices. In the paper's notation Y = XA, the first is split by the columns of A, the second by its
rows, so that nothing is exchanged between the two. Each pair needs one all-reduce of activations in the forward pass
and one in the backward pass. A ``Linear`` stores A transposed: the columns of A are the rows of its weight. Embeddings
and LayerNorms stay whole on every peer.

Tensor parallelism x data parallelism at ZeRO stage 0, 1 or 2: DeepSpeed's AutoTP splits the layers' matrices. Written
for DeepSpeed 0.19.8. Every rank of a tensor group computes on the same micro batches. Parameters that are not split
are the same on all of them, bit for bit, because they see the same activations, gradients and dropout masks. ZeRO
divides gradients and optimizer state among data ranks. ``setup.engine_config`` tells AutoTP which matrices to split,
and how.
"""

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.module_inject import layers
from torch import Tensor, nn

from dsgpt.config.run_config import RunConfig
from dsgpt.model.gpt2 import GPT2, Attention, Block
from dsgpt.strategies.deepspeed.state import SPLIT, attend_with_own_dropout, is_split
from dsgpt.strategies.deepspeed.zero import Zero
from dsgpt.strategies.optimizer import square_sum

_ROW, _COLUMN = layers.RowParallel, layers.ColumnParallel
"""DeepSpeed's own classes, which ``reduce_contiguous`` replaces in ``layers``."""


class ContiguousColumnParallel(_COLUMN):  # type: ignore[misc, valid-type]  # DeepSpeed ships no types
    """The identity, whose gradient is summed over the tensor ranks."""

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """The gradient of this rank, of any layout, to that of all."""
        summed: tuple[None, Tensor] = _COLUMN.backward(context, gradient.contiguous())
        return summed


class ContiguousRowParallel(_ROW):  # type: ignore[misc, valid-type]  # DeepSpeed ships no types
    """The sum over the tensor ranks, whose gradient is used unchanged."""

    @staticmethod
    def forward(context: Any, group: Any, x: Tensor, is_inference_mode: bool) -> Tensor:
        """The part of this rank, of any layout, to the sum."""
        summed: Tensor = _ROW.forward(context, group, x.contiguous(), is_inference_mode)
        return summed


def reduce_contiguous() -> None:
    """Make DeepSpeed's layers use these classes in this process; a second call changes nothing."""
    layers.ColumnParallel, layers.RowParallel = ContiguousColumnParallel, ContiguousRowParallel


def split_block(block: Block, group: dist.ProcessGroup) -> None:
    """Replace the matrices of ``block`` with this rank's parts of them, in place, with uninitialised values.

    Args:
        block: with whole matrices; ``group``'s size divides its number of heads.
        group: the tensor peers.
    """
    size = dist.get_world_size(group)
    attention, mlp = block.attn, block.mlp
    attention.qkv = ColumnParallelLinear(attention.qkv.in_features, attention.qkv.out_features // size, group)
    attention.proj = RowParallelLinear(attention.proj.in_features // size, attention.proj.out_features, group)
    attention.attend = attend_with_own_dropout(attention.attend, rank=dist.get_rank(group))
    mlp.fc = ColumnParallelLinear(mlp.fc.in_features, mlp.fc.out_features // size, group)
    mlp.proj = RowParallelLinear(mlp.proj.in_features // size, mlp.proj.out_features, group)
    for name, parameter in block.named_parameters():
        # DeepSpeed's gradient norms read these marks: peers hold different values of such a parameter, and all count.
        parameter.tensor_model_parallel = parameter.model_parallel = name in SPLIT  # type: ignore[attr-defined]


class _PartOfLinear(nn.Linear):
    """This rank's part of a ``Linear``; ``group`` has the others."""

    def __init__(self, in_features: int, out_features: int, group: dist.ProcessGroup) -> None:
        super().__init__(in_features, out_features)
        self.group = group


class ColumnParallelLinear(_PartOfLinear):
    """A part of the outputs of a ``Linear``, from its whole input."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, in_features), equal on all peers, to (B, T, out_features) of this peer."""
        copied: Tensor = ContiguousColumnParallel.apply(self.group, x)
        return super().forward(copied)


class RowParallelLinear(_PartOfLinear):
    """All outputs of a ``Linear``, from the parts of its input that the peers hold."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, in_features) of this peer to (B, T, out_features), equal on all peers."""
        total: Tensor = ContiguousRowParallel.apply(self.group, F.linear(x, self.weight), False)
        return total + self.bias  # it is whole on every peer, and added once, after the sum


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
                    parameter.grad.tensor_model_parallel = True  # type: ignore[attr-defined]
        return super()._before_step()

    def _reduced_gradient_norm(self) -> Tensor:
        """See ``Zero``; counts the parts of all tensor ranks, and counts once what every rank holds whole."""
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        parts = square_sum(gradient for name, gradient in gradients.items() if is_split(name))
        dist.all_reduce(parts, group=self._tensor_group)
        shared = square_sum(gradient for name, gradient in gradients.items() if not is_split(name))
        norm: Tensor = (parts + shared).sqrt().float()
        return norm

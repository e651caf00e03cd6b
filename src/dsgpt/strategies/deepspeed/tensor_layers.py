"""Tensor parallelism inside a transformer block, as in Megatron-LM (Shoeybi et al. 2019, section 3).

Attention and the MLP each have two matrices. In the paper's notation Y = XA, the first is split by the columns of A,
the second by its rows, so that nothing is exchanged between the two. Each pair needs one all-reduce of activations in
the forward pass and one in the backward pass. A ``Linear`` stores A transposed: the columns of A are the rows of its
weight. Embeddings and LayerNorms stay whole on every peer.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dsgpt.model.gpt2 import Block
from dsgpt.strategies.deepspeed.protocols import attach
from dsgpt.strategies.deepspeed.tensor_layout import SPLIT, attend_with_own_dropout


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
        attach(parameter, tensor_model_parallel=name in SPLIT, model_parallel=name in SPLIT)


class ColumnParallelLinear(nn.Linear):
    """A part of the outputs of a ``Linear``, from its whole input."""

    def __init__(self, in_features: int, out_features: int, group: dist.ProcessGroup) -> None:
        super().__init__(in_features, out_features)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, in_features), equal on all peers, to (B, T, out_features) of this peer."""
        return super().forward(_applied(_Copy, x, self.group))


class RowParallelLinear(nn.Linear):
    """All outputs of a ``Linear``, from the parts of its input that the peers hold."""

    def __init__(self, in_features: int, out_features: int, group: dist.ProcessGroup) -> None:
        super().__init__(in_features, out_features)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, in_features) of this peer to (B, T, out_features), equal on all peers."""
        # The bias is whole on every peer: it is added once, after the sum.
        return _applied(_Reduce, F.linear(x, self.weight), self.group) + self.bias


def _applied(function: type[torch.autograd.Function], x: Tensor, group: dist.ProcessGroup) -> Tensor:
    result: Tensor = function.apply(x, group)  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
    return result


class _Context(torch.autograd.function.FunctionCtx):
    """What ``_Copy`` keeps for its backward pass."""

    group: dist.ProcessGroup


class _Copy(torch.autograd.Function):
    """Megatron's ``f``: the identity, whose gradient is the sum of the gradients of the peers' parts of the layer."""

    @staticmethod
    def forward(context: _Context, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context: _Context, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=context.group)
        return total, None


class _Reduce(torch.autograd.Function):
    """Megatron's ``g``: the sum over the peers, whose gradient every peer uses unchanged."""

    @staticmethod
    def forward(_context: torch.autograd.function.FunctionCtx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_context: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None

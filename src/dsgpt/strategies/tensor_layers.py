"""Tensor parallelism inside a transformer block, as in Megatron-LM (Shoeybi et al. 2019, section 3).

The first matrix of attention and of the MLP is split by columns of the product, the second by rows, so that nothing is
exchanged between them: one all-reduce of activations in the forward pass and one in the backward pass for each pair.
The rows of a ``Linear``'s weight are the columns of the product. Embeddings and LayerNorms stay whole on every peer.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dsgpt.model.gpt2 import Attend, Block

_SPLIT = {
    "attn.qkv.weight": (3, 0),
    "attn.qkv.bias": (3, 0),
    "attn.proj.weight": (1, 1),
    "mlp.fc.weight": (1, 0),
    "mlp.fc.bias": (1, 0),
    "mlp.proj.weight": (1, 1),
}
"""Name inside a block to how many matrices are fused along the first dimension, and the dimension that is split in
each of them: every peer has whole heads, with the query, key and value of each."""


def _rule(name: str) -> tuple[int, int] | None:
    """The entry of ``_SPLIT`` for a canonical name; None for a parameter that every peer holds whole."""
    if not name.startswith("blocks."):
        return None
    return _SPLIT.get(name.split(".", 2)[2])


def is_split(name: str) -> bool:
    """Whether tensor peers hold different parts of the parameter with this canonical name."""
    return _rule(name) is not None


def take_part(name: str, whole: Tensor, *, rank: int, size: int) -> Tensor:
    """What peer ``rank`` of ``size`` holds of the parameter with this canonical name: all of it, if it is not split."""
    rule = _rule(name)
    if rule is None or size == 1:
        return whole
    fused, dimension = rule
    matrices = [matrix.chunk(size, dimension)[rank] for matrix in whole.chunk(fused)]
    return torch.cat(matrices)


def join_parts(name: str, parts: Sequence[Tensor]) -> Tensor:
    """The whole of a split parameter from every peer's part, by rank: undoes ``take_part``."""
    fused, dimension = _rule(name)
    matrices = zip(*(part.chunk(fused) for part in parts), strict=True)
    return torch.cat([torch.cat(pieces, dimension) for pieces in matrices])


def split_block(block: Block, group: dist.ProcessGroup) -> None:
    """Replace the matrices of ``block`` by this rank's parts of them, in place, with uninitialised values.

    Args:
        block: of the model's own shape; ``group``'s size divides its heads.
        group: the tensor peers.
    """
    size = dist.get_world_size(group)
    attention, mlp = block.attn, block.mlp
    attention.qkv = ColumnParallelLinear(attention.qkv.in_features, attention.qkv.out_features // size, group)
    attention.proj = RowParallelLinear(attention.proj.in_features // size, attention.proj.out_features, group)
    attention.attend = _attend_with_own_dropout(attention.attend, dist.get_rank(group))
    mlp.fc = ColumnParallelLinear(mlp.fc.in_features, mlp.fc.out_features // size, group)
    mlp.proj = RowParallelLinear(mlp.proj.in_features // size, mlp.proj.out_features, group)
    for name, parameter in block.named_parameters():
        # How DeepSpeed's gradient norms know that peers hold different values, of which none may be left out.
        parameter.tensor_model_parallel = parameter.model_parallel = name in _SPLIT


class ColumnParallelLinear(nn.Linear):
    """A part of the outputs of a ``Linear``, from its whole input."""

    def __init__(self, in_features: int, out_features: int, group: dist.ProcessGroup) -> None:
        super().__init__(in_features, out_features)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, in_features), equal on all peers, to (B, T, out_features) of this peer."""
        return super().forward(_Copy.apply(x, self.group))


class RowParallelLinear(nn.Linear):
    """All outputs of a ``Linear``, from the parts of its input that the peers hold."""

    def __init__(self, in_features: int, out_features: int, group: dist.ProcessGroup) -> None:
        super().__init__(in_features, out_features)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, in_features) of this peer to (B, T, out_features), equal on all peers."""
        # The bias is whole on every peer: it is added once, after the sum.
        return _Reduce.apply(F.linear(x, self.weight), self.group) + self.bias


class _Copy(torch.autograd.Function):
    """Megatron's ``f``: the identity, whose gradient is the sum of what the peers' parts of the layer ask for."""

    @staticmethod
    def forward(context: torch.autograd.function.FunctionCtx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=context.group)
        return total, None


class _Reduce(torch.autograd.Function):
    """Megatron's ``g``: the sum over the peers, whose gradient every peer takes as it is."""

    @staticmethod
    def forward(_context: torch.autograd.function.FunctionCtx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_context: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _attend_with_own_dropout(attend: Attend, rank: int) -> Attend:
    """``attend`` whose dropout differs between peers, although their random streams are the same.

    The streams are the same so that peers drop the same of the activations that all of them hold. Their heads are
    different ones, which would otherwise share their masks. The seed is drawn from the common stream, so that a
    recomputed forward pass draws the same one.
    """

    def attend_with_own_dropout(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool) -> Tensor:
        if dropout == 0:
            return attend(q, k, v, dropout, causal)
        seed = int(torch.randint(2**62, ()))
        with torch.random.fork_rng(devices=[q.device] if q.device.type == "cuda" else []):
            torch.manual_seed(seed + rank)
            return attend(q, k, v, dropout, causal)

    return attend_with_own_dropout

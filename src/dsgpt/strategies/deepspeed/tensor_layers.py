"""Layers of which each tensor rank has a part. Written for DeepSpeed 0.19.8.

The split is that of Megatron-LM (Shoeybi et al. 2019, section 3). Attention and the MLP each have two matrices. In the
paper's notation Y = XA, the first is split by the columns of A, the second by its rows, so that nothing is exchanged
between the two. Each pair needs one all-reduce of activations in the forward pass and one in the backward pass. A
``Linear`` stores A transposed: the columns of A are the rows of its weight. The token embedding, which is also the
head, is split by its rows. A looked-up id is a row of one peer and zeros of the others, summed in one all-reduce.
Logits stay split: for the loss peers exchange three numbers per token, and the gradient of the hidden states needs one
all-reduce. Positions and LayerNorms stay whole on every peer.

Every rank of a tensor group computes on the same micro batches. Parameters that are not split are the same on all of
them, bit for bit, because they see the same activations, gradients and dropout masks. ZeRO divides gradients and
optimizer state among data ranks. ``setup.engine_config`` tells AutoTP which matrices to split, and how.

DeepSpeed's sums are corrected for tensors of any layout. ``RowParallel.forward`` and ``ColumnParallel.backward``
(``deepspeed/module_inject/layers.py``) reduce ``x.contiguous()`` in place and return ``x``. If ``x`` is not contiguous,
``x.contiguous()`` is a copy: the sum is lost, and every rank continues with its own part, without an error. Matrix
products give contiguous tensors today, but nothing guarantees that. The classes here call PyTorch's collectives, which
a compiler can put into the graph of a block; DeepSpeed's end the graph.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.module_inject import layers
from torch import Tensor, nn

from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import Block
from dsgpt.model.linear_cross_entropy import VocabularyPart
from dsgpt.strategies.deepspeed.state import SPLIT, attend_with_own_dropout, part_range


class ContiguousColumnParallel(torch.autograd.Function):
    """The identity, whose gradient is summed over the tensor ranks."""

    @staticmethod
    def forward(context: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
        """``x`` itself."""
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """The gradient of this rank, of any layout, to that of all."""
        summed = gradient.contiguous()
        dist.all_reduce(summed, group=context.group)
        return None, summed


class ContiguousRowParallel(torch.autograd.Function):
    """The sum over the tensor ranks, whose gradient is used unchanged."""

    @staticmethod
    def forward(context: Any, group: dist.ProcessGroup, x: Tensor, is_inference_mode: bool) -> Tensor:  # noqa: ARG004
        """The part of this rank, of any layout, to the sum."""
        summed = x.contiguous()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, Tensor, None]:  # noqa: ARG004
        """The gradient."""
        return None, gradient, None


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
        mark_split(parameter, split=name in SPLIT)


def mark_split(parameter: Tensor, *, split: bool) -> None:
    """Tell DeepSpeed's gradient norms whether peers hold different values of the parameter, so that all count."""
    parameter.tensor_model_parallel = parameter.model_parallel = split  # type: ignore[attr-defined]


class _PartOfLinear(nn.Linear):
    """This rank's part of a ``Linear``; ``group`` has the others."""

    def __init__(self, in_features: int, out_features: int, group: dist.ProcessGroup) -> None:
        super().__init__(in_features, out_features)
        self.group = group


class ColumnParallelLinear(_PartOfLinear):
    """A part of the outputs of a ``Linear``, from its whole input."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, in_features), equal on all peers, to (B, T, out_features) of this peer."""
        copied: Tensor = ContiguousColumnParallel.apply(self.group, x)  # type: ignore[no-untyped-call]
        return super().forward(copied)


class RowParallelLinear(_PartOfLinear):
    """A ``Linear`` whose outputs are whole, from the parts of its input that the peers hold."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, in_features) of this peer to (B, T, out_features), equal on all peers."""
        part = F.linear(x, self.weight)
        total: Tensor = ContiguousRowParallel.apply(self.group, part, False)  # type: ignore[no-untyped-call]
        return total + self.bias  # it is whole on every peer, and added once, after the sum


def vocabulary_part(config: GPT2Config, group: dist.ProcessGroup, give: Callable[[Tensor], None]) -> VocabularyPart:
    """This rank's rows of the embedding.

    Args:
        config: the model's shape.
        group: the tensor peers.
        give: gets what this rank gives to its peers.
    """
    size, rows = dist.get_world_size(group), config.padded_vocab_size
    first, _ = part_range(rows, rank=dist.get_rank(group), size=size)

    def share(x: Tensor) -> Tensor:
        copied: Tensor = ContiguousColumnParallel.apply(group, x)  # type: ignore[no-untyped-call]
        return copied

    def gather(figures: Tensor) -> Tensor:
        give(figures[1:])
        gathered = figures.new_empty((size * len(figures), *figures.shape[1:]))
        dist.all_gather_into_tensor(gathered, figures, group=group)
        return gathered.view(size, *figures.shape)

    return VocabularyPart(first, -(-rows // size), share, gather)


class VocabularyEmbedding(nn.Embedding):
    """The rows of the token embedding that this rank has, with uninitialised values.

    Args:
        config: the model's shape.
        group: returns the tensor peers; called when the module is built.
        give: gets what this rank gives to its peers.
    """

    def __init__(
        self, config: GPT2Config, *, group: Callable[[], dist.ProcessGroup], give: Callable[[Tensor], None]
    ) -> None:
        peers = group()
        rank, size = dist.get_rank(peers), dist.get_world_size(peers)
        first, rows = part_range(config.padded_vocab_size, rank=rank, size=size)
        # without values: peers with other numbers of rows would draw other masks of dropout afterwards
        super().__init__(rows, config.n_embd, _weight=torch.empty(rows, config.n_embd))
        self.group, self.first, self._give = peers, first, give
        mark_split(self.weight, split=True)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) to (B, T, C), equal on all peers."""
        own = ids - self.first
        elsewhere = (own < 0) | (own >= self.num_embeddings)
        part = super().forward(own.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0)
        self._give(part)
        total: Tensor = ContiguousRowParallel.apply(self.group, part, False)  # type: ignore[no-untyped-call]
        return total

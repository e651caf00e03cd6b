"""DeepSpeed 0.19.8's tensor-parallel sums, of whatever layout the tensors have. Import after DeepSpeed was set up.

``RowParallel.forward`` and ``ColumnParallel.backward`` (``deepspeed/module_inject/layers.py``) reduce
``x.contiguous()`` in place and answer with ``x``. Of a tensor that is not contiguous that is a copy: the sum is thrown
away, and every rank goes on with its own part, in silence. Today's matrix products give contiguous tensors; nothing
promises that.
"""

from typing import Any

from deepspeed.module_inject import layers
from torch import Tensor

_Column, _Row = layers.ColumnParallel, layers.RowParallel


class ContiguousColumnParallel(_Column):
    """The identity, whose gradient is summed over the tensor ranks."""

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """The gradient of this rank, of any layout, to that of all."""
        return _Column.backward(context, gradient.contiguous())


class ContiguousRowParallel(_Row):
    """The sum over the tensor ranks, whose gradient is taken as it is."""

    @staticmethod
    def forward(context: Any, group: Any, x: Tensor, is_inference_mode: bool) -> Tensor:
        """The part of this rank, of any layout, to the sum."""
        return _Row.forward(context, group, x.contiguous(), is_inference_mode)


def reduce_contiguous() -> None:
    """Let DeepSpeed's layers use these in this process; again is no change."""
    layers.ColumnParallel, layers.RowParallel = ContiguousColumnParallel, ContiguousRowParallel

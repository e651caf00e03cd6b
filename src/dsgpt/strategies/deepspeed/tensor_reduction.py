"""DeepSpeed 0.19.8's tensor-parallel sums, corrected for tensors of any layout. Import it after DeepSpeed is set up.

``RowParallel.forward`` and ``ColumnParallel.backward`` (``deepspeed/module_inject/layers.py``) reduce
``x.contiguous()`` in place and return ``x``. If ``x`` is not contiguous, ``x.contiguous()`` is a copy: the sum is lost,
and every rank continues with its own part, without an error. Matrix products give contiguous tensors today, but nothing
guarantees that.
"""

from typing import Any

from deepspeed.module_inject import layers
from torch import Tensor

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

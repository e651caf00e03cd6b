"""Gradient norms that DeepSpeed computes from norms of blocks, instead of converting every element to fp64.

Written for DeepSpeed 0.19.8, whose ``get_grad_norm_direct`` of stages 1 to 3 took more time on a CPU than the
optimizer's update. The norm of the norms of blocks is the norm.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from dsgpt.optimization.optimizer import block_norms

_CLASSES = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")
_Norm = Callable[[list[Tensor], Sequence[Tensor]], Tensor]


def take_norms_of_blocks(optimizer: Any) -> None:
    """Let ``optimizer``, DeepSpeed's of stage 1, 2 or 3, compute its norm so; others have no such method.

    Stage 1 in bf16 (``BF16_Optimizer``), stage 0, and offload below stage 3 compute their norms in other places.
    """
    if type(optimizer).__name__ in _CLASSES:
        optimizer.get_grad_norm_direct = partial(_of_blocks, optimizer.get_grad_norm_direct)


def _of_blocks(norm: _Norm, gradients: Iterable[Tensor], params: Sequence[Tensor]) -> Tensor:
    """What DeepSpeed's ``norm`` gives for gradients that are replaced by the norms of their blocks."""
    return norm([_shortened(gradient) for gradient in gradients], params)


def _shortened(gradient: Tensor) -> Tensor:
    is_padding: bool = getattr(gradient, "_zero_padding", False)  # by which DeepSpeed leaves it out
    return gradient if is_padding else block_norms(gradient)

"""The global gradient norm, exact enough to compare strategies by."""

from collections.abc import Iterable

import torch
from torch import Tensor


def global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all ``gradients`` together, 0-dim fp32.

    Squares are summed in fp64: an fp32 sum over an embedding of millions of small values is off by up to 1e-4 relative.
    """
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms)).float()

"""The global gradient norm, compared with numpy in float64."""

import numpy as np
import pytest
import torch

from dsgpt.optimization.optimizer import global_norm


def in_float64(gradients: list[torch.Tensor]) -> float:
    return float(np.sqrt(sum((part.double().numpy() ** 2).sum() for part in gradients)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_norm_is_exact_to_fp32(dtype, scale):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3000, 200), (7,), (1,), (200, 50)]
    gradients = [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in shapes]
    norm = global_norm(gradients)
    assert (norm.dtype, norm.shape) == (torch.float32, ())
    assert norm.item() == pytest.approx(in_float64(gradients), rel=1e-7)


def test_many_small_values_beside_a_large_one_count():
    gradients = [torch.tensor([1.0]), torch.full((1_000_000,), 1e-4)]
    assert global_norm(gradients).item() == pytest.approx(1.01**0.5, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_gives_a_non_finite_norm(bad):
    assert not torch.isfinite(global_norm([torch.ones(3), torch.tensor([bad])]))

"""The global gradient norm, compared with numpy in float64."""

import numpy as np
import pytest
import torch

from dsgpt.strategies.optimizer import BLOCK, block_norms, global_norm, square_sum


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


def test_norms_of_blocks_are_those_of_consecutive_elements():
    gradient = torch.arange(2 * BLOCK + 3, dtype=torch.float32)
    norms = block_norms(gradient.view(-1, 1))
    assert norms.dtype == torch.float64
    expected = [torch.linalg.vector_norm(part.double()) for part in gradient.split(BLOCK)]
    torch.testing.assert_close(norms, torch.stack(expected), rtol=1e-6, atol=0)


def test_the_squares_of_nothing_are_zero():
    assert square_sum([]).item() == 0
    assert square_sum([torch.empty(0), torch.ones(3)]).item() == pytest.approx(3)


def test_many_small_values_beside_a_large_one_count():
    gradients = [torch.tensor([1.0]), torch.full((1_000_000,), 1e-4)]
    assert global_norm(gradients).item() == pytest.approx(1.01**0.5, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_gives_a_non_finite_norm(bad):
    assert not torch.isfinite(global_norm([torch.ones(3), torch.tensor([bad])]))

"""What replaces DeepSpeed's own norms and sums of gradients, each alone; the parity suite sees them at work."""

from types import SimpleNamespace

import pytest
import torch

from dsgpt.strategies.deepspeed.engine import take_norms_of_blocks
from dsgpt.strategies.deepspeed.zero import spare_passes


class DeepSpeedZeroOptimizer(SimpleNamespace):
    """Has the name of DeepSpeed's class, by which it is recognized."""


class BF16_Optimizer(SimpleNamespace):
    """Likewise."""


def test_deepspeed_still_has_these_classes_and_methods(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    for methods, theirs in (
        (("get_grad_norm_direct",), (stage_1_and_2.DeepSpeedZeroOptimizer, stage3.DeepSpeedZeroOptimizer_Stage3)),
        (("clear_lp_grads", "clear_hp_grads", "_update_hp_grad"), (bf16_optimizer.BF16_Optimizer,)),
    ):
        assert all(callable(getattr(owner, method)) for owner in theirs for method in methods)


def double_norm(gradients, params):
    """As ``get_grad_norm_direct`` does, without padding."""
    counted = [gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False)]
    norms = [torch.linalg.vector_norm(gradient.double()) for gradient, _ in zip(counted, params, strict=False)]
    return torch.linalg.vector_norm(torch.stack(norms)).float()


def test_deepspeed_gets_norms_of_blocks_and_its_own_padding():
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator) for shape in ((300, 70), (5,), (4096,))]
    padding = torch.full((64,), 7.0)
    padding._zero_padding = True
    seen = []

    def norm(given, params):
        seen.extend(given)
        return double_norm(given, params)

    optimizer = DeepSpeedZeroOptimizer(get_grad_norm_direct=norm)
    take_norms_of_blocks(optimizer)
    found = optimizer.get_grad_norm_direct([gradients[0], padding, *gradients[1:]], [0, 1, 2])
    assert found.item() == pytest.approx(double_norm(gradients, [0, 1, 2]).item(), rel=1e-7)
    assert seen[1] is padding
    assert max(tensor.numel() for tensor in seen if tensor is not padding) < 100


def test_optimizers_without_such_methods_stay_as_they_are():
    optimizer, engine = SimpleNamespace(), SimpleNamespace(enable_backward_allreduce=True)
    take_norms_of_blocks(optimizer)
    spare_passes(optimizer, single_rank=True, engine=engine)
    assert vars(optimizer) == {}
    assert engine.enable_backward_allreduce


@pytest.fixture
def bf16_optimizer():
    """The parts of DeepSpeed's ``BF16_Optimizer`` that are replaced or read."""
    cleared = []

    def clear(set_to_none):
        cleared.append(set_to_none)

    return BF16_Optimizer(
        cleared=cleared,
        clear_lp_grads=clear,
        fp32_groups_gradients=[[torch.full((4,), 9.0)]],
        fp32_groups_has_gradients=[[False]],
    )


@pytest.mark.parametrize("single_rank", [True, False])
def test_only_a_single_rank_reduces_nothing(bf16_optimizer, single_rank):
    engine = SimpleNamespace(enable_backward_allreduce=True)
    spare_passes(bf16_optimizer, single_rank=single_rank, engine=engine)
    assert engine.enable_backward_allreduce is not single_rank


def test_gradients_are_freed_however_deepspeed_asks(bf16_optimizer):
    spare_passes(bf16_optimizer, single_rank=False, engine=SimpleNamespace())
    bf16_optimizer.clear_lp_grads()
    bf16_optimizer.clear_lp_grads(True)
    bf16_optimizer.clear_lp_grads(set_to_none=False)
    assert bf16_optimizer.cleared == [True, True, True]


def test_the_first_gradient_of_a_step_replaces_the_sum_of_the_last(bf16_optimizer):
    spare_passes(bf16_optimizer, single_rank=False, engine=SimpleNamespace())
    low = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    (total,) = bf16_optimizer.fp32_groups_gradients[0]
    for step, (parts, expected) in enumerate((((1.0, 2.0), 3.0), ((0.5,), 0.5))):
        for part in parts:
            low.grad = torch.full((2, 2), part, dtype=torch.bfloat16)
            bf16_optimizer._update_hp_grad(low, 0, 0, clear_lp_grads=False)
        assert total.tolist() == [expected] * 4, step
        assert low._hp_grad is total
        assert bf16_optimizer.fp32_groups_has_gradients == [[True]]
        bf16_optimizer.clear_hp_grads()
        assert bf16_optimizer.fp32_groups_has_gradients == [[False]]


def test_a_parameter_without_a_gradient_begins_no_sum(bf16_optimizer):
    spare_passes(bf16_optimizer, single_rank=False, engine=SimpleNamespace())
    bf16_optimizer._update_hp_grad(torch.nn.Parameter(torch.zeros(4)), 0, 0, clear_lp_grads=True)
    assert bf16_optimizer.fp32_groups_has_gradients == [[False]]

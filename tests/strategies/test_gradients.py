"""Gradients of DeepSpeed, initial weights, and what a step computes and sends."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_run import command_line, write_data, write_inputs, write_recipe
from step_counts import Counts
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import resolved

from dsgpt.config.run_config import RunConfig
from dsgpt.strategies.base import build_strategy
from dsgpt.strategies.deepspeed.engine import take_norms_of_blocks
from dsgpt.strategies.deepspeed.zero import _build_whole, spare_passes
from dsgpt.strategies.pytorch import TorchStrategy
from dsgpt.training.trainer import training_batches

# What replaces DeepSpeed's own norms and sums of gradients, each alone; the parity suite sees them at work.


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


class OnMeta(TorchDispatchMode):
    """Notes the precision of every weight that is made on the device ``meta``."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type == "meta":
            self.seen.add(made.dtype)
        return made


def test_no_fp32_copy_of_the_model_is_made_on_the_device(tmp_path):
    """``meta`` stands for a GPU. An fp32 copy there would be twice what ZeRO with offload needs of it later."""
    config = resolved(command_line(write_inputs(tmp_path), precision="bf16"))
    with OnMeta() as made:
        _build_whole(config, torch.device("meta"))
    assert made.seen == {torch.bfloat16}


# What an optimizer step computes and allocates, counted: speed that is lost by accident shows here, on any machine.


DEPTH, WIDTH, BATCH, LENGTH, VOCABULARY, POSITIONS = 2, 32, 4, 16, 257, 16
ROWS = 320
"""Of the embedding: the vocabulary in multiples of 64."""


def configured(folder: Path, **changes: Any) -> RunConfig:
    write_recipe(write_data(folder) / "recipe.json", train_batch_size=2 * BATCH)
    shape = {"num_layers": DEPTH, "embedding_size": WIDTH, "max_position_embeddings": POSITIONS}
    return resolved(command_line(folder, **shape, grad_accum_steps=2, **changes))


@pytest.fixture
def second_step(tmp_path):
    """A function that counts the second step of a run in a precision; the first one makes the optimizer's state."""

    def count(precision: str) -> Counts:
        config = configured(tmp_path, precision=precision)
        strategy, batches = build_strategy(config, torch.device("cpu")), training_batches(config, first_step=0)
        strategy.train_step(batches, 1)
        with Counts() as counts:
            strategy.train_step(batches, 2)
        return counts

    return count


in_both = pytest.mark.parametrize("precision", ["fp32", "bf16"])


def forward_flops() -> int:
    """Of the matrix products of one micro batch."""
    tokens = BATCH * LENGTH
    blocks = DEPTH * 2 * tokens * 12 * WIDTH * WIDTH
    return blocks + 2 * tokens * WIDTH * VOCABULARY


@in_both
def test_no_product_is_computed_twice(second_step, precision):
    """Three products of the forward pass's size for each of two micro batches, and nothing else but attention."""
    counts = second_step(precision)
    attention = 2 * 2 * BATCH * LENGTH * LENGTH * WIDTH * DEPTH
    products = counts.flops_of("mm", "addmm", "_addmm_activation", "bmm")
    assert products == 2 * 3 * forward_flops()
    assert counts.flops - products <= 2 * 3.5 * attention


def test_the_loss_of_a_small_micro_batch_is_one_chunk(second_step):
    """Each further chunk would pass over the gradient of the whole head again."""
    counts = second_step("fp32")
    assert counts.calls["_log_softmax"] == 2  # micro batches


@in_both
def test_the_optimizer_is_one_call_for_each_group(second_step, precision):
    counts = second_step(precision)
    assert counts.calls["_fused_adamw_"] == 2
    assert not counts.calls["addcdiv_"] + counts.calls["_foreach_addcdiv_"]


def test_weights_and_gradients_are_copied_as_lists(second_step):
    """In bf16, one call gathers the gradients of each micro batch, and one publishes the weights."""
    counts = second_step("bf16")
    assert counts.calls["_foreach_copy_"] == 2
    assert counts.calls["_foreach_add_"] - counts.calls["_fused_adamw_"] == 1  # the optimizer counts its own steps


def test_fp32_has_no_copy_of_the_embedding(second_step):
    """New tensors of the embedding's size: the gradients of its two uses and their sum, in each micro batch."""
    counts = second_step("fp32")
    assert counts.new_of(ROWS * WIDTH) <= 2 * 3


@in_both
def test_the_host_reads_one_value_of_a_micro_batch(second_step, precision):
    """On a CPU the factor of the loss; on a GPU, where it would wait, none (``linear_cross_entropy``)."""
    assert second_step(precision).calls["_local_scalar_dense"] <= 2


def test_a_compiled_model_has_no_graph_break(tmp_path, monkeypatch):
    config = configured(tmp_path)
    strategy = build_strategy(config, torch.device("cpu"))
    assert isinstance(strategy, TorchStrategy)
    torch._dynamo.reset()
    ids = torch.zeros((BATCH, LENGTH), dtype=torch.long)
    explained = torch._dynamo.explain(strategy.model)(ids, ids)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)

"""What a step computes, allocates and sends, and where weights are made: speed and memory that no result shows."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.module_inject import layers
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero import stage3, stage_1_and_2
from small_run import command_line, write_data, write_inputs, write_recipe
from step_counts import Counts
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import resolved

from dsgpt.config.run_config import RunConfig
from dsgpt.machine.topology import ParallelSizes, Topology
from dsgpt.strategies.base import build_strategy
from dsgpt.strategies.deepspeed import tensor_layers, zero
from dsgpt.strategies.deepspeed.engine import wait_once
from dsgpt.strategies.pytorch import TorchStrategy
from dsgpt.training.trainer import training_batches


def test_deepspeed_still_has_the_methods_that_are_replaced():
    """They are found by the name of the class. The parity suite sees the replacements at work."""
    for methods, theirs in (
        (("get_grad_norm_direct",), (stage_1_and_2.DeepSpeedZeroOptimizer, stage3.DeepSpeedZeroOptimizer_Stage3)),
        (("clear_lp_grads", "clear_hp_grads", "_update_hp_grad"), (bf16_optimizer.BF16_Optimizer,)),
        (
            ("complete_grad_norm_calculation_for_cpu_offload", "update_offload_overflow_tracker", "_has_inf_or_nan"),
            (stage_1_and_2.DeepSpeedZeroOptimizer,),
        ),
    ):
        assert all(callable(getattr(owner, method)) for owner in theirs for method in methods)


# AutoTP's sums over tensor ranks: acts as ``PEERS`` ranks that hold the same, whose sum multiplies in place.

PEERS = 2


def sums(column: type, row: type, x: torch.Tensor) -> list[float]:
    """The gradient through ``column`` and the output of ``row`` for ``x``, which is all ones."""
    leaf = torch.zeros_like(x, requires_grad=True)
    column.apply(None, leaf).backward(x.clone())
    return [float(total.unique()) for total in (leaf.grad, row.apply(None, x.clone(), False))]


def test_sums_over_tensor_ranks_are_not_lost_for_tensors_that_are_not_contiguous(monkeypatch):
    """If DeepSpeed's own classes do not lose them any more, ours can be removed."""
    monkeypatch.setattr(layers.pg_utils, "is_parallel", lambda group: True)
    for module in (layers.dist, tensor_layers.dist):
        monkeypatch.setattr(module, "all_reduce", lambda tensor, **_: tensor.mul_(PEERS))
    spec = importlib.util.find_spec(layers.__name__)
    theirs = importlib.util.module_from_spec(spec)  # in ``layers`` an earlier test may have replaced them
    spec.loader.exec_module(theirs)
    for name in ("ColumnParallel", "RowParallel"):
        monkeypatch.setattr(layers, name, getattr(layers, name))  # put back afterwards
    transposed = torch.ones(4, 3).t()
    assert sums(theirs.ColumnParallel, theirs.RowParallel, transposed) == [1, 1]
    for _ in range(2):
        tensor_layers.reduce_contiguous()
        for x in (torch.ones(3, 4), transposed):
            assert sums(layers.ColumnParallel, layers.RowParallel, x) == [PEERS, PEERS]


class DeepSpeedZeroOptimizer:
    """What ``wait_once`` uses of DeepSpeed's of this name; parameters are their own keys."""

    cpu_offload, local_overflow = True, False
    get_param_id = staticmethod(lambda param: param)
    _has_inf_or_nan = staticmethod(stage_1_and_2.DeepSpeedZeroOptimizer._has_inf_or_nan)

    def __init__(self, norms: dict[str, torch.Tensor]) -> None:
        self.norm_for_param_grads = norms

    def complete_grad_norm_calculation_for_cpu_offload(self, params):
        return sum(self.norm_for_param_grads[param].item() ** 2 for param in params)


def test_zero_2_with_offload_reads_norms_of_gradients_together_and_keeps_every_overflow():
    """DeepSpeed reads each alone: on a GPU, two waits per parameter and step. A tensor on ``meta`` cannot be read."""
    norms = {name: torch.tensor(value, dtype=torch.float64) for name, value in (("a", 0.1), ("b", 0.7), ("c", 0.3))}
    optimizer, alone = DeepSpeedZeroOptimizer(dict(norms)), DeepSpeedZeroOptimizer(norms)
    wait_once(optimizer)
    with mock.patch("torch.stack", wraps=torch.stack) as read:
        for group in (["a", "c"], ["b"], []):
            theirs = alone.complete_grad_norm_calculation_for_cpu_offload(group)
            assert optimizer.complete_grad_norm_calculation_for_cpu_offload(group) == theirs
    assert read.call_count == 2
    optimizer.update_offload_overflow_tracker(torch.ones(2, device="meta"))
    optimizer.local_overflow = False
    for gradient, overflowed in ((torch.ones(2), False), (torch.tensor([1, torch.inf]), True), (torch.ones(2), True)):
        optimizer.update_offload_overflow_tracker(gradient)
        assert torch.ByteTensor([optimizer.local_overflow]).item() == overflowed  # as ``has_overflow`` reads it


class OnMeta(TorchDispatchMode):
    """Notes the precision of every weight that is made on the device ``meta``, which stands for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type == "meta":
            self.seen.add(made.dtype)
        return made


@pytest.mark.parametrize(("tensor", "precisions"), [(1, {torch.bfloat16}), (2, set())])
def test_no_fp32_copy_of_the_model_is_made_on_the_device_and_none_where_tensor_ranks_will_split_it(
    tmp_path, tensor, precisions
):
    """An fp32 copy would be twice what ZeRO with offload needs of a GPU later; a whole model might not fit on it."""
    topology = Topology(rank=0, local_rank=0, world_size=2, local_world_size=2, launcher="deepspeed")
    config = resolved(command_line(write_inputs(tmp_path), run_type="optimized", precision="bf16"), topology)
    config = replace(config, topology=topology.split(ParallelSizes(tensor=tensor)))
    with OnMeta() as made:
        zero._build_whole(config, torch.device("meta"))
    assert made.seen == precisions


# What an optimizer step computes and allocates, counted: speed that is lost by accident shows here, on any machine.


DEPTH, WIDTH, BATCH, LENGTH, VOCABULARY, POSITIONS = 2, 32, 4, 16, 257, 16
ROWS = 320
"""Of the embedding: the vocabulary in multiples of 64."""


def configured(folder: Path, **changes: Any) -> RunConfig:
    write_recipe(write_data(folder) / "recipe.json", train_batch_size=2 * BATCH)
    shape = {"num_layers": DEPTH, "embedding_size": WIDTH, "max_position_embeddings": POSITIONS}
    return resolved(command_line(folder, **shape, grad_accum_steps=2, **changes))


def forward_flops() -> int:
    """Of the matrix products of one micro batch."""
    tokens = BATCH * LENGTH
    blocks = DEPTH * 2 * tokens * 12 * WIDTH * WIDTH
    return blocks + 2 * tokens * WIDTH * VOCABULARY


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_second_step_of_two_micro_batches_computes_and_copies_no_more_than_it_must(tmp_path, precision):
    """The first step makes the optimizer's state."""
    config = configured(tmp_path, precision=precision)
    strategy, batches = build_strategy(config, torch.device("cpu")), training_batches(config, first_step=0)
    strategy.train_step(batches, 1)
    with Counts() as counts:
        strategy.train_step(batches, 2)
    # Three products of the forward pass's size for each micro batch, and nothing else but attention.
    attention = 2 * 2 * BATCH * LENGTH * LENGTH * WIDTH * DEPTH
    products = counts.flops_of("mm", "addmm", "_addmm_activation", "bmm")
    assert products == 2 * 3 * forward_flops()
    assert counts.flops - products <= 2 * 3.5 * attention
    # One optimizer call for each group.
    assert counts.calls["_fused_adamw_"] == 2
    assert not counts.calls["addcdiv_"] + counts.calls["_foreach_addcdiv_"]
    # The host reads the factor of each loss; on a GPU, where it would wait, nothing (``linear_cross_entropy``).
    assert counts.calls["_local_scalar_dense"] <= 2
    if precision == "fp32":
        # A second chunk of the loss would pass over the gradient of the whole head again.
        assert counts.calls["_log_softmax"] == 2
        # As large as the embedding: the gradients of its two uses and their sum, in each micro batch, but no copy.
        assert counts.new_of(ROWS * WIDTH) <= 2 * 3
    else:
        # One call gathers the gradients of each micro batch, and one publishes the weights.
        assert counts.calls["_foreach_copy_"] == 2
        assert counts.calls["_foreach_add_"] - counts.calls["_fused_adamw_"] == 1  # the optimizer counts its own steps


def test_a_compiled_model_has_no_graph_break(tmp_path, monkeypatch):
    config = configured(tmp_path)
    strategy = build_strategy(config, torch.device("cpu"))
    assert isinstance(strategy, TorchStrategy)
    torch._dynamo.reset()
    ids = torch.zeros((BATCH, LENGTH), dtype=torch.long)
    explained = torch._dynamo.explain(strategy.model)(ids, ids)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)

"""What an optimizer step computes and allocates, counted: speed that is lost by accident shows here, on any machine."""

from pathlib import Path

import pytest
import torch
from small_run import write_data, write_recipe
from step_counts import Counts

from dsgpt.config.options import parse_arguments
from dsgpt.config.run_config import RunConfig, resolve
from dsgpt.machine.topology import read_topology
from dsgpt.strategies.base import build_strategy
from dsgpt.strategies.pytorch import TorchStrategy
from dsgpt.training.trainer import training_batches

LAYERS, WIDTH, BATCH, LENGTH, VOCABULARY, POSITIONS = 2, 32, 4, 16, 257, 16
ROWS = 320
"""Of the embedding: the vocabulary in multiples of 64."""


def configured(folder: Path, *words: str) -> RunConfig:
    write_data(folder)
    recipe = write_recipe(folder / "recipe.json", train_batch_size=2 * BATCH)
    shape = f"--num_layers {LAYERS} --num_heads 2 --embedding_size {WIDTH} --max_position_embeddings {POSITIONS}"
    files = f"--train_data_path {folder}/train.bin --val_data_path {folder}/val.bin --checkpoint_path {folder}/run"
    work = f"--deepspeed_config {recipe} --grad_accum_steps 2 --device cpu --run_type baseline"
    options, problems = parse_arguments([*f"{shape} {files} {work}".split(), *words])
    return resolve(options, topology=read_topology({}), problems=problems)


@pytest.fixture
def second_step(tmp_path):
    """A function that counts the second step of a run with more flags; the first one makes the optimizer's state."""

    def count(*words: str) -> tuple[Counts, TorchStrategy]:
        config = configured(tmp_path, *words)
        strategy, batches = build_strategy(config, torch.device("cpu")), training_batches(config, first_step=0)
        assert isinstance(strategy, TorchStrategy)
        strategy.train_step(batches, 1)
        with Counts() as counts:
            strategy.train_step(batches, 2)
        return counts, strategy

    return count


def forward_flops() -> int:
    """Of the matrix products of one micro batch."""
    tokens = BATCH * LENGTH
    blocks = LAYERS * 2 * tokens * 12 * WIDTH * WIDTH
    return blocks + 2 * tokens * WIDTH * VOCABULARY


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_product_is_computed_twice(second_step, precision):
    """Three products of the forward pass's size for each of two micro batches, and nothing else but attention."""
    counts, _ = second_step("--precision", precision)
    attention = 2 * 2 * BATCH * LENGTH * LENGTH * WIDTH * LAYERS
    products = counts.flops_of("mm", "addmm", "_addmm_activation", "bmm")
    assert products == 2 * 3 * forward_flops()
    assert counts.flops - products <= 2 * 3.5 * attention


def test_the_loss_of_a_small_micro_batch_is_one_chunk(second_step):
    """Each further chunk would pass over the gradient of the whole head again."""
    counts, _ = second_step("--precision", "fp32")
    assert counts.calls["_log_softmax"] == 2  # micro batches


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_optimizer_is_one_call_for_each_group(second_step, precision):
    counts, _ = second_step("--precision", precision)
    assert counts.calls["_fused_adamw_"] == 2
    assert not counts.calls["addcdiv_"] + counts.calls["_foreach_addcdiv_"]


def test_weights_and_gradients_are_copied_as_lists(second_step):
    """In bf16, one call gathers the gradients of each micro batch, and one publishes the weights."""
    counts, _ = second_step("--precision", "bf16")
    assert counts.calls["_foreach_copy_"] == 2
    assert counts.calls["_foreach_add_"] - counts.calls["_fused_adamw_"] == 1  # the optimizer counts its own steps


def test_fp32_has_no_copy_of_the_embedding(second_step):
    """New tensors of the embedding's size: the gradients of its two uses and their sum, in each micro batch."""
    counts, _ = second_step("--precision", "fp32")
    assert counts.new_of(ROWS * WIDTH) <= 2 * 3


@pytest.mark.parametrize(("precision", "reads"), [("fp32", 2), ("bf16", 2)])
def test_the_host_reads_one_value_of_a_micro_batch(second_step, precision, reads):
    """On a CPU the factor of the loss; on a GPU, where it would wait, none (``linear_cross_entropy``)."""
    counts, _ = second_step("--precision", precision)
    assert counts.calls["_local_scalar_dense"] <= reads


def test_a_compiled_model_has_no_graph_break(tmp_path, monkeypatch):
    config = configured(tmp_path)
    strategy = build_strategy(config, torch.device("cpu"))
    assert isinstance(strategy, TorchStrategy)
    torch._dynamo.reset()
    ids = torch.zeros((BATCH, LENGTH), dtype=torch.long)
    explained = torch._dynamo.explain(strategy.model)(ids, ids)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)

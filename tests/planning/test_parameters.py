"""The sizes that plans are made of are the model's, and layers go to stages as DeepSpeed deals them."""

import itertools
import random

import pytest

from dsgpt.model.config import PRESETS, GPT2Config
from dsgpt.model.gpt2 import parameter_shapes
from dsgpt.model.names import decays
from dsgpt.planner.setup import (
    FlatGroup,
    _balanced_bounds,
    _even_bounds,
    fsdp_piece,
    model_parameters,
    on_tensor_rank,
    stage_parameters,
    stages_with_embedding,
    total,
    zero_piece,
)
from dsgpt.strategies.deepspeed.state import is_split

ODD = GPT2Config(n_layer=3, n_head=2, n_embd=34, block_size=48, vocab_size=300)


@pytest.mark.parametrize("model", [ODD, PRESETS["small"]], ids=["odd", "small"])
def test_parameters_are_the_models(model):
    parts = model_parameters(model)
    assert {part.name: part.shape for part in parts} == {k: tuple(v) for k, v in parameter_shapes(model).items()}
    assert [part.name for part in parts] == list(parameter_shapes(model))
    assert all(part.decays == decays(part.name) and part.splits == is_split(part.name) for part in parts)


def test_the_published_size_counts_no_padding():
    model = PRESETS["small"]
    padding = (model.padded_vocab_size - model.vocab_size) * model.n_embd
    assert total(model_parameters(model)) == model.parameter_count() + padding


def test_a_tensor_rank_holds_half_of_what_splits():
    width = ODD.n_embd
    whole, half = model_parameters(ODD), on_tensor_rank(model_parameters(ODD), 2)
    split_of_a_block = 12 * width * width + 3 * width + 4 * width  # matrices; biases of qkv and of the wide layer
    assert total(whole) - total(half) == ODD.n_layer * split_of_a_block // 2


def test_layers_are_dealt_as_deepspeed_deals_them():
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    numbers = random.Random(0)
    for items, parts in itertools.product(range(2, 12), (2, 3, 4)):
        weights = [numbers.randrange(1, 40) for _ in range(items)]
        if items > parts:
            assert _balanced_bounds(weights, parts) == list(map(int, partition_balanced(weights, parts)))
            assert _even_bounds(items, parts) == list(map(int, partition_uniform(items, parts)))


@pytest.mark.parametrize("partition", ["parameters", "uniform", "type:StageBlock"])
def test_both_ends_of_a_pipeline_hold_the_embedding(partition):
    first, last = stage_parameters(ODD, stages=2, partition=partition)
    assert stages_with_embedding([first, last]) == 2
    embedding = ODD.padded_vocab_size * ODD.n_embd
    assert total(first) + total(last) == total(model_parameters(ODD)) + embedding


def test_a_flat_group_is_padded_to_two_elements_per_rank():
    group = FlatGroup(sizes=(5, 4, 2), ranks=2)
    assert (group.padded, group.part) == (12, 6)
    assert (group.touched(0), group.touched(1)) == (9, 6)  # the second parameter lies on both
    assert not group.is_one_piece(0)
    assert FlatGroup(sizes=(8, 4), ranks=2).is_one_piece(0)


def test_pieces_of_one_parameter():
    (embedding,) = (part for part in model_parameters(ODD) if part.name == "wpe.weight")  # 48 x 34
    assert fsdp_piece(embedding, 5) == 10 * 34
    assert zero_piece(embedding, 5) == 327  # of 1,632

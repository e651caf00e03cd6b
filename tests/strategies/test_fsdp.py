"""FSDP: the baseline's training in every precision, the same with every way to keep and gather shards."""

import math

import pytest
from rank_facts import (
    ACCUMULATION,
    BYTES,
    LAYERS,
    RANKS,
    assert_one_decision_on_overflow,
    assert_own_dropout_masks,
    assert_the_baselines_training,
    facts_on_ranks,
)


@pytest.fixture(scope="module")
def facts(corpus, tmp_path_factory):
    return facts_on_ranks("fsdp", corpus, tmp_path_factory.mktemp("fsdp"))


def padded_elements(parameters: dict[str, list[int]], prefix: str = "") -> int:
    """Elements that are sent of the parameters whose names start with ``prefix``, each padded to equal shards."""
    return sum(
        -(-rows // RANKS) * RANKS * math.prod(rest)
        for name, (rows, *rest) in parameters.items()
        if name.startswith(prefix)
    )


@pytest.mark.parametrize("precision", BYTES)
def test_it_trains_as_the_baseline_does(facts, precision):
    """It starts from the same initial weights, split unevenly, with the word embedding tied to the head."""
    assert_the_baselines_training(facts["baseline"][precision], precision)


def test_a_rank_holds_only_its_shards(facts):
    """Also after a validation, which ends with a forward pass."""
    fact = facts["baseline"]["fp32"]
    whole = sum(math.prod(shape) for shape in fact["parameters"].values())
    assert sum(fact["held"]) == whole
    assert max(fact["held"]) - min(fact["held"]) == 32  # a row of the 63 positions
    assert fact["left_whole"] == []


@pytest.mark.parametrize("precision", BYTES)
def test_blocks_are_gathered_for_every_pass_and_gradients_reduced_once(facts, precision):
    """The root's weights, embeddings and last LayerNorm, are gathered once in a step."""
    fact = facts["baseline"][precision]
    everything, blocks = padded_elements(fact["parameters"]), padded_elements(fact["parameters"], "blocks.")
    passes = 2 * ACCUMULATION
    gathered = (everything - blocks + passes * blocks) * BYTES[precision]
    assert fact["traffic"]["all_gather"] == [1 + passes * LAYERS, gathered]
    assert fact["traffic"]["reduce_scatter"] == [1 + LAYERS, everything * 4]


def test_kept_weights_are_gathered_once_in_a_step(facts):
    parameters = facts["baseline"]["bf16"]["parameters"]
    way = facts["ways"]["no reshard"]
    assert way["traffic"]["all_gather"] == [1 + LAYERS, padded_elements(parameters) * 2]
    assert way["traffic"]["reduce_scatter"] == [1 + LAYERS, padded_elements(parameters) * 4]


@pytest.mark.parametrize("way", ["checkpointing", "no reshard", "offload"])
def test_no_option_changes_a_bit(facts, way):
    assert facts["ways"][way]["steps"] == facts["ways"]["usual"]["steps"]


def test_a_reduction_in_low_precision_sends_half_the_bytes_and_rounds(facts):
    usual, low = facts["ways"]["usual"], facts["ways"]["low reduce"]
    calls, payload_bytes = usual["traffic"]["reduce_scatter"]
    assert low["traffic"]["reduce_scatter"] == [calls, payload_bytes / 2]
    for one, two in zip(usual["steps"], low["steps"], strict=True):
        assert two[:2] == pytest.approx(one[:2], rel=1e-2)
        assert two[1] != one[1]


def test_it_trains_the_same_when_compiled(facts):
    for one, two in zip(facts["baseline"]["fp32"]["actual"], facts["ways"]["compiled"]["steps"], strict=True):
        assert two[:2] == pytest.approx(one[:2], rel=1e-5)


def test_all_ranks_skip_the_same_steps(facts):
    assert_one_decision_on_overflow(facts["overflowing"])


def test_ranks_draw_their_own_masks(facts):
    assert_own_dropout_masks(facts["dropout"])

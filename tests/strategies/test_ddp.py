"""DDP: the baseline's training in every precision, one reduction per step, the same with any buckets."""

import pytest
from rank_facts import (
    BYTES,
    assert_one_decision_on_overflow,
    assert_own_dropout_masks,
    assert_the_baselines_training,
    facts_on_ranks,
)


@pytest.fixture(scope="module")
def facts(corpus, tmp_path_factory):
    return facts_on_ranks("ddp", corpus, tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("precision", BYTES)
def test_it_trains_as_the_baseline_does(facts, precision):
    assert_the_baselines_training(facts["baseline"][precision], precision)


@pytest.mark.parametrize("precision", BYTES)
def test_gradients_are_reduced_once_per_step_and_in_fp32(facts, precision):
    """The gradients of three micro batches are summed before they are reduced; the loss is one more number."""
    fact = facts["baseline"][precision]
    _, payload_bytes = fact["traffic"]["all_reduce"]
    assert payload_bytes == 4 * (fact["held"][0] + 1)


@pytest.mark.parametrize("way", ["checkpointing", "small buckets", "own gradients"])
def test_no_option_changes_a_bit(facts, way):
    assert facts["ways"][way]["steps"] == facts["ways"]["usual"]["steps"]


def test_the_bucket_size_is_respected(facts):
    calls, payload_bytes = facts["ways"]["usual"]["traffic"]["all_reduce"]
    more_calls, same_bytes = facts["ways"]["small buckets"]["traffic"]["all_reduce"]
    assert calls == 2  # one bucket, into which everything fits, and the loss
    assert more_calls > 4
    assert same_bytes == payload_bytes


def test_it_trains_the_same_when_compiled(facts):
    """PyTorch's own way of splitting compiled graphs fails with buckets under 1 MiB, as here."""
    for one, two in zip(facts["baseline"]["fp32"]["actual"], facts["ways"]["compiled"]["steps"], strict=True):
        assert two[:2] == pytest.approx(one[:2], rel=1e-5)


def test_all_ranks_skip_the_same_steps(facts):
    assert_one_decision_on_overflow(facts["overflowing"])


def test_ranks_draw_their_own_masks(facts):
    assert_own_dropout_masks(facts["dropout"])

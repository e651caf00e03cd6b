"""Dropout under every way to split a model: ranks draw different masks exactly where their activations differ."""

import itertools

import pytest
from strategy_cells import RECOMPUTED, SPLIT, THREE_D, Asked
from training_runs import read_lines

CASES = [
    *(Asked(2, f"steps {name}") for name in ("zero3", *SPLIT)),
    *(Asked(4, f"steps {name}") for name in SPLIT),
    Asked(8, f"steps {THREE_D}"),
]


def activations(facts):
    """Equal for ranks that compute the same activations."""
    return facts["place"]["stage"], facts["place"]["data"], facts["place"]["sequence"]


def of_attention(shape):
    return len(shape) == 4  # (B, heads, T, T)


@pytest.mark.parametrize("cell", CASES, ids=str)
def test_masks_are_the_ranks_own(seen, cell):
    """Ranks with different data, stages or positions have no mask in common."""
    for one, two in itertools.combinations(seen(cell).ranks, 2):
        masks = [{digest for _, digest in facts["masks"]} for facts in (one, two)]
        assert all(masks)
        if activations(one) != activations(two):
            assert not masks[0] & masks[1]


@pytest.mark.parametrize("cell", [cell for cell in CASES if "tensor2" in cell.name], ids=str)
def test_tensor_peers_share_masks_of_shared_activations(seen, cell):
    """They drop the same elements of activations that both hold; their different heads have different masks."""
    pairs = itertools.combinations(seen(cell).ranks, 2)
    peers = [(one, two) for one, two in pairs if activations(one) == activations(two)]
    assert len(peers) == cell.ranks // 2
    for one, two in peers:
        assert any(of_attention(shape) for shape, _ in one["masks"])
        for (shape, digest), (other_shape, other_digest) in zip(one["masks"], two["masks"], strict=True):
            assert shape == other_shape
            assert (digest == other_digest) == (not of_attention(shape))


@pytest.mark.parametrize("cell", CASES, ids=str)
def test_replicated_weights_stay_equal(seen, cell):
    """After steps with dropout, ranks that hold the same weight hold the same bits."""
    ranks = seen(cell).ranks
    for one, two in itertools.combinations(ranks, 2):
        same = one["replicas"].keys() & two["replicas"].keys()
        assert all(one["replicas"][name] == two["replicas"][name] for name in same)
        assert same or "pipeline" in cell.name
    for facts in ranks:
        assert len(facts["unchanged"]) <= len(facts["replicas"]) / 2


@pytest.mark.parametrize(
    ("cell", "straight"), [(Asked(2, f"recomputed {name}"), Asked(2, f"run {name}")) for name in RECOMPUTED], ids=str
)
def test_recomputed_activations_have_the_same_dropout_masks(seen, cell, straight):
    """With other masks in the second computation, the gradients would belong to another loss."""
    plain, again = (seen(one) for one in (straight, cell))
    assert [facts["exit"] for one in (plain, again) for facts in one.ranks] == [0] * 4
    compared = [(line["loss"], line["grad_norm"]) for line in read_lines(again.run)]
    assert compared == [(line["loss"], line["grad_norm"]) for line in read_lines(plain.run)]
    assert len(compared) == 4

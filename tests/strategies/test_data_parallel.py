"""DDP, FSDP and tensor parallelism as this project sets them up; dropout and losses of every strategy."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from deepspeed.module_inject import layers
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
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
from small_run import RECIPE, command_line, write_data, write_recipe
from strategy_cells import RECOMPUTED, SPLIT, THREE_D, Asked
from torch import nn
from training_runs import read_lines

from dsgpt.config.options import parse_arguments
from dsgpt.config.run_config import RunConfig, resolve
from dsgpt.machine.topology import ParallelSizes, Topology, read_topology
from dsgpt.strategies.deepspeed import state as tensor_layout
from dsgpt.strategies.deepspeed import tensor as tensor_reduction
from dsgpt.strategies.deepspeed import zero
from dsgpt.strategies.deepspeed.zero import Zero

# DDP: the baseline's training in every precision, one reduction per step, the same with any buckets.


@pytest.fixture(scope="module")
def ddp_facts(corpus, tmp_path_factory):
    return facts_on_ranks("ddp", corpus, tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("precision", BYTES)
def test_ddp_trains_as_the_baseline_does(ddp_facts, precision):
    assert_the_baselines_training(ddp_facts["baseline"][precision], precision)


@pytest.mark.parametrize("precision", BYTES)
def test_gradients_are_reduced_once_per_step_and_in_fp32(ddp_facts, precision):
    """The gradients of three micro batches are summed before they are reduced; the loss is one more number."""
    fact = ddp_facts["baseline"][precision]
    _, payload_bytes = fact["traffic"]["all_reduce"]
    assert payload_bytes == 4 * (fact["held"][0] + 1)


@pytest.mark.parametrize("way", ["checkpointing", "small buckets", "own gradients"])
def test_no_option_changes_a_bit_under_ddp(ddp_facts, way):
    assert ddp_facts["ways"][way]["steps"] == ddp_facts["ways"]["usual"]["steps"]


def test_the_bucket_size_is_respected(ddp_facts):
    calls, payload_bytes = ddp_facts["ways"]["usual"]["traffic"]["all_reduce"]
    more_calls, same_bytes = ddp_facts["ways"]["small buckets"]["traffic"]["all_reduce"]
    assert calls == 2  # one bucket, into which everything fits, and the loss
    assert more_calls > 4
    assert same_bytes == payload_bytes


def test_ddp_trains_the_same_when_compiled(ddp_facts):
    """PyTorch's own way of splitting compiled graphs fails with buckets under 1 MiB, as here."""
    for one, two in zip(ddp_facts["baseline"]["fp32"]["actual"], ddp_facts["ways"]["compiled"]["steps"], strict=True):
        assert two[:2] == pytest.approx(one[:2], rel=1e-5)


def test_all_ranks_skip_the_same_steps_under_ddp(ddp_facts):
    assert_one_decision_on_overflow(ddp_facts["overflowing"])


def test_ranks_draw_their_own_masks_under_ddp(ddp_facts):
    assert_own_dropout_masks(ddp_facts["dropout"])


# FSDP: the baseline's training in every precision, the same with every way to keep and gather shards.


@pytest.fixture(scope="module")
def fsdp_facts(corpus, tmp_path_factory):
    return facts_on_ranks("fsdp", corpus, tmp_path_factory.mktemp("fsdp"))


def padded_elements(parameters: dict[str, list[int]], prefix: str = "") -> int:
    """Elements that are sent of the parameters whose names start with ``prefix``, each padded to equal shards."""
    return sum(
        -(-rows // RANKS) * RANKS * math.prod(rest)
        for name, (rows, *rest) in parameters.items()
        if name.startswith(prefix)
    )


@pytest.mark.parametrize("precision", BYTES)
def test_fsdp_trains_as_the_baseline_does(fsdp_facts, precision):
    """It starts from the same initial weights, split unevenly, with the word embedding tied to the head."""
    assert_the_baselines_training(fsdp_facts["baseline"][precision], precision)


def test_a_rank_holds_only_its_shards(fsdp_facts):
    """Also after a validation, which ends with a forward pass."""
    fact = fsdp_facts["baseline"]["fp32"]
    whole = sum(math.prod(shape) for shape in fact["parameters"].values())
    assert sum(fact["held"]) == whole
    assert max(fact["held"]) - min(fact["held"]) == 32  # a row of the 63 positions
    assert fact["left_whole"] == []


@pytest.mark.parametrize("precision", BYTES)
def test_blocks_are_gathered_for_every_pass_and_gradients_reduced_once(fsdp_facts, precision):
    """The root's weights, embeddings and last LayerNorm, are gathered once in a step."""
    fact = fsdp_facts["baseline"][precision]
    everything, blocks = padded_elements(fact["parameters"]), padded_elements(fact["parameters"], "blocks.")
    passes = 2 * ACCUMULATION
    gathered = (everything - blocks + passes * blocks) * BYTES[precision]
    assert fact["traffic"]["all_gather"] == [1 + passes * LAYERS, gathered]
    assert fact["traffic"]["reduce_scatter"] == [1 + LAYERS, everything * 4]


def test_kept_weights_are_gathered_once_in_a_step(fsdp_facts):
    parameters = fsdp_facts["baseline"]["bf16"]["parameters"]
    way = fsdp_facts["ways"]["no reshard"]
    assert way["traffic"]["all_gather"] == [1 + LAYERS, padded_elements(parameters) * 2]
    assert way["traffic"]["reduce_scatter"] == [1 + LAYERS, padded_elements(parameters) * 4]


@pytest.mark.parametrize("way", ["checkpointing", "no reshard", "offload"])
def test_no_option_changes_a_bit_under_fsdp(fsdp_facts, way):
    assert fsdp_facts["ways"][way]["steps"] == fsdp_facts["ways"]["usual"]["steps"]


def test_a_reduction_in_low_precision_sends_half_the_bytes_and_rounds(fsdp_facts):
    usual, low = fsdp_facts["ways"]["usual"], fsdp_facts["ways"]["low reduce"]
    calls, payload_bytes = usual["traffic"]["reduce_scatter"]
    assert low["traffic"]["reduce_scatter"] == [calls, payload_bytes / 2]
    for one, two in zip(usual["steps"], low["steps"], strict=True):
        assert two[:2] == pytest.approx(one[:2], rel=1e-2)
        assert two[1] != one[1]


def test_fsdp_trains_the_same_when_compiled(fsdp_facts):
    for one, two in zip(fsdp_facts["baseline"]["fp32"]["actual"], fsdp_facts["ways"]["compiled"]["steps"], strict=True):
        assert two[:2] == pytest.approx(one[:2], rel=1e-5)


def test_all_ranks_skip_the_same_steps_under_fsdp(fsdp_facts):
    assert_one_decision_on_overflow(fsdp_facts["overflowing"])


def test_ranks_draw_their_own_masks_under_fsdp(fsdp_facts):
    assert_own_dropout_masks(fsdp_facts["dropout"])


# How tensor parallelism corrects DeepSpeed's sums over ranks, and where its model is made.


PEERS = 2


@pytest.fixture
def peers(monkeypatch):
    """Acts as ``PEERS`` ranks that hold the same: a sum over them multiplies in place, as collectives work in place."""
    monkeypatch.setattr(layers.pg_utils, "is_parallel", lambda group: True)
    monkeypatch.setattr(layers.dist, "all_reduce", lambda tensor, **_: tensor.mul_(PEERS))


def sums(column: type, row: type, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient through ``column`` and the output of ``row`` for ``x``."""
    leaf = torch.zeros_like(x, requires_grad=True)
    column.apply(None, leaf).backward(x.clone())
    return leaf.grad, row.apply(None, x.clone(), False)


LAYOUTS = {"contiguous": torch.ones(3, 4), "transposed": torch.ones(4, 3).t()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_of_any_layout(peers, layout):
    ours = (tensor_reduction.ContiguousColumnParallel, tensor_reduction.ContiguousRowParallel)
    for total in sums(*ours, LAYOUTS[layout]):
        assert (total == PEERS).all()


def test_deepspeeds_own_classes_lose_sums_that_are_not_contiguous(peers):
    """If this fails, DeepSpeed is fixed, and our classes can be removed."""
    for total in sums(tensor_reduction._COLUMN, tensor_reduction._ROW, LAYOUTS["transposed"]):
        assert (total == 1).all()


def test_deepspeeds_layers_use_our_classes(monkeypatch):
    for name in ("ColumnParallel", "RowParallel"):
        monkeypatch.setattr(layers, name, getattr(layers, name))  # put back afterwards
    for _ in range(2):
        tensor_reduction.reduce_contiguous()
        assert layers.ColumnParallel is tensor_reduction.ContiguousColumnParallel
        assert layers.RowParallel is tensor_reduction.ContiguousRowParallel


@pytest.mark.parametrize("name", [f"blocks.0.{name}" for name in tensor_layout.SPLIT])
def test_parts_joined_are_the_whole(name):
    """Each rank has its heads of the fused query, key and value; halves of the rows would be a different split."""
    whole = torch.arange(48.0).view(12, 4) if name.endswith("weight") else torch.arange(12.0)
    parts = [tensor_layout.take_part(name, whole, rank=rank, size=PEERS) for rank in range(PEERS)]
    assert [part.numel() for part in parts] == [whole.numel() // PEERS] * PEERS
    assert tensor_layout.join_parts(name, parts).equal(whole)
    if "qkv" in name:
        assert parts[0].equal(whole[[0, 1, 4, 5, 8, 9]])


def test_a_parameter_that_every_rank_holds_whole_is_not_joined():
    whole = torch.ones(4)
    assert tensor_layout.take_part("blocks.0.mlp.proj.bias", whole, rank=1, size=PEERS) is whole
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp\.proj\.bias is not split"):
        tensor_layout.join_parts("blocks.0.mlp.proj.bias", [whole, whole])


def config_of(folder, *, tensor: int) -> RunConfig:
    write_recipe(write_data(folder) / "recipe.json", RECIPE, tensor_parallel={"autotp_size": tensor})
    options, problems = parse_arguments(command_line(folder, run_type="optimized"))
    topology = Topology(rank=0, local_rank=0, world_size=2, local_world_size=2, launcher="deepspeed")
    config = resolve(options, topology=topology, problems=problems)
    return replace(config, topology=topology.split(ParallelSizes(tensor=tensor)))


@pytest.mark.parametrize(("tensor", "place"), [(1, "meta"), (2, "cpu")])
def test_a_whole_model_stays_in_host_memory_where_tensor_ranks_will_split_it(tmp_path, tensor, place):
    """The device ``meta`` represents a GPU, which the model might not fit on."""
    model = zero._build_whole(config_of(tmp_path, tensor=tensor), torch.device("meta"))
    assert {parameter.device.type for parameter in model.parameters()} == {place}


# Dropout under every way to split a model: ranks draw different masks exactly where their activations differ.


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


# Every rank knows the mean loss of what it read.


@pytest.mark.parametrize("cell", CASES, ids=str)
def test_the_loss_is_the_mean_over_what_ranks_read(seen, cell):
    """Stages and tensor peers read the same. Ranks with other data or positions have another loss."""
    ranks = seen(cell).ranks
    for step in range(len(ranks[0]["losses"])):
        own = {(facts["place"]["data"], facts["place"]["sequence"]): facts["losses"][step][1] for facts in ranks}
        assert sum(own.values()) / len(own) == pytest.approx(ranks[0]["losses"][step][0], abs=1e-5)
        assert len({round(loss, 4) for loss in own.values()}) == len(own)
        for facts in ranks:
            place = facts["place"]["data"], facts["place"]["sequence"]
            assert facts["losses"][step][1] == pytest.approx(own[place], abs=1e-5)


# Which weights count as whole on a rank, for checks that all ranks hold the same.


def test_weights_that_are_still_being_gathered_are_left_out():
    """ZeRO-3 gathers weights for the next pass. The memory has its full size before the other ranks' parts arrive."""
    strategy = object.__new__(Zero)
    strategy._topology = read_topology({})
    strategy._parameters = {}
    for name, status in (("kept", ZeroParamStatus.AVAILABLE), ("coming", ZeroParamStatus.INFLIGHT)):
        strategy._parameters[name] = nn.Parameter(torch.ones(3))
        strategy._parameters[name].ds_shape, strategy._parameters[name].ds_status = torch.Size([3]), status
    strategy._parameters["split"] = nn.Parameter(torch.empty(0))
    strategy._parameters["split"].ds_shape, strategy._parameters["split"].ds_status = (
        torch.Size([3]),
        ZeroParamStatus.NOT_AVAILABLE,
    )
    strategy._parameters["plain"] = nn.Parameter(torch.ones(3))
    assert [name for name, _ in strategy.replicated_weights()] == ["kept", "plain"]

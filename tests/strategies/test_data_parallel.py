"""DDP, FSDP and tensor parallelism as this project sets them up; dropout and losses of every strategy."""

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.module_inject import layers
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from forked_ranks import run_script
from small_run import RECIPE, command_line, write_data, write_recipe
from torch import nn
from training_runs import SHAPE, data_flags, finished, resolved, write_optimizer_recipe

from dsgpt.config.run_config import RunConfig
from dsgpt.machine.topology import ParallelSizes, Topology, read_topology
from dsgpt.strategies.deepspeed import state as tensor_layout
from dsgpt.strategies.deepspeed import zero
from dsgpt.strategies.deepspeed.zero import Zero

# DDP and FSDP: the baseline's training in every precision, the same with every option. One launch each for many facts.

RANKS, ACCUMULATION, LAYERS = 2, 3, 2
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
RUN_TYPES = ("ddp", "fsdp")
in_both = pytest.mark.parametrize("run_type", RUN_TYPES)


@pytest.fixture(scope="module")
def facts_of(corpus, tmp_path_factory):
    """From a run type to what ``torch_on_ranks.py`` prints of a training on 2 ranks, 3 micro batches of 2 sequences.

    63 positions cannot be split into two equal shards.
    """

    @functools.cache
    def facts(run_type: str) -> dict[str, Any]:
        recipe = write_optimizer_recipe(
            tmp_path_factory.mktemp(run_type) / "recipe.json",
            **{"clipping": 0, "train_batch_size": 12, "fp16": {"initial_scale_power": 12}},
        )
        flags = [*data_flags(corpus), *SHAPE, "--max_position_embeddings", "63", "--seq_length", "32", "--device"]
        flags += ["cpu", "--deepspeed_config", recipe, "--precision", "fp32", "--micro_batch_size_per_gpu", "2"]
        done = run_script(Path(__file__).with_name("torch_on_ranks.py"), [run_type, *flags], ranks=RANKS)
        finished(done)
        return json.loads(done.stdout.splitlines()[-1])

    return facts


@in_both
@pytest.mark.parametrize("precision", BYTES)
def test_it_trains_as_the_baseline_does(facts_of, run_type, precision):
    """The bounds are far below the difference between precisions, so bf16 and fp16 mean the same as in the baseline.

    In fp16 the smallest gradients have few digits, so the text decides: 2e-5 on that of Python 3.13. FSDP splits the
    same initial weights unevenly, with the word embedding tied to the head.
    """
    fact = facts_of(run_type)["baseline"][precision]
    assert fact["same_start"]
    assert fact["gradient"] <= (6e-5 if precision == "fp16" else 1e-5)
    for step, (one, two) in enumerate(zip(fact["expected"], fact["actual"], strict=True), start=1):
        assert two[0] == pytest.approx(one[0], abs=1e-5), f"step {step}"
        assert two[1] == pytest.approx(one[1], rel=1e-4), f"step {step}"
        assert not two[2]
    for step, own in enumerate(zip(*fact["own_losses"], strict=True)):
        assert sum(own) / len(own) == pytest.approx(fact["actual"][step][0], abs=1e-5)
        assert own[0] != pytest.approx(own[1], abs=1e-4)  # the ranks read different data
    (loss_sum, targets), (own_loss_sum, own_targets) = fact["validation"]
    assert own_targets == targets
    assert own_loss_sum == pytest.approx(loss_sum, rel=1e-5)
    assert fact["equal_weights"]
    assert fact["tied"]


@pytest.mark.parametrize(
    ("run_type", "way"),
    [
        *(("ddp", way) for way in ("checkpointing", "small buckets", "own gradients")),
        *(("fsdp", way) for way in ("checkpointing", "no reshard", "offload")),
    ],
)
def test_no_option_changes_a_bit(facts_of, run_type, way):
    ways = facts_of(run_type)["ways"]
    assert ways[way]["steps"] == ways["usual"]["steps"]


@in_both
def test_it_trains_the_same_when_compiled(facts_of, run_type):
    """PyTorch's own way of splitting compiled graphs fails with DDP's buckets under 1 MiB, as here."""
    facts = facts_of(run_type)
    for one, two in zip(facts["baseline"]["fp32"]["actual"], facts["ways"]["compiled"]["steps"], strict=True):
        assert two[:2] == pytest.approx(one[:2], rel=1e-5)


@in_both
def test_all_ranks_skip_the_same_steps(facts_of, run_type):
    """Each has the same loss scale afterwards: 2**22, halved once per skipped step."""
    ranks = facts_of(run_type)["overflowing"]
    skipped, factor = ranks[0]
    assert ranks == [[skipped, factor]] * RANKS
    assert skipped[0]
    assert not skipped[-1]
    assert factor == 2.0 ** (22 - sum(skipped))


@in_both
def test_ranks_draw_their_own_dropout_masks(facts_of, run_type):
    """Their losses on one batch differ, and each rank repeats its loss from the same random state."""
    (one, one_again), (two, two_again) = facts_of(run_type)["dropout"]
    assert one == one_again
    assert two == two_again
    assert one != two


@pytest.mark.parametrize("precision", BYTES)
def test_ddp_reduces_gradients_once_per_step_and_in_fp32(facts_of, precision):
    """The gradients of three micro batches are summed before they are reduced; the loss is one more number."""
    fact = facts_of("ddp")["baseline"][precision]
    _, payload_bytes = fact["traffic"]["all_reduce"]
    assert payload_bytes == 4 * (fact["held"][0] + 1)


def test_the_bucket_size_is_respected(facts_of):
    calls, payload_bytes = facts_of("ddp")["ways"]["usual"]["traffic"]["all_reduce"]
    more_calls, same_bytes = facts_of("ddp")["ways"]["small buckets"]["traffic"]["all_reduce"]
    assert calls == 2  # one bucket, into which everything fits, and the loss
    assert more_calls > 4
    assert same_bytes == payload_bytes


def padded_elements(parameters: dict[str, list[int]], prefix: str = "") -> int:
    """Elements that are sent of the parameters whose names start with ``prefix``, each padded to equal shards."""
    return sum(
        -(-rows // RANKS) * RANKS * math.prod(rest)
        for name, (rows, *rest) in parameters.items()
        if name.startswith(prefix)
    )


def test_a_rank_holds_only_its_shards(facts_of):
    """Also after a validation, which ends with a forward pass."""
    fact = facts_of("fsdp")["baseline"]["fp32"]
    whole = sum(math.prod(shape) for shape in fact["parameters"].values())
    assert sum(fact["held"]) == whole
    assert max(fact["held"]) - min(fact["held"]) == 32  # a row of the 63 positions
    assert fact["left_whole"] == []


@pytest.mark.parametrize("precision", BYTES)
def test_blocks_are_gathered_for_every_pass_and_gradients_reduced_once(facts_of, precision):
    """The root's weights, embeddings and last LayerNorm, are gathered once in a step."""
    fact = facts_of("fsdp")["baseline"][precision]
    everything, blocks = padded_elements(fact["parameters"]), padded_elements(fact["parameters"], "blocks.")
    passes = 2 * ACCUMULATION
    gathered = (everything - blocks + passes * blocks) * BYTES[precision]
    assert fact["traffic"]["all_gather"] == [1 + passes * LAYERS, gathered]
    assert fact["traffic"]["reduce_scatter"] == [1 + LAYERS, everything * 4]


def test_kept_weights_are_gathered_once_in_a_step(facts_of):
    parameters = facts_of("fsdp")["baseline"]["bf16"]["parameters"]
    way = facts_of("fsdp")["ways"]["no reshard"]
    assert way["traffic"]["all_gather"] == [1 + LAYERS, padded_elements(parameters) * 2]
    assert way["traffic"]["reduce_scatter"] == [1 + LAYERS, padded_elements(parameters) * 4]


def test_a_reduction_in_low_precision_sends_half_the_bytes_and_rounds(facts_of):
    usual, low = facts_of("fsdp")["ways"]["usual"], facts_of("fsdp")["ways"]["low reduce"]
    calls, payload_bytes = usual["traffic"]["reduce_scatter"]
    assert low["traffic"]["reduce_scatter"] == [calls, payload_bytes / 2]
    for one, two in zip(usual["steps"], low["steps"], strict=True):
        assert two[:2] == pytest.approx(one[:2], rel=1e-2)
        assert two[1] != one[1]


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
    ours = (zero.ContiguousColumnParallel, zero.ContiguousRowParallel)
    for total in sums(*ours, LAYOUTS[layout]):
        assert (total == PEERS).all()


def test_deepspeeds_own_classes_lose_sums_that_are_not_contiguous(peers):
    """If this fails, DeepSpeed is fixed, and our classes can be removed."""
    for total in sums(zero._COLUMN, zero._ROW, LAYOUTS["transposed"]):
        assert (total == 1).all()


def test_deepspeeds_layers_use_our_classes(monkeypatch):
    for name in ("ColumnParallel", "RowParallel"):
        monkeypatch.setattr(layers, name, getattr(layers, name))  # put back afterwards
    for _ in range(2):
        zero.reduce_contiguous()
        assert layers.ColumnParallel is zero.ContiguousColumnParallel
        assert layers.RowParallel is zero.ContiguousRowParallel


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
    topology = Topology(rank=0, local_rank=0, world_size=2, local_world_size=2, launcher="deepspeed")
    config = resolved(command_line(folder, run_type="optimized"), topology)
    return replace(config, topology=topology.split(ParallelSizes(tensor=tensor)))


@pytest.mark.parametrize(("tensor", "place"), [(1, "meta"), (2, "cpu")])
def test_a_whole_model_stays_in_host_memory_where_tensor_ranks_will_split_it(tmp_path, tensor, place):
    """The device ``meta`` represents a GPU, which the model might not fit on."""
    model = zero._build_whole(config_of(tmp_path, tensor=tensor), torch.device("meta"))
    assert {parameter.device.type for parameter in model.parameters()} == {place}


# Which weights count as whole on a rank, for checks that all ranks hold the same.


def test_weights_that_are_still_being_gathered_are_left_out():
    """ZeRO-3 gathers weights for the next pass. The memory has its full size before the other ranks' parts arrive."""
    strategy = object.__new__(Zero)
    strategy._topology = read_topology({})
    strategy._parameters = {}
    for name, elements, status in (
        ("kept", 3, ZeroParamStatus.AVAILABLE),
        ("coming", 3, ZeroParamStatus.INFLIGHT),
        ("split", 0, ZeroParamStatus.NOT_AVAILABLE),
    ):
        parameter = strategy._parameters[name] = nn.Parameter(torch.ones(elements))
        parameter.ds_shape, parameter.ds_status = torch.Size([3]), status
    strategy._parameters["plain"] = nn.Parameter(torch.ones(3))
    assert [name for name, _ in strategy.replicated_weights()] == ["kept", "plain"]

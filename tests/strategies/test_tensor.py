"""How tensor parallelism corrects DeepSpeed's sums over ranks, and where its model is made."""

from dataclasses import replace

import pytest
import torch
from deepspeed.module_inject import layers
from small_run import RECIPE, command_line, write_data, write_recipe

from dsgpt.config.options import parse_arguments
from dsgpt.config.run_config import RunConfig, resolve
from dsgpt.machine.topology import ParallelSizes, Topology
from dsgpt.strategies.deepspeed import state as tensor_layout
from dsgpt.strategies.deepspeed import tensor as tensor_reduction
from dsgpt.strategies.deepspeed import zero

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

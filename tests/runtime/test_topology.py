"""The index of a rank in every dimension, compared with DeepSpeed's layouts."""

import socket
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from dsgpt.common.errors import UserError
from dsgpt.machine import topology
from dsgpt.machine.process_group import joined
from dsgpt.machine.topology import ParallelSizes, Topology, free_port


def place(rank: int, world_size: int, **sizes: int) -> Topology:
    process = Topology(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size, launcher="x")
    return process.split(ParallelSizes(**sizes))


def test_without_a_split_every_rank_reads_its_own_data():
    places = [place(rank, 4) for rank in range(4)]
    assert [one.data_rank for one in places] == [0, 1, 2, 3]
    assert {(one.data_parallel_size, one.stage, one.tensor_rank, one.sequence_rank) for one in places} == {(4, 0, 0, 0)}


@pytest.mark.parametrize("data", [1, 2, 3])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("pipeline", [1, 2, 4])
def test_layout_is_deepspeeds(pipeline, tensor, data):
    theirs = PipeModelDataParallelTopology(num_pp=pipeline, num_mp=tensor, num_dp=data)
    world = pipeline * tensor * data
    for rank in range(world):
        ours = place(rank, world, pipeline=pipeline, tensor=tensor)
        assert ours.data_parallel_size == data
        assert (ours.stage, ours.data_rank, ours.tensor_rank) == tuple(theirs.get_coord(rank))


def test_sequence_peers_are_neighbours_with_the_same_data():
    places = [place(rank, 6, sequence=3) for rank in range(6)]
    assert [one.sequence_rank for one in places] == [0, 1, 2, 0, 1, 2]
    assert [one.data_rank for one in places] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [({}, "1"), ({"tensor": 2}, "tensor 2"), ({"tensor": 2, "pipeline": 4}, "pipeline 4 x tensor 2")],
)
def test_sizes_in_words(sizes, words):
    assert str(ParallelSizes(**sizes)) == words


def test_a_free_port_is_none_that_a_connection_could_take_meanwhile(monkeypatch):
    first_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert free_port() < first_of_connections
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(topology, "_FIRST_PORT", port)
        monkeypatch.setattr(topology, "_first_port_of_connections", lambda: port + 1)
        assert free_port() != port
    monkeypatch.setattr(topology, "_first_port_of_connections", lambda: port)
    assert free_port() >= first_of_connections


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "the variable RANK is 2, but WORLD_SIZE is 2: "),
        ({"RANK": "1"}, "the variable RANK is 1, but WORLD_SIZE is 1: "),
        ({"WORLD_SIZE": "2"}, "the variable WORLD_SIZE is 2, but RANK is not set: "),
        ({"WORLD_SIZE": "two"}, "the variable WORLD_SIZE is 'two', not a whole number: "),
    ],
)
def test_variables_that_no_launcher_sets_are_refused(variables, said):
    """Otherwise the ranks wait for each other for ever, or PyTorch ends with a traceback."""
    with pytest.raises(UserError) as caught:
        topology.read_topology(variables)
    (line,) = caught.value.problems
    assert line.startswith(said)


def test_ranks_that_cannot_meet_are_refused(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with (
        pytest.raises(UserError, match=r"^not set: MASTER_ADDR, MASTER_PORT, "),
        joined(place(0, 2), torch.device("cpu")),
    ):
        pass

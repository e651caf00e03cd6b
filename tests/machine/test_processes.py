"""Processes: their place among the ranks, their launcher, their group, and how they leave."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from forked_ranks import run_script
from small_run import REPOSITORY

from dsgpt.common.errors import UserError
from dsgpt.machine import topology
from dsgpt.machine.device import joined
from dsgpt.machine.launcher import launcher_command, starts_launcher
from dsgpt.machine.topology import ParallelSizes, Topology, free_port

# The index of a rank in every dimension, compared with DeepSpeed's layouts.


def place(rank: int, world_size: int, **sizes: int) -> Topology:
    process = Topology(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size, launcher="x")
    return process.split(ParallelSizes(**sizes))


def test_sequence_peers_are_neighbours_with_the_same_data():
    places = [place(rank, 6, sequence=3) for rank in range(6)]
    assert [(one.data_rank, one.sequence_rank) for one in places] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert {(one.data_parallel_size, one.stage, one.tensor_rank) for one in places} == {(2, 0, 0)}
    assert str(places[0].sizes) == "sequence 3"


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


def test_places_on_the_second_machine_are_those_of_the_whole_launch():
    second = Topology(rank=5, local_rank=1, world_size=12, local_world_size=4, launcher="x")
    one, other = second.split(ParallelSizes(sequence=3)), second.split(ParallelSizes(tensor=3))
    assert (one.sequence_rank, one.data_rank, one.machine) == (2, 1, 1)
    assert (other.tensor_rank, other.data_rank, other.is_main) == (2, 1, False)


def test_a_free_port_is_none_that_a_connection_could_take_meanwhile(monkeypatch):
    first_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert free_port() < first_of_connections
    monkeypatch.setattr(topology, "_FIRST_PORT", first_of_connections)  # none is free below
    assert free_port() >= first_of_connections


def test_variables_that_no_launcher_sets_are_refused(monkeypatch):
    """Otherwise the ranks wait for each other for ever, or PyTorch ends with a traceback."""
    for variables, said in (
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"^the variable RANK is 2, but WORLD_SIZE is 2: .*$"),
        ({"WORLD_SIZE": "2"}, r"^the variable WORLD_SIZE is 2, but RANK is not set: .*$"),
        ({"WORLD_SIZE": "two"}, r"^the variable WORLD_SIZE is 'two', not a whole number: .*$"),
    ):
        with pytest.raises(UserError, match=said):
            topology.read_topology(variables)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(UserError, match=r"^not set: MASTER_ADDR, MASTER_PORT, "):
        joined(place(0, 2), torch.device("cpu")).__enter__()


# Joining and leaving the group of all ranks.


# A group belongs to the whole process, so each test starts a new process.
CODE = """
import os, sys
import torch, torch.distributed as dist
from dsgpt.machine.launcher import exit_rank
from dsgpt.machine.device import joined
from dsgpt.machine.topology import read_topology

topology = read_topology()
try:
    with joined(topology, torch.device("cpu")):
        print(*(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")))
        if sys.argv[1] == "fail":
            raise ArithmeticError
except ArithmeticError:
    pass
print("left" if dist.is_initialized() else "destroyed")
exit_rank(0)
"""


@pytest.mark.parametrize(("end", "state"), [("well", "destroyed"), ("fail", "left")])
def test_a_single_process_forms_a_group_whatever_an_earlier_job_has_left(tmp_path, end, state):
    script = tmp_path / "one.py"
    script.write_text(CODE)
    clean = {key: value for key, value in os.environ.items() if "RANK" not in key and not key.startswith("MASTER_")}
    done = run_script(script, [end], environment=clean | {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"})
    assert done.stdout.split("\n")[:2] == ["0 0 1 127.0.0.1", state]


# Launcher commands are recognised, and a rank notices the end of every process of its launcher.


RANK = """
from dsgpt.machine.launcher import Launcher
launcher = Launcher()
print(launcher.is_gone(), flush=True)
input()
print(launcher.is_gone(), flush=True)
"""
START = "import os, subprocess; print({name!r}, os.getpid(), flush=True); subprocess.call({command!r})"
"""A process that starts ``command`` on the same input and output, and waits for it."""


@pytest.mark.parametrize(("launcher", "count"), [("deepspeed", "--num_gpus"), ("torchrun", "--nproc_per_node")])
def test_a_launcher_command_is_recognised(launcher, count):
    words = launcher_command(launcher, 2, "--no_such_flag")
    assert starts_launcher([*words, "src/gpt2.py"])
    assert Path(words[0]).exists() and words[words.index(count) + 1] == "2" and words[-1] == "--no_such_flag"
    assert not starts_launcher([*launcher_command("python", 1), "src/gpt2.py"])


def test_deepspeed_starts_ranks_on_the_visible_gpus(monkeypatch, tmp_path):
    """It ignores CUDA_VISIBLE_DEVICES where --num_gpus is given, and would take others."""
    monkeypatch.setattr("dsgpt.machine.launcher.NVIDIA_DRIVER", tmp_path)
    for visible, ranks, *given in (
        ("2,3", 1, "--include", "localhost:2"),
        ("2,3", 2, "--include", "localhost:2,3"),
        ("", 2, "--num_gpus", "2"),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert launcher_command("deepspeed", ranks)[2:4] == given


@pytest.mark.parametrize(("killed", "noticed"), [("shell", "False"), ("torchrun", "True"), ("agent", "True")])
def test_the_end_of_each_process_up_to_the_launcher_is_noticed(tmp_path: Path, killed: str, noticed: str):
    """A shell starts torchrun, which starts an agent, which starts the rank. A shell may end before its run."""
    script = tmp_path / "torchrun"
    agent = START.format(name="agent", command=[sys.executable, "-c", RANK])
    script.write_text(START.format(name="torchrun", command=[sys.executable, "-c", agent]))
    shell = START.format(name="shell", command=[sys.executable, str(script)])
    with subprocess.Popen(
        [sys.executable, "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        pids = {name: int(pid) for name, pid in [process.stdout.readline().split() for _ in range(3)]}
        assert process.stdout.readline() == "False\n"
        dying = psutil.Process(pids[killed])
        dying.kill()
        dying.wait(timeout=60)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{noticed}\n"


# Every process that joined a group ends at once: an ordinary exit aborts about one in a hundred.


CELLS = "src/dsgpt/benchmarks/launch.py"
ENDED_BY = {
    "src/dsgpt/training/run.py": "src/gpt2.py",
    **{f"src/dsgpt/benchmarks/{name}.py": CELLS for name in ("parity_rank", "plan_rank", "resume")},
    "tests/strategies/strategy_worker.py": CELLS,
}
"""For a file that joins a group, another file whose last line the process reaches."""


def test_whoever_joins_a_group_leaves_at_once():
    files = [*REPOSITORY.glob("src/**/*.py"), *REPOSITORY.glob("tests/**/*.py")]
    texts = {str(file.relative_to(REPOSITORY)): file.read_text(encoding="utf-8") for file in files}
    joins = r"(?<!def )\bjoined(\((?:config\.)?topology|_run\()"
    joining = {name for name, text in texts.items() if re.search(joins, text)}
    assert joining > ENDED_BY.keys()
    for name in joining:
        assert re.search(r"\bexit_rank\((\d|train\()", texts[ENDED_BY.get(name, name)]), name


def test_it_writes_what_was_printed_and_runs_nothing_more():
    code = "from dsgpt.machine.launcher import exit_rank; import atexit; atexit.register(print, 'more'); "
    code += "print('all'); exit_rank(3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (3, "all\n")

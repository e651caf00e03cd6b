"""Processes: their place among the ranks, their launcher, their group, and how they leave."""

import os
import re
import socket
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


@pytest.mark.parametrize(
    ("world", "sizes", "data_ranks", "sequence_ranks"),
    [(4, {}, [0, 1, 2, 3], [0] * 4), (6, {"sequence": 3}, [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2])],
    ids=["own data without a split", "sequence peers are neighbours with the same data"],
)
def test_ranks_without_stages_and_tensor_ranks(world, sizes, data_ranks, sequence_ranks):
    places = [place(rank, world, **sizes) for rank in range(world)]
    assert [one.data_rank for one in places] == data_ranks
    assert [one.sequence_rank for one in places] == sequence_ranks
    assert {(one.data_parallel_size, one.stage, one.tensor_rank) for one in places} == {(max(data_ranks) + 1, 0, 0)}


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
@pytest.mark.parametrize("leftover", [{}, {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}])
def test_a_single_process_forms_a_group(tmp_path, end, state, leftover):
    script = tmp_path / "one.py"
    script.write_text(CODE)
    clean = {key: value for key, value in os.environ.items() if "RANK" not in key and not key.startswith("MASTER_")}
    done = run_script(script, [end], environment=clean | leftover)
    assert done.stdout.split("\n")[:2] == ["0 0 1 127.0.0.1", state]


RANKS = """
import torch
from dsgpt.machine.launcher import exit_rank
from dsgpt.machine.device import HostGroup, joined
from dsgpt.machine.topology import read_topology

topology = read_topology()
with joined(topology, torch.device("cpu")):
    ranks = HostGroup()
    values, largest = ranks.gathered([topology.rank + 0.1, 2]), ranks.largest(topology.rank)
    if topology.rank == 0:
        print(values, largest)
exit_rank(0)
"""


def test_every_rank_learns_what_the_others_have(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    done = run_script(script, [], ranks=2)
    assert done.stdout == "[[0.1, 2.0], [1.1, 2.0]] 1\n"


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


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_launcher_command_is_recognised(launcher):
    words = launcher_command(launcher, 2, "--no_such_flag")
    assert starts_launcher([*words, "src/gpt2.py"])
    assert Path(words[0]).exists() and words[1:3] in (["--num_gpus", "2"], ["--nproc_per_node", "2"])
    assert words[-1] == "--no_such_flag"


def test_one_process_needs_no_launcher():
    assert launcher_command("python", 1) == [sys.executable]
    assert not starts_launcher([sys.executable, "src/gpt2.py"])


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
        words = [process.stdout.readline().split() for _ in range(3)]
        pids = {name: int(pid) for name, pid in words}
        assert process.stdout.readline() == "False\n"
        dying = psutil.Process(pids[killed])
        dying.kill()
        dying.wait(timeout=60)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{noticed}\n"


# Every process that joined a group ends at once: an ordinary exit aborts about one in a hundred.


TRAINING, CELLS = "src/gpt2.py", "src/dsgpt/benchmarks/launch.py"
CONTENDERS = "src/dsgpt/benchmarks/contenders.py"
ENDED_BY = {
    "src/dsgpt/training/run.py": TRAINING,
    "src/dsgpt/planner/calibrate.py": "src/dsgpt/planner/calibrate.py",
    "src/dsgpt/benchmarks/parity_rank.py": CELLS,
    "src/dsgpt/benchmarks/plan_rank.py": CELLS,
    "src/dsgpt/benchmarks/resume_rank.py": CELLS,
    CONTENDERS: CONTENDERS,
    "tests/machine/test_processes.py": "tests/machine/test_processes.py",
    "tests/strategies/strategy_worker.py": CELLS,
    "tests/strategies/torch_on_ranks.py": "tests/strategies/torch_on_ranks.py",
    "tests/training/test_loss_scaling.py": "tests/training/test_loss_scaling.py",
}
"""For each file that joins a group, the file whose last line the process reaches."""


JOINS = re.compile(r"(?<!def )\bjoined\((?:config\.)?topology")


def test_whoever_joins_a_group_leaves_at_once():
    files = [*REPOSITORY.glob("src/**/*.py"), *REPOSITORY.glob("tests/**/*.py")]
    texts = {str(file.relative_to(REPOSITORY)): file.read_text(encoding="utf-8") for file in files}
    joining = {name: len(JOINS.findall(text)) for name, text in texts.items() if JOINS.search(text)}
    assert set(joining) == set(ENDED_BY)
    for name, ender in ENDED_BY.items():
        processes = joining[name] if name == ender else 1
        assert len(re.findall(r"\bexit_rank\(\d", texts[ender])) >= processes or ender == TRAINING, name
    assert "exit_rank(train(" in texts[TRAINING]


def test_it_writes_what_was_printed_and_runs_nothing_more():
    code = "from dsgpt.machine.launcher import exit_rank; import atexit; atexit.register(print, 'more'); "
    code += "print('all'); exit_rank(3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (3, "all\n")

"""Joining and leaving the group of all ranks."""

import os

import pytest
from forked_ranks import run_script

# A group belongs to the whole process, so each test starts a new process.
CODE = """
import os, sys
import torch, torch.distributed as dist
from dsgpt.machine.launcher import leave
from dsgpt.machine.process_group import joined
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
leave(0)
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
from dsgpt.machine.launcher import leave
from dsgpt.machine.process_group import HostGroup, joined
from dsgpt.machine.topology import read_topology

topology = read_topology()
with joined(topology, torch.device("cpu")):
    ranks = HostGroup()
    values, largest = ranks.gathered([topology.rank + 0.1, 2]), ranks.largest(topology.rank)
    if topology.rank == 0:
        print(values, largest)
leave(0)
"""


def test_every_rank_learns_what_the_others_have(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    done = run_script(script, [], ranks=2)
    assert done.stdout == "[[0.1, 2.0], [1.1, 2.0]] 1\n"

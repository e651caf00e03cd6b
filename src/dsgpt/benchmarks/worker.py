"""A rank of a suite: ``python -m dsgpt.benchmarks.worker JOB``, under ``torchrun``, ``deepspeed`` or alone.

A launch takes seconds, most of them imports, so one launch serves many cells. The ranks of a cell join a new process
group, and nothing that one cell leaves behind reaches another. ``launch.Start`` says how a cell's ranks start.

A cell names the function that its ranks call; see ``launch.Assignment``.
"""

import argparse
import functools
import gc
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.launch import ELSEWHERE, PORT_FILE, Alive, Start, fork, killed_on_error, run_cell, spawn, watch
from dsgpt.common.files import write_atomic, write_json_atomic
from dsgpt.machine.launcher import exit_rank
from dsgpt.machine.topology import Topology, free_port, read_topology

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""With this variable ranks meet in torchrun's own store, which serves one process group, not many."""
OF_A_RANK = (*ELSEWHERE, "RANK", "WORLD_SIZE", "CROSS_")
"""Prefixes of the variables that a launcher sets for a rank."""
POLL_SEC = 0.02


def main(arguments: list[str]) -> int:
    """Run every cell of the job. The exit code is always 0, because each cell's folder says how it ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("--local_rank", type=int, help="from launchers; the environment has it too")
    parser.add_argument("--cell", type=int, help="run this one alone, in this process, which is a spawned child")
    given = parser.parse_args(arguments)
    job = json.loads(given.job.read_text(encoding="utf-8"))
    topology = read_topology()
    if given.cell is not None:
        run_cell(job["cells"][given.cell], topology.rank)
        exit_rank(0)
    alive = Alive(runner=job["runner"])
    if job["start"] == Start.FORK_ALL:
        _fork_all(job, given.job, topology, alive)
    else:
        _run_own(job, given.job, topology, alive)
    return 0


def _fork_all(job: dict[str, Any], job_file: Path, topology: Topology, alive: Alive) -> None:
    """On rank 0, run all ranks of every cell; the other ranks wait for it."""
    finished = job_file.with_suffix(".finished")
    if topology.rank != 0:
        write_json_atomic(_variables_file(job_file, topology.rank), _variables_of_this_rank())
        alive.wait_for(finished)
        return
    _import_once(job["imports"])
    ranks = {0: _variables_of_this_rank()}
    for rank in range(1, topology.world_size):
        alive.wait_for(_variables_file(job_file, rank))
        ranks[rank] = json.loads(_variables_file(job_file, rank).read_text(encoding="utf-8"))
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(OF_A_RANK)}
    for cell in job["cells"]:
        meeting = _meeting(free_port())
        write_atomic(Path(cell["folder"]) / PORT_FILE, meeting["MASTER_PORT"].encode())
        children: dict[int, int] = {}
        with killed_on_error(children):
            for rank, variables in ranks.items():
                children[rank] = fork(cell, rank, inherited | variables | meeting)
            watch(children, cell, ranks=topology.world_size, alive=alive)
    write_atomic(finished, b"")


def _run_own(job: dict[str, Any], job_file: Path, topology: Topology, alive: Alive) -> None:
    """Run this rank of every cell."""
    forks = job["start"] == Start.FORK_OWN
    if forks:
        _import_once(job["imports"])
    environment = {key: value for key, value in os.environ.items() if key != AGENT_STORE}
    for index, cell in enumerate(job["cells"]):
        port_file = Path(cell["folder"]) / PORT_FILE
        if topology.rank == 0:  # just before use: another process may take a port that was found earlier
            write_atomic(port_file, str(free_port()).encode())
        alive.wait_for(port_file)
        module = [job["worker"], str(job_file), "--cell", str(index)]
        variables = environment | _meeting(int(port_file.read_text(encoding="utf-8")))
        rank = topology.rank
        children = {rank: fork(cell, rank, variables) if forks else spawn(module, cell, rank, variables)}
        with killed_on_error(children):
            watch(children, cell, ranks=topology.world_size, alive=alive)


def _import_once(modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    if "deepspeed" in modules:
        identify_cpu_once()
    gc.collect()
    gc.freeze()  # else every collection of a child touches, and so copies, the memory of all that was imported


def identify_cpu_once() -> None:
    """Identify the CPU now, and let forked children reuse the answer.

    DeepSpeed's CPU Adam calls ``get_cpu_info`` whenever it is built, and the function sleeps for a second to measure
    the clock rate.
    """
    cpuinfo: Any = importlib.import_module("cpuinfo")
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()


def _variables_of_this_rank() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key.startswith(OF_A_RANK) and key != AGENT_STORE}


def _variables_file(job_file: Path, rank: int) -> Path:
    return job_file.with_suffix(f".variables-{rank}")


def _meeting(port: int) -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _on_sigterm(_number: int, _frame: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _on_sigterm)
    sys.exit(main(sys.argv[1:]))

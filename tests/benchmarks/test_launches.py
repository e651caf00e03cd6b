"""What happens around the trainings: refusals and crashes are results, and no process is left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from small_run import REPOSITORY, command_line, within

from dsgpt.benchmarks import launch as launching
from dsgpt.benchmarks.launch import Assignment, CellStart, Launch, child_environment, read_ranks, run_job

START_A_JOB = """
import json, sys
from pathlib import Path
from dsgpt.benchmarks.launch import Assignment, Launch, run_job

assignments = [Assignment(**fields) for fields in json.loads(sys.argv[1])]
list(run_job(Launch(launcher="python", ranks=1, cells=1), assignments, job_file=Path(sys.argv[2]), device="cpu"))
"""
WORKER = """
import sys, time
from dsgpt.benchmarks import launch
from dsgpt.machine.topology import read_topology

def fail_or_wait(flags, folder):
    if read_topology().rank == 0:
        raise RuntimeError("this rank fails")
    time.sleep(600)

def note_hash(flags, folder):
    launch.write_end(folder, read_topology().rank, hash=hash("a string"))

if __name__ == "__main__":
    launch.PATIENCE_SEC = 1
    sys.exit(launch.main(sys.argv[1:]))
"""
IDLE_WORKER = "import time; time.sleep(600)"
CALL = "dsgpt.benchmarks.parity_rank:train_cell"


@pytest.fixture
def assignment(here):
    """A function from changes of a small baseline's command line to an assignment."""

    def make(name: str, *, bug: str = "", **changes) -> Assignment:
        folder = here / name
        folder.mkdir()
        words = command_line(here, **changes)
        return Assignment(folder=str(folder), flags=words, call=CALL, arguments={"bug": bug})

    return make


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A function that replaces the module that ranks of a launch run; it returns the module's name."""

    def replace_by(text: str) -> str:
        (tmp_path / "stand_in_worker.py").write_text(text, encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setattr(launching, "WORKER", "stand_in_worker")
        return "stand_in_worker"

    return replace_by


def ends(*cells: Assignment, ranks: int = 1) -> list[dict]:
    """The files of all ranks of the cells."""
    return [end for cell in cells for end in read_ranks(Path(cell.folder), ranks)]


@pytest.mark.long
def test_every_end_is_a_result_and_the_next_training_runs(assignment, tmp_path):
    cells = [
        assignment("refused", seq_length=1000),
        assignment("crashed", bug="there-is-no-such-bug"),
        assignment("killed", max_train_steps=100_000),
        assignment("done"),
    ]
    launch = Launch(launcher="python", ranks=1, cells=4)
    coming = run_job(launch, cells, job_file=tmp_path / "job.json", device="cpu")
    assert [next(coming)[0], next(coming)[0]] == [0, 1]
    with ThreadPoolExecutor(1) as thread:
        third = thread.submit(next, coming)
        within((tmp_path / "killed" / launching.PORT_FILE).exists, seconds=120)  # the others have ended
        trained = within(lambda: trainings(os.getpid(), tmp_path / "job.json"), seconds=120)
        trained[0].send_signal(signal.SIGKILL)
        assert third.result()[0] == 2
    assert [index for index, _ in coming] == [3]
    refused, crashed, killed, done = ends(*cells)
    assert refused["status"] == "refused"
    assert "--seq_length 1000 is longer than" in refused["message"]
    assert (crashed["status"], crashed["message"]) == ("error", "KeyError: 'there-is-no-such-bug'")
    assert "Traceback" in (tmp_path / "crashed" / "rank-0.log").read_text()
    assert killed["message"] == "rank 0 was killed by signal 9"
    assert done["status"] == "done"
    assert len(done["steps"]) == 2


@pytest.mark.long
def test_ranks_end_with_the_first_that_fails(assignment, worker, tmp_path):
    """As on GPUs: the other rank does not wait half an hour for one that failed, and the next training runs."""
    module = worker(WORKER)
    calls = {"one fails": f"{module}:fail_or_wait", "done": f"{module}:note_hash"}
    cells = [replace(assignment(name), call=call, arguments={}) for name, call in calls.items()]
    launch = Launch(launcher="torchrun", ranks=2, cells=2)
    finished = list(run_job(launch, cells, job_file=tmp_path / "job.json", device="cpu", start=CellStart.SPAWN))
    assert [index for index, _ in finished] == [0, 1]
    failed, waiting, *done = ends(*cells, ranks=2)
    assert (failed["status"], failed["message"]) == ("error", "RuntimeError: this rank fails")
    assert (waiting["status"], waiting["message"]) == ("error", "rank 1 was killed by signal 9")
    assert [end["status"] for end in done] == ["done", "done"]


@pytest.mark.long
def test_two_ranks_differ_as_two_pythons_do(worker, tmp_path, monkeypatch):
    """Code that uses the order of a set would give every rank the same order if all were forked from one Python."""
    call = f"{worker(WORKER)}:note_hash"
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (tmp_path / "cell").mkdir()
    cell = Assignment(folder=str(tmp_path / "cell"), flags=[], call=call)
    launch = Launch(launcher="torchrun", ranks=2, cells=1)
    assert len(list(run_job(launch, [cell], job_file=tmp_path / "job.json", device="cpu", imports=[]))) == 1
    one, other = ends(cell, ranks=2)
    assert one["hash"] != other["hash"]


def test_a_launch_that_does_nothing_is_ended(assignment, worker, tmp_path, monkeypatch):
    worker(IDLE_WORKER)
    monkeypatch.setattr(launching, "STUCK_SEC", 1)
    launch = Launch(launcher="python", ranks=1, cells=1)
    assert list(run_job(launch, [assignment("never")], job_file=tmp_path / "job.json", device="cpu")) == []
    assert "no training ended within 1 s" in (tmp_path / "job.log").read_text()


def test_a_launcher_around_the_suite_does_not_reach_its_ranks(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "SLURM_PROCID", "DS_SKIP"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("KEPT", "7")
    ours = child_environment("cpu")
    assert ours["KEPT"] == "7"
    assert (ours["OMP_NUM_THREADS"], ours["DS_ACCELERATOR"]) == ("1", "cpu")
    assert "7" not in {value for name, value in ours.items() if name.startswith(("DS_", *launching.ELSEWHERE))}
    assert not {"RANK", "WORLD_SIZE"} & ours.keys()
    assert not {"RANK", "OMP_NUM_THREADS", "DS_ACCELERATOR"} & child_environment().keys()


@pytest.mark.long
def test_the_ranks_of_a_killed_suite_exit(assignment, tmp_path):
    endless = json.dumps([asdict(assignment("endless", max_train_steps=100_000))])
    suite = subprocess.Popen([sys.executable, "-c", START_A_JOB, endless, str(tmp_path / "job.json")], cwd=REPOSITORY)
    try:
        trained = within(lambda: trainings(suite.pid, tmp_path / "job.json"), seconds=120)
        ranks = [*trained, *(child.parent() for child in trained)]
    finally:
        suite.send_signal(signal.SIGKILL)
        suite.wait()
    within(lambda: not any(alive(rank) for rank in ranks), seconds=30)


def trainings(pid: int, job_file: Path) -> list[psutil.Process]:
    """The forked children below process ``pid`` in which workers of ``job_file`` train.

    A fork has the command line of its worker. Programs that are started by imports have their own.
    """
    ranks = {}
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if str(job_file) in process.cmdline():
                ranks[process.pid] = process
    return [process for process in ranks.values() if process.ppid() in ranks]


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

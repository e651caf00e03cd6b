"""What happens around the trainings: refusals and crashes are results, and no process is left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from small_run import REPOSITORY, command_line, write_data, write_recipe

from dsgpt.benchmarks import launch as launching
from dsgpt.benchmarks.launch import Assignment, Launch, Start, environment_for, read_rank, run_job

START_A_JOB = """
import json, sys
from pathlib import Path
from dsgpt.benchmarks.launch import Assignment, Launch, environment_for, run_job

assignments = [Assignment(**fields) for fields in json.loads(sys.argv[1])]
list(run_job(Launch(launcher="python", ranks=1, cells=1), assignments, job_file=Path(sys.argv[2]), device="cpu"))
"""

FAILING_WORKER = """
import sys, time
from dsgpt.benchmarks import launch as children
from dsgpt.benchmarks import worker
from dsgpt.machine.topology import read_topology

def fail_or_wait(flags, folder):
    if read_topology().rank == 0:
        raise RuntimeError("this rank fails")
    time.sleep(600)

if __name__ == "__main__":
    children.PATIENCE_SEC = 1
    sys.exit(worker.main(sys.argv[1:]))
"""
HASHING_WORKER = """
import sys
from dsgpt.benchmarks import worker
from dsgpt.benchmarks.launch import rank_file
from dsgpt.common.files import write_json_atomic
from dsgpt.machine.topology import read_topology

def note_hash(flags, folder):
    write_json_atomic(rank_file(folder, read_topology().rank), {"status": "done", "hash": hash("a string")})

if __name__ == "__main__":
    sys.exit(worker.main(sys.argv[1:]))
"""
CALL = "dsgpt.benchmarks.parity_rank:train_cell"


@pytest.fixture
def assignment(tmp_path):
    """A function from changes of a small baseline's command line to an assignment."""
    write_recipe(write_data(tmp_path) / "recipe.json")

    def make(name: str, *, bug: str = "", **changes) -> Assignment:
        folder = tmp_path / name
        folder.mkdir()
        words = command_line(tmp_path, **changes)
        return Assignment(folder=str(folder), flags=words, call=CALL, arguments={"bug": bug})

    return make


def test_every_end_is_a_result_and_the_next_training_runs(assignment, tmp_path):
    cells = [
        assignment("refused", seq_length=1000),
        assignment("crashed", bug="there-is-no-such-bug"),
        assignment("done"),
    ]
    launch = Launch(launcher="python", ranks=1, cells=3)
    finished = list(run_job(launch, cells, job_file=tmp_path / "job.json", device="cpu"))
    assert [index for index, _ in finished] == [0, 1, 2]
    refused, crashed, done = (read_rank(Path(cell.folder), 0) for cell in cells)
    assert refused["status"] == "refused"
    assert "--seq_length 1000 is longer than" in refused["message"]
    assert (crashed["status"], crashed["message"]) == ("error", "KeyError: 'there-is-no-such-bug'")
    assert "Traceback" in (tmp_path / "crashed" / "rank-0.log").read_text()
    assert done["status"] == "done"
    assert len(done["steps"]) == 2


@pytest.mark.parametrize("start", [Start.FORK_ALL, Start.SPAWN])
def test_ranks_end_with_the_first_that_fails(assignment, tmp_path, monkeypatch, start):
    """As on GPUs: the other rank does not wait half an hour for one that failed, and the next training runs."""
    (tmp_path / "failing_worker.py").write_text(FAILING_WORKER, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(launching, "WORKER", "failing_worker")
    failing = replace(assignment("one fails", run_type="ddp"), call="failing_worker:fail_or_wait", arguments={})
    cells = [failing, assignment("done", run_type="ddp")]
    launch = Launch(launcher="torchrun", ranks=2, cells=2)
    finished = list(run_job(launch, cells, job_file=tmp_path / "job.json", device="cpu", start=start))
    assert [index for index, _ in finished] == [0, 1]
    failed, waiting = (read_rank(tmp_path / "one fails", rank) for rank in range(2))
    assert (failed["status"], failed["message"]) == ("error", "RuntimeError: this rank fails")
    assert (waiting["status"], waiting["message"]) == ("error", "rank 1 was killed by signal 9")
    assert [read_rank(tmp_path / "done", rank)["status"] for rank in range(2)] == ["done", "done"]


def test_two_ranks_differ_as_two_pythons_do(tmp_path, monkeypatch):
    """Code that uses the order of a set would give every rank the same order if all were forked from one Python."""
    (tmp_path / "hashing_worker.py").write_text(HASHING_WORKER, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(launching, "WORKER", "hashing_worker")
    (folder := tmp_path / "cell").mkdir()
    cell = Assignment(folder=str(folder), flags=[], call="hashing_worker:note_hash")
    launch = Launch(launcher="torchrun", ranks=2, cells=1)
    assert len(list(run_job(launch, [cell], job_file=tmp_path / "job.json", device="cpu", imports=[]))) == 1
    assert read_rank(folder, 0)["hash"] != read_rank(folder, 1)["hash"]


def test_a_launch_that_does_nothing_is_ended(assignment, tmp_path, monkeypatch):
    (tmp_path / "idle_worker.py").write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(launching, "WORKER", "idle_worker")
    monkeypatch.setattr(launching, "STUCK_SEC", 1)
    launch = Launch(launcher="python", ranks=1, cells=1)
    assert list(run_job(launch, [assignment("never")], job_file=tmp_path / "job.json", device="cpu")) == []
    assert "no training ended within 1 s" in (tmp_path / "job.log").read_text()


def test_a_launcher_around_the_suite_does_not_reach_its_ranks(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "SLURM_PROCID", "DS_SKIP"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("KEPT", "7")
    ours = environment_for("cpu")
    assert ours["KEPT"] == "7"
    assert (ours["OMP_NUM_THREADS"], ours["DS_ACCELERATOR"]) == ("1", "cpu")
    assert "7" not in {value for name, value in ours.items() if name.startswith(("DS_", *launching.ELSEWHERE))}
    assert not {"RANK", "WORLD_SIZE"} & ours.keys()


def test_a_training_whose_process_is_killed(assignment, tmp_path):
    cells = [assignment("killed", max_train_steps=100_000), assignment("next")]
    launch = Launch(launcher="python", ranks=1, cells=2)
    coming = run_job(launch, cells, job_file=tmp_path / "job.json", device="cpu")
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(next, coming)

        def started() -> list[psutil.Process]:
            if first.done():
                first.result()  # raises again what it raised, for example to skip the test
            return trainings(os.getpid(), tmp_path / "job.json")

        training = wait_for(started, seconds=120)[0]
        training.send_signal(signal.SIGKILL)
        assert first.result()[0] == 0
    assert next(coming)[0] == 1
    coming.close()
    assert read_rank(tmp_path / "killed", 0)["message"] == "rank 0 was killed by signal 9"
    assert read_rank(tmp_path / "next", 0)["status"] == "done"


def test_the_ranks_of_a_killed_suite_exit(assignment, tmp_path):
    endless = json.dumps([asdict(assignment("endless", max_train_steps=100_000))])
    suite = subprocess.Popen([sys.executable, "-c", START_A_JOB, endless, str(tmp_path / "job.json")], cwd=REPOSITORY)
    try:
        trained = wait_for(lambda: trainings(suite.pid, tmp_path / "job.json"), seconds=120)
        ranks = [*trained, *(child.parent() for child in trained)]
    finally:
        suite.send_signal(signal.SIGKILL)
        suite.wait()
    wait_for(lambda: not any(alive(rank) for rank in ranks), seconds=30)


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


def wait_for(condition, *, seconds: float):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return value

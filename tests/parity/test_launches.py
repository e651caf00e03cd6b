"""What happens around the trainings: refusals and crashes are results, and nobody is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from small_run import REPOSITORY, command_line, write_data, write_recipe

from dsgpt.parity.launch import Assignment, Launch, run_job
from dsgpt.parity.measurement import read_rank

START_A_JOB = """
import json, sys
from pathlib import Path
from dsgpt.parity.launch import Assignment, Launch, run_job

assignments = [Assignment(**fields) for fields in json.loads(sys.argv[1])]
list(run_job(Launch(launcher="python", ranks=1, cells=1), assignments, job_file=Path(sys.argv[2]), device="cpu"))
"""


@pytest.fixture
def assignment(tmp_path):
    """From what changes in a small baseline's command line to an assignment."""
    write_recipe(write_data(tmp_path) / "recipe.json")

    def make(name: str, *, bug: str = "", **changes) -> Assignment:
        folder = tmp_path / name
        folder.mkdir()
        return Assignment(folder=str(folder), flags=command_line(tmp_path, **changes), bug=bug)

    return make


def test_every_end_is_a_result_and_the_next_training_goes_on(assignment, tmp_path):
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


def test_a_training_whose_process_is_killed(assignment, tmp_path):
    cells = [assignment("killed", max_train_steps=100_000), assignment("next")]
    launch = Launch(launcher="python", ranks=1, cells=2)
    coming = run_job(launch, cells, job_file=tmp_path / "job.json", device="cpu")
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(next, coming)
        _, training = wait_for(lambda: grandchildren(os.getpid()), seconds=120)
        training.send_signal(signal.SIGKILL)
        assert first.result()[0] == 0
    assert next(coming)[0] == 1
    coming.close()
    assert read_rank(tmp_path / "killed", 0)["message"] == "rank 0 was killed by signal 9"
    assert read_rank(tmp_path / "next", 0)["status"] == "done"


def test_a_killed_suite_takes_its_ranks_along(assignment, tmp_path):
    endless = json.dumps([asdict(assignment("endless", max_train_steps=100_000))])
    suite = subprocess.Popen([sys.executable, "-c", START_A_JOB, endless, str(tmp_path / "job.json")], cwd=REPOSITORY)
    try:
        ranks = wait_for(lambda: grandchildren(suite.pid), seconds=120)
    finally:
        suite.send_signal(signal.SIGKILL)
        suite.wait()
    wait_for(lambda: not any(alive(rank) for rank in ranks), seconds=30)


def grandchildren(pid: int) -> list[psutil.Process]:
    """The worker and the child in which it trains, as soon as both are there."""
    found = psutil.Process(pid).children(recursive=True)
    return found if len(found) >= 2 else []


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

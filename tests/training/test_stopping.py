"""Requests to stop a run whose output nobody reads. Other tests of signals: ``tests/benchmarks/faults``."""

import signal
import subprocess
import time

import pytest
from run_folders import LONG, checkpoints, record
from small_run import command_line
from training_runs import SCRIPT

from dsgpt.benchmarks.faults_runs import default_sighup
from dsgpt.common.errors import EXIT_STOPPED
from dsgpt.machine.launcher import launcher_command


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_run_whose_output_is_closed_still_saves(finished_run, tmp_path, number):
    """For example, Ctrl-C ends ``tee`` first in ``... | tee log``, or the terminal was closed."""
    endless = LONG | {"max_train_steps": 100_000, "save_every": 0, "eval_every": 0, "steps_per_print": 1}
    words = command_line(finished_run, **endless, checkpoint_path=tmp_path / "run")
    command = [*launcher_command("python", 1), SCRIPT, *words]
    with default_sighup():
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with run:
        assert any(line.startswith("step ") for line in run.stdout)
        run.stdout.close()
        run.send_signal(number)
        if number == signal.SIGHUP:  # a terminal that is closed sends it again when its shell has gone
            time.sleep(0.3)
            run.send_signal(number)
        assert run.wait(60) == EXIT_STOPPED
    (step,) = checkpoints(tmp_path / "run")
    assert (found := record(tmp_path / "run"))["status"] == "interrupted"
    assert found["summary"]["optimizer_steps"] == step

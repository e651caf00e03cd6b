"""Limits of time and money, the plan beside the run, ``--on_event``, and memory that runs out."""

import json
import re
import shlex
import sys

import pytest
from forked_ranks import run_script
from run_folders import record
from small_run import REPOSITORY, command_line, write_data, write_recipe
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from dsgpt.common.errors import EXIT_NON_FINITE, EXIT_OUT_OF_MEMORY, EXIT_STOPPED, EXIT_USER_ERROR, UserError
from dsgpt.config.options import parse_arguments
from dsgpt.dashboard.summaries import read_recorded
from dsgpt.record.schema import RECORD_FILE

SABOTAGE = """
import os, sys, time
import torch
from dsgpt.training.command import train
from dsgpt.machine.launcher import leave
from dsgpt.training import budget as events
from dsgpt.training.budget import Budget
from dsgpt.training.trainer import Trainer
{}
leave(train(sys.argv[1:]))
"""
"""A stand-in for ``src/gpt2.py``, into which a test puts what cannot happen here, or only after hours."""
LIMIT_ON_THE_LAST_RANK = """
calls = []
def reached(self):
    calls.append(1)
    return "--max_hours 3" if int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1 \
        and len(calls) > 3 else None
Budget.reached = reached
"""
LIMIT_AFTER_ALL_STEPS = """
complete = Trainer._complete
def reached(self):
    Budget.reached = lambda self: "--max_hours 3"
    return complete(self)
Trainer._complete = reached
"""
NO_MEMORY = """
os.environ["TORCHELASTIC_ERROR_FILE"] = "error.json"  # as torchrun names one; its summary ends with what is in it
def fails(*args, **named):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total of 14.56 GiB")
torch.optim.AdamW.step = fails
"""
STALL = """
events.STALLED_SEC = events.STALLED_TIMES = events.POLL_SEC = 0.01
take = Trainer._after_step
def slow(self, step):
    time.sleep(0.5 if step == 3 else 0)
    return take(self, step)
Trainer._after_step = slow
"""
SIGNAL = """
import signal
take = Trainer._after_step
def signalled(self, step):
    if step == 8:
        signal.raise_signal(signal.SIGTERM)
    return take(self, step)
Trainer._after_step = signalled
"""
NOTE = "import sys; open(sys.argv[1], 'a').write(' '.join(sys.argv[2:]) + '\\n')"


@pytest.fixture
def sabotaged(tmp_path):
    """Trains 12 steps with a sabotage and ``--on_event``; returns what it printed, its code and the events."""
    write_recipe(write_data(tmp_path) / "recipe.json")

    def run(sabotage: str, ranks: int | None = None, **flags):
        script, told = tmp_path / "sabotage.py", tmp_path / "told"
        script.write_text(SABOTAGE.format(sabotage))
        event = f"{sys.executable} -c \"{NOTE}\" '{told}'"
        flags = {"max_train_steps": 12, "no_inference": True, "on_event": event} | flags
        run_type = "baseline" if ranks is None else "ddp"
        done = run_script(script, command_line(tmp_path, run_type=run_type, **flags), ranks=ranks, cwd=tmp_path)
        lines = [line.split(" ", 1) for line in told.read_text().splitlines()] if told.exists() else []
        assert {path for _, path in lines} <= {str(flags.get("checkpoint_path", tmp_path / "run") / RECORD_FILE)}
        return done, [event for event, _ in lines]

    return run


@pytest.mark.parametrize("ranks", [None, 2])
def test_every_rank_stops_at_the_limit_that_one_of_them_sees(sabotaged, tmp_path, ranks):
    done, events = sabotaged(LIMIT_ON_THE_LAST_RANK, ranks)
    assert done.returncode == EXIT_STOPPED, done.stderr
    steps = record(tmp_path / "run")["summary"]["optimizer_steps"]
    assert f"stopped by --max_hours 3 after step {steps}, which is saved" in done.stdout
    assert (tmp_path / "run" / f"step-{steps:08}").is_dir()
    assert events == ["limit"]
    done, events = sabotaged(SIGNAL, ranks, resume=True)
    assert (done.returncode, events[1:]) == (EXIT_STOPPED, ["preempted"]), done.stderr
    done, events = sabotaged("", ranks, resume=True)
    assert (done.returncode, events[2:]) == (0, ["done"])


def test_no_limit_stops_a_run_whose_steps_are_all_done(sabotaged, tmp_path):
    done, events = sabotaged(LIMIT_AFTER_ALL_STEPS, no_inference=None)
    assert (done.returncode, events) == (0, ["done"]), done.stderr
    assert record(tmp_path / "run")["status"] == "completed"


def test_money_counts_over_all_processes_of_a_run(sabotaged, tmp_path):
    _, events = sabotaged(LIMIT_ON_THE_LAST_RANK, price_per_gpu_hour=3600)  # a dollar a second
    first = record(tmp_path / "run")["plan"]["spent_usd"]
    assert first > 0
    done, events = sabotaged("", resume=True, price_per_gpu_hour=3600, max_cost=first)
    assert done.returncode == EXIT_USER_ERROR
    assert f"--max_cost {first:g} leaves no time for a step and its save: raise it" in done.stderr
    done, events = sabotaged("", resume=True, price_per_gpu_hour=3600, max_cost=first + 10_000)
    assert (done.returncode, events[-1]) == (0, "done")
    assert record(tmp_path / "run")["plan"]["spent_usd"] > first


def test_the_command_hears_of_stalls_and_of_nan(sabotaged, tmp_path):
    done, events = sabotaged(STALL)
    assert done.returncode == 0, done.stderr
    assert (set(events), events[-1]) == ({"stalled", "done"}, "done")
    recipe = write_recipe(tmp_path / "nan.json", optimizer={"type": "SGD", "params": {"lr": 1e30}})
    done, events = sabotaged("", overwrite=True, deepspeed_config=recipe)
    assert (done.returncode, events[-1]) == (EXIT_NON_FINITE, "nan")


def test_a_command_that_fails_is_one_line(sabotaged):
    done, _ = sabotaged("", on_event="false")
    assert done.returncode == 0
    assert len([line for line in (done.stdout + done.stderr).splitlines() if "--on_event done: " in line]) == 1
    with pytest.raises(UserError, match="--on_event must be a command that exists, not no-such x"):
        parse_arguments(["--on_event", "no-such x"])[1].raise_if_any()


@pytest.mark.parametrize("ranks", [None, 2])
def test_memory_that_runs_out_is_one_line(sabotaged, tmp_path, ranks):
    """No GPU is needed: the optimizer raises what PyTorch raises on one."""
    done, events = sabotaged(NO_MEMORY, ranks)
    assert (done.returncode, events) == (EXIT_OUT_OF_MEMORY, ["failed"])
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: rank 0 ")]
    assert "out of memory in the optimizer step: tried to allocate 2.50 GiB, " in line
    assert "were predicted for a step; this fits by the formulas: --micro_batch_size_per_gpu " in line
    assert "Traceback" not in done.stderr
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=EXIT_OUT_OF_MEMORY, error_file=str(tmp_path / "error.json"))
    shown = ChildFailedError("gpt2.py", {0: failure}).format_msg()
    assert shown.splitlines()[-2] == f"  traceback : {line.removeprefix('error: ')}"


def test_the_plan_is_held_against_the_steps(sabotaged, tmp_path):
    plan = {
        "strategy": "baseline",
        "model": {"parameters": 10_960},
        "machine": {"devices": 1},
        "seq_length": 16,
        "micro_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "data_parallel_size": 1,
        "step": {"seconds": 1e-9},
        "training": {"steps": 60, "seconds": 3600.0},
        "costs": [{"usd_per_hour": 2.0}],
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    done, _ = sabotaged("", plan=tmp_path / "plan.json", max_train_steps=30)
    assert "% slower than planned: 30 min 0" in done.stdout
    assert "instead of 30 min 00 s, $1.00 instead of $1.00" in done.stdout
    block = record(tmp_path / "run")["plan"]
    assert block["planned_usd"] == 1.0
    assert block["seconds"] > block["planned_seconds"] == 1800
    shown = read_recorded(tmp_path / "run", name="run").plan  # of the dashboard's page Live
    assert re.fullmatch(r"\d+% slower than planned, \$\S+ spent, \$1.00 expected instead of \$1.00", shown)
    (tmp_path / "plan.json").write_text(json.dumps(plan | {"strategy": "zero2", "seq_length": 32}))
    done, _ = sabotaged("", plan=tmp_path / "plan.json", overwrite=True)
    assert done.returncode == EXIT_USER_ERROR
    assert "was made for strategy zero2, not baseline; sequence length 32, not 16: plan this training" in done.stderr


def test_the_next_line_resumes_the_run_and_then_evaluates_it(sabotaged, tmp_path):
    """Pasted as they are; the folder has a space, and the flags of the run need quotes."""
    done, _ = sabotaged(LIMIT_ON_THE_LAST_RANK, checkpoint_path=tmp_path / "a run", overwrite=True)
    words = next_words(done.stdout)
    assert words[0] == sys.executable
    assert words[-1] == "--resume"
    script = str(REPOSITORY / "src" / "gpt2.py")
    done = run_script(script, words[2:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words = next_words(done.stdout)
    assert words[1] == str(REPOSITORY / "src" / "evaluate.py")
    done = run_script(words[1], words[2:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a run").is_dir()


def next_words(output: str) -> list[str]:
    (line,) = [line for line in output.splitlines() if line.startswith("next: ")]
    return shlex.split(line)[1:]

"""``goodput`` in the record: every second of a run's wall time has one cause, over kills and resumes."""

import json
import signal
import time
from dataclasses import replace

import pytest
from forked_ranks import run_script
from small_run import command_line
from training_runs import read_lines, read_record

from dsgpt.checkpoints.manifest import Goodput
from dsgpt.record.schema import CAUSES, STEPS_FILE

DYING = """
import os, pathlib, signal, sys, time
with pathlib.Path("began").open("a") as file:
    print(time.time(), file=file)
from dsgpt.machine.launcher import exit_rank
from dsgpt.strategies import pytorch
from dsgpt.training.command import train
last = int(sys.argv.pop(1))
train_step = pytorch.TorchStrategy.train_step


def dying(self, batches, step):
    if step == last:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    return train_step(self, batches, step)


pytorch.TorchStrategy.train_step = dying
exit_rank(train(sys.argv[1:]))
"""
PAUSE_SEC = 1.5


def test_every_second_of_three_processes_has_its_cause(here):
    """It saves after steps 4 and 8. The first process dies before the first save, the second and third after 4."""
    script, run = here / "dying.py", here / "run"
    script.write_text(DYING)
    flags = {"max_train_steps": 8, "save_every": 4, "eval_every": 3, "steps_per_print": 1, "no_inference": True}
    words, lost = command_line(here, **flags, resume=True), 0.0
    for last, repeated in ((4, 3), (7, 2), (8, 3), (99, 0)):
        done = run_script(script, [last, *words], cwd=here)
        assert done.returncode == (0 if last == 99 else -signal.SIGKILL), done.stderr
        lost += sum(line["step_time_sec"] for line in read_lines(run)[-repeated:] if repeated)
        time.sleep(PAUSE_SEC if repeated else 0)
    passed = time.time() - float((here / "began").read_text().split()[0])
    goodput = read_record(run)["goodput"]
    assert (goodput["starts"], goodput["repeated_steps"]) == (4, 3 + 2 + 3)
    assert tuple(goodput["lost_sec"]) == CAUSES
    assert goodput["wall_sec"] == pytest.approx(goodput["kept_sec"] + sum(goodput["lost_sec"].values()))
    assert passed - 3 < goodput["wall_sec"] < passed + 3  # the system rounds the start of a process
    assert goodput["share"] == pytest.approx(goodput["kept_sec"] / goodput["wall_sec"])
    assert goodput["lost_sec"]["repeated"] == pytest.approx(lost)
    assert goodput["lost_sec"]["gaps"] > 3 * PAUSE_SEC - 3
    least = goodput["lost_sec"] | {"compilation": 1}  # none, if the machine was busier during later steps
    assert all(seconds > 0 for seconds in least.values()) and goodput["lost_sec"]["compilation"] >= 0, least
    steps = sum(line["step_time_sec"] for line in read_lines(run))
    inside = goodput["kept_sec"] + goodput["lost_sec"]["compilation"] + goodput["lost_sec"]["data"]
    assert inside == pytest.approx(steps)
    assert 8 * 0.05 < goodput["kept_sec"] <= steps


@pytest.mark.parametrize("ago", [100.0, -3600.0], ids=["usual", "a clock that was set back"])
def test_the_time_between_two_processes_is_that_from_the_last_sign_of_life(tmp_path, ago):
    """The first took six steps of a second each from its third second on, and wrote its record after four of them."""
    lines = [{"step": step, "loss": 1.0, "step_time_sec": 1.0, "wall_time_sec": 2.0 + step} for step in range(1, 7)]
    (tmp_path / STEPS_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    first = Goodput().begin(10.0).now(process_sec=14.0, kept_sec=4.0, lost_sec={"start": 8.0})
    first = replace(first, seen_at=time.time() - ago).after_loss(tmp_path / STEPS_FILE, kept_step=3, wall_sec=6.0)
    second = first.begin(20.0).now(process_sec=30.0, kept_sec=7.0, lost_sec={"start": 20.0, "data": 2.0})
    assert (second.repeated_steps, second.lost_sec["repeated"], second.lost_sec["start"]) == (3, 3.0, 28.0)
    gap = 100 - 2 - 20 if ago > 0 else None  # two steps came after the record
    assert second.lost_sec["gaps"] == (pytest.approx(gap, abs=1) if gap else None)
    assert second.wall_sec == (pytest.approx(14 + 2 + 78 + 30, abs=1) if gap else None)
    assert second.lost_sec["other"] == (pytest.approx(14 + 2 + 30 - 7 - 3 - 28 - 2, abs=1) if gap else None)
    assert (second.share is None) == (gap is None)


def test_what_a_record_of_before_does_not_have_stays_unknown():
    ended = Goodput.unknown().begin(5.0).now(process_sec=10.0, kept_sec=4.0, lost_sec={"start": 5.0})
    assert {ended.wall_sec, ended.share, ended.repeated_steps, ended.starts, *ended.lost_sec.values()} == {None, 0.0}
    assert (ended.kept_sec, ended.lost_sec["data"], ended.lost_sec["compilation"]) == (4.0, 0.0, 0.0)

"""``kill -9`` at an instant, and whether the resumed run equals an undisturbed one."""

import time
from pathlib import Path
from typing import Any

import psutil

from dsgpt.benchmarks.faults.outcome import Outcome, all_wrong
from dsgpt.benchmarks.faults.plan import RUNS, SAVE_EVERY, Kill
from dsgpt.benchmarks.faults.processes import Training, kill
from dsgpt.benchmarks.faults.runs import Runs

GONE_SEC = {"one rank": 60, "all": 60, "the launcher": 30}
"""Seconds after the kill of a victim within which every process of the run must have ended."""


def try_kill(runs: Runs, plan: Kill) -> Outcome:
    """Start the run, kill the victim, wait until all processes have ended, resume and compare.

    Raises:
        Missed: the run did not reach the instant, or did not end.
    """
    started = time.perf_counter()
    run_dir = runs.new(f"{plan.run} {plan.victim} {plan.moment} {plan.step}")
    usual = runs.undisturbed(plan.run)
    with runs.start(plan.run, run_dir, "--save_mode", plan.save_mode) as training:
        victims = _victims(training, plan)
        _wait_for_instant(training, plan, step_sec=usual.step_sec, save_sec=usual.save_sec)
        kill(victims)
        code, launcher_sec, gone_sec = training.wait_until_gone()
    unpublished = half_written(run_dir)
    resumed = runs.resume(plan.run, run_dir)
    allowed = SAVE_EVERY + (resumed.taken - unpublished if unpublished else 0)
    measured: dict[str, Any] = {
        "run": plan.run,
        "victim": f"rank {plan.rank}" if plan.victim == "one rank" else plan.victim,
        "aimed_at": plan.moment,
        "launcher_outlived_victim": plan.victim == "one rank" and RUNS[plan.run].ranks > 1,
        "save_mode": plan.save_mode,
        "save_cut_off": bool(unpublished),
        "steps_taken": resumed.taken,
        "resumed_from": resumed.resumed_from,
        "steps_lost": resumed.steps_lost,
        "steps_allowed": allowed,
        "exit_code": code,
        "launcher_sec": round(launcher_sec, 2),
        "gone_sec": round(gone_sec, 2),
    }
    limit = GONE_SEC[plan.victim]
    wrong = all_wrong(
        (code == 0, "the launcher ended with exit code 0"),
        (allowed > 2 * SAVE_EVERY, f"the save of step {unpublished} was not done by step {resumed.taken}"),
        (gone_sec > limit, f"a process was left for {gone_sec:.0f} s, allowed are {limit}"),
        (resumed.steps_lost > allowed, f"{resumed.steps_lost} steps are lost, allowed are {allowed}"),
        (bool(resumed.wrong), resumed.wrong),
    )
    return Outcome(kind="kill", name=plan.name, wrong=wrong, seconds=time.perf_counter() - started, measured=measured)


def _wait_for_instant(training: Training, plan: Kill, *, step_sec: float, save_sec: float) -> None:
    if plan.moment == "saving":
        training.wait_for_save(plan.step)
        time.sleep(plan.fraction * save_sec)
    else:
        training.wait_for_step(plan.step)
        time.sleep(plan.fraction * step_sec)


def _victims(training: Training, plan: Kill) -> list[psutil.Process]:
    """The processes to kill; looked up before the instant, because that takes longer than a step."""
    training.wait_for_step(1)
    if plan.victim == "the launcher":
        return [training.launcher]
    if plan.victim == "all":
        return training.everyone()
    return [training.ranks(RUNS[plan.run].ranks)[plan.rank]]


def half_written(run_dir: Path) -> int:
    """The step whose checkpoint was being written; 0 if there is none."""
    return max((int(path.name[-8:]) for path in run_dir.glob(".partial-step-????????")), default=0)

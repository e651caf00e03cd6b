"""Signals that ask a run to stop: to ranks and launchers, once and twice."""

import re
import signal
import time
from dataclasses import dataclass

import psutil

from dsgpt.benchmarks.faults.outcome import Outcome, all_wrong
from dsgpt.benchmarks.faults.plan import RUNS
from dsgpt.benchmarks.faults.processes import Training, send
from dsgpt.benchmarks.faults.runs import Runs, read_record
from dsgpt.common.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from dsgpt.runtime.interruption import ECHO_SEC

AFTER_STEP = 6
"""Between two saves."""
HANDLED = ("--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1")
"""Makes torchrun pass SIGUSR1 on to its workers; by default SIGUSR1 kills torchrun."""
SLOW = {"num_layers": 8, "embedding_size": 512, "num_heads": 8}
"""Steps of more than a second on one core."""
GONE_SEC = 60
"""Seconds after the signal within which every process of the run must have ended."""


@dataclass(frozen=True, kw_only=True)
class SentSignal:
    """A signal to some processes of a run, after ``AFTER_STEP``."""

    run: str
    signal: signal.Signals
    to: str
    """``rank N``, ``the launcher``, or ``the terminal``: every process of the session, as with Ctrl-C."""
    again: bool = False
    """Whether it is sent twice, which ends the run at once."""
    launcher: tuple[str, ...] = ()
    """Further flags of the launcher."""

    @property
    def name(self) -> str:
        """The name in console lines, pages and test ids."""
        flags = f", started with {' '.join(self.launcher)}" if self.launcher else ""
        return f"{self.run}: {self.signal.name} to {self.to}{', twice' if self.again else ''}{flags}"


SIGNALS = (
    SentSignal(run="baseline", signal=signal.SIGTERM, to="rank 0"),
    SentSignal(run="baseline", signal=signal.SIGUSR1, to="rank 0"),
    SentSignal(run="baseline", signal=signal.SIGINT, to="the terminal"),
    SentSignal(run="baseline", signal=signal.SIGTERM, to="rank 0", again=True),
    SentSignal(run="baseline", signal=signal.SIGHUP, to="rank 0"),
    SentSignal(run="ddp", signal=signal.SIGUSR1, to="rank 1"),
    SentSignal(run="ddp", signal=signal.SIGTERM, to="the launcher"),
    SentSignal(run="ddp", signal=signal.SIGUSR1, to="the launcher"),
    SentSignal(run="ddp", signal=signal.SIGUSR1, to="the launcher", launcher=HANDLED),
    SentSignal(run="ddp", signal=signal.SIGINT, to="the terminal"),
    SentSignal(run="zero1", signal=signal.SIGTERM, to="the launcher"),
    SentSignal(run="zero1", signal=signal.SIGUSR1, to="the launcher"),
    SentSignal(run="zero1", signal=signal.SIGINT, to="the terminal"),
    SentSignal(run="pipeline2", signal=signal.SIGTERM, to="rank 0"),
    SentSignal(run="zero3", signal=signal.SIGUSR1, to="rank 1"),
)
CORE_SIGNALS = (SIGNALS[2], SIGNALS[3], SIGNALS[5])


def try_signal(runs: Runs, plan: SentSignal) -> Outcome:
    """Send the signal, check how the run ends, and resume it.

    Raises:
        Missed: the run did not reach the step, or did not end.
    """
    if plan.again:
        return _try_twice(runs, plan)
    started = time.perf_counter()
    run_dir = runs.new(plan.name)
    with runs.start(plan.run, run_dir, launcher=plan.launcher) as training:
        training.wait_for_step(AFTER_STEP)
        send(_receivers(training, plan), plan.signal)
        code, launcher_sec, gone_sec = training.wait_until_gone()
        lines = _lines_of(training)
    status = read_record(run_dir)["status"]
    resumed = runs.resume(plan.run, run_dir)
    finished = finished_unaware(plan, code=code, status=status)
    wrong = all_wrong(
        (code == 0, "the launcher ended with exit code 0"),
        (plan.run == "baseline" and code != EXIT_STOPPED, f"exit code {code} instead of {EXIT_STOPPED}"),
        (status != "interrupted" and not finished, f"its record says {status}"),
        (resumed.steps_lost > 0, f"{resumed.steps_lost} steps are lost"),
        (gone_sec > GONE_SEC, f"a process was left for {gone_sec:.0f} s"),
        (not lines and not finished, "the run printed nothing about it"),
        (bool(resumed.wrong), resumed.wrong),
    )
    measured = {
        "exit_code": code,
        "launcher_sec": round(launcher_sec, 2),
        "gone_sec": round(gone_sec, 2),
        "steps_taken": resumed.taken,
        "steps_lost": resumed.steps_lost,
        "status": status,
    }
    seconds = time.perf_counter() - started
    return Outcome(kind="request", name=plan.name, wrong=wrong, seconds=seconds, measured=measured, said=lines)


def finished_unaware(plan: SentSignal, *, code: int, status: str) -> bool:
    """Whether the run ended before it noticed that its launcher was gone: then nothing was left to stop or to save.

    Args:
        plan: what was sent.
        code: the launcher's exit code; negative if the signal itself ended it.
        status: that of the run's record.
    """
    return plan.to == "the launcher" and code == -plan.signal and status == "completed"


def _try_twice(runs: Runs, plan: SentSignal) -> Outcome:
    """Send the signal twice in one step. Steps take more than a second, so the second signal comes before its end."""
    started = time.perf_counter()
    run_dir = runs.new(plan.name)
    with runs.start(plan.run, run_dir, changes=SLOW) as training:
        training.wait_for_step(1)
        for _ in range(2):
            training.launcher.send_signal(plan.signal)
            time.sleep(ECHO_SEC[False] * 1.5)
        code, launcher_sec, gone_sec = training.wait_until_gone()
        lines = _lines_of(training)
    wrong = all_wrong(
        (code != EXIT_INTERRUPTED, f"exit code {code} instead of {EXIT_INTERRUPTED}"),
        (gone_sec > 1, f"it was left for {gone_sec:.1f} s after the second signal"),
        (bool(list(run_dir.glob("step-*"))), "it saved nevertheless"),
        (not lines, "the run printed nothing about it"),
    )
    measured = {"exit_code": code, "launcher_sec": round(launcher_sec, 2), "gone_sec": round(gone_sec, 2)}
    seconds = time.perf_counter() - started
    return Outcome(kind="request", name=plan.name, wrong=wrong, seconds=seconds, measured=measured, said=lines)


def _lines_of(training: Training) -> tuple[str, ...]:
    """What the run printed about the signal, without the lines of launchers."""
    printed = (re.sub(r"^.*\r", "", line).strip() for line in training.output().splitlines())
    words = ("stopped by", "the run stops after this step", "ended at once")
    return tuple(dict.fromkeys(line for line in printed if any(word in line for word in words)))


def _receivers(training: Training, plan: SentSignal) -> list[psutil.Process]:
    if plan.to == "the launcher":
        return [training.launcher]
    if plan.to == "the terminal":
        return training.everyone()
    return [training.ranks(RUNS[plan.run].ranks)[int(plan.to.removeprefix("rank "))]]

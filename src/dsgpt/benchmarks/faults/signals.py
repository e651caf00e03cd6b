"""Requests to stop: signals to ranks and launchers, once and twice."""

import re
import signal
import time
from dataclasses import dataclass

import psutil

from dsgpt.benchmarks.faults.outcome import Outcome, first_wrong
from dsgpt.benchmarks.faults.plan import RUNS
from dsgpt.benchmarks.faults.processes import Training, tell
from dsgpt.benchmarks.faults.runs import Runs, read_record
from dsgpt.common.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from dsgpt.runtime.interruption import ECHO_SEC

AFTER_STEP = 6
"""Between two saves."""
HANDLED = ("--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1")
"""What makes torchrun pass SIGUSR1 on; by default it dies of it."""
SLOW = {"num_layers": 8, "embedding_size": 512, "num_heads": 8}
"""Steps of more than a second on one core."""
GONE_SEC = 60
"""How long after a request a process of the run may be there."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A signal to somebody, after ``AFTER_STEP``."""

    run: str
    signal: signal.Signals
    to: str
    """``rank N``, ``the launcher``, or ``the terminal``: every process of the session, as Ctrl-C does it."""
    again: bool = False
    """Whether it is sent once more, which ends the run at once."""
    launcher: tuple[str, ...] = ()
    """Further flags of the launcher."""

    @property
    def name(self) -> str:
        """For people and for test ids."""
        told = f", started with {' '.join(self.launcher)}" if self.launcher else ""
        return f"{self.run}: {self.signal.name} to {self.to}{', twice' if self.again else ''}{told}"


REQUESTS = (
    Request(run="baseline", signal=signal.SIGTERM, to="rank 0"),
    Request(run="baseline", signal=signal.SIGUSR1, to="rank 0"),
    Request(run="baseline", signal=signal.SIGINT, to="the terminal"),
    Request(run="baseline", signal=signal.SIGTERM, to="rank 0", again=True),
    Request(run="baseline", signal=signal.SIGHUP, to="rank 0"),
    Request(run="ddp", signal=signal.SIGUSR1, to="rank 1"),
    Request(run="ddp", signal=signal.SIGTERM, to="the launcher"),
    Request(run="ddp", signal=signal.SIGUSR1, to="the launcher"),
    Request(run="ddp", signal=signal.SIGUSR1, to="the launcher", launcher=HANDLED),
    Request(run="ddp", signal=signal.SIGINT, to="the terminal"),
    Request(run="zero1", signal=signal.SIGTERM, to="the launcher"),
    Request(run="zero1", signal=signal.SIGUSR1, to="the launcher"),
    Request(run="zero1", signal=signal.SIGINT, to="the terminal"),
    Request(run="pipeline2", signal=signal.SIGTERM, to="rank 0"),
    Request(run="zero3", signal=signal.SIGUSR1, to="rank 1"),
)
CORE_REQUESTS = (REQUESTS[2], REQUESTS[3], REQUESTS[5])


def try_request(runs: Runs, plan: Request) -> Outcome:
    """Ask the run to stop, and look how it ends and whether it goes on.

    Raises:
        Missed: it did not come so far, or did not end.
    """
    if plan.again:
        return _try_twice(runs, plan)
    started = time.perf_counter()
    run_dir = runs.new(plan.name)
    with runs.start(plan.run, run_dir, launcher=plan.launcher) as training:
        training.wait_for_step(AFTER_STEP)
        tell(_asked(training, plan), plan.signal)
        code, launcher_sec, gone_sec = training.wait_until_gone()
        told = _told(training)
    status = read_record(run_dir)["status"]
    gone_on = runs.go_on(plan.run, run_dir)
    wrong = first_wrong(
        (code == 0, "the launcher ended with exit code 0"),
        (plan.run == "baseline" and code != EXIT_STOPPED, f"exit code {code} instead of {EXIT_STOPPED}"),
        (status != "interrupted", f"its record says {status}"),
        (gone_on.steps_lost > 0, f"{gone_on.steps_lost} steps are lost"),
        (gone_sec > GONE_SEC, f"a process was there for {gone_sec:.0f} s"),
        (not told, "nothing was said"),
        (bool(gone_on.wrong), gone_on.wrong),
    )
    measured = {
        "exit_code": code,
        "launcher_sec": round(launcher_sec, 2),
        "gone_sec": round(gone_sec, 2),
        "steps_taken": gone_on.taken,
        "steps_lost": gone_on.steps_lost,
        "status": status,
    }
    seconds = time.perf_counter() - started
    return Outcome(kind="request", name=plan.name, wrong=wrong, seconds=seconds, measured=measured, said=told)


def _try_twice(runs: Runs, request: Request) -> Outcome:
    """Steps take more than a second, so that the second signal finds the run in the step that the first allowed it."""
    started = time.perf_counter()
    run_dir = runs.new(request.name)
    with runs.start(request.run, run_dir, changes=SLOW) as training:
        training.wait_for_step(1)
        for _ in range(2):
            training.launcher.send_signal(request.signal)
            time.sleep(ECHO_SEC[False] * 1.5)
        code, launcher_sec, gone_sec = training.wait_until_gone()
        told = _told(training)
    wrong = first_wrong(
        (code != EXIT_INTERRUPTED, f"exit code {code} instead of {EXIT_INTERRUPTED}"),
        (gone_sec > 1, f"it was there for {gone_sec:.1f} s after the second signal"),
        (bool(list(run_dir.glob("step-*"))), "it saved all the same"),
        (not told, "nothing was said"),
    )
    measured = {"exit_code": code, "launcher_sec": round(launcher_sec, 2), "gone_sec": round(gone_sec, 2)}
    seconds = time.perf_counter() - started
    return Outcome(kind="request", name=request.name, wrong=wrong, seconds=seconds, measured=measured, said=told)


def _told(training: Training) -> tuple[str, ...]:
    """What the run said of the request; launchers say much besides."""
    lines = (re.sub(r"^.*\r", "", line).strip() for line in training.said().splitlines())
    words = ("stopped by", "the run stops after this step", "ended at once")
    return tuple(dict.fromkeys(line for line in lines if any(word in line for word in words)))


def _asked(training: Training, request: Request) -> list[psutil.Process]:
    if request.to == "the launcher":
        return [training.launcher]
    if request.to == "the terminal":
        return training.everyone()
    return [training.ranks(RUNS[request.run].ranks)[int(request.to.removeprefix("rank "))]]

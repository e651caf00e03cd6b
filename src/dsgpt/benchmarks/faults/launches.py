"""Faults of launches: a worker that torchrun restarts, and two runs on one folder."""

import signal
import time

from dsgpt.benchmarks.faults.outcome import Outcome, all_wrong, first_error
from dsgpt.benchmarks.faults.processes import kill
from dsgpt.benchmarks.faults.runs import Runs
from dsgpt.common.errors import EXIT_USER_ERROR

RESTARTS = 3


def try_restart(runs: Runs) -> Outcome:
    """Kill a worker under ``torchrun --max-restarts 3``: torchrun restarts all workers, and they must resume the run.

    Raises:
        Missed: the run did not end.
    """
    started, run = time.perf_counter(), "ddp"
    run_dir = runs.new("torchrun restarts")
    runs.undisturbed(run)
    with runs.start(run, run_dir, "--resume", launcher=("--max-restarts", str(RESTARTS))) as training:
        training.wait_for_step(9)
        kill(training.ranks(2)[1:])
        code, _, _ = training.wait_until_gone()
        output = training.output()
    lines = [line for line in output.splitlines() if "resuming from" in line or "starting fresh" in line]
    difference = "" if code else runs.difference(run, run_dir)
    wrong = all_wrong(
        (code != 0, f"exit code {code}: {first_error(output)}"),
        (not any("resuming from" in line for line in lines), "it did not resume from a checkpoint"),
        (bool(difference), difference),
    )
    return Outcome(
        kind="launch",
        name=f"{run}: rank 1 killed after step 9 under torchrun --max-restarts {RESTARTS}",
        wrong=wrong,
        seconds=time.perf_counter() - started,
        measured={"exit_code": code},
        said=tuple(line.replace(f"{run_dir.parent}/", "") for line in lines),
    )


def try_two_runs(runs: Runs) -> Outcome:
    """Start two runs on the folder of a training that is paused: one to overwrite it, one to resume it.

    Raises:
        Missed: one of them did not end.
    """
    started, run = time.perf_counter(), "baseline"
    run_dir = runs.new("two runs")
    runs.undisturbed(run)
    with runs.start(run, run_dir) as first:
        first.wait_for_step(6)
        first.launcher.send_signal(signal.SIGSTOP)
        with runs.start(run, run_dir, "--overwrite", log="second.log") as second:
            refused = second.wait()
        with runs.start(run, run_dir, "--resume", log="third.log") as third:
            third.wait_for(lambda: "waiting up to" in third.output(), what="its line about waiting")
            first.launcher.send_signal(signal.SIGCONT)
            code, waited = first.wait(), third.wait()
    difference = runs.difference(run, run_dir)
    lines = [*second.output().splitlines()[-1:], *(line for line in third.output().splitlines() if "waiting" in line)]
    lines += [line for line in third.output().splitlines() if "nothing to do" in line]
    wrong = all_wrong(
        (refused != EXIT_USER_ERROR, f"--overwrite ended with exit code {refused} instead of {EXIT_USER_ERROR}"),
        ("another process is training in this folder" not in second.output(), "--overwrite printed no reason"),
        (code != 0, f"the first ended with exit code {code}"),
        (waited != 0, f"--resume ended with exit code {waited}"),
        (len(lines) < 3, "the run that waited did not find the finished run"),
        (bool(difference), difference),
    )
    return Outcome(
        kind="launch",
        name=f"{run}: two more runs started on its folder",
        wrong=wrong,
        seconds=time.perf_counter() - started,
        measured={"exit_code": refused},
        said=tuple(line.replace(f"{run_dir.parent}/", "") for line in lines),
    )

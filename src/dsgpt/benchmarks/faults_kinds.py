"""The faults of the campaign: how each is caused, and what a resumed run must show."""

import contextlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from dsgpt.benchmarks import faults
from dsgpt.benchmarks.faults import RUNS, SAVE_EVERY, STEPS, Kill, Outcome, all_wrong
from dsgpt.benchmarks.faults_machine import machine_faults
from dsgpt.benchmarks.faults_runs import Fault, Missed, Resumed, Runs, Training, fill, send
from dsgpt.benchmarks.hosts import NoHosts, run
from dsgpt.checkpoints import store
from dsgpt.checkpoints.manifest import MANIFEST, parse_manifest, read_manifest
from dsgpt.checkpoints.pieces import MOMENTS, numbered
from dsgpt.common.errors import EXIT_INTERRUPTED, EXIT_NOT_SAVED, EXIT_STOPPED, EXIT_USER_ERROR, UserError
from dsgpt.common.json_files import read_object
from dsgpt.machine.launcher import ECHO_SEC
from dsgpt.record.schema import RECORD_FILE, STEPS_FILE, read_steps

# Damage to the files of a killed run, and what ``--resume`` prints and does about it.

DAMAGED_RUN = "zero1"
WEIGHTS_OF_0, MOMENTS_OF_1 = numbered(store.WEIGHTS, 0, 2), numbered(MOMENTS, 1, 2)
"""Files of its two ranks."""
NEWEST = STEPS - SAVE_EVERY
"""Step of the newest checkpoint of a run that was rolled back; the one before it is ``SAVE_EVERY`` older."""


def truncate(checkpoint: Path) -> None:
    """Leave half of the moments."""
    file = checkpoint / MOMENTS_OF_1
    os.truncate(file, file.stat().st_size // 2)


def flip(checkpoint: Path) -> None:
    """Change one bit of the weights."""
    file = checkpoint / WEIGHTS_OF_0
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def tear(checkpoint: Path) -> None:
    """Add the beginning of a line to the log."""
    with (checkpoint.parent / STEPS_FILE).open("a", encoding="utf-8") as file:
        file.write('{"step": 23, "los')


def lines_with(words: Sequence[str], output: str) -> tuple[str, ...]:
    """The lines of ``output`` with one of ``words``."""
    return tuple(line for line in output.splitlines() if any(word in line for word in words))


@dataclass(frozen=True)
class Damage:
    """Damage to the newest checkpoint, or to a file next to it."""

    what: str
    harm: Callable[[Path], object]
    """Damages the files of, or beside, the checkpoint whose folder it gets."""
    resumed_from: int
    """The step that the run must resume from."""
    words: str = "resuming from"
    """Words that the run must print."""

    @property
    def name(self) -> str:
        """The name in console lines and pages."""
        return f"{DAMAGED_RUN}: {self.what}"


BEFORE = NEWEST - SAVE_EVERY
MISSING = f"{WEIGHTS_OF_0}: is damaged: it is missing"
DAMAGES = (
    Damage("truncated shard", truncate, BEFORE, f"{MOMENTS_OF_1}: is damaged: it has"),
    Damage("flipped bit", flip, BEFORE, f"{WEIGHTS_OF_0}: is damaged: its sha256"),
    Damage("deleted shard", lambda at: (at / WEIGHTS_OF_0).unlink(), BEFORE, MISSING),
    Damage("deleted manifest", lambda at: (at / MANIFEST).unlink(), BEFORE, "the checkpoint is incomplete"),
    Damage("deleted `latest`", lambda at: (at.parent / store.LATEST).unlink(), NEWEST),
    Damage(
        "stale temporary folder", lambda at: shutil.copytree(at, store.partial_folder(at.parent, STEPS - 1)), NEWEST
    ),
    Damage("torn log", tear, NEWEST),
)


def try_damage(runs: Runs, plan: Damage) -> Outcome:
    """Damage a rolled-back copy of the undisturbed run, resume it and compare.

    Raises:
        Missed: the run did not end.
    """
    run_dir = runs.rolled_back(DAMAGED_RUN, plan.what)
    plan.harm(run_dir / store.folder_name(NEWEST))
    resumed = runs.resume(DAMAGED_RUN, run_dir)
    wrong = all_wrong(
        (resumed.resumed_from != plan.resumed_from, f"it resumed from step {resumed.resumed_from}"),
        (plan.words not in resumed.output, f"it did not print: {plan.words}"),
        (bool(list(run_dir.glob(".partial-*"))), "temporary folders are left"),
        (bool(resumed.wrong), resumed.wrong),
    )
    said = lines_with(("is refused", "resuming from"), resumed.output)
    return Outcome(wrong=wrong, measured={"resumed_from": resumed.resumed_from}, said=said)


# File systems that refuse writes in the middle of a run: a full one, and a folder that becomes read-only.

DISK_RUN = "baseline"
FITTING = 2.5
"""Size of the small file system, in checkpoints."""
AS_A_USER = ("setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner")
"""Prefix of a command that root starts: drops the capabilities that override permissions."""
BALLAST = "ballast"
"""The file that fills the file system."""
FULL = "No space left on device"
FORESEEN = f"{FULL}: the last checkpoint took"


@dataclass(frozen=True)
class DiskFault:
    """A way in which a file system refuses writes, and the run's policy for it."""

    what: str
    policy: str
    """The value of ``--on_save_failure``."""
    words: str
    """Words that the run must print."""
    spoil: Callable[[Training], None] | None = None
    """Damages the file system while the run trains."""
    not_words: str = "\0"
    """Words that it must not print, because they belong to a different error."""
    small: bool = True
    """Whether the run folder is a separate, small file system."""

    @property
    def name(self) -> str:
        """The name in console lines and pages."""
        return f"{DISK_RUN}: {self.what}, --on_save_failure {self.policy}"


def fill_up(training: Training) -> None:
    """Leave as much space as the last checkpoint took, which is too little: files take whole pages.

    Three more pages are for the lines that the run writes before its next save.
    """
    first = training.run_dir / store.folder_name(SAVE_EVERY)
    training.wait_for(first.exists, what="the first save")
    spare = shutil.disk_usage(training.run_dir).free - parse_manifest(first).size
    (training.run_dir / BALLAST).write_bytes(bytes(max(0, spare - 3 * os.sysconf("SC_PAGE_SIZE"))))


def fill_wholly(training: Training) -> None:
    """Leave no space: not even a line of a log can be written."""
    training.wait_for((training.run_dir / store.folder_name(SAVE_EVERY)).exists, what="the first save")
    fill(training.run_dir / BALLAST)


def forbid(training: Training) -> None:
    """Make the folder read-only."""
    training.wait_for_step(SAVE_EVERY + 1)
    training.run_dir.chmod(0o555)


DISK_FAULTS = (
    DiskFault("a full file system, seen before the save", "stop", FORESEEN),
    DiskFault("a full file system, seen before the save", "continue", FORESEEN),
    DiskFault("a file system that is full in the middle of a save", "stop", FULL, fill_up, not_words=FORESEEN),
    DiskFault("a file system without a free byte", "continue", FULL, fill_wholly),
    DiskFault("a folder that becomes read-only", "stop", "Permission denied", forbid, small=False),
)


def try_disk_fault(runs: Runs, plan: DiskFault) -> Outcome:
    """Let the run meet the fault, repair the file system, resume and compare.

    Raises:
        Missed: the run did not end.
    """
    run_dir = runs.new(f"{plan.what} {plan.policy}")
    size = int(FITTING * parse_manifest(store.checkpoints(runs.undisturbed(DISK_RUN))[0]).size)
    prefix = AS_A_USER if os.geteuid() == 0 and not plan.small else ()
    if prefix and shutil.which(prefix[0]) is None:
        return Outcome(not_run=f"root needs {prefix[0]} for it")
    with contextlib.ExitStack() as mounted:
        try:
            if plan.small:
                run_dir.mkdir()
                run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", run_dir)
                mounted.callback(lambda: subprocess.run(["umount", "--lazy", run_dir], check=True))
        except NoHosts as error:
            return Outcome(not_run=f"this user may not mount a file system ({error})")
        with runs.start(DISK_RUN, run_dir, "--on_save_failure", plan.policy, prefix=prefix) as training:
            if plan.spoil:
                plan.spoil(training)
            code = training.wait_until_gone()["exit_code"]
            lines = lines_with(("not saved",), training.output())
        left = [path.name for path in run_dir.glob(".partial-*")]
        try:  # the step of the newest checkpoint if it is whole
            whole = max((read_manifest(path).step or 0 for path in store.checkpoints(run_dir)[:1]), default=0)
        except UserError:
            whole = 0
        if plan.small:
            (run_dir / BALLAST).unlink(missing_ok=True)
            run("mount", "-o", f"remount,size={100 * size}", run_dir)
        else:
            run_dir.chmod(0o755)
        resumed = runs.resume(DISK_RUN, run_dir)
    start, lost, printed = resumed.resumed_from, resumed.steps_lost, "\n".join(lines)
    wrong = all_wrong(
        (code != EXIT_NOT_SAVED, f"exit code {code} instead of {EXIT_NOT_SAVED}"),
        (plan.words not in printed, f"it did not print: {plan.words}"),
        (plan.not_words in printed, f"it printed: {plan.not_words}"),
        (plan.policy == "continue" and "the run continues" not in printed, "it did not continue"),
        (bool(left), f"left behind: {left}"),
        (whole != start or not whole, f"it resumed from step {start}; the newest whole checkpoint is of step {whole}"),
        (plan.policy == "stop" and lost > SAVE_EVERY, f"{lost} steps are lost"),
        (bool(resumed.wrong), resumed.wrong),
    )
    return Outcome(wrong=wrong, measured={"exit_code": code, "resumed_from": start, "steps_lost": lost}, said=lines)


# ``kill -9`` at an instant, and whether the resumed run equals an undisturbed one.

GONE_AFTER_KILL_SEC = {"one rank": 60, "all": 60, "the launcher": 30}
"""Seconds after the kill of a victim within which every process of the run must have ended."""


def try_kill(runs: Runs, plan: Kill) -> Outcome:
    """Start the run, kill the victim, wait until all processes have ended, resume and compare.

    Raises:
        Missed: the run did not reach the instant, or did not end.
    """
    run_dir = runs.new(f"{plan.run} {plan.victim} {plan.moment} {plan.step}")
    usual = runs.undisturbed(plan.run)
    if plan.moment == "saving":
        usual_sec = [save["save_total_sec"] for save in read_object(usual / RECORD_FILE)["saves"]]
    else:
        usual_sec = [line["step_time_sec"] for line in read_steps(usual / STEPS_FILE) if "loss" in line]
    with runs.start(plan.run, run_dir, "--save_mode", plan.save_mode) as training:
        training.wait_for_step(1)
        victims = _processes(training, plan.run, plan.killed)  # before the instant: it takes longer than a step
        if plan.moment == "saving":
            written = (store.partial_folder(run_dir, plan.step), run_dir / store.folder_name(plan.step))
            training.wait_for(lambda: any(path.exists() for path in written), what=f"the save of step {plan.step}")
        else:
            training.wait_for_step(plan.step)
        time.sleep(plan.fraction * statistics.median_high(usual_sec))
        send(victims, signal.SIGKILL)
        ended = training.wait_until_gone()
    partial = max((int(path.name[-8:]) for path in run_dir.glob(".partial-step-????????")), default=0)
    resumed = runs.resume(plan.run, run_dir)
    unpublished = save_cut_off(partial, plan.save_mode, resumed, training.output())
    allowed = SAVE_EVERY + (resumed.taken - unpublished if unpublished else 0)
    limit, outlived = GONE_AFTER_KILL_SEC[plan.victim], plan.victim == "one rank" and RUNS[plan.run].ranks > 1
    measured: dict[str, Any] = {"run": plan.run, "victim": plan.killed, "aimed_at": plan.moment}
    measured |= {"launcher_outlived_victim": outlived, "save_mode": plan.save_mode, "save_cut_off": bool(unpublished)}
    measured |= {"steps_taken": resumed.taken, "resumed_from": resumed.resumed_from}
    measured |= {"steps_lost": resumed.steps_lost, "steps_allowed": allowed} | ended
    wrong = all_wrong(
        (ended["exit_code"] == 0, "the launcher ended with exit code 0"),
        (allowed > 2 * SAVE_EVERY, f"the save of step {unpublished} was not done by step {resumed.taken}"),
        (ended["gone_sec"] > limit, f"a process was left for {ended['gone_sec']:.0f} s, allowed are {limit}"),
        (resumed.steps_lost > allowed, f"{resumed.steps_lost} steps are lost, allowed are {allowed}"),
        (bool(resumed.wrong), resumed.wrong),
    )
    return Outcome(wrong=wrong, measured=measured)


def save_cut_off(partial: int, save_mode: str, resumed: Resumed, output: str) -> int:
    """The step whose save the kill interrupted; 0 if there is none.

    The thread of an asynchronous save may not have begun to write. A save that the run announced was done.

    Args:
        partial: the step of the folder that was being written; 0 if there was none.
        save_mode: as ``--save_mode``.
        resumed: the run after the kill.
        output: what it printed before.
    """
    due = resumed.taken // SAVE_EVERY * SAVE_EVERY
    waits = save_mode == "async" and due > resumed.resumed_from
    return partial or (due if waits and not re.search(rf"step +{due}/\d+  saved in", output) else 0)


def _processes(training: Training, run: str, which: str) -> list[psutil.Process]:
    """``rank N`` or ``the launcher`` of ``run``; otherwise all that it started."""
    if which == "the launcher":
        return [training.launcher]
    if which.startswith("rank "):
        return [training.ranks(RUNS[run].ranks)[int(which.removeprefix("rank "))]]
    return training.everyone()


# Faults of launches: a worker that torchrun restarts, and two runs on one folder.

RESTARTS = 3


def try_restart(runs: Runs) -> Outcome:
    """Kill a worker under ``torchrun --max-restarts 3``: torchrun restarts all workers, and they must resume the run.

    Raises:
        Missed: the run did not end.
    """
    run_dir = runs.new("torchrun restarts")
    runs.undisturbed("ddp")
    with runs.start("ddp", run_dir, "--resume", launcher=("--max-restarts", str(RESTARTS))) as training:
        training.wait_for_step(9)
        send(training.ranks(2)[1:], signal.SIGKILL)
        code = training.wait_until_gone()["exit_code"]
        output = training.output()
    difference = "" if code else runs.difference("ddp", run_dir)
    wrong = all_wrong(
        (code != 0, f"exit code {code}: {faults.first_error(output)}"),
        ("resuming from" not in output, "it did not resume from a checkpoint"),
        (bool(difference), difference),
    )
    return Outcome(
        wrong=wrong, measured={"exit_code": code}, said=lines_with(("resuming from", "starting fresh"), output)
    )


def try_two_runs(runs: Runs) -> Outcome:
    """Start two runs on the folder of a training that is paused: one to overwrite it, one to resume it.

    Raises:
        Missed: one of them did not end.
    """
    run_dir, baseline = runs.new("two runs"), "baseline"
    runs.undisturbed(baseline)
    with runs.start(baseline, run_dir) as first:
        first.wait_for_step(6)
        first.launcher.send_signal(signal.SIGSTOP)
        with runs.start(baseline, run_dir, "--overwrite", log="second.log") as second:
            refused = second.wait()
        with runs.start(baseline, run_dir, "--resume", log="third.log") as third:
            third.wait_for(lambda: "waiting up to" in third.output(), what="its line about waiting")
            first.launcher.send_signal(signal.SIGCONT)
            code, waited = first.wait(), third.wait()
    difference = runs.difference(baseline, run_dir)
    found = [lines_with((words,), third.output()) for words in ("waiting", "nothing to do")]
    lines = (*second.output().splitlines()[-1:], *found[0], *found[1])
    wrong = all_wrong(
        (refused != EXIT_USER_ERROR, f"--overwrite ended with exit code {refused} instead of {EXIT_USER_ERROR}"),
        ("another process is training in this folder" not in second.output(), "--overwrite printed no reason"),
        (code != 0, f"the first ended with exit code {code}"),
        (waited != 0, f"--resume ended with exit code {waited}"),
        (len(lines) < 3, "the run that waited did not find the finished run"),
        (bool(difference), difference),
    )
    return Outcome(wrong=wrong, measured={"exit_code": refused}, said=lines)


# Signals that ask a run to stop: to ranks and launchers, once and twice.

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
    run_dir = runs.new(plan.name)
    with runs.start(plan.run, run_dir, launcher=plan.launcher) as training:
        training.wait_for_step(AFTER_STEP)
        send(_processes(training, plan.run, plan.to), plan.signal)
        ended = training.wait_until_gone()
        lines = _lines_of(training)
    code, status = ended["exit_code"], read_object(run_dir / RECORD_FILE)["status"]
    resumed = runs.resume(plan.run, run_dir)
    # A run may end before it notices that its launcher is gone: then nothing was left to stop or to save.
    finished = plan.to == "the launcher" and code == -plan.signal and status == "completed"
    wrong = all_wrong(
        (code == 0, "the launcher ended with exit code 0"),
        (plan.run == "baseline" and code != EXIT_STOPPED, f"exit code {code} instead of {EXIT_STOPPED}"),
        (status != "interrupted" and not finished, f"its record says {status}"),
        (resumed.steps_lost > 0, f"{resumed.steps_lost} steps are lost"),
        (ended["gone_sec"] > GONE_SEC, f"a process was left for {ended['gone_sec']:.0f} s"),
        (not lines and not finished, "the run printed nothing about it"),
        (bool(resumed.wrong), resumed.wrong),
    )
    measured = ended | {"steps_taken": resumed.taken, "steps_lost": resumed.steps_lost, "status": status}
    return Outcome(wrong=wrong, measured=measured, said=lines)


def _try_twice(runs: Runs, plan: SentSignal) -> Outcome:
    """Send the signal twice in one step. Steps take more than a second, so the second signal comes before its end."""
    run_dir = runs.new(plan.name)
    with runs.start(plan.run, run_dir, changes=SLOW) as training:
        training.wait_for_step(1)
        for _ in range(2):
            training.launcher.send_signal(plan.signal)
            time.sleep(ECHO_SEC[False] * 1.5)
        ended = training.wait_until_gone()
        lines = _lines_of(training)
    wrong = all_wrong(
        (ended["exit_code"] != EXIT_INTERRUPTED, f"exit code {ended['exit_code']} instead of {EXIT_INTERRUPTED}"),
        (ended["gone_sec"] > 1, f"it was left for {ended['gone_sec']:.1f} s after the second signal"),
        (bool(list(run_dir.glob("step-*"))), "it saved nevertheless"),
        (not lines, "the run printed nothing about it"),
    )
    return Outcome(wrong=wrong, measured=ended, said=lines)


def _lines_of(training: Training) -> tuple[str, ...]:
    """Lines that the run printed about the signal, without the lines of launchers."""
    said = lines_with(("stopped by", "the run stops after this step", "ended at once"), training.output())
    return tuple(dict.fromkeys(line.strip() for line in said))


# The faults of the campaign, tried one after the other.


def all_faults(*, kills: int, seed: int) -> list[Fault]:
    """Every fault of the campaign, among them ``kills`` kills drawn with ``seed``."""
    planned = [_fault("request", try_signal, plan) for plan in SIGNALS]
    planned += [_fault("damage", try_damage, plan) for plan in DAMAGES]
    planned += [_fault("disk", try_disk_fault, plan) for plan in DISK_FAULTS]
    drawn = [_fault("kill", try_kill, plan) for plan in faults.seeded_kills(kills, seed=seed)]
    return [*planned, *machine_faults(), RESTART, TWO_RUNS, *drawn]


def core_faults() -> list[Fault]:
    """The faults of ``make test``. Other tests there damage files, without a launcher."""
    kills = [_fault("kill", try_kill, plan) for plan in faults.core_kills()]
    return [*kills, *(_fault("request", try_signal, plan) for plan in CORE_SIGNALS), RESTART]


def _fault(kind: str, attempt: Callable[..., Outcome], plan: Any) -> Fault:
    return Fault(kind=kind, name=plan.name, attempt=partial(attempt, plan=plan))


RESTART_NAME = f"ddp: rank 1 killed after step 9 under torchrun --max-restarts {RESTARTS}"
RESTART = Fault(kind="launch", name=RESTART_NAME, attempt=try_restart)
TWO_RUNS = Fault(kind="launch", name="baseline: two more runs started on its folder", attempt=try_two_runs)


def try_faults(runs: Runs, planned: list[Fault]) -> Iterator[Outcome]:
    """Yield the outcome of each fault as it comes. A fault that could not be caused counts as failed."""
    for fault in planned:
        started = time.perf_counter()
        try:
            outcome = fault.attempt(runs)
        except Exception as error:  # noqa: BLE001 - an unexpected error must not end the campaign
            outcome = Outcome(wrong=str(error) if isinstance(error, Missed) else f"{type(error).__name__}: {error}")
        seconds = time.perf_counter() - started
        said = tuple(re.sub(rf"{re.escape(str(runs.folder))}/[^/]*/", "", line) for line in outcome.said)
        yield replace(outcome, kind=fault.kind, name=fault.name, seconds=seconds, said=said)

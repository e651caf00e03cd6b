"""The faults of the campaign: how each is caused, and what a resumed run must show."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil

from dsgpt.benchmarks.faults import (
    RUNS,
    SAVE_EVERY,
    STEPS,
    Kill,
    Outcome,
    all_wrong,
    core_kills,
    first_error,
    seeded_kills,
)
from dsgpt.benchmarks.faults_runs import Missed, Resumed, Runs, Training, kill, read_record, send
from dsgpt.checkpoints import store
from dsgpt.checkpoints.manifest import MANIFEST, parse_manifest, read_manifest
from dsgpt.checkpoints.training_state import MOMENTS
from dsgpt.common.errors import EXIT_INTERRUPTED, EXIT_NOT_SAVED, EXIT_STOPPED, EXIT_USER_ERROR, UserError
from dsgpt.machine.launcher import ECHO_SEC

# Damage to the files of a killed run, and what ``--resume`` prints and does about it.

DAMAGED_RUN = "zero1"
NEWEST = STEPS - SAVE_EVERY
"""Step of the newest checkpoint of a run that was rolled back; the one before it is ``SAVE_EVERY`` older."""


def _truncate(checkpoint: Path) -> None:
    file = checkpoint / MOMENTS
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def _flip(checkpoint: Path) -> None:
    file = checkpoint / store.WEIGHTS
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _delete(checkpoint: Path) -> None:
    (checkpoint / store.WEIGHTS).unlink()


def _delete_manifest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()


def _delete_latest(checkpoint: Path) -> None:
    (checkpoint.parent / store.LATEST).unlink()


def _leave_partial(checkpoint: Path) -> None:
    shutil.copytree(checkpoint, store.partial_folder(checkpoint.parent, STEPS - 1))


def _tear_log(checkpoint: Path) -> None:
    with (checkpoint.parent / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 23, "los')


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Damage to the newest checkpoint, or to a file next to it."""

    name: str
    harm: Callable[[Path], None]
    resumed_from: int
    """The step that the run must resume from."""
    words: str = "resuming from"
    """What the run must print."""


BEFORE = NEWEST - SAVE_EVERY
DAMAGES = (
    Damage(name="truncated shard", harm=_truncate, resumed_from=BEFORE, words=f"{MOMENTS}: is damaged: it has"),
    Damage(name="flipped bit", harm=_flip, resumed_from=BEFORE, words=f"{store.WEIGHTS}: is damaged: its sha256"),
    Damage(
        name="deleted shard", harm=_delete, resumed_from=BEFORE, words=f"{store.WEIGHTS}: is damaged: it is missing"
    ),
    Damage(name="deleted manifest", harm=_delete_manifest, resumed_from=BEFORE, words="the checkpoint is incomplete"),
    Damage(name="deleted `latest`", harm=_delete_latest, resumed_from=NEWEST),
    Damage(name="stale temporary folder", harm=_leave_partial, resumed_from=NEWEST),
    Damage(name="torn log", harm=_tear_log, resumed_from=NEWEST),
)


def try_damage(runs: Runs, plan: Damage) -> Outcome:
    """Damage a rolled-back copy of the undisturbed run, resume it and compare.

    Raises:
        Missed: the run did not end.
    """
    started = time.perf_counter()
    run_dir = runs.rolled_back(DAMAGED_RUN, plan.name)
    plan.harm(run_dir / store.folder_name(NEWEST))
    resumed = runs.resume(DAMAGED_RUN, run_dir)
    lines = [line for line in resumed.output.splitlines() if "is refused" in line or "resuming from" in line]
    wrong = all_wrong(
        (resumed.resumed_from != plan.resumed_from, f"it resumed from step {resumed.resumed_from}"),
        (plan.words not in resumed.output, f"it did not print: {plan.words}"),
        (bool(list(run_dir.glob(".partial-*"))), "temporary folders are left"),
        (bool(resumed.wrong), resumed.wrong),
    )
    return Outcome(
        kind="damage",
        name=f"{DAMAGED_RUN}: {plan.name}",
        wrong=wrong,
        seconds=time.perf_counter() - started,
        measured={"resumed_from": resumed.resumed_from},
        said=tuple(line.replace(f"{run_dir.parent}/", "") for line in lines),
    )


# File systems that refuse writes in the middle of a run: a full one, and a folder that becomes read-only.

DISK_RUN = "baseline"
FITTING = 2.5
"""How many checkpoints fit on the small file system."""
AS_A_USER = ("setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner")
"""Prefix of a command that root starts: drops the capabilities that override permissions."""
BALLAST = "ballast"
"""The file that fills the file system."""
FORESEEN = "No space left on device: the last checkpoint took"


class NotAllowed(RuntimeError):
    """This user may not mount a file system."""


@dataclass(frozen=True, kw_only=True)
class DiskFault:
    """How a file system refuses writes, and the run's policy for it."""

    name: str
    policy: str
    """The value of ``--on_save_failure``."""
    words: str
    """What the run must print."""
    not_words: str = "\0"
    """What it must not print, because it belongs to a different error."""
    spoil: Callable[[Training], None] | None = None
    """What to do to the file system while the run trains."""
    small: bool = True
    """Whether the run folder is a separate, small file system."""


def _fill_up(training: Training) -> None:
    """Leave as much space as the last checkpoint took, which is too little: files take whole pages.

    Three more pages are for the lines that the run writes before its next save.
    """
    first = training.run_dir / store.folder_name(SAVE_EVERY)
    training.wait_for(first.exists, what="the first save")
    needed = parse_manifest(first).size
    free = shutil.disk_usage(training.run_dir).free
    (training.run_dir / BALLAST).write_bytes(bytes(max(0, free - needed - 3 * os.sysconf("SC_PAGE_SIZE"))))


def _fill_wholly(training: Training) -> None:
    """Leave no space: not even a line of a log can be written."""
    training.wait_for((training.run_dir / store.folder_name(SAVE_EVERY)).exists, what="the first save")
    with (training.run_dir / BALLAST).open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(os.sysconf("SC_PAGE_SIZE"))):
            pass


def _forbid(training: Training) -> None:
    training.wait_for_step(SAVE_EVERY + 1)
    training.run_dir.chmod(0o555)


DISK_FAULTS = (
    DiskFault(name="a full file system, seen before the save", policy="stop", words=FORESEEN),
    DiskFault(name="a full file system, seen before the save", policy="continue", words=FORESEEN),
    DiskFault(
        name="a file system that is full in the middle of a save",
        policy="stop",
        words="No space left on device",
        not_words=FORESEEN,
        spoil=_fill_up,
    ),
    DiskFault(
        name="a file system without a free byte",
        policy="continue",
        words="No space left on device",
        spoil=_fill_wholly,
    ),
    DiskFault(
        name="a folder that becomes read-only", policy="stop", words="Permission denied", spoil=_forbid, small=False
    ),
)


def try_disk_fault(runs: Runs, plan: DiskFault) -> Outcome:
    """Let the run meet the fault, repair the file system, resume and compare.

    Raises:
        Missed: the run did not end.
    """
    started, name = time.perf_counter(), f"{DISK_RUN}: {plan.name}, --on_save_failure {plan.policy}"
    run_dir = runs.new(f"{plan.name} {plan.policy}")
    size = int(FITTING * parse_manifest(store.checkpoints(runs.undisturbed(DISK_RUN).run_dir)[0]).size)
    prefix = AS_A_USER if os.geteuid() == 0 and not plan.small else ()
    if prefix and shutil.which(prefix[0]) is None:
        return Outcome(kind="disk", name=name, not_run=f"root needs {prefix[0]} for it")
    try:
        with _small_file_system(run_dir, size) if plan.small else _writable_again(run_dir) as repair:
            with runs.start(DISK_RUN, run_dir, "--on_save_failure", plan.policy, prefix=prefix) as training:
                if plan.spoil:
                    plan.spoil(training)
                code, _, _ = training.wait_until_gone()
                lines = [line for line in training.output().splitlines() if "not saved" in line]
            left = [path.name for path in run_dir.glob(".partial-*")]
            whole = _verified(run_dir)
            repair()
            resumed = runs.resume(DISK_RUN, run_dir)
    except NotAllowed as error:
        return Outcome(kind="disk", name=name, not_run=f"this user may not mount a file system ({error})")
    return Outcome(
        kind="disk",
        name=name,
        wrong=all_wrong(
            (code != EXIT_NOT_SAVED, f"exit code {code} instead of {EXIT_NOT_SAVED}"),
            *_wrong_lines(plan, lines),
            (bool(left), f"left behind: {left}"),
            *_wrong_resume(plan, resumed, whole=whole),
        ),
        seconds=time.perf_counter() - started,
        measured={"exit_code": code, "resumed_from": resumed.resumed_from, "steps_lost": resumed.steps_lost},
        said=tuple(line.replace(f"{run_dir.parent}/", "") for line in lines),
    )


def _wrong_lines(plan: DiskFault, lines: list[str]) -> list[tuple[bool, str]]:
    """What is wrong with what the run printed about its failed save, as findings for ``all_wrong``."""
    return [
        (not any(plan.words in line for line in lines), f"it did not print: {plan.words}"),
        (any(plan.not_words in line for line in lines), f"it printed: {plan.not_words}"),
        (plan.policy == "continue" and not any("the run continues" in line for line in lines), "it did not continue"),
    ]


def _wrong_resume(plan: DiskFault, resumed: Resumed, *, whole: int) -> list[tuple[bool, str]]:
    """What is wrong with the resumed run; ``whole`` is the step of the newest whole checkpoint."""
    start = resumed.resumed_from
    return [
        (whole != start or not whole, f"it resumed from step {start}; the newest whole checkpoint is of step {whole}"),
        (plan.policy == "stop" and resumed.steps_lost > SAVE_EVERY, f"{resumed.steps_lost} steps are lost"),
        (bool(resumed.wrong), resumed.wrong),
    ]


def _verified(run_dir: Path) -> int:
    """The step of the newest checkpoint if it is whole, else 0."""
    try:
        return max((read_manifest(path).step or 0 for path in store.checkpoints(run_dir)[:1]), default=0)
    except UserError:
        return 0


@contextlib.contextmanager
def _small_file_system(folder: Path, size: int) -> Iterator[Callable[[], None]]:
    """A file system of ``size`` bytes at ``folder``, in memory; the function that it yields makes room on it.

    Raises:
        NotAllowed: this user may not mount one.
    """

    def make_room() -> None:
        (folder / BALLAST).unlink(missing_ok=True)
        _mount("-o", f"remount,size={100 * size}", str(folder))

    folder.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield make_room
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def _writable_again(folder: Path) -> Iterator[Callable[[], None]]:
    """The file system as it is; the function that it yields makes ``folder`` writable again."""
    yield lambda: folder.chmod(0o755)


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotAllowed(done.stderr.strip())


# ``kill -9`` at an instant, and whether the resumed run equals an undisturbed one.

GONE_AFTER_KILL_SEC = {"one rank": 60, "all": 60, "the launcher": 30}
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
    limit = GONE_AFTER_KILL_SEC[plan.victim]
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


# Faults of launches: a worker that torchrun restarts, and two runs on one folder.

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


# The faults of the campaign, tried one after the other.


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault to try."""

    kind: str
    name: str
    attempt: Callable[[Runs], Outcome]


def all_faults(*, kills: int, seed: int) -> list[Fault]:
    """All faults of the campaign, among them ``kills`` kills drawn with ``seed``."""
    return [
        *_faults("kill", try_kill, seeded_kills(kills, seed=seed)),
        *_faults("request", try_signal, SIGNALS),
        *_faults("damage", try_damage, DAMAGES),
        *_faults("disk", try_disk_fault, DISK_FAULTS),
        RESTART,
        Fault(kind="launch", name="two runs on one folder", attempt=try_two_runs),
    ]


def core_faults() -> list[Fault]:
    """The faults of ``make test``. Other tests there damage files, without a launcher."""
    return [*_faults("kill", try_kill, core_kills()), *_faults("request", try_signal, CORE_SIGNALS), RESTART]


def try_faults(runs: Runs, faults: list[Fault]) -> Iterator[Outcome]:
    """Yield the outcome of each fault as it comes. A fault that could not be caused counts as failed."""
    for fault in faults:
        started = time.perf_counter()
        try:
            yield fault.attempt(runs)
        except Missed as error:
            yield _failed(fault, str(error), started)
        except Exception as error:  # noqa: BLE001 - an unexpected error must not end the campaign
            yield _failed(fault, f"{type(error).__name__}: {error}", started)


def _failed(fault: Fault, why: str, started: float) -> Outcome:
    return Outcome(kind=fault.kind, name=fault.name, wrong=why, seconds=time.perf_counter() - started)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


P = TypeVar("P", bound=_Named)


def _faults(kind: str, attempt: Callable[[Runs, P], Outcome], plans: Iterable[P]) -> list[Fault]:
    return [_fault(kind, attempt, plan) for plan in plans]


def _fault(kind: str, attempt: Callable[[Runs, P], Outcome], plan: P) -> Fault:
    return Fault(kind=kind, name=plan.name, attempt=lambda runs: attempt(runs, plan))


RESTART = Fault(kind="launch", name="torchrun restarts a killed worker", attempt=try_restart)

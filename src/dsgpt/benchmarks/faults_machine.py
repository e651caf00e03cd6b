"""Faults of the machine below a run: memory, disk, clock, host name; and interruptions of an interrupted run."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from dsgpt.benchmarks.faults import SAVE_EVERY, Outcome, all_wrong
from dsgpt.benchmarks.faults_runs import SLEEP, Fault, Resumed, Runs, send
from dsgpt.benchmarks.hosts import NoHosts
from dsgpt.checkpoints import store
from dsgpt.checkpoints.manifest import MANIFEST, STATE_FILE, parse_manifest
from dsgpt.checkpoints.pieces import MOMENTS, numbered
from dsgpt.checkpoints.training_state import COUNTERS
from dsgpt.common.errors import EXIT_NOT_SAVED

SPOILED = 2 * SAVE_EVERY
"""The step whose save meets the full disk."""
WRITES = "write,pwrite64,writev"
NO_NAME = """\
import errno, os
replace = os.replace
def refused(source, target):
    if os.fspath(target) == {path!r}:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(target))
    replace(source, target)
os.replace = refused
"""
"""A ``sitecustomize.py`` without space for one name. Files of JSON are written under the process's own name, which
strace cannot be told before, and then renamed."""
AFTER_STEP = SPOILED + 1
LEFT_SEC = 10
SPARE = 16 << 20
"""Bytes that a control group has left when its limit is set."""
HOG = f"""\
import os, sys, time
open("/proc/self/oom_score_adj", "w").write("-1000")  # the kernel ends another process of the group
sys.stdin.read()
open(sys.argv[1], "w").write(str(os.getpid()))
filled = b"1" * {2 * SPARE}
time.sleep(600)
"""
"""Fills the control group whose file of processes it gets, at the end of its input."""
ENTER = 'echo $$ > "$0" && exec "$@"'
"""Shell: runs a command in the control group of such a file."""


DISK_RUN, WRITERS = "zero1", 2
WRITTEN = (
    *(numbered(name, rank, WRITERS) for name in (store.WEIGHTS, MOMENTS) for rank in range(WRITERS)),
    *(f"random-{rank:05d}.safetensors" for rank in range(WRITERS)),
    *(store.INDEX, store.MODEL, COUNTERS, STATE_FILE, MANIFEST),
)
"""The files of its checkpoint, without the tokenizer's."""


def with_customized(text: str, folder: Path) -> list[str]:
    """The command that runs another in which every Python begins with ``text``, which ``folder`` will hold."""
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    return ["env", f"PYTHONPATH={folder}:{os.environ.get('PYTHONPATH', '')}"]


def try_full_at(runs: Runs, file: str) -> Outcome:
    """Refuse what needs space for one file of a save; then resume and compare.

    Raises:
        Missed: the run did not end.
    """
    if shutil.which("strace") is None:
        return Outcome(not_run="it needs strace")
    run_dir = runs.new(file)
    usual = parse_manifest(store.checkpoints(runs.undisturbed(DISK_RUN))[0]).files
    if others := {name for name in (*usual, MANIFEST) if "/" not in name} ^ set(WRITTEN):
        return Outcome(wrong=f"the files of a checkpoint are others: {', '.join(sorted(others))}")
    at = store.partial_folder(run_dir, SPOILED) / file
    strace = ["strace", "--follow-forks", "--seccomp-bpf", "--quiet=all", "--output=/dev/null", f"--trace-path={at}"]
    strace += [f"--trace={WRITES}", f"--inject={WRITES}:error=ENOSPC"]
    prefix = with_customized(NO_NAME.format(path=str(at)), run_dir.parent) if at.suffix == ".json" else strace
    with runs.start(DISK_RUN, run_dir, prefix=prefix) as training:
        code = training.wait_until_gone()["exit_code"]
        lines = tuple(line for line in training.output().splitlines() if "not saved" in line)
    left = [path.name for path in run_dir.glob(".partial-*")]
    resumed = runs.resume(DISK_RUN, run_dir)
    wrong = all_wrong(
        (code != EXIT_NOT_SAVED, f"exit code {code} instead of {EXIT_NOT_SAVED}"),
        (not any("No space left on device" in line for line in lines), "it did not say why it was not saved"),
        (bool(left), f"left behind: {left}"),
        (resumed.resumed_from != SPOILED - SAVE_EVERY, f"it resumed from step {resumed.resumed_from}"),
        (bool(resumed.wrong), resumed.wrong),
    )
    return Outcome(wrong=wrong, measured={"exit_code": code, "resumed_from": resumed.resumed_from}, said=lines)


@contextlib.contextmanager
def memory_group() -> Iterator[tuple[Path, str, str]]:
    """A new control group, and its files of the limit and of the memory in use; version 1 or 2, as the machine has.

    Raises:
        NoHosts: this machine or this user cannot make one.
    """
    for mount in psutil.disk_partitions(all=True):
        folder, second = Path(mount.mountpoint), mount.fstype == "cgroup2"
        names = ("memory.max", "memory.current") if second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        try:
            if second and "memory" in (folder / "cgroup.controllers").read_text().split():
                (folder / "cgroup.subtree_control").write_text("+memory")
            elif mount.fstype != "cgroup" or "memory" not in mount.opts.split(","):
                continue
            group = folder / f"dsgpt-{os.getpid()}"
            group.mkdir()
        except OSError as error:
            raise NoHosts(f"this user may not limit memory ({error})") from error
        try:
            yield group, *names
        finally:
            until = time.monotonic() + LEFT_SEC
            while group.exists():  # it is busy until the kernel has forgotten the last process
                with contextlib.suppress(OSError) if time.monotonic() < until else contextlib.nullcontext():
                    group.rmdir()
        return
    raise NoHosts("no control group of this machine can limit memory")


def try_memory_limit(runs: Runs, run: str) -> Outcome:
    """Limit the memory of a run to little more than it has, and fill that; then resume and compare.

    Raises:
        Missed: the run did not reach the step, or did not end.
    """
    run_dir = runs.new("memory limit")
    try:
        with memory_group() as (group, limit, used):
            processes = str(group / "cgroup.procs")
            with (
                subprocess.Popen([sys.executable, "-c", HOG, processes], stdin=subprocess.PIPE) as hog,
                contextlib.ExitStack() as ending,
                runs.start(run, run_dir, prefix=("sh", "-c", ENTER, processes)) as training,
            ):
                ending.callback(hog.kill)
                training.wait_for_step(AFTER_STEP)
                (group / limit).write_text(str(int((group / used).read_text()) + SPARE))
                hog.stdin.close()  # type: ignore[union-attr]  # it is a pipe
                ended = training.wait_until_gone()
            events = (group / ("memory.events" if limit == "memory.max" else "memory.oom_control")).read_text()
    except NoHosts as error:
        return Outcome(not_run=str(error))
    killed = next(int(line.split()[1]) for line in events.splitlines() if line.startswith("oom_kill "))
    resumed = runs.resume(run, run_dir)
    wrong = (not killed, "the kernel ended no process"), (ended["exit_code"] == 0, "the launcher ended with code 0")
    return _resumed(resumed, ended["exit_code"], *wrong)


def try_elsewhere(runs: Runs, run: str, what: str, *, prefix: Sequence[str] = (), again: bool = False) -> Outcome:
    """Kill the run, resume it where something is different, and compare.

    Args:
        runs: as for every fault.
        run: a key of ``RUNS``.
        what: the difference, in words.
        prefix: the command in which it is resumed.
        again: whether the resumed run is interrupted, too, and resumed once more.

    Raises:
        Missed: the run did not reach the step, or did not end.
    """
    if prefix and shutil.which(prefix[0]) is None:
        return Outcome(not_run=f"it needs {prefix[0]}")
    if prefix[:1] == ("unshare",) and os.geteuid() != 0:
        return Outcome(not_run="only root can rename a host")
    run_dir, interruptions = runs.new(what), {AFTER_STEP: signal.SIGKILL}
    if again:
        interruptions[AFTER_STEP + SAVE_EVERY] = signal.SIGTERM
    for step, number in interruptions.items():
        with runs.start(run, run_dir, "--resume") as training:
            training.wait_for_step(step)
            send(training.everyone(), number)
            code = training.wait_until_gone()["exit_code"]
    if prefix[:1] == ("faketime",):
        prefix = [*with_customized(SLEEP, run_dir.parent), *prefix]
    return _resumed(runs.resume(run, run_dir, prefix=prefix), code)


def _resumed(resumed: Resumed, code: int, *more: tuple[bool, str]) -> Outcome:
    lost = resumed.steps_lost
    lines = tuple(line for line in resumed.output.splitlines() if "resuming from" in line)
    wrong = all_wrong(*more, (lost > SAVE_EVERY, f"{lost} steps are lost"), (bool(resumed.wrong), resumed.wrong))
    return Outcome(wrong=wrong, measured={"exit_code": code, "resumed_from": resumed.resumed_from}, said=lines)


def machine_faults() -> list[Fault]:
    """The faults of this file."""
    back = ("faketime", "--exclude-monotonic", "-f", "-1d")
    renamed = ("unshare", "--uts", "sh", "-c", 'echo dsgpt-other > /proc/sys/kernel/hostname && exec "$@"', "sh")
    twice = "interrupted again in the resumed run"
    elsewhere: list[tuple[str, str, dict[str, Any]]] = [
        ("baseline", "resumed with a clock that is a day behind", {"prefix": back}),
        ("ddp", "resumed on a host of another name", {"prefix": renamed}),
        *((run, twice, {"again": True}) for run in ("baseline", "zero1")),
    ]
    full = f"{DISK_RUN}: no space while `{{}}` of step {SPOILED} is written"
    limit = f"{{}}: the limit of memory of its control group after step {AFTER_STEP}"
    killed = f"{{}}: killed after step {AFTER_STEP}, {{}}"
    return [
        *(Fault(kind="disk", name=full.format(file), attempt=partial(try_full_at, file=file)) for file in WRITTEN),
        *(
            Fault(kind="machine", name=limit.format(run), attempt=partial(try_memory_limit, run=run))
            for run in ("baseline", "zero1")
        ),
        *(
            Fault(
                kind="machine",
                name=killed.format(run, what),
                attempt=partial(try_elsewhere, run=run, what=what, **more),
            )
            for run, what, more in elsewhere
        ),
    ]

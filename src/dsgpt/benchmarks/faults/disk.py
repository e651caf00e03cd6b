"""File systems that refuse in the middle of a run: a full one, and a folder that nobody may write in any more."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dsgpt.benchmarks.faults.outcome import Outcome, first_wrong
from dsgpt.benchmarks.faults.plan import SAVE_EVERY
from dsgpt.benchmarks.faults.processes import Training
from dsgpt.benchmarks.faults.runs import Runs
from dsgpt.checkpointing import store
from dsgpt.checkpointing.manifest import parse_manifest, read_manifest
from dsgpt.common.errors import EXIT_NOT_SAVED, UserError

RUN = "baseline"
FITTING = 2.5
"""Checkpoints on the small file system."""
AS_A_USER = ("setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner")
"""In front of a command of root's: permissions hold for it too."""


FORESEEN = "No space left on device: the last checkpoint took"


class NotAllowed(RuntimeError):
    """This user may not make a file system."""


@dataclass(frozen=True, kw_only=True)
class DiskFault:
    """How a file system refuses, and what the run was told to do then."""

    name: str
    policy: str
    """``--on_save_failure``."""
    words: str
    """What must be said."""
    not_words: str = "\0"
    """What must not be said, because it tells of another refusal."""
    spoil: Callable[[Training], None] | None = None
    """What is done to it while the run goes on."""
    small: bool = True
    """Whether the run folder is a small file system of its own."""


def _fill_up(training: Training) -> None:
    """Leave as much as the last checkpoint took, which the next one does not fit into: files take whole pages."""
    first = training.run_dir / store.folder_name(SAVE_EVERY)
    training.wait_for(first.exists, what="the first save")
    needed = parse_manifest(first).size
    free = shutil.disk_usage(training.run_dir).free
    (training.run_dir / "ballast").write_bytes(bytes(max(0, free - needed - os.sysconf("SC_PAGE_SIZE"))))


def _fill_wholly(training: Training) -> None:
    """Leave nothing: not a line of a log can be written any more."""
    training.wait_for((training.run_dir / store.folder_name(SAVE_EVERY)).exists, what="the first save")
    with (training.run_dir / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
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
    """Let the run meet the fault, mend it, resume and compare.

    Raises:
        Missed: the run did not end.
    """
    started, name = time.perf_counter(), f"{RUN}: {plan.name}, --on_save_failure {plan.policy}"
    run_dir = runs.new(f"{plan.name} {plan.policy}")
    size = int(FITTING * parse_manifest(store.checkpoints(runs.undisturbed(RUN).run_dir)[0]).size)
    is_root = os.geteuid() == 0
    if is_root and not plan.small and shutil.which(AS_A_USER[0]) is None:
        return Outcome(kind="disk", name=name, not_run=f"root needs {AS_A_USER[0]} for it")
    try:
        with _small_file_system(run_dir, size) if plan.small else contextlib.nullcontext() as grow:
            prefix = AS_A_USER if is_root and not plan.small else ()
            with runs.start(RUN, run_dir, "--on_save_failure", plan.policy, prefix=prefix) as training:
                if plan.spoil:
                    plan.spoil(training)
                code, _, _ = training.wait_until_gone()
                told = [line for line in training.said().splitlines() if "not saved" in line]
            left = [path.name for path in run_dir.glob(".partial-*")]
            whole = _verified(run_dir)
            if plan.small:
                (run_dir / "ballast").unlink(missing_ok=True)
                grow()
            else:
                run_dir.chmod(0o755)
            gone_on = runs.go_on(RUN, run_dir)
    except NotAllowed as error:
        return Outcome(kind="disk", name=name, not_run=f"this user may not mount a file system ({error})")
    wrong = first_wrong(
        (code != EXIT_NOT_SAVED, f"exit code {code} instead of {EXIT_NOT_SAVED}"),
        (not any(plan.words in line for line in told), f"it did not say: {plan.words}"),
        (any(plan.not_words in line for line in told), f"it said: {plan.not_words}"),
        (plan.policy == "continue" and not any("going on" in line for line in told), "it did not go on"),
        (bool(left), f"left behind: {left}"),
        (whole != gone_on.resumed_from or not whole, f"it went on from step {gone_on.resumed_from}, whole is {whole}"),
        (plan.policy == "stop" and gone_on.steps_lost > SAVE_EVERY, f"{gone_on.steps_lost} steps are lost"),
        (bool(gone_on.wrong), gone_on.wrong),
    )
    measured = {"exit_code": code, "resumed_from": gone_on.resumed_from, "steps_lost": gone_on.steps_lost}
    said = tuple(line.replace(f"{run_dir.parent}/", "") for line in told)
    seconds = time.perf_counter() - started
    return Outcome(kind="disk", name=name, wrong=wrong, seconds=seconds, measured=measured, said=said)


def _verified(run_dir: Path) -> int:
    """The step of the newest checkpoint, if it is whole; 0 if it is not."""
    try:
        return max((read_manifest(path).step for path in store.checkpoints(run_dir)[:1]), default=0)
    except UserError:
        return 0


@contextlib.contextmanager
def _small_file_system(folder: Path, size: int) -> Iterator[Callable[[], None]]:
    """A file system of ``size`` bytes at ``folder``, in memory; what it gives makes it large.

    Raises:
        NotAllowed: this user may not.
    """
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield lambda: _mount("-o", f"remount,size={100 * size}", str(folder))
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotAllowed(done.stderr.strip())

"""File systems that refuse writes in the middle of a run: a full one, and a folder that becomes read-only."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dsgpt.benchmarks.faults.outcome import Outcome, all_wrong
from dsgpt.benchmarks.faults.plan import SAVE_EVERY
from dsgpt.benchmarks.faults.processes import Training
from dsgpt.benchmarks.faults.runs import Resumed, Runs
from dsgpt.checkpointing import store
from dsgpt.checkpointing.manifest import parse_manifest, read_manifest
from dsgpt.common.errors import EXIT_NOT_SAVED, UserError

RUN = "baseline"
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
    started, name = time.perf_counter(), f"{RUN}: {plan.name}, --on_save_failure {plan.policy}"
    run_dir = runs.new(f"{plan.name} {plan.policy}")
    size = int(FITTING * parse_manifest(store.checkpoints(runs.undisturbed(RUN).run_dir)[0]).size)
    prefix = AS_A_USER if os.geteuid() == 0 and not plan.small else ()
    if prefix and shutil.which(prefix[0]) is None:
        return Outcome(kind="disk", name=name, not_run=f"root needs {prefix[0]} for it")
    try:
        with _small_file_system(run_dir, size) if plan.small else _writable_again(run_dir) as repair:
            with runs.start(RUN, run_dir, "--on_save_failure", plan.policy, prefix=prefix) as training:
                if plan.spoil:
                    plan.spoil(training)
                code, _, _ = training.wait_until_gone()
                lines = [line for line in training.output().splitlines() if "not saved" in line]
            left = [path.name for path in run_dir.glob(".partial-*")]
            whole = _verified(run_dir)
            repair()
            resumed = runs.resume(RUN, run_dir)
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

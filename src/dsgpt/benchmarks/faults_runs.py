"""Starts, watches, resumes and compares the runs of the fault campaign."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dsgpt.benchmarks.cells import STRATEGIES, flags, prepare_corpus, write_recipe
from dsgpt.benchmarks.faults import DROPOUT, RUNS, SAVE_EVERY, STEPS, Outcome, first_error
from dsgpt.benchmarks.launch import child_environment
from dsgpt.checkpoints import store
from dsgpt.common.files import write_json_atomic
from dsgpt.common.json_files import read_object
from dsgpt.machine.launcher import launcher_command
from dsgpt.record.schema import COMPLETE_FILE, RECORD_FILE, STEPS_FILE, drop_steps_after, read_steps

# A training as a user starts it, observed from outside: its steps, its ranks, the processes left after its end.

POLL_SEC = 0.002
"""Much shorter than a step or a save, so that a kill hits the instant that it is aimed at."""
MARK = "DSGPT_LAUNCH_UNDER_TEST"
"""The variable that all processes of a launch inherit."""
LIMIT_SEC = 300
"""Longer than any training of the campaign takes."""
SLEEP = "import select, time\ntime.sleep = lambda sec: select.select([], [], [], sec)\n"
"""A ``sitecustomize.py`` that replaces ``time.sleep``: it fails under libfaketime 0.9.10 (absolute clock_nanosleep)."""


class Missed(RuntimeError):
    """An event that the suite waited for did not happen."""


class Training(contextlib.AbstractContextManager["Training"]):
    """One launch of ``src/gpt2.py`` in a new session. At the end of the context all its processes are killed.

    Args:
        command: launcher, script and flags.
        run_dir: the run folder.
        log: the file to which its output is appended.
    """

    def __init__(self, command: Sequence[str], *, run_dir: Path, log: Path) -> None:
        self._mark = uuid.uuid4().hex
        self.run_dir, self._log, self._log_start = run_dir, log, log.stat().st_size if log.exists() else 0
        with log.open("ab") as file, default_sighup():
            own: dict[str, Any] = {"env": child_environment("cpu") | {MARK: self._mark}, "cwd": run_dir.parent}
            own |= {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            self.launcher = psutil.Popen(list(command), start_new_session=True, **own)

    def __exit__(self, *_: object) -> None:
        for process in self.everyone():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.launcher.wait()

    def everyone(self) -> list[psutil.Process]:
        """Every process that this launch started, even if its parent has ended."""
        every = psutil.process_iter(["environ"], ad_value={})
        return [process for process in every if process.info["environ"].get(MARK) == self._mark]

    def ranks(self, count: int) -> list[psutil.Process]:
        """The processes that train, by rank.

        Raises:
            Missed: there are not ``count`` of them.
        """
        if count == 1:
            return [self.launcher]
        named = {process.pid: process for process in self.everyone() if "RANK" in process.info["environ"]}
        outermost = [process for process in named.values() if process.ppid() not in named]  # children have it, too
        by_rank = {int(process.info["environ"]["RANK"]): process for process in outermost}
        if sorted(by_rank) != list(range(count)):
            raise Missed(f"of {count} ranks, {sorted(by_rank)} were found")
        return [by_rank[rank] for rank in range(count)]

    def wait_for(self, condition: Callable[[], bool], *, what: str) -> None:
        """Wait until ``condition`` holds.

        Raises:
            Missed: the launcher ended first, or it took ``LIMIT_SEC``.
        """
        deadline = time.monotonic() + LIMIT_SEC
        while not condition():
            if self.launcher.poll() is not None and not condition():
                raise Missed(f"the run ended before {what}: {self.output()[-500:]}")
            if time.monotonic() > deadline:
                raise Missed(f"{what} did not happen within {LIMIT_SEC} s: {self.output()[-500:]}")
            time.sleep(POLL_SEC)

    def wait_for_step(self, step: int) -> None:
        """Wait until ``step`` is done and logged."""
        self.wait_for(lambda: last_step(self.run_dir) >= step, what=f"step {step}")

    def wait_until_gone(self) -> dict[str, Any]:
        """Wait until all processes have ended.

        Returns:
            ``exit_code`` and ``launcher_sec`` of the launcher; ``gone_sec``, the seconds until the last process ended.

        Raises:
            Missed: some are still there after ``LIMIT_SEC``.
        """
        started, ended = time.monotonic(), None
        while True:
            now = time.monotonic() - started
            if ended is None and self.launcher.poll() is not None:
                ended = now
            if ended is not None and not self.everyone():
                seconds = {"launcher_sec": round(ended, 2), "gone_sec": round(now, 2)}
                return {"exit_code": self.launcher.returncode, **seconds}
            if now > LIMIT_SEC:
                raise Missed(f"{len(self.everyone())} processes are left after {LIMIT_SEC} s: {self.output()[-500:]}")
            time.sleep(0.05)

    def wait(self) -> int:
        """Wait for the end of the launcher alone, and return its exit code.

        Raises:
            Missed: it is still there after ``LIMIT_SEC``.
        """
        try:
            return self.launcher.wait(LIMIT_SEC)
        except psutil.TimeoutExpired as error:
            raise Missed(f"it did not end within {LIMIT_SEC} s: {self.output()[-500:]}") from error

    def output(self) -> str:
        """Output of the launcher and its ranks."""
        return self._log.read_bytes()[self._log_start :].decode(errors="replace").strip()


@contextlib.contextmanager
def default_sighup() -> Iterator[None]:
    """A context whose child processes do not ignore SIGHUP, even if this process was started with ``nohup``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def last_step(run_dir: Path) -> int:
    """The last step in the run's log; 0 if there is none. A torn line does not count."""
    log = run_dir / STEPS_FILE
    return max((line["step"] for line in read_steps(log) if "loss" in line), default=0) if log.exists() else 0


def fill(file: Path) -> None:
    """Make ``file`` so large that its file system has no free byte."""
    with file.open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while ballast.write(bytes(os.sysconf("SC_PAGE_SIZE"))):
            pass


def send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to each of ``processes`` that still exists, as close together as one process can."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


# Starts and resumes the runs of the campaign, and compares a disturbed run with the undisturbed one.

LOG = "console.log"
COMPARED = ("loss", "grad_norm", "lr", "val_loss")
"""Figures that must be the same at every step, to the last bit."""


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A disturbed run after ``--resume``."""

    output: str
    resumed_from: int
    """The checkpoint's step; 0 for a fresh start. The last step if the run was finished before it noticed the fault."""
    taken: int
    """The last step that the run had logged before."""
    wrong: str
    """Difference from the undisturbed run; empty if there is none."""

    @property
    def steps_lost(self) -> int:
        """Steps that had to be repeated."""
        return self.taken - self.resumed_from


class Runs:
    """Folders, recipes and text for the campaign's runs.

    Args:
        folder: an existing folder, in which everything is written.
        repository: holds the scripts and recipes.
    """

    def __init__(self, folder: Path, *, repository: Path) -> None:
        self.folder, self._repository = folder.resolve(), repository
        self._corpus = prepare_corpus(repository, self.folder / "corpus")
        self._undisturbed: dict[str, Path] = {}

    def new(self, name: str) -> Path:
        """The path of a run folder that does not exist yet, in a new folder named after ``name``."""
        count = sum(1 for _ in self.folder.iterdir())
        parent = self.folder / f"{count:03d}-{''.join(c if c.isalnum() else '-' for c in name)}"
        parent.mkdir()
        return parent / "run"

    def start(
        self,
        run: str,
        run_dir: Path,
        *more: str,
        launcher: Sequence[str] = (),
        prefix: Sequence[str] = (),
        changes: Mapping[str, Any] | None = None,
        log: str = LOG,
    ) -> Training:
        """Start ``run`` with its launcher.

        Args:
            run: a key of ``RUNS``.
            run_dir: its folder.
            more: further flags.
            launcher: further flags of the launcher.
            prefix: a command that runs the launcher.
            changes: other values for flags that every run has; they change the training.
            log: name of the file beside the run folder for what the launcher and its ranks print.
        """
        cell = RUNS[run]
        front = launcher_command(STRATEGIES[cell.strategy].launcher if cell.ranks > 1 else "python", cell.ranks)
        words = self.words(run, run_dir, changes or {})
        command = [*prefix, *front, *launcher, str(self._repository / "src" / "gpt2.py"), *words, *more]
        return Training(command, run_dir=run_dir, log=run_dir.parent / log)

    def words(self, run: str, run_dir: Path, changes: Mapping[str, Any]) -> list[str]:
        """The flags of ``run``, with ``changes`` of values."""
        cell, recipe = RUNS[run], self.folder / f"{run}.json"
        if not recipe.exists():
            write_recipe(recipe, cell, recipes=self._repository / "ds_configs")
        words = flags(cell, recipe=recipe, corpus=self._corpus, run_dir=run_dir, device="cpu")
        for name, value in {"dropout": DROPOUT, "max_train_steps": STEPS, **changes}.items():
            words[words.index(f"--{name}") + 1] = str(value)
        return [*words, "--save_every", str(SAVE_EVERY), "--keep_checkpoints", "9", "--steps_per_print", "1"]

    def train(self, run: str, run_dir: Path, *more: str, prefix: Sequence[str] = ()) -> tuple[int, str]:
        """Train ``run`` without a fault, with ``more`` flags, under ``prefix``; its exit code and what it printed."""
        with self.start(run, run_dir, *more, prefix=prefix) as training:
            return training.wait_until_gone()["exit_code"], training.output()

    def undisturbed(self, run: str) -> Path:
        """The folder of the undisturbed run, which is trained at the first call.

        Raises:
            Missed: it failed.
        """
        if run not in self._undisturbed:
            run_dir = self.new(f"{run} undisturbed")
            code, output = self.train(run, run_dir)
            if code:
                raise Missed(f"{run} failed undisturbed, exit code {code}: {output[-1000:]}")
            self._undisturbed[run] = run_dir
        return self._undisturbed[run]

    def rolled_back(self, run: str, name: str) -> Path:
        """A copy of the undisturbed run in the state in which a kill just before its last step would have left it."""
        run_dir = self.copied(run, name)
        (run_dir / COMPLETE_FILE).unlink()
        shutil.rmtree(store.checkpoints(run_dir)[0])
        store.name_newest_and_best(run_dir)
        drop_steps_after(run_dir / STEPS_FILE, STEPS - 1)
        write_json_atomic(run_dir / RECORD_FILE, read_object(run_dir / RECORD_FILE) | {"status": "running"})
        return run_dir

    def copied(self, run: str, name: str) -> Path:
        """A copy of the undisturbed run."""
        return shutil.copytree(self.undisturbed(run), self.new(name))

    def resume(self, run: str, run_dir: Path, *, prefix: Sequence[str] = ()) -> Resumed:
        """Resume ``run`` under ``prefix`` to its end, and compare it with the undisturbed run.

        Raises:
            Missed: it did not end.
        """
        taken = last_step(run_dir)
        code, output = self.train(run, run_dir, "--resume", prefix=prefix)
        failure = f"--resume ended with exit code {code}: {first_error(output)}"
        wrong = failure if code else self.difference(run, run_dir)
        begun = re.search(r"resuming from \S*/step-(\d{8})", output)
        at = taken if "holds a finished run" in output else int(begun[1]) if begun else 0
        return Resumed(output=output, taken=taken, resumed_from=at, wrong=wrong)

    def difference(self, run: str, run_dir: Path) -> str:
        """Difference of ``run_dir`` from the undisturbed run; empty if both are the same to the last bit."""
        expected, actual = (figures(folder) for folder in (self.undisturbed(run), run_dir))
        if actual.keys() != expected.keys():
            return f"it has other steps: {sorted(actual.keys() ^ expected.keys())[:3]}"
        for place, value in expected.items():
            if actual[place] != value:
                return f"{place[1]} of step {place[0]} is {actual[place]!r}, undisturbed {value!r}"
        if read_object(run_dir / RECORD_FILE)["status"] != "completed":
            return "its record does not say that it is completed"
        return ""


def figures(run_dir: Path) -> dict[tuple[int, str], Any]:
    """Every compared figure by step and name. A step that is logged twice gives a pair, which equals no figure."""
    figures: dict[tuple[int, str], Any] = {}
    for line in read_steps(run_dir / STEPS_FILE):
        for key in COMPARED:
            if key in line:
                place = (line["step"], key)
                figures[place] = (figures[place], line[key]) if place in figures else line[key]
    return figures


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault to try."""

    kind: str
    """One of ``KINDS``."""
    name: str
    """Description of the fault and the run, in console lines, pages and test ids."""
    attempt: Callable[[Runs], Outcome]

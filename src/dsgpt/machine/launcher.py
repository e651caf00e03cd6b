"""Launchers and signals: how the processes of a run are started, asked to stop, and ended.

Requests to stop a run early: signals, and the end of its launcher. After the first request the run finishes its step
and saves. A thread watches for requests and deadlines: Python runs signal handlers only in the main thread, and the
main thread may be waiting for another rank.
"""

import contextlib
import itertools
import logging
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from dsgpt.common.errors import EXIT_INTERRUPTED, EXIT_STOPPED, Interrupted
from dsgpt.machine.topology import free_port

if TYPE_CHECKING:
    import psutil

# Launchers (``deepspeed``, ``torchrun``): makes and recognises their commands, and watches the launcher of this rank.

LAUNCHERS = {"baseline": "python", "ddp": "torchrun", "fsdp": "torchrun", "optimized": "deepspeed"}
"""The launcher of each run type that users take."""
NVIDIA_DRIVER = Path("/dev/nvidiactl")
_COMMANDS = {"deepspeed", "deepspeed.pt", "ds", "torchrun"}
_MODULES = re.compile(r"deepspeed\.launcher\.(launch|runner)|torch\.distributed\.(launch|run)")


def launcher_command(launcher: str, ranks: int, *flags: str) -> list[str]:
    """The words to put before a script to start ``ranks`` ranks of it on this machine, with a free port as rendezvous.

    Args:
        launcher: ``python``, which starts one rank; or this environment's ``deepspeed`` or ``torchrun``. The
            environment need not be activated.
        ranks: how many to start.
        flags: further flags of the launcher.
    """
    if launcher == "python":
        return [sys.executable]
    visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.isdecimal()]
    if launcher == "torchrun":
        these = ["--nproc_per_node", str(ranks)]
    elif len(visible) >= ranks and NVIDIA_DRIVER.exists():
        these = ["--quiet", "--include", f"localhost:{','.join(visible[:ranks])}"]  # --num_gpus takes the first of all
    else:
        these = ["--quiet", "--num_gpus", str(ranks)]
    return [str(Path(sys.executable).parent / launcher), *these, "--master_port", str(free_port()), *flags]


def job_words(launcher: str, *, machines: int, devices: int, gpus: bool, launch: str = "launch") -> list[str]:
    """The words of a shell to put before the flags of ``src/gpt2.py`` to start a training.

    Args:
        launcher: one of ``planner.options.JOB_LAUNCHERS`` but ``kubernetes``, whose flags are in a file.
        machines: how many take part.
        devices: ranks of each of them.
        gpus: whether a rank is a GPU; otherwise a share of the CPU.
        launch: the folder with the scripts for several machines; ``src`` is beside it.
    """
    script = str(Path(launch).parent / "src" / "gpt2.py")
    if launcher == "python":
        return ["python", script]
    if launcher == "slurm":
        given = [f"--ntasks-per-node={devices}", *[f"--gpus-per-node={devices}"] * gpus]
        given += [] if launch == "launch" else [f"--export=ALL,ROOT={Path(launch).parent}"]
        return ["sbatch", f"--nodes={machines}", *given, f"{launch}/slurm/train.sbatch"]
    if machines > 1 and launcher == "torchrun":
        return ["env", f"DEVICES={devices}", f"{launch}/torchrun.sh"]
    if machines > 1:
        return [f"{launch}/run_hostfile.sh"]
    count = ["--nproc_per_node"] if launcher == "torchrun" else ["--quiet", "--num_gpus"]
    return [launcher, *count, str(devices), script]


def starts_launcher(words: Sequence[str]) -> bool:
    """Whether a command line is a launcher's, called by name or as a module."""
    if any(Path(word).name in _COMMANDS for word in words[:2]):
        return True
    return any(flag == "-m" and _MODULES.fullmatch(module) for flag, module in itertools.pairwise(words))


def own_command() -> list[str]:
    """The words that started this run: those of its launcher, if it has one, else of this process."""
    processes = waiting_processes()
    words = _words(processes[-1]) if processes else []
    if not starts_launcher(words):
        return [sys.executable, *sys.argv]
    return words if Path(words[0]).name in _COMMANDS or "-m" in words else words[1:]  # without the script's interpreter


class Launcher:
    """The processes that wait for this rank: its parent and those above, up to the topmost launcher command.

    ``deepspeed`` is two processes. A kill may end the upper one and leave the lower one running.
    """

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._processes = waiting_processes()

    def is_gone(self) -> bool:
        """Whether one of these processes has ended, so that nothing waits for this rank any more.

        A zombie has ended, but its parent has not read its exit code.
        """
        import psutil  # noqa: PLC0415 - --help needs none of it

        dead = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        try:
            ended = any(not process.is_running() or process.status() in dead for process in self._processes)
        except psutil.NoSuchProcess:
            return True
        return ended or os.getppid() != self._parent


def waiting_processes() -> "list[psutil.Process]":
    """This process's parent, its parent, and so on to the topmost process that is a launcher; at least the first."""
    import psutil  # noqa: PLC0415 - --help needs none of it

    parents: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):  # a parent that ended just now, or that this user may not see
        parents = psutil.Process().parents()
    launchers = [index for index, process in enumerate(parents) if starts_launcher(_words(process))]
    return parents[: max([0, *launchers]) + 1]


def _words(process: "psutil.Process") -> list[str]:
    import psutil  # noqa: PLC0415

    try:
        return process.cmdline()
    except psutil.Error:  # it has ended, or belongs to another user
        return []


# The end of a process that was a rank.


def exit_rank(code: int) -> NoReturn:
    """End this process at once, after its output is flushed. Every process that joined a group ends with this.

    At an ordinary exit a thread of gloo may still hold the last reference to a tensor. It needs the interpreter to free
    it, which is gone, and the process aborts: about one in a hundred finished runs of two ranks ended with signal 6
    ("terminate called without an active exception").
    """
    for flush in (logging.shutdown, sys.stdout.flush, sys.stderr.flush):
        with contextlib.suppress(OSError):  # of a terminal that is gone
            flush()
    os._exit(code)


SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Signals that stop a run, sent by, in this order: schedulers and launchers; Slurm and spot instances; the keyboard;
a closed terminal.
"""
ECHO_SEC = {True: 2.0, False: 0.2}
"""Seconds after the first signal in which further signals count as the same request, with a launcher (True) and without
one (False). A launcher forwards signals that its ranks already got from the terminal or the batch system."""
ORPHAN_SEC = 25
"""Seconds that ranks have for their step and save after their launcher ended; then they end at once."""
UNWIND_SEC = 10
"""Seconds that a rank with nothing to save has to exit: it may be waiting for a rank that is gone."""
_POLL_SEC = 1.0
_CLOSE = b"\0"


class Interruption:
    """Whether this process was asked to stop its run, and by what. A context manager: handles signals inside.

    Args:
        launcher: the launcher of this rank; None if there is none.
        speaks: whether this rank prints a line about the request.
    """

    def __init__(self, launcher: Launcher | None = None, *, speaks: bool = True) -> None:
        self.reason: str | None = None
        """The first request, for example ``SIGTERM``; None before any."""
        self._launcher, self._echo_sec, self._speaks = launcher, ECHO_SEC[launcher is not None], speaks
        self._patient = self._raised = False
        self._asked_at: float | None = None
        self._deadline: tuple[float, int] | None = None

    def __enter__(self) -> "Interruption":
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        outlives_its_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # started with ``nohup``
        handled = [number for number in SIGNALS if number != signal.SIGHUP or not outlives_its_terminal]
        self._before = {number: signal.signal(number, self._handle) for number in handled}
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="interruption", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        os.write(self._write_end, _CLOSE)
        self._thread.join()
        os.close(self._read_end)
        os.close(self._write_end)

    @property
    def asked_sec(self) -> float:
        """Seconds since the first request; 0 before any."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    @contextlib.contextmanager
    def patience(self, patient: bool = True) -> Iterator[None]:
        """A context in which a request only sets ``reason``.

        Outside, or inside ``patience(False)``, a request raises ``Interrupted`` in the main thread at once.
        """
        before, self._patient = self._patient, patient
        try:
            yield
        finally:
            self._patient = before

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal in the main thread, between two Python instructions."""
        if not self._patient and not self._raised:
            self._raised = True  # a repeated signal must not disturb the unwinding
            raise Interrupted(f"stopped by {self.reason or signal.Signals(number).name}")

    def _listen(self) -> None:
        while True:
            ready, _, _ = select.select([self._read_end], [], [], _POLL_SEC)
            numbers = os.read(self._read_end, 512) if ready else b""
            if _CLOSE in numbers:
                return
            for number in numbers:
                if number in SIGNALS:
                    self._signalled(signal.Signals(number).name)
            if self._launcher is not None and self._launcher.is_gone():
                self._orphaned()
            if self._deadline is not None and time.monotonic() > self._deadline[0]:
                _leave_at_once("the run did not end in time", self._deadline[1])

    def _signalled(self, name: str) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._ask(name, now)
            if self._speaks and self._patient:
                line = f"{name}: the run stops after this step and saves; a second signal ends it at once"
                with contextlib.suppress(OSError):  # the terminal is gone; this thread must continue
                    print(_in_place_of_a_live_line(line), file=sys.stderr, flush=True)
        elif name == signal.SIGHUP.name:
            return  # a closed terminal may send several
        elif now - self._asked_at > self._echo_sec:
            _leave_at_once(f"{name} after {self.reason}", EXIT_INTERRUPTED)

    def _orphaned(self) -> None:
        self._launcher = None  # report it only once
        now = time.monotonic()
        if self._asked_at is None:
            self._ask("the end of its launcher", now)
            if not self._patient:
                main = threading.main_thread().ident
                assert main is not None  # it runs
                signal.pthread_kill(main, signal.SIGTERM)  # raises Interrupted there
        self._deadline = (now + ORPHAN_SEC, EXIT_INTERRUPTED)

    def _ask(self, reason: str, now: float) -> None:
        self.reason, self._asked_at = reason, now
        if not self._patient:
            self._deadline = (now + UNWIND_SEC, EXIT_STOPPED)


def _in_place_of_a_live_line(line: str) -> str:
    """``line``; on a terminal it first erases what the run shows in the cursor's row."""
    return f"\r\x1b[K{line}" if sys.stderr.isatty() else line


def _leave_at_once(why: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # the terminal may be gone
        line = _in_place_of_a_live_line(f"error: {why}: ended at once; continue with --resume\n")
        os.write(sys.stderr.fileno(), line.encode())
    os._exit(code)


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Block ``SIGNALS`` in this thread, and in processes forked here, inside the context.

    Otherwise a data worker that gets a signal before it calls ``ignore_stop_signals`` would run the rank's handlers.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals(*_: Any) -> None:
    """Make a data worker ignore these signals, which terminals and schedulers send to it too.

    The rank needs its workers to finish the step; they end with the rank.
    """
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

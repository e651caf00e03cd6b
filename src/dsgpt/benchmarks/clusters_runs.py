"""Runs the faults of ``benchmark.py clusters``: a run on two hosts each, the fault, and what became of the run.

The campaign forks most processes of a run from one that has imported torch and DeepSpeed. Launchers start the others.
"""

import contextlib
import gc
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from dsgpt.benchmarks import clusters
from dsgpt.benchmarks.cells import cut_validation, flags, prepare_corpus, write_recipe
from dsgpt.benchmarks.clusters import LIMIT_SEC, Fault, Outcome
from dsgpt.benchmarks.faults import SAVE_EVERY, STEPS, all_wrong
from dsgpt.benchmarks.faults_runs import SLEEP, Missed, figures, fill
from dsgpt.benchmarks.hosts import Hosts, NoHosts, enter, made_hosts, run
from dsgpt.benchmarks.launch import IMPORTS
from dsgpt.checkpoints.store import folder_name
from dsgpt.checkpoints.training_state import StateReader
from dsgpt.common.files import write_atomic, write_json_atomic
from dsgpt.common.json_files import read_object
from dsgpt.machine import peers, spot
from dsgpt.machine.launcher import exit_rank
from dsgpt.machine.topology import Topology
from dsgpt.model.gpt2 import Head
from dsgpt.record.schema import COMPLETE_FILE, RECORD_FILE
from dsgpt.training import trainer
from dsgpt.training.command import train

# A process on a host: a rank or torchrun's agent, and the fault that is planted there.

PLAN = "CLUSTERS_PLAN"
"""The environment variable with the fault as JSON, and ``folder``, that of its run."""
BALLAST, SERVER = "ballast", "server.pid"
"""Files in the folder of a fault: what fills its disk, below ``shared``; the process of its FUSE folder."""
SHAPES = {"link slow": {"mbit": clusters.SLOW_MBIT}, "packets lost": {"loss": clusters.LOST}}
"""Of the kinds of faults that change a link, what of it."""
PACE_SEC = 0.1
"""Seconds added to every step, so that a fault meets a run of some seconds."""


def be_host(
    hosts: Hosts, number: int, words: Sequence[str], *, variables: Mapping[str, str], log: Path, agent: list[str] | None
) -> None:
    """Move this forked process to a host; be a rank there, or torchrun's agent, which forks its rank.

    Args:
        hosts: all of them.
        number: of the host.
        words: flags of ``src/gpt2.py``.
        variables: the whole environment.
        log: what it prints is appended there.
        agent: flags of torchrun; None for a rank without a launcher.
    """
    gc.freeze()  # else every collection copies the memory of all that was imported
    os.setsid()
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(variables)
    enter(hosts.host(number), hosts.names)
    sys.argv = ["src/gpt2.py", *words]
    if agent is None:
        main()
        exit_rank(0)
    config, _, _ = config_from_args(parse_args([*agent, *sys.argv]))  # type: ignore[no-untyped-call]
    config.start_method = "fork"
    elastic_launch(config, main)()


def main() -> None:
    """Be ``src/gpt2.py`` with the planted fault; returns after a success, and ends the process after a failure.

    The limits of this process are lower than a user's, and the fault strikes if it is on the host of it.
    """
    plan = json.loads(os.environ[PLAN])
    folder = Path(plan.pop("folder"))
    fault = Fault(**plan)
    here = int(socket.gethostname().rsplit("-", 1)[1])
    if fault.limit_sec == LIMIT_SEC:
        begin = peers.Peers.__init__
        peers.OBSERVED_SEC, spot.POLL_SEC = 3.0, 0.5
        peers.JOIN_SEC = 30.0 if fault.kind == "second fault" else 180.0

        def impatient(own: peers.Peers, topology: Topology, **_: float) -> None:
            begin(own, topology, stall_timeout=LIMIT_SEC)  # the flag takes no less than 20 s

        peers.Peers.__init__ = impatient  # type: ignore[method-assign,assignment]
    poisons = Head if fault.how == "loss" else nn.LayerNorm
    watch, forward, poison = trainer.Measurements.watch, poisons.forward, threading.Event()

    def watched(measurements: trainer.Measurements, step: int) -> Any:
        time.sleep(PACE_SEC)
        poison.clear()
        if step == fault.step and here == fault.host and fault.strikes and not mark(folder, 1).exists():
            if fault.delay and fault.second is None:
                threading.Timer(fault.delay, strike, (fault, folder, 1, poison)).start()
            else:
                strike(fault, folder, 1, poison)
        return watch(measurements, step)

    def poisoned(*given: Any) -> Tensor:
        return forward(*given) * (float("nan") if poison.is_set() else 1.0)

    trainer.Measurements.watch = watched  # type: ignore[method-assign,assignment]
    if fault.kind == "NaN":
        poisons.forward = poisoned  # type: ignore[method-assign,assignment]
    number = len(list(folder.glob(mark(folder, 0).name.replace("0", "*")))) + 1
    if here == fault.host and fault.every_sec:
        delay = random.Random(f"{fault.index}/{number}").expovariate(1 / fault.every_sec)
        threading.Timer(delay, strike, (fault, folder, number, poison)).start()
    if here == fault.second and mark(folder, 1).exists() and not mark(folder, 2).exists():
        threading.Timer(fault.delay, strike, (fault, folder, 2, poison)).start()
    if code := train(sys.argv[1:]):
        exit_rank(code)


def mark(folder: Path, number: int) -> Path:
    """The file that says when the first or second fault struck."""
    return folder / f"struck-{number}.json"


def strike(fault: Fault, folder: Path, number: int, poison: threading.Event) -> None:
    """Do what the fault does to this host."""
    name, own = socket.gethostname().rsplit("-", 1)
    hosts, here = Hosts(name, 0), int(own)
    write_json_atomic(mark(folder, number), {"time": time.time()})
    if fault.kind in {"host killed", "second fault", "link cut"}:
        hosts.unplug(here)  # first, else the system of a killed host would tell the others
        for process in sorted(hosts.processes(here) if fault.kind != "link cut" else [], key=os.getpid().__eq__):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    elif fault.kind in SHAPES:
        hosts.shape(here, **SHAPES[fault.kind])
    elif fault.kind == "rank stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "NaN":
        poison.set()
    elif fault.kind == "disk full":
        fill(folder / "shared" / BALLAST)
    elif fault.kind == "folder stands still":
        server = (folder / SERVER).read_text()
        os.kill(int(server), signal.SIGSTOP)
        subprocess.Popen(["sh", "-c", f"sleep {clusters.PAUSE_SEC}; kill -CONT {server}"], start_new_session=True)
    elif fault.how == "spot notice":
        (folder / f"notice-{here}").touch()
    else:
        os.kill(os.getpid(), signal.Signals[fault.how])


# A run on two hosts.

PORT = "29500"
"""Port at which the ranks meet; every pair of hosts has ports of its own."""
SHIM = "import deepspeed, torch._dynamo\nfrom dsgpt.benchmarks.clusters_runs import main\nmain()\n"
"""Stands for ``src/gpt2.py`` beside copies of the scripts of ``launch/``. The limits are too low for slow imports."""
PYTHON_FOLDER = str(Path(sys.executable).parent)
LONGEST_SEC = 300.0
"""Seconds after which a run that has not ended counts as stuck."""
GRACE_SEC, PATIENCE_SEC = 2.0, 30.0
"""Seconds for a rank to leave after the others: beside one that is stopped; and beyond the limit of detection."""
RESTARTS = 6
ACCUSED = re.compile(r"error: rank \d+ on|does not answer any more|is slow: ")
EVENTS = re.compile(r"step +(\d+)/\d+  (loss|saved)|resuming from \S*step-(\d{8})|starting fresh")


class Job(contextlib.AbstractContextManager["Job"]):
    """A run on two hosts, and the processes that train it; at the end of the context they are killed.

    Args:
        fault: what is done to it.
        hosts: where.
        folder: of the fault: an existing folder.
        words: flags of ``src/gpt2.py``.
        context: forks its processes.
    """

    def __init__(self, fault: Fault, hosts: Hosts, folder: Path, words: list[str], context: ForkServerContext) -> None:
        self.fault, self.hosts, self.folder = fault, hosts, folder
        self._words, self._context = words, context
        self._log = folder / "console.log"
        self._processes: dict[int, BaseProcess | subprocess.Popen[bytes]] = {}
        self.resumes = 0
        """Number of times that it has continued, and taken a step."""
        self.repaired = False
        """Whether the agent of the host that was struck was started again."""

    def __exit__(self, *_: object) -> None:
        for number in range(self.hosts.count):
            self.clear(number)

    def start(self, number: int) -> None:
        """Start what trains on a host."""
        fault, hosts, launcher = self.fault, self.hosts, self.fault.launcher
        notice, words = self.folder / f"notice-{number}", list(self._words)
        notice.unlink(missing_ok=True)
        if fault.how == "spot notice":
            words += ["--spot_notice", str(notice)]
        master, nodes = hosts.address(0), "1:2" if launcher.endswith("1:2") else "2"
        variables = hosts.variables() | {PLAN: json.dumps(asdict(fault) | {"folder": str(self.folder)})}
        variables |= {"PATH": f"{PYTHON_FOLDER}:{os.environ['PATH']}", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        before, command, agent = list[str](), list[object](), None
        if fault.kind == "clock off" and number == fault.host:
            before = ["faketime", "--exclude-monotonic", "-f", fault.how]
            variables["PYTHONPATH"] = f"{self.folder / 'python'}:{os.environ.get('PYTHONPATH', '')}"
        if launcher.endswith(".sh"):
            variables |= {"MASTER": master, "NODES": nodes, "DEVICES": "1", "RESTARTS": str(RESTARTS), "SAVE_SEC": "15"}
            variables |= {"HOSTFILE": str(self.folder / "hosts"), "NODE_RANK": str(number)}
            command = [self.folder / "launch" / launcher]
        elif launcher == "ranks":
            variables |= {"RANK": str(number), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
            variables |= {"MASTER_ADDR": master, "MASTER_PORT": PORT}
            command = [sys.executable, self.folder / "src" / "gpt2.py"] if before else []
        else:
            variables["PET_NNODES"] = nodes
            agent = ["--nproc_per_node=1", f"--max-restarts={RESTARTS}", "--rdzv_backend=c10d"]
            agent += ["--rdzv_id=dsgpt", f"--rdzv_endpoint={master}:{PORT}", "--rdzv_conf=last_call_timeout=5"]
            agent += [f"--local-addr={hosts.address(number)}", "--shutdown-timeout=15"]
            agent += ["--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"]
        if command:
            facts: dict[str, Any] = {"log": self._log, "cwd": self.folder, "variables": variables}
            self._processes[number] = hosts.start(number, *before, *command, *words, **facts)
            return
        own = {"variables": variables, "log": self._log, "agent": agent}
        forked = self._context.Process(target=be_host, args=(hosts, number, words), kwargs=own)
        forked.start()
        self._processes[number] = forked

    def clear(self, number: int) -> None:
        """Kill what is left on a host, and repair its network."""
        for left in self.hosts.processes(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        self.hosts.plug(number)
        process = self._processes.pop(number, None)
        if isinstance(process, BaseProcess):
            process.join()
        elif process:
            process.wait()
            for shared in Path("/dev/shm").glob(f"*faketime_*_{process.pid}"):
                shared.unlink()

    def codes(self) -> dict[int, int | None]:
        """By host, how what was started there ended; None while it runs."""
        return {
            number: process.exitcode if isinstance(process, BaseProcess) else process.poll()
            for number, process in sorted(self._processes.items())
        }

    def printed(self) -> str:
        """What was printed on both hosts."""
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def struck(self) -> float | None:
        """When the first fault struck; None before."""
        path = mark(self.folder, 1)
        return float(read_object(path)["time"]) if path.exists() else None


class ClusterRuns(contextlib.AbstractContextManager["ClusterRuns"]):
    """The runs of a campaign: recipes, text, the undisturbed runs, and one run for each fault.

    Args:
        folder: an existing folder, in which everything is written.
        repository: holds the scripts and recipes.
    """

    def __init__(self, folder: Path, *, repository: Path) -> None:
        self._folder, self._repository = folder.resolve(), repository
        self._corpus = cut_validation(prepare_corpus(repository, self._folder / "corpus"))
        for name, cell in clusters.RUNS.items():
            write_recipe(self._folder / f"{name}.json", cell, recipes=repository / "ds_configs")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*IMPORTS["torchrun"], *IMPORTS["deepspeed"], be_host.__module__])
        self._undisturbed: dict[str, Path] = {}
        self._locks = {name: threading.Lock() for name in clusters.RUNS}
        self._stop = threading.Event()

    def __exit__(self, *_: object) -> None:
        """End all runs."""
        self._stop.set()

    def attempt(self, fault: Fault) -> Outcome:
        """Cause the fault, start the run again until it is complete, and compare it with the undisturbed run."""
        started, outcome = time.monotonic(), Outcome()
        try:
            self._run(fault, outcome, self._undisturbed_run(fault.strategy))
        except NoHosts as error:
            outcome.not_run = str(error)
        except (Missed, OSError, RuntimeError, ValueError) as error:
            outcome.wrong = "; ".join(filter(None, [outcome.wrong, f"{type(error).__name__}: {error}"]))
        outcome.seconds = round(time.monotonic() - started, 1)
        return outcome

    def _undisturbed_run(self, strategy: str) -> Path:
        with self._locks[strategy]:
            if strategy not in self._undisturbed:
                quiet = replace(clusters.campaign(0, seed=0)[0], index=-1, strategy=strategy, kind="", host=-1)
                self._undisturbed[strategy] = self._run(quiet, Outcome())
            return self._undisturbed[strategy]

    def _run(self, fault: Fault, outcome: Outcome, expected: Path | None = None) -> Path:
        """One run from its begin to its end; notes in ``outcome`` what happened. Returns the run folder."""
        folder = Path(tempfile.mkdtemp(prefix=f"{fault.index:03d}-{fault.strategy}-", dir=self._folder))
        run_dir = folder / "shared" / "run"
        recipe, cell = self._folder / f"{fault.strategy}.json", clusters.RUNS[fault.strategy]
        steps = clusters.STREAM_STEPS if fault.every_sec else STEPS
        words = flags(cell, recipe=recipe, corpus=self._corpus, run_dir=run_dir, device="cpu", steps=steps)
        words += ["--save_every", str(SAVE_EVERY), "--save_mode", fault.save_mode, "--keep_checkpoints", "9"]
        words += ["--steps_per_print", "1", "--no_inference", "--resume"]
        with made_hosts(2) as hosts:
            shutil.copytree(self._repository / "launch", folder / "launch")
            slots = "".join(f"{hosts.address(number)} slots=1\n" for number in range(hosts.count))
            for name, text in (("src/gpt2.py", SHIM), ("python/sitecustomize.py", SLEEP), ("hosts", slots)):
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8")
            with _shared_folder(fault, folder), Job(fault, hosts, folder, words, self._context) as job:
                self._watch(job, outcome, complete=run_dir / COMPLETE_FILE)
                if fault.every_sec:
                    outcome.goodput = read_object(run_dir / RECORD_FILE)["goodput"]
                elif expected:
                    _judge(job, outcome, run_dir, expected)
        return run_dir

    def _watch(self, job: Job, outcome: Outcome, *, complete: Path) -> None:
        """Start the run, and what has ended or was struck again, as a scheduler does, until the run is complete.

        Raises:
            Missed: it was not complete in time, or after ``RESTARTS``.
        """
        fault, end = job.fault, time.monotonic() + LONGEST_SEC + job.fault.limit_sec
        alone = float("inf")
        for number in range(job.hosts.count):
            job.start(number)
        while True:
            time.sleep(0.2)
            struck, text, codes = job.struck(), job.printed(), job.codes()
            if struck:
                _time(job, outcome, text, since=struck)
            ended = [number for number, code in codes.items() if code is not None]
            alone = min(alone, time.monotonic()) if 0 < len(ended) < len(codes) else float("inf")
            waited = time.monotonic() - alone
            if self._stop.is_set() or time.monotonic() > end or (outcome.restarts > RESTARTS and not fault.every_sec):
                raise Missed(f"not complete after {outcome.restarts} restarts: {text[-500:]}")
            if complete.exists():
                if len(ended) == len(codes) or waited > PATIENCE_SEC:
                    if not fault.launcher.startswith("torchrun") and set(codes.values()) != {0}:
                        outcome.wrong = f"complete, but its processes ended with {list(codes.values())}"
                    return
                continue
            again = _to_start(job, outcome, ended, waited=waited)
            for number in again:
                job.clear(number)
            if again:
                (job.folder / "shared" / BALLAST).unlink(missing_ok=True)
                outcome.restarts += 1
            for number in again:
                job.start(number)


def _to_start(job: Job, outcome: Outcome, ended: list[int], *, waited: float) -> list[int]:
    """The hosts to clear and to start again.

    Without an agent these are all, when no rank is left; a rank that does not leave is killed after some time. Of
    agents it is each that ended, and once that of the host that was killed or cut off.
    """
    fault, struck = job.fault, job.struck()
    if not fault.launcher.startswith("torchrun"):
        left, stopped = len(ended) < job.hosts.count, fault.kind == "rank stopped"
        if left and waited < (GRACE_SEC if stopped else fault.limit_sec + PATIENCE_SEC):
            return []
        if left and not stopped:
            outcome.wrong = "a rank did not leave"
        return list(range(job.hosts.count))
    if fault.kind in {"host killed", "link cut", "second fault"} and struck and not job.repaired:
        job.repaired = outcome.detect_sec is not None or time.time() - struck > PATIENCE_SEC
        return list({*ended, fault.host}) if job.repaired else []
    return ended


def _time(job: Job, outcome: Outcome, text: str, *, since: float) -> None:
    """Note when the culprit was named, and when the run that was started again took a step."""
    number, named, seconds = job.fault.host, clusters.KINDS[job.fault.kind].named, round(time.time() - since, 1)
    words = named.replace("HOST", re.escape(job.hosts.host(number)))
    words = words.replace("ADDRESS", re.escape(job.hosts.address(number)))
    if named and outcome.detect_sec is None and re.search(words, text):
        outcome.detect_sec = seconds
    starts = [match for match in EVENTS.finditer(text) if not match[1]]
    if len(starts) > job.resumes and EVENTS.search(text, starts[-1].end()):
        job.resumes, outcome.resume_sec = len(starts), round(seconds - (outcome.detect_sec or 0), 1)


@contextlib.contextmanager
def _shared_folder(fault: Fault, folder: Path) -> Iterator[None]:
    """The folder ``shared`` that both hosts see: a disk of its own that can be full, or a FUSE folder that can stop.

    Raises:
        NoHosts: this machine lacks what it needs.
    """
    shared, server = folder / "shared", None
    shared.mkdir()
    try:
        if fault.kind == "disk full":
            run("mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", shared)
        elif fault.kind == "folder stands still":
            if not shutil.which("bindfs") or not Path("/dev/fuse").exists():
                raise NoHosts("a FUSE folder needs bindfs and /dev/fuse")
            (folder / "behind").mkdir()
            server = subprocess.Popen(["bindfs", "-f", folder / "behind", shared])
            write_atomic(folder / SERVER, str(server.pid).encode())
            while not shared.is_mount() and server.poll() is None:
                time.sleep(0.01)
        if fault.kind == "clock off" and not shutil.which("faketime"):
            raise NoHosts("another clock needs faketime")
        yield
    finally:
        if server:
            server.kill()
            server.wait()
        if shared.is_mount():
            run("umount", "--lazy", shared)


def _judge(job: Job, outcome: Outcome, run_dir: Path, expected: Path) -> None:
    """Note whether the culprit was named, what was lost, and how the complete run differs from the undisturbed one."""
    kind, text, lost = clusters.KINDS[job.fault.kind], job.printed(), False
    outcome.named = outcome.detect_sec is not None if kind.named else None
    taken = saved = 0
    for step, what, checkpoint in EVENTS.findall(text):
        if what == "loss":
            taken = int(step)
        elif what == "saved":
            saved = int(step)
        else:
            begins = int(checkpoint or 0)
            lost |= begins < saved
            outcome.steps_lost += max(0, taken - begins)
            taken = begins
    usual, actual = figures(expected), figures(run_dir)
    repeated = sorted({step for (step, _), value in actual.items() if isinstance(value, tuple)})
    if not repeated and usual.keys() == actual.keys():
        outcome.loss_difference = max(abs(actual[key] - usual[key]) for key in usual)
    ours, theirs = (StateReader(folder / folder_name(STEPS)) for folder in (run_dir, expected))
    outcome.weight_difference = max(float((ours.read(name) - theirs.read(name)).abs().max()) for name in theirs.shapes)
    accused = ACCUSED.search(text)
    outcome.wrong = all_wrong(
        (bool(outcome.wrong), outcome.wrong),
        (job.fault.strikes and job.struck() is None, "the fault did not strike"),
        (lost, "it went back to before the last checkpoint"),
        (bool(repeated), f"steps are logged twice: {repeated}"),
        (not repeated and usual.keys() != actual.keys(), "steps are missing"),
        ((outcome.loss_difference or 0) > clusters.BOUND, f"a loss differs by {outcome.loss_difference}"),
        (outcome.weight_difference > clusters.BOUND, f"a weight differs by {outcome.weight_difference}"),
        (not kind.named and accused is not None, f"it accuses: {accused and accused[0]}"),
        (not kind.ends and outcome.restarts > 0, "the run ended"),
    )

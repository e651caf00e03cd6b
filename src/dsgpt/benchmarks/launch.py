"""The processes that suites start: the ranks of a job, workers that answer lines, and trainings of the product.

A job yields each cell as it ends. ``python -m dsgpt.benchmarks.launch JOB`` is one of its ranks, under ``torchrun``,
``deepspeed`` or alone. A launch takes seconds, most of them imports, so one launch serves many cells. The ranks of a
cell join a new process group, and nothing that one cell leaves behind reaches another. ``CellStart`` says how a cell's
ranks start.

A cell names the function that its ranks call; see ``Assignment``.
"""

import argparse
import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
import pkgutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import psutil

from dsgpt.common.errors import UserError
from dsgpt.common.files import write_atomic, write_json_atomic
from dsgpt.common.json_files import clipped_text, read_object
from dsgpt.config.options import parse_arguments
from dsgpt.config.run_config import RunConfig, resolve
from dsgpt.machine.console import logging_to_console
from dsgpt.machine.launcher import Interruption, exit_rank, launcher_command
from dsgpt.machine.topology import free_port, read_topology
from dsgpt.model.config import SHAPE_FLAGS, GPT2Config
from dsgpt.record.schema import RECORD_FILE

if TYPE_CHECKING:
    import torch

# The file that every rank of a cell writes at its end: a status, and what the rank measured.

RankEnd = dict[str, Any]
"""``status`` is ``done``, ``refused`` or ``error``; the last two come with a ``message`` and a ``time``."""


def rank_file(folder: Path, rank: int) -> Path:
    """The file that ``rank`` writes into the cell's folder when it ends, however it ends."""
    return folder / f"rank-{rank}.json"


def write_end(folder: Path, rank: int, **facts: Any) -> None:
    """Write the rank's file: ``facts`` are what it measured, or ``status`` and ``message`` of a failure."""
    write_json_atomic(rank_file(folder, rank), {"status": "done", "time": time.time(), **facts})


def read_ranks(folder: Path, ranks: int) -> list[RankEnd]:
    """The contents of the files of those ranks of a cell that have ended."""
    files = [rank_file(folder, rank) for rank in range(ranks)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]


def config_of(flags: list[str]) -> RunConfig:
    """The run that this rank of a cell executes.

    Raises:
        UserError: the product refuses the combination.
    """
    options, problems = parse_arguments(flags)
    return resolve(options, topology=read_topology(), problems=problems)


@contextlib.contextmanager
def joined_run(flags: list[str]) -> Iterator[tuple[RunConfig, "torch.device"]]:
    """The run that this rank of a cell executes, and its device, within the group of all ranks if it needs one.

    Raises:
        UserError: the product refuses the combination.
    """
    from dsgpt.machine.device import bring_up, joined  # noqa: PLC0415 - torch takes seconds

    config = config_of(flags)
    device = bring_up(config.device, local_rank=config.topology.local_rank, threads=config.threads_per_device)
    with contextlib.nullcontext() if config.run_type == "baseline" else joined(config.topology, device):
        yield config, device


def train_rank(config: RunConfig, folder: Path, **facts: Any) -> None:
    """Train as ``src/gpt2.py`` does in this rank, and write its file with ``facts``."""
    from dsgpt.training.run import run  # noqa: PLC0415 - torch takes seconds

    main = config.topology.is_main
    with logging_to_console(speaks=main), Interruption(speaks=main) as interruption:
        run(config, interruption)
    write_end(folder, config.topology.rank, **facts)


# Starts the ranks of a job with the launcher that users use, and yields each cell as it ends.

WORKER = "dsgpt.benchmarks.launch"
LAUNCH_POLL_SEC = 0.05
IMPORTS = {
    "python": ["torch._dynamo"],
    "torchrun": ["torch._dynamo", "torch.distributed.fsdp"],
    "deepspeed": ["torch._dynamo", "deepspeed"],
}
"""Modules that take seconds to import and would otherwise be imported in every cell. The optimizers of torch need its
compiler."""
ALL_IMPORTS = (*IMPORTS["torchrun"], *IMPORTS["deepspeed"], "dsgpt.training.run")
"""Of cells that train as ``src/gpt2.py`` does, under any strategy."""
ELSEWHERE = (
    *("DS_", "OMP_", "MKL_", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_"),
    *("RANK", "WORLD_SIZE", "CROSS_"),
)
"""Prefixes of variables that a launcher around the suite (a pod's, ``srun``) sets for its own ranks, or a machine for
its own jobs."""
STUCK_SEC = 900
"""Seconds without the end of a cell after which a launch counts as stuck. A rank ends its own cell sooner."""
LEAVE_SEC = 5
"""Seconds between SIGTERM and SIGKILL for a launcher and its ranks, and for the processes of a training."""
PORT_FILE = "port"
"""File in a cell's folder with the port at which its ranks meet. It is the first file that rank 0 writes."""


class CellStart(StrEnum):
    """Ways to start the ranks of a cell."""

    FORK_ALL = "fork all"
    """Rank 0 of the launch imports, then forks all ranks of each cell: much faster where ranks outnumber cores."""
    FORK_OWN = "fork own"
    """Every rank of the launch imports, then forks its own rank of each cell. As in a user's run, each rank has its own
    interpreter state, such as the order of sets."""
    SPAWN = "spawn"
    """Every rank of the launch starts its rank of each cell in a new Python: a process that uses a GPU cannot fork."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One cell as a rank gets it."""

    folder: str
    """An existing folder with nothing in it but the recipe."""
    flags: list[str]
    call: str
    """``module:function``: what every rank calls with flags, folder and ``arguments``."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the call, as JSON can hold them."""


@dataclass(kw_only=True)
class Launch:
    """One start of a launcher, for the record."""

    launcher: str
    ranks: int
    cells: int
    seconds: float = 0.0
    """Seconds from the launcher's start to its end."""
    start_seconds: float | None = None
    """Seconds from the launcher's start to the first rank ready for work: imports, mostly."""


def child_environment(device: str | None = None) -> dict[str, str]:
    """This process's variables, without those that would make a child part of another job.

    With ``device``, for ranks of one thread; on a CPU, a variable keeps DeepSpeed's launcher from looking for GPUs.
    """
    ours = {key: value for key, value in os.environ.items() if not key.startswith(ELSEWHERE)}
    ours |= {"OMP_NUM_THREADS": "1"} if device else {}
    return ours | ({"DS_ACCELERATOR": "cpu"} if device == "cpu" else {})


def run_job(
    launch: Launch,
    assignments: Sequence[Assignment],
    *,
    job_file: Path,
    device: str,
    start: CellStart | None = None,
    imports: Sequence[str] | None = None,
) -> Iterator[tuple[int, float]]:
    """Run ``assignments`` one after the other; yield index and seconds of each when all its ranks have ended.

    An assignment that is not yielded was lost with its launch. The launcher's output is in ``job_file`` with the suffix
    ``.log``.

    Args:
        launch: how to start the ranks; its times are filled in.
        assignments: what to run.
        job_file: the file to write for the ranks.
        device: ``cpu`` or ``cuda``.
        start: how the ranks of each cell start; by default new Pythons on GPUs, forks of every rank's own Python on two
            ranks, and else forks of one.
        imports: modules to import once for all forked cells, besides those of the calls; by default what the launcher's
            own strategies need.
    """
    usual = CellStart.SPAWN if device != "cpu" else CellStart.FORK_OWN if launch.ranks == 2 else CellStart.FORK_ALL
    modules = [*(IMPORTS[launch.launcher] if imports is None else imports)]
    modules += [one.call.partition(":")[0] for one in assignments]
    job = {"start": start or usual, "runner": os.getpid(), "imports": list(dict.fromkeys(modules))}
    write_json_atomic(job_file, job | {"cells": [asdict(assignment) for assignment in assignments]})
    front = launcher_command(launch.launcher, launch.ranks)
    command = [*front, "--module" if launch.launcher == "deepspeed" else "-m", WORKER, str(job_file)]
    done, started = 0, time.perf_counter()
    since = started
    with job_file.with_suffix(".log").open("wb") as log, own_group(command, log, device=device) as process:
        while done < len(assignments):
            ended = process.poll() is not None  # asked first: a file may appear just before the end
            folder, now = Path(assignments[done].folder), time.perf_counter()
            if launch.start_seconds is None and (folder / PORT_FILE).exists():
                since = now
                launch.start_seconds = since - started
            if all(rank_file(folder, rank).exists() for rank in range(launch.ranks)):
                yield done, now - since
                done, since = done + 1, now
            elif ended:
                break
            elif now - since > STUCK_SEC:
                log.write(f"no training ended within {STUCK_SEC} s\n".encode())
                break
            else:
                time.sleep(LAUNCH_POLL_SEC)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):  # ``own_group`` stops a launcher that does not exit
                process.wait(timeout=STUCK_SEC)
    launch.seconds = time.perf_counter() - started


# A rank of a launch: starts child processes that run one rank of a cell each, and notices how they end.

CELL_LIMIT_SEC = 600
"""Seconds after which a cell counts as stuck."""
PATIENCE_SEC = 15
"""Seconds that a rank may continue after another one failed. A rank that runs longer only waits for the failed one."""
POLL_SEC = 0.02
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Variable with which ranks meet in torchrun's own store, which serves one process group, not many."""

Cell = dict[str, Any]
"""The fields of an ``Assignment``."""


class Alive:
    """Ends this process when the suite or the launcher is gone: neither can end its ranks when it is killed.

    Args:
        runner: process id of the suite.
    """

    def __init__(self, *, runner: int) -> None:
        self._runner, self._launcher = runner, os.getppid()

    def check(self) -> None:
        """Exit if the suite's process or the launcher is gone."""
        if os.getppid() != self._launcher:
            sys.exit("the launcher is gone")
        if not psutil.pid_exists(self._runner):
            sys.exit("the suite is gone")

    def wait_for(self, path: Path) -> None:
        """Return when ``path`` exists; exit as ``check`` does."""
        while not path.exists():
            self.check()
            time.sleep(POLL_SEC)


def main(arguments: list[str]) -> int:
    """Run every cell of the job. The exit code is always 0, because each cell's folder says how it ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("--local_rank", type=int, help="from launchers; the environment has it too")
    parser.add_argument("--cell", type=int, help="run this one alone, in this process, which is a spawned child")
    given = parser.parse_args(arguments)
    job_file: Path = given.job
    job = json.loads(job_file.read_text(encoding="utf-8"))
    topology = read_topology()
    if given.cell is not None:
        _run_cell(job["cells"][given.cell], topology.rank)
        exit_rank(0)
    alive, rank = Alive(runner=job["runner"]), topology.rank
    # By rank, the environment of the children that this process runs of every cell.
    shared = {key: value for key, value in os.environ.items() if not key.startswith(ELSEWHERE)}
    by_rank = {rank: {key: value for key, value in os.environ.items() if key not in shared and key != AGENT_STORE}}
    if job["start"] == CellStart.FORK_ALL:
        files = [job_file.with_suffix(f".variables-{one}") for one in range(topology.world_size)]
        write_json_atomic(files[rank], by_rank.pop(rank))
        for one, file in enumerate(files if rank == 0 else []):
            alive.wait_for(file)
            by_rank[one] = json.loads(file.read_text(encoding="utf-8"))
    if by_rank and job["start"] != CellStart.SPAWN:
        for module in job["imports"]:
            importlib.import_module(module)
        if "deepspeed" in job["imports"]:
            identify_cpu_once()
        gc.collect()
        gc.freeze()  # else every collection of a child touches, and so copies, the memory of all that was imported
    for index, cell in enumerate(job["cells"]):
        port_file = Path(cell["folder"]) / PORT_FILE
        if rank == 0:  # just before use: another process may take a port that was found earlier
            write_atomic(port_file, str(free_port()).encode())
        alive.wait_for(port_file)
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port_file.read_text(encoding="utf-8")}
        variables = {one: shared | own | meeting for one, own in by_rank.items()}
        words = None if job["start"] != CellStart.SPAWN else [WORKER, str(job_file), "--cell", str(index)]
        _run_children(cell, variables, words, ranks=topology.world_size, alive=alive)
    finished = job_file.with_suffix(".finished")
    if rank == 0:
        write_atomic(finished, b"")
    alive.wait_for(finished)
    return 0


def identify_cpu_once() -> None:
    """Identify the CPU now, and let forked children reuse the answer.

    DeepSpeed's CPU Adam calls ``get_cpu_info`` whenever it is built, and the function sleeps for a second to measure
    the clock rate.
    """
    cpuinfo: Any = importlib.import_module("cpuinfo")
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()


def _run_children(
    cell: Cell, variables: Mapping[int, dict[str, str]], module: list[str] | None, *, ranks: int, alive: Alive
) -> None:
    """Run ranks of a cell in child processes, kill them if they hang, and write the end of each that wrote none.

    Args:
        cell: what they run.
        variables: the whole environment of each, by rank.
        module: name and arguments of the module that new Pythons run; None to fork this process.
        ranks: number of ranks of the cell; other processes may run some of them.
        alive: checked while they run.
    """
    folder, children = Path(cell["folder"]), dict[int, int]()
    started, alone_since = time.monotonic(), float("inf")
    try:
        for rank, environment in variables.items():
            children[rank] = _start(cell, rank, environment, module)
        while children:
            for rank, child in list(children.items()):
                done, status = os.waitpid(child, os.WNOHANG)
                if not done:
                    continue
                del children[rank]
                if not rank_file(folder, rank).exists():
                    code = os.waitstatus_to_exitcode(status)
                    how = f"ended with exit code {code} and without a result"
                    how = f"was killed by signal {-code}" if code < 0 else how
                    write_end(folder, rank, status="error", message=f"rank {rank} {how}")
            alive.check()
            now = time.monotonic()
            if now < alone_since and any(end["status"] != "done" for end in read_ranks(folder, ranks)):
                alone_since = now
            if now - started > CELL_LIMIT_SEC or now - alone_since > PATIENCE_SEC:
                for child in children.values():
                    os.kill(child, signal.SIGKILL)
            time.sleep(POLL_SEC)
    except BaseException:  # this process must exit
        for child in children.values():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        raise


def _start(cell: Cell, rank: int, environment: dict[str, str], module: list[str] | None) -> int:
    """Start ``rank`` of ``cell``, which prints into a file of the cell's folder; return the id of its process."""
    log = str(Path(cell["folder"]) / f"rank-{rank}.log")
    new = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    if module:
        outputs = [(os.POSIX_SPAWN_OPEN, 1, log, new, 0o644), (os.POSIX_SPAWN_DUP2, 1, 2)]
        return os.posix_spawn(sys.executable, [sys.executable, "-m", *module], environment, file_actions=outputs)
    child = os.fork()
    if not child:
        output = os.open(log, new, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.clear()
        os.environ.update(environment)
        _run_cell(cell, rank)
        exit_rank(0)
    return child


def _run_cell(cell: Cell, rank: int) -> None:
    """Run one cell in this process. Write the rank's file after a refusal or error; else the called function does."""
    folder = Path(cell["folder"])
    try:
        pkgutil.resolve_name(cell["call"])(cell["flags"], folder, **cell["arguments"])
    except UserError as error:
        write_end(folder, rank, status="refused", message="\n".join(error.problems))
    except Exception as error:  # noqa: BLE001 - every failure of a cell is a result of the suite
        traceback.print_exc()
        write_end(folder, rank, status="error", message=f"{type(error).__name__}: {error}")


# Other processes that suites start: workers that answer lines, and trainings of the product.

LONGEST_ANSWER_SEC, ENDING_SEC = 3600, 60
"""Longest wait for an answer of a process, and for its end; then it is killed."""
MARK = "answer "
"""Prefix of each answer. Other lines of the output are those of libraries."""


class WorkerEnded(UserError):
    """A process ended instead of answering. The message has the last line that it printed, ``output`` has all."""

    def __init__(self, code: int, output: str) -> None:
        last = clipped_text(output.strip().split("\n")[-1], width=200) or "it printed nothing"
        super().__init__(f"its process ended with {code}: {last}")
        self.output = output


class LineWorker(contextlib.AbstractContextManager["LineWorker"]):
    """A process that waits, without using a core, until it is sent a line of JSON, and answers with one.

    A context manager, which ends it. ``read`` raises ``WorkerEnded`` if it ended before.

    Args:
        module: what it runs, with the job's file as argument; an empty input must end it.
        job: what it is to do. It also gets the key ``mark``: what must stand before each answer.
        folder: new, for the job and what the process prints.
        threads: its CPU threads; 0 for as many as the machine gives.
        variables: further variables of its environment.
        python: its interpreter.
    """

    def __init__(
        self,
        module: str,
        job: Mapping[str, Any],
        folder: Path,
        *,
        threads: int,
        variables: Mapping[str, object] | None = None,
        python: Path = Path(sys.executable),
    ) -> None:
        self._log = folder / "output.txt"
        folder.mkdir(parents=True)
        write_json_atomic(folder / "job.json", {**job, "mark": MARK})
        own_variables = child_environment() | {key: str(value) for key, value in (variables or {}).items()}
        own_variables |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
        command, pipe = [str(python), "-m", module, str(folder / "job.json")], subprocess.PIPE
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=output, text=True, env=own_variables
            )

    def send(self, question: object) -> None:
        """Ask for an answer, which ``read`` returns."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ``read`` says why it ended
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """The next answer, when it is there."""
        assert self._process.stdout is not None
        watch = threading.Timer(LONGEST_ANSWER_SEC, self._process.kill)
        watch.start()
        try:
            for line in self._process.stdout:
                if line.startswith(MARK):
                    answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                    return answer
        finally:
            watch.cancel()
        raise WorkerEnded(self._process.wait(), self._log.read_text(encoding="utf-8", errors="replace"))

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=ENDING_SEC)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def own_group(
    command: Sequence[str], output: BinaryIO, *, cwd: Path | None = None, device: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """The running command; at the end of the context none of its processes is left: terminated, then killed.

    ``torchrun`` gives each worker a session of its own, and DeepSpeed's launcher leaves its ranks behind, so they are
    found by their parents.
    """
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=cwd, env=child_environment(device), start_new_session=True, **streams)
    try:
        yield process
    finally:
        if process.poll() is None:
            family = [psutil.Process(process.pid)]
            with contextlib.suppress(psutil.NoSuchProcess):
                family += family[0].children(recursive=True)
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.terminate()
            for one in psutil.wait_procs(family, timeout=LEAVE_SEC)[1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait()


def training_words(values: Mapping[str, object]) -> list[str]:
    """Flags of ``src/gpt2.py`` with their values; True is a switch."""
    words = ([f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in values.items())
    return list(itertools.chain.from_iterable(words))


def shape_values(config: GPT2Config) -> dict[str, object]:
    """The flags of the shape of a model, for ``training_words``."""
    return {name.removeprefix("--"): getattr(config, field) for field, name in SHAPE_FLAGS.items()}


def train(values: Mapping[str, object], *, repository: Path, what: str) -> dict[str, Any]:
    """Train in a process of its own, in ``values["checkpoint_path"]``; return the record.

    Raises:
        UserError: it failed: ``what`` and the end of its errors.
    """
    command = [*launcher_command("python", 1), str(repository / "src" / "gpt2.py"), *training_words(values)]
    done = subprocess.run(command, cwd=repository, env=child_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{what} failed: {done.stderr.strip()[-1500:]}")
    return read_object(Path(str(values["checkpoint_path"])) / RECORD_FILE)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # unwinds: the children are killed
    sys.exit(main(sys.argv[1:]))
